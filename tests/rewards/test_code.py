import json
import os
from pathlib import Path

import pytest

from logitless.errors import DataError
from logitless.rewards import code
from logitless.rewards.code import Code
from logitless.rewards.workers.pool import Outcome, program_pool
from logitless.rewards.workers.tasks import unfenced

ADD = [{"input": "1 2\n", "output": "3"}, {"input": "5 5\n", "output": "10\n"}]
ADDER = "a, b = map(int, input().split())\nprint(a + b)"


def score(program, tests, **knobs):
    return Code(**knobs).verdicts(["p"], [program], {"tests": [tests]})[0]


def test_a_program_that_prints_what_is_expected_passes():
    verdict = score(ADDER, ADD)
    assert verdict.score == 1.0
    assert verdict.detail == (("code:test", True), ("code:test", True))


def test_all_or_nothing_or_the_fraction():
    wrong_for_large = ADDER + "\nif a > 4: print('more')"
    assert score(wrong_for_large, ADD).score == 0.0
    assert score(wrong_for_large, ADD, partial=True).score == 0.5


def test_expressions_are_compared_by_their_representation():
    tests = [{"call": "half(3)", "output": "1.5"}, {"call": "half([])", "output": "'none'"}]
    assert score("def half(x): return x / 2 if x else 'none'", tests).score == 1.0
    assert score("def half(x): return str(x / 2) if x else 'none'", tests, partial=True).score == 0.5


def test_the_last_fenced_block_is_the_program():
    text = f"First:\n```python\nprint(1)\n```\nBetter:\n```python\n{ADDER}\n```\nas asked.\n```text\nnot this\n"
    assert score(text, ADD).score == 1.0
    assert unfenced("```python\nopen", "python") == "```python\nopen"


@pytest.mark.parametrize(
    "program",
    [
        "",
        "print('3'); raise SystemExit(1)",
        "import os; os.abort()",
        "while True: pass",
        "import time; time.sleep(100)",
        "x = []\nwhile True: x.append(bytearray(10**7))",
        "while True: print('x' * 10**6)",
        "open('big', 'wb').write(bytes(10**8)); print(3)",
        "files = [open(f'f{i}', 'w') for i in range(1000)]; print(3)",
        "import sys; sys.stdin.close(); sys.stdout.close()",
        "import os, time\nif os.fork() == 0: os.setsid()\ntime.sleep(100)",
    ],
)
def test_a_program_that_fails_hangs_or_goes_over_a_limit_is_graded_wrong(program):
    verdict = score(program, ADD[:1], deadline_seconds=0.5, memory_mib=256)
    assert (verdict.status, verdict.score) == ("graded", 0.0)


NESTED = "import os\nfor _ in range(%d):\n    os.mkdir('%s'); os.chdir('%s'); open('f', 'w').close()\n"
LEFT_BEHIND = {
    "a few folders": NESTED % (3, "d", "d"),
    "deeper than the stack": NESTED % (1500, "d", "d"),
    "longer than a path": NESTED % (40, "d" * 200, "d" * 200),
    "folders that nobody writes to": "import os\nos.mkdir('a'); os.mkdir('a/b', 0o500); os.mkdir('a/c', 0)\n",
    "links": "import os\nos.mkdir('a'); os.symlink('/', 'a/root'); os.symlink('a', 'b'); os.symlink('gone', 'c')\n",
}


@pytest.mark.parametrize("program", LEFT_BEHIND.values(), ids=LEFT_BEHIND)
def test_whatever_a_program_leaves_in_its_folder_it_is_graded_and_its_folder_removed(program):
    program = "import os; here = os.getcwd()\n" + program
    rest = {"tests": [[{"output": "3"}]] * 2}
    verdicts = Code().verdicts(["p"] * 2, [f"{program}print(3)", f"{program}print(4)"], rest)
    assert [(verdict.status, verdict.score) for verdict in verdicts] == [("graded", 1.0), ("graded", 0.0)]
    task = "logitless.rewards.workers.programs:output_of"
    [outcome] = program_pool().run(task, [(f"{program}print(here)", "", 10.0, 1 << 30, True)])
    assert Path(outcome.value.strip()).name.startswith("tmp")
    assert not Path(outcome.value.strip()).exists()


def test_a_program_sees_neither_the_expected_output_nor_our_environment(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "swordfish")
    spy = (
        "import os, sys\n"
        "seen = str(dict(os.environ)) + open('program.py').read() + sys.stdin.read() + str(os.listdir('.'))\n"
        "print('sword' + 'fish' in seen, 'expected' + '-output' in seen)"
    )
    assert score(spy, [{"input": "", "output": "False False"}]).score == 1.0
    assert score(spy, [{"input": "", "output": "expected-output"}]).score == 0.0


def test_white_space_at_line_ends_does_not_count_and_lines_do():
    assert score("print('a ', end='\\n\\n')", [{"output": "a"}]).score == 1.0
    assert score("print(' a')", [{"output": "a"}]).score == 0.0
    assert score("print('a\\n\\nb')", [{"output": "a\nb"}]).score == 0.0


@pytest.mark.parametrize(
    "tests",
    [[], None, "no json", {}, [{"input": "1"}], [{"output": 3}], [{"input": "", "call": "f()", "output": ""}], [5]],
)
def test_a_row_without_tests_is_named(tests):
    with pytest.raises(DataError, match="in row 1"):
        Code().check({"tests": [ADD, tests]})


def test_tests_may_be_json_text_and_null_fields_are_absent():
    rows = [json.dumps(ADD), [{"input": None, "call": "1 + 1", "output": "2"}]]
    Code().check({"tests": rows})
    assert Code()(["p"] * 2, [ADDER, ""], tests=rows) == [1.0, 1.0]


ESCAPES = {
    "reads its parent's memory": "open(f'/proc/{os.getppid()}/mem', 'rb').read(0)",
    "reads the trainer's memory": "open('/proc/TRAINER/mem', 'rb').read(0)",
    "reads the trainer's environment": "print(open('/proc/TRAINER/environ', 'rb').read(), file=sys.stderr)",
    "reads a file of ours": "open('FILE').read()",
    "lists a folder of ours": "os.listdir(os.path.dirname('FILE'))",
    "writes beside its folder": "open('../escaped', 'w')",
    "writes to a folder of ours": "open(os.path.dirname('FILE') + '/escaped', 'w')",
    "writes to shared memory": "open('/dev/shm/escaped', 'w')",
    "links its way out": "os.symlink(os.path.dirname('FILE'), 'out'); open('out/escaped', 'w')",
    "changes rights": "os.chmod('FILE', 0o777)",
    "opens a socket": "import socket; socket.socket()",
    "forks": "os.fork()",
    "starts a program": "import subprocess; subprocess.run(['true'], check=True)",
    "signals the trainer": "os.kill(TRAINER, 0)",
    "signals all": "os.kill(-1, 0)",
    "debugs": "import ctypes; assert ctypes.CDLL(None).ptrace(16, TRAINER, 0, 0) == 0",
    "makes a namespace": "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0",
}


@pytest.mark.parametrize("escape", ESCAPES.values(), ids=ESCAPES)
def test_a_program_cannot_leave_its_sandbox(escape, tmp_path):
    ours = tmp_path / "answers.json"
    ours.write_text("3")
    escape = escape.replace("TRAINER", str(os.getpid())).replace("FILE", str(ours))
    program = f"import os, sys\n{escape}\nprint(3)"
    assert score(program, [{"output": "3"}]).score == 0.0
    assert [path.name for path in tmp_path.iterdir()] == ["answers.json"]
    assert score("import os, sys\nprint(3)", [{"output": "3"}]).score == 1.0


def test_threads_temporary_files_and_event_loops_work_in_the_sandbox():
    program = (
        "import asyncio, tempfile, threading\n"
        "with tempfile.TemporaryFile() as file: file.write(b'x')\n"
        "open('own', 'w').write('y')\n"
        "asyncio.run(asyncio.sleep(0))\n"
        "thread = threading.Thread(target=lambda: print(open('own').read()))\n"
        "thread.start(); thread.join()"
    )
    assert score(program, [{"output": "y"}]).score == 1.0


def test_what_a_program_ought_to_print_is_never_sent_to_a_worker(monkeypatch):
    sent, nothing = [], [Outcome("done", {"prints": [None]})]
    monkeypatch.setattr(code.program_pool(), "run", lambda task, items, **limits: sent.extend(items) or nothing)
    assert score("print(3)", [{"input": "", "output": "expected-output"}]).score == 0.0
    assert "expected-output" not in repr(sent)

import json
import time
import uuid
from pathlib import Path

import pytest

from logitless.errors import DataError
from logitless.rewards.code import Code
from logitless.rewards.tasks import unfenced

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
        "print(",
        "raise SystemExit(1)",
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


def test_a_program_leaves_no_process_and_costs_only_its_own_deadline():
    mark = str(1000 + uuid.uuid4().int % 10**9)
    detached = f"import os\nif os.fork() == 0:\n  os.setsid()\n  os.execlp('sleep', 'sleep', '{mark}')\n"
    programs = [detached + ADDER, ADDER, detached + "while True: pass", ADDER]
    start = time.monotonic()
    verdicts = Code(deadline_seconds=1.0).verdicts(["p"] * 4, programs, {"tests": [ADD[:1]] * 4})
    assert time.monotonic() - start < 4.0
    assert [verdict.score for verdict in verdicts][1:] == [1.0, 0.0, 1.0]
    assert not [place for place in Path("/proc").glob("[0-9]*/cmdline") if mark in _content(place)]


def _content(place):
    try:
        return place.read_text(errors="replace")
    except OSError:
        return ""


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

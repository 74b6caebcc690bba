import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from logitless.errors import UnavailableError
from logitless.rewards.code import Code
from logitless.rewards.math import Math
from logitless.rewards.workers import sandbox
from logitless.rewards.workers.confinement import layers
from logitless.rewards.workers.pool import shared_pool
from logitless.rewards.workers.sandbox import CLAIMS, Sandbox, require_sandbox, sandbox_of

ROOT = Path(__file__).parents[3]
REPORT = """
import json, sys
from logitless.errors import UnavailableError
from logitless.rewards.code import Code
from logitless.rewards.math import Math
from logitless.rewards.workers.sandbox import sandbox_of
def score(reward, text, **columns):
    try:
        reward.check(columns)
        return reward.verdicts(["p"], [text], columns)[0].score
    except UnavailableError as error:
        return str(error)
program, grader = sandbox_of("program"), sandbox_of("grader")
print(json.dumps({
    "layers": program.layers, "program": program.open, "grader": grader.open,
    "failure": program.failure + grader.failure,
    "code": score(Code(), "print(4)", tests=[[{"output": "4"}]]),
    "no sandbox": score(Code(sandbox="none"), "print(4)", tests=[[{"output": "4"}]]),
    "math": score(Math(), "$(4)$", answer=["4"]),
    "math without sandbox": score(Math(sandbox="none"), "$(4)$", answer=["4"]),
}))
"""


def report_of(forbidden, user=None):
    """The sandbox and the scores of a process on a machine without these layers."""
    command = [sys.executable, "-m", "tests.rewards.restricted", forbidden, sys.executable, "-c", REPORT]
    as_user = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, **as_user)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def needs(*names):
    absent = [name for name in names if name not in layers()]
    if absent:
        pytest.skip(f"this kernel or container forbids {' and '.join(absent)}")


def test_this_machine_keeps_programs_and_graders_in():
    if not {"landlock", "namespaces"} & set(layers()) or "seccomp" not in layers():
        pytest.skip(f"this kernel or container has no more than {layers()}")
    assert sandbox_of("program").open == sandbox_of("grader").open == ()
    assert sandbox_of("program").failure == sandbox_of("grader").failure == ""


@pytest.mark.slow
@pytest.mark.parametrize("forbidden", ["namespaces", "landlock"])
def test_any_layers_that_suffice_do_and_verdicts_are_the_same(forbidden):
    needs("seccomp", *({"namespaces": ["landlock"], "landlock": ["namespaces"]}.get(forbidden, [])))
    found = report_of(forbidden)
    assert forbidden not in found["layers"]
    assert (found["program"], found["grader"], found["failure"]) == ([], [], "")
    assert [found[name] for name in ("code", "no sandbox", "math", "math without sandbox")] == [1.0] * 4


def test_without_layers_for_files_and_memory_programs_are_refused_and_graders_are_not():
    needs("seccomp")
    found = report_of("namespaces,landlock")
    assert found["layers"][-1:] == ["seccomp"]
    assert found["program"]
    assert "`sandbox: none`" in found["code"]
    assert found["grader"] == []
    assert [found[name] for name in ("no sandbox", "math", "math without sandbox")] == [1.0] * 3


def test_without_any_layer_both_are_refused_unless_the_recipe_does_without():
    found = report_of("namespaces,landlock,seccomp")
    assert not {"namespaces", "landlock", "seccomp"} & set(found["layers"])
    for name in ("code", "math"):
        assert "a sandbox that keeps a" in found[name]
        assert "`sandbox: none`" in found[name]
    assert [found[name] for name in ("no sandbox", "math without sandbox")] == [1.0] * 2


@pytest.mark.parametrize("forbidden", ["", "namespaces"])
def test_an_ordinary_user_has_the_same_sandbox(forbidden):
    needs("seccomp", *(["landlock"] if forbidden else []))
    if os.getuid() != 0:
        pytest.skip("every other test runs as an ordinary user already")
    try:
        subprocess.run([sys.executable, "-c", ""], user=65534, group=65534, extra_groups=[], cwd="/", check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"other users may not run {sys.executable} ({error})")
    found = report_of(forbidden, user=65534)
    assert (found["program"], found["grader"], found["failure"]) == ([], [], "")
    assert [found[name] for name in ("code", "no sandbox", "math", "math without sandbox")] == [1.0] * 4


def test_what_is_open_is_said_and_refused(monkeypatch, caplog):
    monkeypatch.setattr(sandbox, "sandbox_of", lambda contained: Sandbox(("seccomp",), ("memory", "files")))
    with pytest.raises(UnavailableError, match=r"seccomp; it can read the memory.*and write outside"):
        require_sandbox("program")
    with pytest.raises(UnavailableError):
        Code().check({"tests": [[{"output": "4"}]]})
    with pytest.raises(UnavailableError):
        Math().verdicts(["p"], ["(4)"], {"answer": ["4"]})
    monkeypatch.setattr(sandbox, "sandbox_of", lambda contained: Sandbox(("seccomp",), ()))
    sandbox._log_once.cache_clear()
    with caplog.at_level("INFO", "logitless"):
        require_sandbox("program")
        require_sandbox("program")
    assert [record.getMessage() for record in caplog.records] == [
        "sandbox: a program that the model writes cannot read the memory or environment of other processes, read files "
        "outside its folder, Python and the system's libraries, reach the network, write outside its folder, start "
        "processes or signal other processes (kept by seccomp)"
    ]


def test_a_spy_outside_a_sandbox_reaches_what_it_tries():
    with shared_pool().__class__(workers=1) as pool:
        listening = "__import__('socket').create_server(('127.0.0.1', 0))"
        port = "[s.getsockname()[1] for s in [globals().setdefault('kept', %s)]][0]" % listening  # noqa: UP031
        source = (
            "__import__('logitless.rewards.workers.spy').rewards.workers.spy.reached("
            f"[__import__('os').getppid()], {port}, '{__file__}', ['/tmp'], {list(CLAIMS)!r})"
        )
        [outcome] = pool.run(
            "builtins:eval", [(source,)], needs=["logitless.rewards.workers.spy:reached"], ways="fresh"
        )
    found = set(CLAIMS) - set(outcome.value)
    assert found <= {"memory"}  # which is closed to an ordinary user: the supervisor forbids it

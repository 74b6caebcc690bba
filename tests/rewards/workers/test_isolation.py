"""One completion never decides about another one, in its block or the next."""

import os

import pytest

from logitless.rewards.math import Math
from logitless.rewards.reasoning_gym import ReasoningGym
from logitless.rewards.user_function import Function
from logitless.rewards.workers.pool import shared_pool
from tests.rewards.takeovers import OF_A_FUNCTION, OF_A_VERIFIER

EVALUATES = "tests.rewards.functions:evaluates"
SAW = "tests.rewards.functions:says_what_it_saw"


@pytest.fixture(autouse=True)
def fresh_pools():
    yield
    for purpose in ("functions", "math", "reasoning_gym"):
        shared_pool(purpose).close()


def scores(reward, texts, **columns):
    return [verdict.score for verdict in reward.verdicts(["p"] * len(texts), texts, columns)]


def test_the_takeovers_work_where_a_process_is_kept(monkeypatch):
    monkeypatch.setattr(shared_pool("functions"), "num_workers", 1)  # which every text meets after the takeovers
    reward = Function(path=EVALUATES, process="kept")
    for takeover in OF_A_FUNCTION:
        shared_pool("functions").close()
        found = scores(reward, [takeover] * 8 + ["'wrong'"] * 64, answer=["4"] * 72)
        assert found[8:] == [1.0] * 64, takeover


@pytest.mark.parametrize("process", ["fresh", "confined"])
def test_eight_hostile_completions_change_no_verdict_of_a_function_that_evaluates_them(process):
    reward = Function(path=EVALUATES, process=process)
    for _ in range(2):
        found = scores(reward, OF_A_FUNCTION + ["'wrong'"] * 64 + ["'4'"], answer=["4"] * 73)
        assert found[8:] == [0.0] * 64 + [1.0]
    assert scores(reward, ["'wrong'"] * 64, answer=["4"] * 64) == [0.0] * 64


def test_eight_hostile_completions_change_no_verdict_of_a_verifier_and_gain_nothing_themselves():
    reasoning_gym = pytest.importorskip("reasoning_gym")
    dataset = reasoning_gym.create_dataset("string_insertion", size=1, seed=3)
    reward = ReasoningGym(task="string_insertion")
    right, wrong = dataset[0]["answer"], "['wrong']"
    assert len(OF_A_VERIFIER) == 8
    for _ in range(2):
        texts = OF_A_VERIFIER + [wrong, "wrong"] * 32 + [right]
        assert scores(reward, texts, entry=[dataset[0]] * len(texts)) == [0.0] * 72 + [1.0]


def test_formulas_that_are_programs_gain_nothing():
    hostile = ["exec('raise SystemExit')", "x.__class__", "print(3)", "$\\exec{3}$", "open('/tmp/x', 'w')", "S('3')"]
    texts = [*hostile, "3"]
    found = scores(Math(), texts, answer=["77"] * len(texts))
    assert found == [0.0] * len(texts)


@pytest.mark.parametrize("process", ["kept", "fresh", "confined"])
def test_secrets_of_the_environment_are_in_no_process_that_sees_a_completion(process, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "swordfish")
    looks = [
        "'SECRET_TOKEN' in __import__('os').environ",
        "b'SECRET_TOKEN' in open('/proc/self/environ', 'rb').read()",
        "b'SECRET_TOKEN' in __import__('subprocess').run(['env'], capture_output=True).stdout",
        "'PATH' in __import__('os').environ",
    ]
    shared_pool("functions").close()
    found = scores(Function(path=SAW, process=process), looks)
    assert found[0] == 0.0
    assert found[1] in (0.0, None)  # an ordinary user may not even look
    assert found[2] == (None if process == "confined" else 0.0)
    assert found[3] == 1.0


def test_a_function_finds_the_variables_that_its_recipe_names(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "swordfish")
    look = ["__import__('os').environ.get('JUDGE_KEY') == 'swordfish'"]
    assert scores(Function(path=SAW, environment=("JUDGE_KEY",)), look) == [1.0]
    assert scores(Function(path=SAW), look) == [0.0]


@pytest.mark.parametrize(
    "attempt",
    [
        "open('/tmp/logitless-escaped', 'w')",
        "__import__('os').mkdir('/tmp/logitless-escaped')",
        "__import__('os').fork()",
        "__import__('os').execv('/bin/true', ['true'])",
        "__import__('socket').socket()",
        "__import__('os').kill(__import__('os').getppid(), 0) or True",
        "__import__('os').kill(-1, 0) or True",
        "open('/proc/TRAINER/environ', 'rb').read()",
        "open('/proc/TRAINER/mem', 'rb')",
        "open('/proc/' + str(__import__('os').getppid()) + '/mem', 'rb')",
        "__import__('ctypes').CDLL(None).unshare(0x10000000) == 0 or 1 / 0",
        "__import__('ctypes').CDLL(None).ptrace(16, __import__('os').getppid(), 0, 0) == 0 or 1 / 0",
    ],
)
def test_a_confined_process_reaches_nothing_outside(attempt):
    attempt = attempt.replace("TRAINER", str(os.getpid()))
    [verdict] = Function(path=SAW, process="confined").verdicts(["p"], [attempt], {})
    assert (verdict.status, verdict.score) == ("error", None)
    assert "Error" in verdict.message
    assert not os.path.exists("/tmp/logitless-escaped")  # noqa: PTH110


def test_a_confined_process_computes_and_reads():
    looks = ["len(open('/proc/version').read()) > 0", "sum(range(10)) == 45", "__import__('fractions').Fraction(1, 2)"]
    assert scores(Function(path=SAW, process="confined"), looks) == [1.0] * 3


def test_a_raised_error_comes_with_its_traceback():
    [verdict] = Function(path=SAW).verdicts(["p"], ["1 / 0"], {})
    assert verdict.status == "error"
    assert verdict.traceback.startswith("Traceback (most recent call last)")
    assert "says_what_it_saw" in verdict.traceback
    assert verdict.traceback.rstrip().endswith("ZeroDivisionError: division by zero")

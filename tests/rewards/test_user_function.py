import asyncio

import numpy as np
import pytest

from logitless.errors import ConfigurationError
from logitless.rewards.user_function import Function, TrustedFunction
from tests.rewards import functions

HERE = "tests.rewards.functions"
ORDERS = {
    "none": ("missing", "None"), "raise": ("error", "RuntimeError: asked to"), "hang": ("timeout", "over 2 s"),
    "exit": ("error", "exit code 1"), "nan": ("error", "nan returned"), "inf": ("error", "inf returned"),
    "-inf": ("error", "-inf returned"), "1e300": ("error", "1e+300 returned"), "text": ("error", "str returned"),
    "fork": ("error", "left processes running"),
}  # fmt: skip


def test_every_misbehaviour_is_a_status_of_its_own_completion():
    completions = [text for order in ORDERS for text in ("well", order)]
    verdicts = Function(path=f"{HERE}:as_told", deadline_seconds=2.0).verdicts(["p"] * 20, completions, {})
    assert {verdict.score for verdict in verdicts[::2]} == {1.0}
    for (order, (status, reason)), verdict in zip(ORDERS.items(), verdicts[1::2], strict=True):
        assert (order, verdict.status) == (order, status)
        assert reason in verdict.message


def in_workers_and_here(name):
    return Function(path=f"{HERE}:{name}"), TrustedFunction(function=getattr(functions, name))


@pytest.mark.parametrize(
    ("name", "reason"), [("too_many", "2 returned"), ("none_at_all", "0 returned"), ("not_a_list", "float returned")]
)
def test_another_number_of_values_than_one_a_completion_is_an_error(name, reason):
    worker, trusted = (reward.verdicts(["p"] * 2, ["a", "b"], {}) for reward in in_workers_and_here(name))
    assert [verdict.status for verdict in worker + trusted] == ["error"] * 4
    assert reason in worker[0].message


@pytest.mark.parametrize("name", ["matches", "patient_matches"])
def test_sync_and_async_functions_get_their_columns_in_workers_and_in_this_process(name):
    columns = {"answer": ["a", "x", "c"], "unused": [1, 2, 3]}
    for reward in in_workers_and_here(name):
        assert reward.metric_name == name
        assert [v.score for v in reward.verdicts(["p"] * 3, ["a", "b", "c"], columns)] == [1.0, 0.0, 1.0]


def test_an_async_function_runs_below_a_running_event_loop():
    async def caller():
        reward = TrustedFunction(function=functions.patient_matches)
        return reward(prompts=["p"], completions=["a"], answer=["a"])

    assert asyncio.run(caller()) == [1.0]


def test_a_function_without_keywords_gets_only_what_it_names():
    for reward in in_workers_and_here("strict_length"):
        assert reward(prompts=["p"], completions=["four"], completion_ids=[[1]], answer=["x"]) == [4.0]


def test_columns_called_kwargs_and_self_arrive():
    columns = {"kwargs": [1, 10], "self": [2, 20], "path": [4, 40], "function": [8, 80]}
    for reward in in_workers_and_here("sums_of_columns"):
        assert [v.score for v in reward.verdicts(["p"] * 2, ["a", "b"], columns)] == [15.0, 150.0]


def test_token_ids_and_messages_arrive():
    for tokens in in_workers_and_here("num_tokens"):
        assert tokens(["p"] * 2, ["a", "b"], [[1, 2], np.array([3])]) == [2.0, 1.0]
    as_messages = Function(path=f"{HERE}:content_length", messages=True)
    assert as_messages(["p"] * 2, ["four", [{"role": "assistant", "content": "to"}]]) == [4.0, 2.0]


@pytest.mark.parametrize("path", ["", "module", "module:", ":function"])
def test_a_path_of_another_form_is_refused_when_the_recipe_is_read(path):
    with pytest.raises(ConfigurationError, match="colon"):
        Function(path=path)


def test_an_argument_without_a_default_must_be_a_column():
    for reward in in_workers_and_here("matches"):
        reward.check({"answer": ["4"], "other": [1]})
        with pytest.raises(ConfigurationError, match=r"prompts or a column of the data \(gold\); given answer"):
            reward.check({"gold": ["4"]})


@pytest.mark.parametrize("name", ["log_metric", "log_extra", "trainer_state"])
def test_what_only_trls_trainer_passes_needs_a_default_and_the_error_says_so(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    body = f"    if {name} is not None:\n        {name}('a', 1.0)\n    return [1.0]\n"
    (tmp_path / "own.py").write_text(
        f"def needs(completions, {name}):\n{body}\ndef guarded(completions, {name}=None):\n{body}"
        f"def lacks(completions, hardness, {name}):\n{body}"
    )
    with pytest.raises(ConfigurationError, match=rf"Only TRL's trainer passes {name}: .* Rename the others"):
        Function(path="./own.py:lacks").check({})
    with pytest.raises(ConfigurationError, match=rf"given {name}\. Only TRL's trainer passes {name}: .* None"):
        Function(path="./own.py:needs").check({})
    guarded = Function(path="./own.py:guarded")
    guarded.check({})
    assert guarded(["a"], ["b"]) == [1.0]


def test_a_function_that_takes_no_names_is_refused_before_the_first_rollout():
    with pytest.raises(ConfigurationError, match=r"given seq \(by position\)"):
        Function(path="math:fsum").check({"seq": [[1.0]]})


def test_a_function_of_a_file_is_called_and_finds_what_stands_beside_the_file(tmp_path):
    (tmp_path / "beside_it.py").write_text("FACTOR = 3.0\n")
    (tmp_path / "mine.py").write_text(
        "from beside_it import FACTOR\n\n\ndef tripled(completions):\n    return [FACTOR * len(completions[0])]\n"
    )
    reward = Function(path=f"{tmp_path}/mine.py:tripled")
    reward.check({})
    assert reward.metric_name == "tripled"
    assert reward(["p"] * 2, ["a", "four"]) == [3.0, 12.0]


@pytest.mark.parametrize(
    ("result", "given"), [("None", "NoneType"), ("'1.0'", "str"), ("[0.0] * 8", "one of 8"), ("['1.0']", "str")]
)
def test_a_function_that_returns_no_list_of_numbers_is_refused_before_the_first_rollout(tmp_path, result, given):
    (tmp_path / "mine.py").write_text(f"def mine(completions, answer):\n    return {result}\n")
    with pytest.raises(ConfigurationError, match=rf"expected, {given} returned\. Return for example \[0\.5\]"):
        Function(path=f"{tmp_path}/mine.py:mine").check({"answer": ["4", "5"]})


def test_a_function_that_raises_at_both_completions_of_its_check_is_told_of_once(tmp_path, caplog):
    """Written for conversations, where a completion is a list of messages."""
    (tmp_path / "mine.py").write_text("def mine(completions):\n    return [c[0]['content'] for c in completions]\n")
    (tmp_path / "half.py").write_text("def half(completions):\n    return [1 / len(c) for c in completions]\n")
    for _ in range(2):
        Function(path=f"{tmp_path}/mine.py:mine").check({})
        Function(path=f"{tmp_path}/half.py:half").check({})
    [told] = caplog.messages
    assert "reward 'mine' raises at an empty completion and at 'The answer is 4.': TypeError: string indices" in told


@pytest.mark.parametrize(
    ("does", "process", "said"),
    [
        ("time.sleep(60)", "fresh", "hits its deadline of 0.5 s"),
        ("time.sleep(60)", "confined", "hits its deadline of 0.5 s"),
        ("while True: pass", "fresh", "hits its deadline of 0.5 s"),
        ("os._exit(1)", "fresh", "fails"),
    ],
)
def test_a_function_that_hits_its_deadline_or_ends_at_both_completions_of_its_check_is_told_of(
    tmp_path, caplog, does, process, said
):
    (tmp_path / "mine.py").write_text(f"import os, time\n\ndef mine(completions):\n    {does}\n")
    Function(path=f"{tmp_path}/mine.py:mine", label=str(tmp_path), deadline_seconds=0.5, process=process).check({})
    [told] = caplog.messages
    assert f"{said} at an empty completion and at 'The answer is 4.': " in told
    assert told.endswith("raise its deadline_seconds") == ("deadline of" in said)


@pytest.mark.parametrize(
    ("result", "error"),
    [
        ("[float('nan')]", r"a score \(a number or None\) expected, nan returned"),
        ("__import__('numpy').full(1, 'nan', 'float32')", r"a score \(a number or None\) expected, nan returned"),
        ("[float('inf')]", r"a number within ±1e\+09 expected, inf returned"),
    ],
)
def test_a_function_without_a_finite_score_for_any_completion_is_refused_before_the_first_rollout(
    tmp_path, result, error
):
    (tmp_path / "mine.py").write_text(f"def mine(completions):\n    return {result}\n")
    with pytest.raises(ConfigurationError, match=f"mine.py:mine: {error}"):
        Function(path=f"{tmp_path}/mine.py:mine").check({})


@pytest.mark.parametrize(
    "result",
    [
        "[None]",
        "__import__('numpy').full(1, 1.0 if completions[0] else 'nan', 'float32')",
        "[1.0 if completions[0] else float('-inf')]",
        "[1 / len(completions[0])]",
        "[True]",
    ],
)
def test_what_another_completion_may_do_better_at_is_not_refused(tmp_path, result):
    (tmp_path / "mine.py").write_text(f"def mine(completions):\n    return {result}\n")
    Function(path=f"{tmp_path}/mine.py:mine").check({"answer": ["4", "5"]})

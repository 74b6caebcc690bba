"""TRL's own code calls our rewards, and its reward functions run here."""

import asyncio
import math
import threading
from types import SimpleNamespace

import pytest

from logitless.rewards.text.exact import Exact
from logitless.rewards.text.length import Length
from logitless.rewards.text.regex import Regex
from logitless.rewards.user_function import Function, TrustedFunction

grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer")

PROMPTS = ["2+2=", "2+3="]
ROWS = [{"prompt": "2+2=", "answer": "4", "kwargs": {"a": 1}}, {"prompt": "2+3=", "answer": "5", "kwargs": {}}]


@pytest.fixture
def event_loop():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def trl_scores(reward_funcs, completions, event_loop):
    """The table (completion, function) that TRL's trainer makes of these reward functions."""
    names = [grpo_trainer.get_callable_name(function) for function in reward_funcs]
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", is_main_process=True),
        args=SimpleNamespace(report_to=[]),
        state=SimpleNamespace(global_step=0),
        environments=None,
        async_loop=event_loop,
        reward_funcs=reward_funcs,
        reward_func_names=names,
        reward_processing_classes=[None] * len(reward_funcs),
        _log_completion_extra=print,
        _log_metric=print,
    )
    table = grpo_trainer.GRPOTrainer._calculate_rewards(trainer, ROWS, PROMPTS, completions, [[1], [1, 2]])
    return names, table.tolist()


@pytest.mark.parametrize(
    "completions", [["4", "6"], [[{"role": "assistant", "content": "4"}], [{"role": "assistant", "content": "6"}]]]
)
def test_trl_calls_our_rewards_unchanged(completions, event_loop):
    rewards = [
        Exact(),
        Length(),
        Regex(pattern="[5-9]", label="high"),
        Function(path="tests.rewards.functions:as_told"),
    ]
    names, table = trl_scores(rewards, completions, event_loop)
    assert names == ["exact", "length", "high", "as_told"]
    assert [row[:3] for row in table] == [[1.0, 1.0, 0.0], [0.0, 2.0, 1.0]]


def test_an_unscored_completion_is_nan_in_trl(event_loop):
    _, table = trl_scores([Exact(), Function(path="tests.rewards.functions:as_told")], ["4", "none"], event_loop)
    assert table[0] == [1.0, 1.0]
    assert table[1][0] == 0.0
    assert math.isnan(table[1][1])


@pytest.mark.parametrize("name", ["think_format_reward", "get_soft_overlong_punishment"])
def test_trls_own_functions_score_the_same_here_as_there(name, event_loop):
    rewards = pytest.importorskip("trl.rewards")
    function = getattr(rewards, name)
    if name == "get_soft_overlong_punishment":
        function = function(max_completion_len=3, soft_punish_cache=2)
    completions = [[{"role": "assistant", "content": text}] for text in ("<think>\na\n</think>\nb", "<think>a")]
    _, table = trl_scores([function], completions, event_loop)
    reward = TrustedFunction(function=function, label=name)
    verdicts = reward.verdicts(PROMPTS, completions, {"answer": ["4", "5"]}, [[1], [1, 2]])
    assert [[verdict.score] for verdict in verdicts] == table
    assert len({score for (score,) in table}) == 2

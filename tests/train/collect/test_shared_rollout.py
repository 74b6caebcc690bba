"""Judged groups on their way between ranks: nothing is lost, and each rank asks for its share alone."""

import json

import torch.distributed as dist

from logitless.distributed import Ranks
from logitless.rewards.combine import weighted
from logitless.rewards.text.length import Length
from logitless.rollout.environment import SingleTurn
from logitless.rollout.sampling import SamplingOptions
from logitless.train.collect.shared_rollout import (
    _put_together,
    _taken_apart,
    group_as_json,
    group_of_json,
    sampled_and_judged,
)
from logitless.types import Completion, Group, Prompt, Verdict
from tests.ranks import run_on_ranks

PROMPTS = [Prompt(str(i), f"prompt {i}", (i + 1,)) for i in range(5)]


def test_numbers_that_need_no_more_travel_in_four_bytes():
    small, large = (
        Group(PROMPTS[0], (Completion("0", (x,), "", "stop", (-0.1,)),), ({},), (None,)) for x in (7, 2**40)
    )
    assert [len(_taken_apart([group])[1]) for group in (small, large)] == [4 + 4 + 4, 4 + 8 + 4]


def test_a_group_comes_back_equal_from_json():
    of_turns = Completion(
        "7",
        (4, 5, 6),
        "\ud800 π",
        "length",
        (-0.1, 0.0, -1e-300),
        trained=(True, False, True),
        turn=(0, 0, 1),
        weights_version=3,
    )
    plain = Completion("7", (), "", "stop")
    verdicts = (
        {"a": Verdict.graded(1 / 3, detail=(("length:at_most", True), ("length:at_most", False)))},
        {"a": Verdict(None, "timeout", message="over 2 s")},
    )
    group = Group(Prompt("7", "2+2=", (1,)), (of_turns, plain), verdicts, (0.1 + 0.2, None), ((0.5, -0.25), ()))
    large = Group(group.prompt, (Completion("7", (2**40,), "", "stop", (-1e30,)),), verdicts[:1], (1.0,))
    assert group_of_json(group.prompt, json.loads(json.dumps(group_as_json(group)))) == group
    for groups in ([group], [group, large], []):
        rest, numbers = _taken_apart(groups)
        assert _put_together([group.prompt for group in groups], json.loads(json.dumps(rest)), numbers) == groups


class Counting:
    """An engine whose completions say what they were asked for."""

    def __init__(self):
        self.asked = []

    def load(self, weights, version):
        """Nothing to keep."""

    def close(self):
        """Nothing to give back."""

    def sample(self, prompts, num_samples, options, *, seed):
        self.asked.append([prompt.id for prompt in prompts])
        return [
            [
                Completion(p.id, (seed % 7, *range(g)), f"{p.id}/{g}", "stop", weights_version=2)
                for g in range(num_samples)
            ]
            for p in prompts
        ]


def _groups(rank, num_prompts):
    engine = Counting()
    ranks = Ranks(data=dist.group.WORLD) if dist.is_initialized() else Ranks.alone()
    groups = sampled_and_judged(
        ranks,
        engine,
        SingleTurn(),
        PROMPTS[:num_prompts],
        weighted([Length()]),
        num_samples=2,
        options=SamplingOptions(max_new_tokens=4),
        unscored="leave_out",
        seed=11,
    )
    return groups, engine.asked


def test_each_rank_samples_its_share_and_all_get_all_groups():
    alone, asked = _groups(0, 5)
    assert asked == [["0", "1", "2", "3", "4"]]
    (first, asked_first), (second, asked_second) = run_on_ranks(2, _groups, 5)
    assert first == second == alone
    assert (asked_first, asked_second) == ([["0", "2", "4"]], [["1", "3"]])


def test_a_rank_without_a_prompt_asks_for_nothing():
    alone, _ = _groups(0, 1)
    (first, _), (second, asked) = run_on_ranks(2, _groups, 1)
    assert first == second == alone
    assert asked == []

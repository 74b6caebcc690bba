"""What rewards say of episodes: each beside its own prompt, by text or as a whole."""

import pytest

from logitless.rewards.combine import weighted
from logitless.rewards.reward import WeightedReward
from logitless.rewards.text.exact import Exact
from logitless.rewards.text.length import Length
from logitless.train.collect.episode_rewards import judge, signal
from logitless.types import Completion, Episode, Prompt, Verdict
from tests.train.groups import group_of

MISSING = Verdict(score=None, status="timeout")


def _episodes(prompts, num_samples=2, **fields) -> list[list[Episode]]:
    """Completions ``<prompt id><number>``."""
    return [
        [Episode(Completion(p.id, (5,) * (i + 1), f"{p.id}{i}", "stop"), (), **fields) for i in range(num_samples)]
        for p in prompts
    ]


def test_a_group_has_a_signal_where_its_known_rewards_differ():
    groups = [
        group_of("1", [1.0, 1.0]),
        group_of("2", [1.0, 0.0]),
        group_of("3", [1.0, None]),
        group_of("4", [None, None]),
    ]
    assert signal(groups) == [False, True, False, False]


def test_each_completion_is_judged_beside_the_columns_of_its_own_prompt():
    prompts = [Prompt("a", "?", (1,), {"answer": "a1"}), Prompt("b", "?", (1,), {"answer": "b0"})]
    rewards = weighted([Exact(weight=2.0), Length(weight=0.5, cap=9)])
    groups = judge(prompts, _episodes(prompts), rewards, unscored="leave_out")
    # exact counts 2, each token a half
    assert [g.rewards for g in groups] == [(0.5, 3.0), (2.5, 1.0)]
    assert groups[1].verdicts[0]["exact"].score == 1.0


@pytest.mark.parametrize(("unscored", "expected"), [("leave_out", (0.5, 1.0)), ("drop", (None, None))])
def test_what_a_partly_scored_completion_is_worth_is_a_choice(unscored, expected):
    prompts = [Prompt("a", "?", (1,), {"answer": None})]
    rewards = weighted([Unable(), Length(weight=0.5, cap=9)])
    (group,) = judge(prompts, _episodes(prompts), rewards, unscored=unscored)
    assert group.rewards == expected


class Unable(Length):
    """Can judge nothing."""

    @property
    def metric_name(self):
        return "unable"

    def verdicts(self, prompts, completions, columns, completion_ids=None):
        return [MISSING] * len(completions)


def test_what_an_environment_paid_at_the_turns_is_part_of_the_reward():
    prompts = [Prompt("a", "?", (1,))]
    completion = Completion("a", (5, 6, 7), "c", "stop", trained=(True, False, True), turn=(0, 0, 1))
    episodes = [[Episode(completion, (), (0.25, 0.5)), Episode(completion, ())]]
    (group,) = judge(prompts, episodes, weighted([Length(weight=2.0)]), unscored="leave_out")
    assert group.rewards == (6.75, 6.0)
    assert group.turn_rewards == ((0.25, 0.5), ())
    (unknown,) = judge(prompts, episodes, weighted([Unable()]), unscored="leave_out")
    assert unknown.rewards == (None, None)


class Turns(Length):
    """Counts assistant turns, which no text shows."""

    @property
    def metric_name(self):
        return "turns"

    def episode_verdicts(self, episodes, columns):
        assert len(columns["answer"]) == len(episodes)
        return [Verdict.graded(float(sum(m["role"] == "assistant" for m in e.messages))) for e in episodes]


def test_a_reward_that_judges_episodes_is_given_them_and_the_others_their_text():
    prompts = [Prompt("a", "?", (1,), {"answer": "a1"})]
    episodes = [[Episode(e.completion, ({"role": "assistant"},) * n) for n, e in enumerate(_episodes(prompts)[0])]]
    rewards = [WeightedReward(Turns(), name="turns"), WeightedReward(Exact())]
    (group,) = judge(prompts, episodes, rewards, unscored="leave_out")
    assert [list(v) for v in group.verdicts] == [["turns", "exact"]] * 2
    assert [v["turns"].score for v in group.verdicts] == [0, 1]
    assert group.rewards == (0.0, 2.0)


def test_without_rewards_what_the_environment_paid_is_the_reward_and_its_failure_is_no_zero():
    prompt = Prompt("7", "p", (1,))
    completion = Completion("7", (1, 2), "ab", "stop")
    paid = Episode(completion, (), (0.75,))
    unpaid = Episode(completion, ())
    failed = Episode(completion, (), (), "ValueError: broken\nTraceback")
    [group] = judge([prompt], [[paid, unpaid, failed]], (), unscored="leave_out")
    assert group.rewards == (0.75, 0.0, None)
    assert [verdicts["environment"].status for verdicts in group.verdicts] == ["graded", "graded", "error"]
    assert group.verdicts[2]["environment"].traceback == "Traceback"

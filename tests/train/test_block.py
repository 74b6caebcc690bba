"""From groups to a scored block with advantages: numbers by hand, and the same prompt drawn twice."""

import math
from dataclasses import replace

import pytest
import torch

from logitless.data.packing import pack
from logitless.errors import ConfigurationError
from logitless.models.loading import load_model
from logitless.objective.advantage import Gae, Gdpo, GroupCentered, GroupStandardized, LeaveOneOut, ReinforcePP
from logitless.rewards.combine import weighted
from logitless.rewards.exact import Exact
from logitless.rewards.length import Length
from logitless.rollout.sampling import SamplingOptions
from logitless.train.block import (
    advantage_metrics,
    advantages_of,
    block_metrics,
    derived_seed,
    packed,
    roll_out,
    score,
    signal,
    value_metrics,
    verdict_metrics,
    with_advantages,
)
from logitless.train.policy import Policy
from logitless.types import Completion, Group, Prompt, TokenBatch, Verdict

MISSING = Verdict(score=None, status="timeout")


def _group(prompt_id: str, rewards, lengths=None, **verdicts) -> Group:
    """A group whose completions have these rewards and lengths (default 2 each)."""
    prompt = Prompt(prompt_id, "p", (1, 2))
    lengths = lengths or [2] * len(rewards)
    completions = tuple(Completion(prompt_id, (3,) * n, "c" * n, "stop") for n in lengths)
    said = tuple({name: values[i] for name, values in verdicts.items()} for i in range(len(rewards)))
    return Group(prompt, completions, said, tuple(rewards))


def _advantages(groups, estimator, **options):
    batch, _ = packed(groups)
    if "logp_old" in options:
        batch = replace(batch, logp_old=options.pop("logp_old"), logp_ref=options.pop("logp_ref"))
    return with_advantages(batch, groups, estimator, weights=options.pop("weights", {}), **options)


@pytest.mark.parametrize("estimator", [GroupStandardized(), GroupCentered(), LeaveOneOut()])
def test_advantages_sum_to_zero_in_each_group_whatever_the_prompts_are_called(estimator):
    groups = [_group("907", [1.0, 1.0, 1.0, 9.0]), _group("-3", [9.0, 1.0, 1.0, 1.0])]
    per_completion = advantages_of(_advantages(groups, estimator), groups, [True, True])
    for group, outlier in zip(per_completion, (3, 0), strict=True):
        assert math.fsum(group) == pytest.approx(0, abs=1e-5)
        assert max(group) == group[outlier] > 0
    # rewards 1 1 1 9: mean 3, Bessel-corrected standard deviation 4, to which 1e-4 is added
    if estimator == GroupStandardized():
        assert per_completion[0] == pytest.approx([x / 4.0001 for x in (-2, -2, -2, 6)], rel=1e-5)


def test_the_same_prompt_drawn_twice_makes_two_groups():
    first, second = _group("7", [0.0, 2.0]), _group("7", [0.0, 8.0])
    batch, members = packed([first, second])
    assert members == ((0, 1), (2, 3))
    batch = with_advantages(batch, [first, second], GroupCentered(), weights={})
    assert advantages_of(batch, [first, second], [True, True]) == [[-1.0, 1.0], [-4.0, 4.0]]


def test_groups_left_out_and_completions_without_a_token_have_no_advantage():
    equal, differing = _group("7", [1.0, 1.0]), _group("7", [0.0, 2.0, 4.0], lengths=[1, 0, 3])
    batch = _advantages([differing], GroupCentered())
    assert advantages_of(batch, [equal, differing], [False, True]) == [[None, None], [-2.0, None, 2.0]]


def test_the_number_of_clipped_advantages_is_there_exactly_when_there_is_a_limit():
    assert "advantage/clipped" not in advantage_metrics([[1.0, 2.0]], limit=None)
    estimator = GroupCentered(clip=0.7)  # 0.7 is not a float32
    batch = _advantages([_group("7", [0.0, 3.0, 1.5])], estimator)
    found = advantage_metrics(advantages_of(batch, [_group("7", [0.0, 3.0, 1.5])], [True]), estimator.clip)
    assert found["advantage/clipped"] == 2
    assert found["advantage/mean"] == 0
    assert found["advantage/std"] == pytest.approx(0.7)


def test_a_completion_without_a_reward_has_advantage_0_and_enters_no_mean():
    batch = _advantages([_group("7", [1.0, None, 3.0])], GroupCentered())
    assert batch.advantage.tolist() == [-1, -1, 0, 0, 1, 1]


def test_a_loss_without_advantages_gets_zeros():
    assert _advantages([_group("7", [1.0, 3.0])], None).advantage.tolist() == [0, 0, 0, 0]


def test_kl_in_the_reward_is_taken_from_a_completion_before_its_group_is_compared():
    options = {
        "logp_old": torch.tensor([-1.0, -1.0, -1.0, -1.0]),
        "logp_ref": torch.tensor([-2.0, -1.5, -1.0, -1.25]),
    }
    batch = _advantages([_group("7", [5.0, 4.0])], GroupCentered(), kl_beta=2.0, **options)
    # k1 sums to 1.5 and 0.25 nat: rewards 5 - 3 and 4 - 0.5, mean 2.75
    assert batch.advantage.tolist() == [-0.75, -0.75, 0.75, 0.75]


def test_kl_in_the_reward_is_paid_token_by_token_where_returns_are_tokens():
    batch = _advantages(
        [_group("7", [6.0, 1.0], lengths=[2, 1])],
        ReinforcePP(),
        kl_beta=2.0,
        logp_old=torch.tensor([-1.0, -1.0, -1.0]),
        logp_ref=torch.tensor([-2.0, -1.5, -1.0]),
    )
    # token rewards -2, 6 - 1, 1; returns 3, 5, 1: mean 3, standard deviation 2
    assert batch.advantage.tolist() == pytest.approx([0.0, 1.0, -1.0], abs=1e-3)


def test_values_give_generalised_advantages_and_a_target():
    batch, _ = packed([_group("7", [1.0])])
    batch = replace(batch, value_old=torch.tensor([0.5, 0.25]))
    batch = with_advantages(batch, [_group("7", [1.0])], Gae(1.0, 0.5), weights={})
    # 0.125 and 0.75 before they are whitened
    assert batch.advantage.tolist() == pytest.approx([-0.7071, 0.7071], abs=1e-3)
    assert batch.value_target.tolist() == [0.625, 1.0]


def test_a_kl_in_the_reward_is_part_of_the_return_that_values_are_fitted_to():
    batch, _ = packed([_group("7", [6.0])])
    batch = replace(
        batch,
        logp_old=torch.tensor([-1.0, -1.0]),
        logp_ref=torch.tensor([-2.0, -1.5]),
        value_old=torch.tensor([1.0, 3.0]),
    )
    batch = with_advantages(batch, [_group("7", [6.0])], Gae(1.0, 0.5, whiten=False), weights={}, kl_beta=2.0)
    # rewards -2 and 6 - 1; deltas -2 + 3 - 1 = 0 and 5 - 3 = 2; advantages 0 + 2 / 2 and 2
    assert batch.advantage.tolist() == [1.0, 2.0]
    assert batch.value_target.tolist() == [2.0, 5.0]


def test_a_completion_without_a_reward_has_advantage_0_and_nothing_to_fit_its_values_to():
    group = _group("7", [1.0, None])
    batch, _ = packed([group])
    batch = replace(batch, value_old=torch.tensor([0.5, 0.25, 8.0, 9.0]))
    batch = with_advantages(batch, [group], Gae(1.0, 0.5), weights={})
    assert batch.advantage.tolist() == pytest.approx([-0.7071, 0.7071, 0.0, 0.0], abs=1e-3)  # whitened without it
    assert batch.value_target.tolist()[:2] == [0.625, 1.0]
    assert batch.value_target[2:].isnan().all()
    found = value_metrics(batch)
    assert found["value/mean"] == (0.75 + 17) / 4
    assert found["value/return_mean"] == 0.8125
    # returns 0.625 and 1, variance 0.1875^2; errors 0.125 and 0.75, variance 0.3125^2
    assert found["value/explained_variance"] == pytest.approx(1 - (0.3125 / 0.1875) ** 2)


def test_without_values_there_are_no_numbers_of_them():
    assert value_metrics(_advantages([_group("7", [1.0, 3.0])], GroupCentered())) == {}


def _two_turns() -> tuple[Group, TokenBatch]:
    """Three tokens in two turns with a tool's answer in between, and a completion of one turn."""
    prompt = Prompt("7", "p", (1, 2))
    first = Completion("7", (3, 4, 5, 6, 7), "", "stop", trained=(True, True, False, False, True), turn=(0, 0, 0, 1, 1))
    second = Completion("7", (3, 4), "", "stop")
    group = Group(prompt, (first, second), ({}, {}), (8.0, 2.0))
    return group, replace(packed([group])[0], value_old=torch.tensor([1.0, 50.0, 4.0, 3.0, 50.0]))


def test_a_reward_of_several_turns_is_paid_once_at_the_last_token_of_the_last_turn():
    group, batch = _two_turns()
    assert batch.turn.tolist() == [0, 0, 1, 0, 0]
    per_token = with_advantages(batch, [group], Gae(1.0, 1.0, whiten=False), weights={})
    assert per_token.value_target.tolist() == [8.0, 8.0, 8.0, 2.0, 2.0]  # undiscounted: the reward, not twice it


def test_a_turn_has_one_advantage_from_the_value_before_its_first_token():
    group, batch = _two_turns()
    batch = with_advantages(batch, [group], Gae(0.5, 0.5, action="turn", whiten=False), weights={})
    # turn 0: reward 0, value 1, next value 4: delta 0 + 2 - 1 = 1; turn 1: delta 8 - 4 = 4; the other: 2 - 3 = -1
    # advantages 1 + 4 / 4 = 2, 4 and -1; returns 3, 8 and 2
    assert batch.advantage.tolist() == [2.0, 2.0, 4.0, -1.0, -1.0]
    assert batch.value_target.tolist() == [3.0, 3.0, 8.0, 2.0, 2.0]


def test_gdpo_refuses_a_kl_in_the_reward_that_it_would_not_see():
    verdicts = {"a": [Verdict.graded(0.0), Verdict.graded(1.0)]}
    options = {"logp_old": torch.zeros(4), "logp_ref": -torch.ones(4), "weights": {"a": 1.0}}
    group = _group("7", [0.0, 1.0], **verdicts)
    with pytest.raises(ConfigurationError, match=r"gdpo.*kl\.placement: loss"):
        _advantages([group], Gdpo(), kl_beta=0.5, **options)
    _advantages([group], Gdpo(), kl_beta=0.0, **options)


def test_gdpo_takes_the_functions_apart():
    verdicts = {
        "a": [Verdict.graded(0.0), Verdict.graded(1.0)],
        "b": [Verdict.graded(100.0), Verdict.graded(0.0)],
    }
    batch = _advantages([_group("7", [0.0, 0.0], **verdicts)], Gdpo(), weights={"a": 2.0, "b": 1.0})
    # each function alone: -+0.707 and +-0.707; weighted -0.707 and +0.707, whitened
    assert batch.advantage.tolist() == pytest.approx([-0.7071, -0.7071, 0.7071, 0.7071], abs=1e-3)


def test_a_group_has_a_signal_where_its_known_rewards_differ():
    groups = [
        _group("1", [1.0, 1.0]),
        _group("2", [1.0, 0.0]),
        _group("3", [1.0, None]),
        _group("4", [None, None]),
    ]
    assert signal(groups) == [False, True, False, False]


def test_the_numbers_of_a_block_speak_of_everything_that_was_drawn():
    groups = [_group("1", [1.0, 1.0], lengths=[0, 4]), _group("2", [0.0, None], lengths=[2, 2])]
    found = block_metrics(groups, num_trained=1, rounds=3)
    assert found["reward/mean"] == pytest.approx(2 / 3)
    assert found["reward/std"] == pytest.approx(math.sqrt(1 / 3))
    assert found["reward/unscored"] == 1
    assert found["group/zero_signal_fraction"] == 1.0
    assert (found["group/trained"], found["group/dropped"], found["group/refill_rounds"]) == (1, 1, 2)
    assert (found["length/mean"], found["length/min"], found["length/max"]) == (2, 0, 4)
    assert (found["length/empty"], found["length/truncated_fraction"], found["length/prompt_mean"]) == (1, 0, 2)


def test_a_block_that_nothing_could_score_has_no_mean_reward():
    found = block_metrics([_group("1", [None, None])], num_trained=0, rounds=1)
    assert math.isnan(found["reward/mean"])
    assert found["reward/unscored"] == 2


def test_two_functions_that_check_one_constraint_share_its_pass_rate():
    def graded(*passed: bool) -> Verdict:
        return Verdict.graded(0.0, [("words:few", p) for p in passed])

    verdicts = {"a": [graded(True), graded(True)], "b": [graded(False, True), MISSING]}
    found = verdict_metrics([_group("1", [0.0, 0.0], **verdicts)])
    assert (found["constraint/words:few/count"], found["constraint/words:few/pass_rate"]) == (4, 0.75)
    assert (found["constraint_family/words/count"], found["constraint_family/words/pass_rate"]) == (4, 0.75)
    assert (found["verdict/b/graded"], found["verdict/b/timeout"]) == (1, 1)


class _Engine:
    """Completions ``<prompt id><number>``."""

    version = 0

    def sample(self, prompts, num_samples, options, *, seed):
        return [[Completion(p.id, (5,) * (i + 1), f"{p.id}{i}", "stop") for i in range(num_samples)] for p in prompts]

    def update_weights(self, model, *, version):
        pass


def test_each_completion_is_judged_beside_the_columns_of_its_own_prompt():
    prompts = [Prompt("a", "?", (1,), {"answer": "a1"}), Prompt("b", "?", (1,), {"answer": "b0"})]
    rewards = weighted([Exact(weight=2.0), Length(weight=0.5, cap=9)])
    groups = roll_out(
        _Engine(),
        prompts,
        rewards,
        num_samples=2,
        sampling=SamplingOptions(max_new_tokens=4),
        unscored="leave_out",
        seed=0,
    )
    # exact counts 2, each token a half
    assert [g.rewards for g in groups] == [(0.5, 3.0), (2.5, 1.0)]
    assert groups[1].verdicts[0]["exact"].score == 1.0


@pytest.mark.parametrize(("unscored", "expected"), [("leave_out", (0.5, 1.0)), ("drop", (None, None))])
def test_what_a_partly_scored_completion_is_worth_is_a_choice(unscored, expected):
    prompts = [Prompt("a", "?", (1,), {"answer": None})]
    (group,) = roll_out(
        _Engine(),
        prompts,
        weighted([Unable(), Length(weight=0.5, cap=9)]),
        num_samples=2,
        sampling=SamplingOptions(max_new_tokens=4),
        unscored=unscored,
        seed=0,
    )
    assert group.rewards == expected


class Unable(Length):
    """Can judge nothing."""

    @property
    def metric_name(self):
        return "unable"

    def verdicts(self, prompts, completions, columns, completion_ids=None):
        return [MISSING] * len(completions)


def test_scores_come_back_in_the_blocks_order_however_the_rows_are_laid():
    config = {
        "model_type": "gpt2",
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 1,
        "vocab_size": 11,
        "n_positions": 32,
        "initializer_range": 0.5,
        **{f"{part}_pdrop": 0.0 for part in ("resid", "embd", "attn")},
    }
    policy = Policy(load_model(config, random_weights=True, seed=1))
    pairs = []
    for s, (prompt, answer) in enumerate([((1,), (4, 5, 6)), ((1, 2), ()), ((3, 4, 5), (7,)), ((2,), (8, 9))]):
        pairs.append((Prompt(str(s), "", prompt), Completion(str(s), answer, "", "stop")))
    found = score(policy, pack(pairs), [(3, 0), (2,)], temperature=2.0, backend="reference")
    expected = []
    for prompt, completion in pairs:
        ids = torch.tensor([prompt.token_ids + completion.token_ids])
        with torch.no_grad():
            rows = (policy.model(ids).logits[0] / 2.0).log_softmax(-1)
        for j, token in enumerate(completion.token_ids):
            row = rows[len(prompt.token_ids) - 1 + j]
            expected.append((float(row[token]), float(-(row.exp() * row).sum())))
    assert found.logp.tolist() == pytest.approx([e[0] for e in expected], abs=1e-5)
    assert found.entropy.tolist() == pytest.approx([e[1] for e in expected], abs=1e-5)


def test_seeds_of_different_purposes_differ():
    seeds = {derived_seed(seed, name, n) for seed in range(3) for name in ("a", "b") for n in range(5)}
    assert len(seeds) == 30
    assert all(0 <= seed < 2**63 for seed in seeds)

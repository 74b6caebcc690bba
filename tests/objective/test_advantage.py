"""Advantages: hand-worked numbers for each equation, and the laws that hold for all rewards."""

import itertools
import math
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logitless.errors import ConfigurationError, InputError
from logitless.objective import advantage as adv
from logitless.objective import ranges
from logitless.objective.advantage import batch_relative, group_relative, token_returns
from logitless.objective.over_ranks import one_rank
from tests.objective.batches import double as f64

NAN = float("nan")
EPS = 1e-4


def assert_close(actual, expected, atol=1e-12):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=1e-12, atol=atol)


def completions(estimator, rewards, group, total=one_rank):
    """One advantage a completion: each is a single token here."""
    return estimator(adv.AdvantageInputs(rewards, group, torch.arange(len(rewards))), total).advantage


def along(estimator, token_rewards, sequence, total=one_rank, **more):
    """Advantage and value target of rewards that are paid anywhere."""
    num_sequences = int(sequence.max()) + 1 if len(sequence) else 0
    rewards, group = token_rewards.new_zeros(num_sequences), torch.zeros(num_sequences, dtype=torch.long)
    found = estimator(adv.AdvantageInputs(rewards, group, sequence, kl=-token_rewards, **more), total)
    return found.advantage, found.value_target


# Two interleaved groups with ids that are neither compact nor in order:
# group 41: 1, 2, 6, 3 -> mean 3; group 7: 0, 4 -> mean 2
REWARDS = f64(1, 0, 2, 6, 4, 3)
GROUP = torch.tensor([41, 7, 41, 41, 7, 41])
CENTERED = [-2, -2, -1, 3, 2, 0]
# The batch: 1 0 2 6 4 3, mean 16/6, sum of squares 66 - 256/6 = 70/3.
BATCH_STD = math.sqrt(70 / 3 / 5)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (group_relative.group_centered, CENTERED),
        # by the spread of the raw rewards of the batch
        (batch_relative.batch_standardized, [c / (BATCH_STD + EPS) for c in CENTERED]),
        # 1 - (2+6+3)/3, 0 - 4, 2 - (1+6+3)/3, 6 - (1+2+3)/3, 4 - 0, 3 - (1+2+6)/3
        (group_relative.leave_one_out, [-8 / 3, -4, -4 / 3, 4, 4, 0]),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_an_advantage_in_its_group_by_hand(function, expected):
    assert_close(function(REWARDS, GROUP), expected)


def test_max_rl_by_hand_and_zero_where_the_mean_is_not_positive():
    rewards = f64(0, 3, -1, 1, -4, 2, 0, 0)
    group = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    assert_close(group_relative.max_rl(rewards, group), [-1, 1, 0, 0, 0, 0, 0, 0])


def test_a_length_weighted_mean_counts_a_completion_once_a_token():
    # verl's compute_opo_outcome_advantage gives these numbers, too.
    # Group 41 of lengths 3 1 1 5 with rewards 1 2 6 3: 26/10. Group 7 of lengths 2 6 with rewards 0 4: 24/8.
    sequence = torch.repeat_interleave(torch.arange(6), torch.tensor([3, 2, 1, 1, 6, 5]))
    found = adv.LengthWeighted()(adv.AdvantageInputs(REWARDS, GROUP, sequence)).advantage
    assert_close(found, f64(-1.6, -3, -0.6, 3.4, 1, 0.4)[sequence])


def test_remax_is_verls_in_its_own_numbers():
    expected = [0.5, -1, 2, 4, 5, 0]  # compute_remax_outcome_advantage, at every token
    assert_close(group_relative.remax(REWARDS, f64(0.5, 1, 0, 2, -1, 3)), expected)


def test_a_length_weighted_mean_leaves_out_an_unscored_completion_however_long():
    rewards, group = f64(1, 3, NAN), torch.zeros(3, dtype=torch.long)
    assert_close(group_relative.length_weighted(rewards, group, f64(1, 3, 90)), [-1.5, 0.5, 0])  # 1 and 9 over 4
    assert group_relative.length_weighted(f64(1, 3), torch.tensor([0, 0]), f64(0, 0)).tolist() == [
        0,
        0,
    ]  # no trained token


def test_gpg_by_hand():
    # Of three groups that are compared two differ: alpha 3/2. Those of one scored completion and of none do not count.
    rewards = f64(0, 1, 1, 2, 1, 1, 5, NAN, NAN)
    group = torch.tensor([4, 4, 2, 2, 9, 9, 3, 3, 8])
    assert_close(batch_relative.gpg(rewards, group), [-0.75, 0.75, -0.75, 0.75, 0, 0, 0, 0, 0])
    seen = []

    def twins(counts):
        seen.append(counts)
        return counts + f64(3, 0)  # the other rank has three groups without a signal

    assert_close(batch_relative.gpg(rewards, group, twins)[:2], [-1.5, 1.5])
    assert len(seen) == 1


def test_gpg_is_verls_where_half_of_the_groups_and_of_the_rewards_are_0():
    rewards, group = f64(1, 2, 0, 0, 3, 1, 0, 0), torch.tensor([4, 4, 2, 2, 9, 9, 3, 3])
    # compute_gpg_outcome_advantage: its alpha is 8 completions over 4 rewards that are not 0, ours 4 groups over 2
    assert_close(batch_relative.gpg(rewards, group), [-1, 1, 0, 0, 2, -2, 0, 0])


@pytest.mark.parametrize(
    ("rewards", "k", "of_pass", "of_fail"),
    # calc_adv of RUCAIBox/Passk_Training c3ba575, which adds 1e-6 to the deviation
    [([1, 1, 0, 0, 0, 0, 0], 3, 0.632454132037, -0.252981652815), ([1, 0, 0, 0], 2, 0.999998000004, -0.333332666668)],
)
def test_pass_at_k_is_its_authors_in_their_own_numbers(rewards, k, of_pass, of_fail):
    found = group_relative.pass_at_k(f64(*rewards), torch.zeros(len(rewards), dtype=torch.long), k)
    torch.testing.assert_close(found, f64(*[of_pass if r else of_fail for r in rewards]), rtol=3e-6, atol=0)


def test_pass_at_k_is_the_reward_of_the_sets_averaged_over_those_of_a_completion():
    rewards = [0.0, 1.0, 0.5, 2.0, 0.0, 0.0, 0.0]
    for k in range(1, 8):
        sets = list(itertools.combinations(range(7), k))
        best = np.array([max(rewards[i] >= 1 for i in each) for each in sets], dtype=float)
        std = best.std()  # of all sets, not of a sample
        mine = [best[[i in each for each in sets]].mean() for i in range(7)]
        expected = [(m - best.mean()) / std if std else 0.0 for m in mine]
        assert_close(group_relative.pass_at_k(f64(*rewards), torch.zeros(7, dtype=torch.long), k), expected)


def test_pass_at_k_is_zero_where_every_set_passes_or_none_or_there_is_none():
    group = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])
    rewards = f64(1, 1, 0, 0, 0, 0, 1, 0, NAN)
    assert group_relative.pass_at_k(rewards, group, 2)[:6].tolist() == [0] * 6
    assert group_relative.pass_at_k(rewards, group, 3).tolist() == [0] * 9


def test_pass_at_k_refuses_a_kl_in_the_reward():
    inputs = adv.AdvantageInputs(f64(1, 0), torch.tensor([0, 0]), torch.tensor([0, 1]), kl=f64(0.1, 0.1))
    with pytest.raises(ConfigurationError, match="rewards without a KL for pass_at_k"):
        adv.PassAtK(2)(inputs)


def test_reinforce_pp_baseline_counts_a_completion_once_a_token_unless_told_otherwise():
    # Lengths 3 1 1 1 2 1: centred -2 -2 -2 | -2 | -1 | 3 | 2 2 | 0, sum -2 over 9 tokens, mean -2/9,
    # squares 12 + 4 + 1 + 9 + 8 + 0 = 34, less 9 * (2/9)^2 = 4/9.
    lengths = torch.tensor([3, 1, 1, 1, 2, 1])
    sequence = torch.repeat_interleave(torch.arange(6), lengths)
    std = math.sqrt((34 - 4 / 9) / 8)
    by_tokens = [(c + 2 / 9) / (std + EPS) for c in CENTERED]
    inputs = adv.AdvantageInputs(REWARDS, GROUP, sequence)
    found = adv.ReinforcePPBaseline()(inputs).advantage
    assert_close(found, [a for a, n in zip(by_tokens, lengths.tolist(), strict=True) for _ in range(n)])
    by_completions = adv.ReinforcePPBaseline(whiten_over="completions")(inputs).advantage
    expected = [c / (math.sqrt(22 / 5) + EPS) for c in CENTERED]
    assert_close(by_completions, [a for a, n in zip(expected, lengths.tolist(), strict=True) for _ in range(n)])


def test_reinforce_pp_baseline_leaves_tokens_without_a_reward_out_of_the_whitening():
    # -1 | 1 1 are left: mean 1/3, std sqrt(4/3)
    inputs = adv.AdvantageInputs(f64(1, 3, NAN), torch.zeros(3, dtype=torch.long), torch.tensor([0, 1, 1, 2, 2]))
    scale = math.sqrt(4 / 3) + EPS
    assert_close(adv.ReinforcePPBaseline()(inputs).advantage, [-4 / 3 / scale, 2 / 3 / scale, 2 / 3 / scale, 0, 0])


def test_gdpo_by_hand():
    # f: 0 2 in group 0, 0 0 in group 1; g: 5 5, 1 3. Standardised: f -+1/(sqrt2 + eps), 0; g 0, -+1/(sqrt2 + eps).
    # With weights 1 and 3: -a, a, -3a, 3a; mean 0, std sqrt(20/3) a.
    rewards = torch.tensor([[0, 5], [2, 5], [0, 1], [0, 3]], dtype=torch.float64)
    a = 1 / (math.sqrt(2) + EPS)
    scale = math.sqrt(20 / 3) * a + EPS
    expected = [-a / scale, a / scale, -3 * a / scale, 3 * a / scale]
    assert_close(batch_relative.gdpo(rewards, torch.tensor([0, 0, 1, 1]), f64(1, 3)), expected)


def test_gdpo_leaves_a_missing_value_out_of_its_function_only():
    # f of completion 1 is missing: group f = 0, 2 (completions 0, 2); g = 1, 1, 4 with mean 2, std sqrt(3).
    rewards = torch.tensor([[0, 1], [NAN, 1], [2, 4], [NAN, NAN]], dtype=torch.float64)
    f, g = 1 / (math.sqrt(2) + EPS), 1 / (math.sqrt(3) + EPS)
    combined = [-f - g, -g, f + 2 * g]  # sums to 0
    scale = math.sqrt(sum(c**2 for c in combined) / 2) + EPS
    actual = batch_relative.gdpo(rewards, torch.zeros(4, dtype=torch.long), f64(1, 1))
    assert_close(actual, [*(c / scale for c in combined), 0])


def test_a_lone_completion_has_advantage_zero_and_counts_in_the_whitening():
    # Centred -1, 1, 0: std 1, not sqrt 2.
    rewards, group = f64(1, 3, 7), torch.tensor([0, 0, 1])
    expected = [-1 / (1 + EPS), 1 / (1 + EPS), 0]
    assert_close(batch_relative.reinforce_pp_baseline(rewards, group, torch.arange(3)), expected)
    a = 1 / (math.sqrt(2) + EPS)  # standardised in the group, then of -a, a, 0: std a
    assert_close(batch_relative.gdpo(rewards[:, None], group, f64(1)), [-a / (a + EPS), a / (a + EPS), 0])


def test_a_group_has_signal_where_its_scored_rewards_differ():
    rewards = f64(1, 1, NAN, 0, 1, NAN, NAN, 5, NAN)
    group = torch.tensor([9, 9, 9, 4, 4, 4, 30, 2, 2])
    assert adv.has_signal(rewards, group).tolist() == [False, True, False, False]  # ids 2, 4, 9, 30


GROUP_RELATIVE = [
    adv.GroupCentered(),
    adv.GroupStandardized(),
    adv.BatchStandardized(),
    adv.LeaveOneOut(),
    adv.Percentile(30.0),
    adv.Robust(),
    adv.MaxRl(),
    adv.ReinforcePPBaseline(),
    adv.LengthWeighted(),
    adv.Gpg(),
    adv.PassAtK(1, passing=3.5),
]
CENTERED_ON_THE_MEAN = [e for e in GROUP_RELATIVE if not isinstance(e, adv.Percentile | adv.Robust)]
CENTERED_ON_THE_MEAN += [adv.PassAtK(2, passing=0.25), adv.PassAtK(3, passing=0.25)]
by_name = {"ids": lambda estimator: estimator.name}


@pytest.mark.parametrize("estimator", GROUP_RELATIVE, **by_name)
def test_an_unscorable_completion_has_advantage_zero_and_moves_no_other(estimator):
    rewards = torch.cat([REWARDS, f64(NAN, NAN)])
    group = torch.cat([GROUP, torch.tensor([7, 99])])
    actual = completions(estimator, rewards, group)
    assert_close(actual[:6], completions(estimator, REWARDS, GROUP))
    assert actual[6:].tolist() == [0, 0]


@pytest.mark.parametrize("estimator", GROUP_RELATIVE, **by_name)
def test_a_completion_with_nothing_to_compare_it_with_has_advantage_zero(estimator):
    actual = completions(estimator, f64(5, 1, NAN, 3, 4), torch.tensor([0, 1, 1, 2, 2]))
    assert actual[:3].tolist() == [0, 0, 0]
    assert actual[3] <= 0 < actual[4]


@pytest.mark.parametrize("estimator", GROUP_RELATIVE, **by_name)
@pytest.mark.parametrize("reward", [0.1, -0.3, 1e6, NAN])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_equal_rewards_and_none_give_exactly_zero(estimator, reward, size):
    rewards = torch.full((size,), reward)
    assert completions(estimator, rewards, torch.zeros(size, dtype=torch.long)).tolist() == [0] * size
    assert not adv.has_signal(rewards, torch.zeros(size, dtype=torch.long)).any()


batches = st.integers(1, 4).flatmap(
    lambda num_groups: st.lists(
        st.tuples(st.integers(0, num_groups - 1), st.sampled_from([-1.0, 0.0, 0.25, 1.0, 9.0, NAN])),
        min_size=1,
        max_size=16,
    )
)


@given(
    batch=batches, seed=st.integers(0, 99), estimator=st.sampled_from([*GROUP_RELATIVE, adv.PassAtK(2, passing=0.25)])
)
@settings(max_examples=60, deadline=None)
def test_neither_order_nor_ids_matter(batch, seed, estimator):
    group = torch.tensor([g for g, _ in batch])
    rewards = f64(*(r for _, r in batch))
    shuffle = torch.from_numpy(np.random.default_rng(seed).permutation(len(batch)))
    ids = torch.tensor([70, -3, 11, 4])
    expected = completions(estimator, rewards, group)[shuffle]
    assert_close(completions(estimator, rewards[shuffle], ids[group[shuffle]]), expected)


@given(batch=batches, estimator=st.sampled_from(CENTERED_ON_THE_MEAN))
@settings(max_examples=60, deadline=None)
def test_centred_advantages_sum_to_zero_in_each_group(batch, estimator):
    group = torch.tensor([g for g, _ in batch])
    actual = completions(estimator, f64(*(r for _, r in batch)), group)
    for g in group.unique():
        assert abs(actual[group == g].sum().item()) < 1e-9


@given(batch=batches, q=st.sampled_from([0.0, 25.0, 50.0, 80.0, 100.0]))
@settings(max_examples=60)
def test_group_statistics_are_numpy_s(batch, q):
    group = np.array([g for g, _ in batch])
    rewards = np.array([r for _, r in batch])
    standardized, robust, percentile = (np.zeros(len(batch)) for _ in range(3))
    for g in np.unique(group):
        mine = (group == g) & ~np.isnan(rewards)
        r = rewards[mine]
        if len(r) < 2:
            continue
        standardized[mine] = (r - r.mean()) / (r.std(ddof=1) + EPS)
        mad = np.median(np.abs(r - np.median(r)))
        robust[mine] = (r - np.median(r)) / ((mad if mad > 0 else r.std(ddof=1)) + EPS)
        percentile[mine] = r - np.percentile(r, q)
    tensors = torch.from_numpy(rewards), torch.from_numpy(group)
    assert_close(group_relative.group_standardized(*tensors), standardized, atol=1e-9)
    assert_close(group_relative.robust(*tensors), robust, atol=1e-9)
    assert_close(group_relative.percentile(*tensors, q), percentile, atol=1e-9)


def test_float32_rewards_give_float32_advantages():
    assert all(completions(e, REWARDS.float(), GROUP).dtype == torch.float32 for e in GROUP_RELATIVE)


@pytest.mark.parametrize("estimator", get_args(adv.Advantage), ids=lambda each: each.__name__)
@pytest.mark.parametrize("infinite", [math.inf, -math.inf])
def test_every_estimator_refuses_an_infinite_reward(estimator, infinite):
    rewards, turn = f64(1.0, infinite, NAN, 2.0), torch.tensor([0, 0, 0, 0])
    inputs = adv.AdvantageInputs(
        rewards,
        torch.tensor([0, 0, 1, 1]),
        torch.arange(4),
        turn=turn,
        scores=rewards[:, None],
        weights=f64(1.0),
        values=torch.zeros_like(rewards),
        logp_old=torch.zeros_like(rewards),
        sum_squares=torch.zeros_like(rewards),
        baseline=torch.zeros_like(rewards),
        columns=dict.fromkeys(("role", "task", "problem", "reference_rewards"), [[1.0]] * 4),
    )
    with pytest.raises(InputError, match=r"a finite reward.*of which 1 infinite"):
        estimator(**{adv.Percentile: {"q": 50.0}, adv.PassAtK: {"k": 2}}.get(estimator, {}))(inputs)


def test_an_infinite_score_is_refused_whatever_its_weight():
    with pytest.raises(InputError, match=r"a finite reward.*of which 1 infinite"):
        adv.combine_rewards(torch.tensor([[1.0, math.inf]]), torch.tensor([1.0, 0.0]))


@pytest.mark.parametrize("value", [NAN, math.inf])
def test_a_value_that_is_no_number_is_refused_instead_of_an_advantage_of_zero(value):
    with pytest.raises(InputError, match="a finite value for each token; given 2 values, of which 1 infinite or NaN"):
        token_returns.gae(f64(0.0, 1.0), f64(value, 0.5), torch.tensor([0, 0]))


def test_rewards_without_a_group_are_refused(without_shape_checks):
    with pytest.raises(InputError, match=r"group \[B\] with B = 1"):
        group_relative.group_centered(f64(1.0), torch.tensor([], dtype=torch.long))


def test_no_completion_has_no_advantage_for_a_rank_may_hold_none():
    none = f64(), torch.tensor([], dtype=torch.long)
    assert [completions(e, *none).shape for e in GROUP_RELATIVE] == [(0,)] * len(GROUP_RELATIVE)
    assert adv.has_signal(*none).shape == (0,)


# --- token returns ---


SEQUENCE = torch.tensor([0, 0, 0, 2, 2])
PAID, VALUES = f64(1, 0, 16, 0, 6), f64(2, 4, 8, 4, 2)
BY_TURN = {"values": f64(2, 100, 8, 4, 100), "turn": torch.tensor([0, 0, 1, 0, 0])}


def test_a_turn_s_reward_is_paid_once_at_the_last_token_of_the_turn():
    turn = torch.tensor([0, 1, 1, 1, 4])
    index = adv.turn_index(SEQUENCE, turn)
    assert index.tolist() == [0, 1, 1, 2, 3]
    assert ranges.pay_at_last_token(f64(1, 2, 3, 4), index).tolist() == [1, 0, 2, 3, 4]
    assert ranges.pay_at_last_token(f64(5, 6, 7), SEQUENCE).tolist() == [0, 0, 5, 0, 7]  # no token of sequence 1
    # a new sequence is a new turn even under the same turn id
    assert adv.turn_index(torch.tensor([0, 1, 1]), torch.tensor([3, 3, 3])).tolist() == [0, 1, 1]


runs = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@given(lengths=runs, seed=st.integers(0, 99), discount=st.sampled_from([0.0, 0.3, 0.99, 1.0]))
@settings(max_examples=50, deadline=None)
def test_discounted_returns_are_those_of_the_recursion(lengths, seed, discount):
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    rewards = np.random.default_rng(seed).normal(size=len(sequence))
    expected, following = np.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        last = t + 1 == len(rewards) or sequence[t + 1] != sequence[t]
        following = rewards[t] + (0.0 if last else discount * following)
        expected[t] = following
    assert_close(ranges.discounted_returns(torch.from_numpy(rewards), sequence, discount), expected)


def test_reinforce_pp_by_hand():
    # Returns with gamma 1/2 of the rewards above: 3 4 4 11 6, mean 28/5, squares 198 - 784/5 = 206/5, std sqrt(206/20).
    std = math.sqrt(206 / 20) + EPS
    expected = [(r - 5.6) / std for r in (3, 4, 4, 11, 6)]
    assert_close(token_returns.reinforce_pp(f64(1, 2, 4, 8, 6), SEQUENCE, 0.5), expected)


def test_reinforce_pp_leaves_an_unscorable_sequence_out():
    actual, target = along(adv.ReinforcePP(), f64(0, 0, NAN, 0, 2, 0), torch.tensor([0, 0, 0, 1, 1, 2]))
    std = math.sqrt(4 / 3) + EPS  # returns 2 2 0, mean 4/3, squares 8/3
    assert_close(actual, [0, 0, 0, 2 / 3 / std, 2 / 3 / std, -4 / 3 / std])
    assert target is None


def test_gae_by_hand():
    # gamma 1/2, lambda 1/2: delta = 1 + .5*4 - 2 = 1, 0 + .5*8 - 4 = 0, 16 - 8 = 8 | 0 + .5*2 - 4 = -3, 6 - 2 = 4
    # A: 8; 0 + 8/4 = 2; 1 + 2/4 = 1.5 | 4; -3 + 4/4 = -2.  R = A + V.
    of_tokens = adv.Gae(0.5, 0.5, whiten=False)
    for more in ({"values": VALUES}, {"values": VALUES, "turn": BY_TURN["turn"]}):  # turns matter to actions alone
        advantage, target = along(of_tokens, PAID, SEQUENCE, **more)
        assert advantage.tolist() == [1.5, 2, 8, -2, 4]
        assert target.tolist() == [3.5, 6, 16, 2, 6]
    # whitened: mean 2.7, squares 90.25 - 36.45 = 53.8; the targets are not
    advantage, target = along(adv.Gae(gamma=0.5, lambda_=0.5), PAID, SEQUENCE, values=VALUES)
    assert_close(advantage, [(a - 2.7) / (math.sqrt(53.8 / 4) + EPS) for a in (1.5, 2, 8, -2, 4)])
    assert target.tolist() == [3.5, 6, 16, 2, 6]


def test_gae_per_turn_by_hand():
    # Sequence 0: turn 0 (tokens 0, 1; reward 1 + 3 = 4, V 2), turn 1 (token 2; reward 16, V 8). Sequence 2: one turn
    # (reward 6, V 4). gamma 1/2, lambda 1/2: delta = 4 + 4 - 2 = 6, 16 - 8 = 8 | 6 - 4 = 2. A: 6 + 8/4 = 8, 8 | 2.
    advantage, target = along(adv.Gae(0.5, 0.5, action="turn", whiten=False), f64(1, 3, 16, 0, 6), SEQUENCE, **BY_TURN)
    assert advantage.tolist() == [8, 8, 8, 2, 2]
    assert target.tolist() == [10, 10, 16, 6, 6]


def test_gae_leaves_an_unscorable_sequence_out_and_gives_its_values_nothing_to_fit():
    rewards = f64(0, 0, NAN, 0, 6)
    advantage, target = along(adv.Gae(gamma=0.5, lambda_=0.5), rewards, SEQUENCE, values=VALUES)
    # Of the second sequence: -3 + 4/4 = -2 and 4, mean 1, std sqrt(18).
    std = math.sqrt(18) + EPS
    assert_close(advantage, [0, 0, 0, -3 / std, 3 / std])
    assert target[:3].isnan().all()
    assert target[3:].tolist() == [2, 6]
    assert token_returns.gae(rewards, VALUES, SEQUENCE, 0.5, 0.5)[1].tolist() == [2, 4, 8, 2, 6]


def test_token_advantages_of_no_token_are_empty():
    nothing = f64()
    assert along(adv.ReinforcePP(), nothing, nothing.long())[0].tolist() == []
    assert [x.tolist() for x in along(adv.Gae(), nothing, nothing.long(), values=nothing)] == [[], []]
    assert token_returns.gae(nothing, nothing, nothing.long(), turn=nothing.long())[0].tolist() == []


def test_gae_without_what_it_needs_is_refused():
    with pytest.raises(InputError, match="value head"):
        along(adv.Gae(), PAID, SEQUENCE)
    with pytest.raises(InputError, match="turn for every token"):
        along(adv.Gae(action="turn"), PAID, SEQUENCE, values=VALUES)


# --- what is paid where ---


TWO_TURNS = {"sequence": torch.tensor([0, 0, 0, 1, 1]), "turn": torch.tensor([0, 0, 1, 0, 0])}


def test_what_a_completion_earned_is_its_reward_and_those_of_its_turns_less_its_kl():
    kl = f64(0.5, 0, 0.25, 1, 1)
    inputs = adv.AdvantageInputs(f64(8, 2), torch.tensor([4, 4]), kl=kl, turn_rewards=f64(1, 2, NAN), **TWO_TURNS)
    earned = inputs.completion_rewards()
    assert earned[0] == 8 + 1 + 2 - 0.75
    assert earned[1].isnan()
    assert inputs.token_rewards()[:4].tolist() == [-0.5, 1, 8 + 2 - 0.25, -1]
    assert inputs.token_rewards()[4].isnan()


def test_without_a_kl_and_rewards_of_turns_only_the_end_is_paid():
    inputs = adv.AdvantageInputs(f64(8, 2), torch.tensor([4, 4]), **TWO_TURNS)
    assert inputs.completion_rewards().tolist() == [8, 2]
    assert inputs.token_rewards().tolist() == [0, 0, 8, 0, 2]


def test_rewards_of_turns_without_turns_are_refused():
    inputs = adv.AdvantageInputs(f64(8), torch.tensor([4]), torch.tensor([0, 0]), turn_rewards=f64(1))
    for earned in (inputs.completion_rewards, inputs.token_rewards):
        with pytest.raises(InputError, match="turn"):
            earned()


def test_a_completion_without_a_token_is_compared_and_trained_nowhere():
    inputs = adv.AdvantageInputs(f64(0, 3, 6), torch.zeros(3, dtype=torch.long), torch.tensor([0, 2, 2]))
    assert adv.GroupCentered()(inputs).advantage.tolist() == [-3, 3, 3]


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"scores": None}, InputError, "AdvantageInputs.scores"),
        ({"weights": None}, InputError, "AdvantageInputs.weights"),
        ({"kl": f64(0, 0)}, ConfigurationError, r"given gdpo.*kl\.placement: loss"),
        ({"turn_rewards": f64(0, 0), "turn": torch.tensor([0, 0])}, ConfigurationError, r"gdpo.*kl\.placement: loss"),
    ],
)
def test_gdpo_refuses_to_go_without_scores_and_weights_and_what_belongs_to_no_function(changed, error, said):
    given = {"scores": f64(0, 2)[:, None], "weights": f64(1), **changed}
    inputs = adv.AdvantageInputs(f64(0, 2), torch.tensor([0, 0]), torch.arange(2), **given)
    with pytest.raises(error, match=said):
        adv.Gdpo()(inputs)


def test_defaults_of_gae_are_the_papers():
    assert torch.equal(
        token_returns.gae(PAID, VALUES, SEQUENCE)[0], token_returns.gae(PAID, VALUES, SEQUENCE, 1.0, 0.95)[0]
    )


def test_only_gae_needs_values():
    assert adv.Gae.needs_values
    assert not any(kind.needs_values for kind in get_args(adv.Advantage) if kind is not adv.Gae)


def test_clip_holds_the_advantage_and_the_held_are_counted():
    for estimator, expected in [
        (adv.GroupCentered(clip=2.0), [-2, -2, -1, 2, 2, 0]),
        (adv.Raw(clip=2.0), [1, 0, 2, 2, 2, 2]),
    ]:
        assert completions(estimator, REWARDS, GROUP).tolist() == expected
    assert adv.num_clipped(f64(-2, -2, -1, 2, 2, 0), 2.0) == 4
    held, target = along(adv.Gae(0.5, 0.5, whiten=False, clip=3.0), PAID, SEQUENCE, values=VALUES)
    assert held.tolist() == [1.5, 2, 3, -2, 3]
    assert target.tolist() == [3.5, 6, 16, 2, 6]
    one, _ = along(adv.ReinforcePP(clip=0.5), f64(0, 2, 0), torch.tensor([0, 0, 1]))
    assert one.tolist() == [0.5, 0.5, -0.5]
    scores, tokens = f64(0, 2)[:, None], torch.arange(2)
    inputs = adv.AdvantageInputs(f64(0, 2), torch.tensor([0, 0]), tokens, scores=scores, weights=f64(1))
    assert adv.Gdpo(clip=0.5)(inputs).advantage.tolist() == [-0.5, 0.5]


def test_whitening_gives_mean_zero_and_deviation_one_over_the_kept():
    kept = torch.tensor([True, True, True, False])
    white = batch_relative.whiten(f64(1, 2, 6, 1000), kept)
    # Mean 3, squares 4 + 1 + 9 = 14, std sqrt 7.
    assert_close(white, [-2 / (math.sqrt(7) + EPS), -1 / (math.sqrt(7) + EPS), 3 / (math.sqrt(7) + EPS), 0])
    assert batch_relative.whiten(f64(5, 7), torch.tensor([True, False])).tolist() == [0, 0]  # a single one

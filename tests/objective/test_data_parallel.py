"""A step whose sequences lie on several ranks: advantages, weights, loss, gradients and diagnostics are those of one.

Every rank makes the whole block from a seed, keeps its own groups, and does what a trainer does.
"""

import functools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from logitless.distributed import gather_over_group, sum_over_group
from logitless.objective import advantage as adv
from logitless.objective.diagnostics import step_diagnostics
from logitless.objective.entropy import EntropyBonus
from logitless.objective.filters import TopEntropy
from logitless.objective.objective import Objective
from logitless.objective.over_ranks import one_rank
from logitless.objective.surrogate import ClipCov, KlCov
from logitless.objective.weighting import ConstantLength, SequenceMean, SequenceSum, TokenMean, Totals
from tests.objective.batches import random_batch
from tests.objective.compositions import composed, options_of, parts
from tests.ranks import run_on_ranks

ESTIMATORS = [
    adv.GroupStandardized(),
    adv.Robust(),
    adv.BatchStandardized(),
    adv.LengthWeighted(),
    adv.Gpg(),
    adv.PassAtK(2, passing=0.0),
    adv.ReinforcePPBaseline(),
    adv.ReinforcePPBaseline(whiten_over="completions"),
    adv.Gdpo(),
    adv.ReinforcePP(gamma=0.9),
    adv.Gae(gamma=0.9),
    adv.Gae(gamma=0.9, action="turn", clip=1.0),
    adv.GroupTurns(gamma=0.9),
]
WEIGHTINGS = [TokenMean(), SequenceMean(), ConstantLength(7), SequenceSum(), TokenMean("block")]


def advantages(estimator, batch, rewards, group, values, total):
    """[N] from rewards [B, 2]; the first completion of the block is unscorable."""
    weights = torch.tensor([1.0, 0.5], dtype=torch.float64)
    inputs = adv.AdvantageInputs(
        adv.combine_rewards(rewards, weights),
        group,
        batch.sequence,
        turn=batch.turn,
        scores=rewards,
        weights=weights,
        values=values,
    )
    return estimator(inputs, total).advantage


def step_of(sequences, total, gather, *, objective, estimator, weighting, lengths, group_size, seed, rows=2):
    """Loss, gradients [2, N], their tokens, and diagnostics of a step in which these sequences lie here."""
    logp, entropy, block = random_batch(lengths, seed)
    mine = sorted(sequences)
    tokens = torch.nonzero(torch.isin(block.sequence, torch.tensor(mine, dtype=torch.long)))[:, 0]
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(len(lengths), 2, generator=generator, dtype=torch.float64)
    rewards[0] = torch.nan
    values = torch.randn(block.num_tokens, generator=generator, dtype=torch.float64)[tokens]
    group = torch.arange(len(lengths)) // group_size

    batch = block.take(mine)
    batch = replace(batch, advantage=advantages(estimator, batch, rewards[mine], group[mine], values, total))
    counts, truncated = tuple(lengths[s] for s in mine), [s % 5 == 3 for s in mine]
    totals = Totals.of(counts, truncated).over_ranks(total)
    batch = replace(batch, token_weight=weighting(counts, totals, truncated, torch.float64))
    statistics = objective.block_statistics(batch, gather=gather, generator=generator)
    if statistics is not None:
        batch = statistics.attach(batch)
    if objective.entropy_bonus is not None:
        batch = replace(batch, entropy_weight=objective.entropy_weight(batch, block=statistics, sum_over_ranks=total))
    outputs, gradients = [], torch.zeros(2, len(tokens), dtype=torch.float64)
    for part in torch.arange(len(mine)).tensor_split(rows):
        there = torch.isin(batch.sequence, part)
        leaves = [each.detach()[tokens][there].requires_grad_() for each in (logp, entropy)]
        outputs.append(
            objective(
                *leaves,
                batch.take(part.tolist()),
                block=statistics,
                gather=gather,
                generator=generator,
                **options_of(objective),
            )
        )
        outputs[-1].loss.backward()
        gradients[:, there] = torch.stack([each.grad for each in leaves])
    loss = sum(output.loss.detach() for output in outputs)
    return loss, gradients, tokens, step_diagnostics(outputs, gather=gather)


def on_a_rank(rank, shares, cases):
    total, gather = sum_over_group(dist.group.WORLD), gather_over_group(dist.group.WORLD)
    return [step_of(shares[rank], total, gather, **case) for case in cases]


def assert_ranks_make_no_difference(shares, *cases):
    found = run_on_ranks(len(shares), on_a_rank, shares, cases)
    assert_same = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-11, equal_nan=True)
    for index, case in enumerate(cases):
        everything = sorted(s for share in shares for s in share)
        loss, gradients, _, numbers = step_of(everything, one_rank, one_rank, **case)
        together = torch.full_like(gradients, torch.nan)
        for _, part, tokens, _ in (each[index] for each in found):
            together[:, tokens] = part
        assert_same(sum(each[index][0] for each in found), loss, msg=lambda m, case=case: f"{case}: {m}")
        assert_same(together, gradients, msg=lambda m, case=case: f"{case}: {m}")
        for _, _, _, seen in (each[index] for each in found):
            assert seen.keys() == numbers.keys()
            for name, value in numbers.items():
                assert_same(seen[name], value, msg=lambda m, name=name, case=case: f"{name} of {case}: {m}")


def choosing_all(objective):
    """With a Clip-Cov that takes every token of its band: which ones a random draw takes is up to each rank's seed."""
    if isinstance(objective.surrogate, ClipCov):
        return replace(objective, surrogate=replace(objective.surrogate, fraction=1.0, low=0.1))
    return objective


@settings(max_examples=25, deadline=None)
@given(data=st.data(), chosen=parts(), weighting=st.sampled_from(WEIGHTINGS), seed=st.integers(0, 2**16))
def test_no_placement_of_groups_on_ranks_changes_loss_gradients_or_diagnostics(data, chosen, weighting, seed):
    objective = choosing_all(composed(chosen))
    constant = objective.ratio.level != "token" or objective.surrogate.level != "token"
    estimators = [e for e in ESTIMATORS if not constant or e.level(kl_in_reward=False) == "sequence"]
    group_size, num_groups = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    num_sequences = group_size * num_groups
    lengths = tuple(data.draw(st.lists(st.integers(0, 5), min_size=num_sequences, max_size=num_sequences)))
    num_ranks = data.draw(st.sampled_from([2, 4]))
    owners = data.draw(st.lists(st.integers(0, num_ranks - 1), min_size=num_groups, max_size=num_groups))
    shares = [[s for s in range(num_sequences) if owners[s // group_size] == rank] for rank in range(num_ranks)]
    case = {
        "objective": objective,
        "estimator": data.draw(st.sampled_from(estimators)),
        "weighting": weighting,
        "lengths": lengths,
        "group_size": group_size,
        "seed": seed,
    }
    assert_ranks_make_no_difference(shares, case)


# Three groups of two: a rank with two of them, one, none.
@pytest.mark.parametrize("shares", [((0, 1, 4, 5), (2, 3)), ((2, 3), (), (0, 1, 4, 5), ())], ids=["2 ranks", "4 ranks"])
def test_statistics_of_advantages_and_of_current_values_are_over_all_ranks(shares):
    common = {"weighting": TokenMean(), "lengths": (5, 0, 1, 9, 2, 7), "group_size": 2, "seed": 3, "rows": 1}
    objectives = [
        Objective(filters=(TopEntropy(0.4, scope="micro_batch"),), entropy_bonus=EntropyBonus(0.1)),
        Objective(surrogate=KlCov(fraction=0.3, scope="micro_batch")),
        Objective(surrogate=ClipCov(fraction=1.0, low=0.1, scope="micro_batch")),
    ]
    cases = [{"objective": each, "estimator": adv.BatchStandardized()} for each in objectives]
    cases += [{"objective": Objective(), "estimator": each} for each in ESTIMATORS]
    assert_ranks_make_no_difference(shares, *(case | common for case in cases))

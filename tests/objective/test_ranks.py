"""Sequences split over ranks: real processes, many compositions, the loss and gradient of one rank."""

import functools
import random
from dataclasses import fields, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from logitless.distributed import gather_over_group, sum_over_group
from logitless.errors import ConfigurationError
from logitless.objective.filters import TopEntropy
from logitless.objective.objective import Objective
from logitless.objective.ranges import Ranges
from logitless.objective.surrogate import ClipCov, KlCov
from tests.objective.batches import random_batch
from tests.objective.compositions import BONUSES, CORRECTIONS, FILTERS, PENALTIES, RATIOS, SURROGATES, options_of
from tests.ranks import run_on_ranks

LENGTHS = (5, 0, 1, 9, 2, 7)
SEED = 11


@functools.cache
def compositions():
    """Every ratio with every surrogate that takes it, the other parts dealt out at random; the same on every rank."""
    dealer = random.Random(0)
    chosen = []
    for ratio in RATIOS:
        for surrogate in SURROGATES:
            others = (dealer.choice(choices) for choices in (FILTERS, CORRECTIONS, PENALTIES, BONUSES))
            try:
                chosen.append(Objective(ratio, surrogate, *others))
            except ConfigurationError:
                continue
    of_micro_batches = [
        Objective(surrogate=KlCov(fraction=0.3, scope="micro_batch"), filters=(TopEntropy(0.5, scope="micro_batch"),)),
        Objective(surrogate=KlCov(fraction=0.3)),
        Objective(surrogate=ClipCov(fraction=0.9, low=0.0, high=99.0, scope="micro_batch")),
    ]
    return chosen + of_micro_batches


def shard(batch, tokens):
    """The rank's own tokens of every sequence."""
    values = {f.name: getattr(batch, f.name) for f in fields(batch) if isinstance(getattr(batch, f.name), Tensor)}
    return replace(batch, **{name: value[tokens] for name, value in values.items()})


def evaluate(objective, logp, entropy, batch, **ranks):
    logp, entropy = logp.detach().requires_grad_(), entropy.detach().requires_grad_()
    generator = torch.Generator().manual_seed(SEED)
    statistics = objective.block_statistics(batch, generator=generator, **ranks)
    if isinstance(objective.surrogate, KlCov) and statistics is not None and statistics.selected is not None:
        batch = statistics.attach(batch)
    output = objective(logp, entropy, batch, block=statistics, generator=generator, **options_of(objective), **ranks)
    output.loss.backward()
    return output.loss.detach(), logp.grad, entropy.grad


def on_a_rank(rank, borders):
    logp, entropy, batch = random_batch(LENGTHS, SEED)
    tokens = slice(borders[rank], borders[rank + 1])
    total, gather = sum_over_group(dist.group.WORLD), gather_over_group(dist.group.WORLD)
    local = shard(batch, tokens)
    return [
        evaluate(each, logp[tokens], entropy[tokens], local, sum_over_ranks=total, gather=gather)
        for each in compositions()
    ]


# 24 tokens; borders cut through sequences, one rank holds a piece of one sequence, another nothing at all.
@pytest.mark.parametrize(
    "borders",
    [pytest.param((0, 8, 24), id="2 ranks"), pytest.param((0, 3, 11, 11, 24), id="4 ranks", marks=pytest.mark.slow)],
)
def test_sequences_split_over_ranks_have_the_loss_and_gradients_of_one_rank(borders):
    logp, entropy, batch = random_batch(LENGTHS, SEED)
    found = run_on_ranks(len(borders) - 1, on_a_rank, borders)
    assert len(compositions()) > 50
    for index, objective in enumerate(compositions()):
        loss, *gradients = evaluate(objective, logp, entropy, batch)
        parts = [results[index] for results in found]
        torch.testing.assert_close(sum(part[0] for part in parts), loss, rtol=1e-12, atol=1e-13, msg=str(objective))
        for which, gradient in enumerate(gradients, start=1):
            together = torch.cat([part[which] for part in parts])
            torch.testing.assert_close(together, gradient, rtol=1e-12, atol=1e-13, msg=str(objective))


def sums_on_a_rank(rank, borders, counted):
    tokens = slice(borders[rank], borders[rank + 1])
    index = torch.tensor([0, 0, 0, 2, 2])[tokens]
    ranges = Ranges(index, 3, counted[tokens], sum_over_group(dist.group.WORLD))
    values = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])[tokens]
    return ranges.counts.tolist(), ranges.sum(values).tolist(), ranges.spread(ranges.mean(values)).tolist()


def test_counts_and_sums_are_those_of_whole_ranges_on_every_rank():
    # token 1 is not counted: range 0 holds 1 + 4, range 2 holds 8 + 16
    counted = torch.tensor([True, False, True, True, True])
    found = run_on_ranks(2, sums_on_a_rank, (0, 2, 5), counted)
    for counts, sums, _ in found:
        assert (counts, sums) == ([2, 0, 2], [5, 0, 24])
    assert found[0][2] + found[1][2] == [2.5, 2.5, 2.5, 12, 12]

"""Columns that come in parts, on one device: what the kernels do for shards, without ranks."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from logitless.head import fused
from logitless.head.columns import Columns
from logitless.head.sharded import Shard
from tests.head.cases import DEVICES, Case, assert_same, error, gradient_error, plain, problem, run, sized, truth

pytest.importorskip("triton")


@dataclass(frozen=True)
class InTurn(Columns):
    """Shards of a whole weight that come by one after the other, as if other ranks had them."""

    shards: int = 2

    @property
    def most(self) -> int:
        return -(-len(self.weight) // self.shards)

    def shards_in_turn(self, dtype):
        for first in range(0, len(self.weight), self.most):
            yield Shard(first, self.weight[first : first + self.most].to(dtype, copy=True), 0)

    def gradient_buffer(self, shard):
        return torch.empty_like(shard.weight, dtype=torch.float32)

    def gradient_of_shards(self):
        return _InOrder([])

    def as_weight(self, gradient):
        return gradient.to(self.weight.dtype)


class _InOrder(NamedTuple):
    """Gradients of shards that nobody else has."""

    gradients: list[Tensor]

    def add(self, gradient, shard):
        self.gradients.append(gradient)

    def mine(self):
        return torch.cat(self.gradients)


@pytest.fixture
def in_turn(monkeypatch):
    """The fused head on a weight in so many shards."""

    def run_in_turn(given, shards, **options):
        with monkeypatch.context() as patch:
            patch.setattr(fused._Call, "columns", lambda call, weight: InTurn(weight.detach(), None, shards))
            return run(given, "fused", **options)

    return run_in_turn


FULL = Case(37, 1043, 96, bias=True, lora=3, temperature="per token", spread=4.0)
BUDGETS = {"all kept": None, "half kept": 0.5, "none kept": 0}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("softcap", [None, 8.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_shards_in_turn_give_the_result_of_the_whole_weight(dtype, softcap, budget, device, in_turn):
    case = sized(replace(FULL, dtype=dtype, softcap=softcap), "fused", device)
    given = problem(case, device)
    part = BUDGETS[budget]
    memory_budget = part and int(part * case.rows * 4 * case.vocabulary)
    exact, usual = truth(given), plain(given)
    for shards in (3,) if device == "cpu" else (2, 3):
        parted = in_turn(given, shards, memory_budget=memory_budget)
        for name, value in exact.items():
            assert error(parted[name], value) <= 1.5 * error(usual[name], value) + gradient_error(given), name


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_anchors_that_sums_outgrow_only_with_a_later_shard_change_nothing(shards, in_turn):
    # Sums of 2^57 to 2^63 about an anchor that is kept up to 2^60: some rows are anchored anew at a later shard.
    given = problem(Case(24, 64, 8, dtype=torch.float32, spread=0.1))
    logits = (given.hidden @ given.head.weight.T).detach()
    anchor = logits.logsumexp(1) - torch.linspace(57, 63, 24) * torch.tensor(2.0).log()
    assert_same(in_turn(given, shards, anchor=anchor), truth(given), 2e-5)


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_an_anchor_far_above_all_logits_is_noticed_before_the_targets_shard_comes(shards, in_turn):
    given = problem(Case(8, 32, 8, bias=True, dtype=torch.float32))
    with torch.no_grad():
        given.head.bias.sub_(110)
        given.target[:] = 31 - given.target % 4
    assert_same(in_turn(given, shards, anchor=torch.zeros(8)), truth(given), 5e-5)


@settings(max_examples=10, deadline=None)
@drawn(
    rows=st.integers(1, 18),
    vocabulary=st.integers(1, 40),
    shards=st.integers(1, 5),
    kept=st.integers(0, 18),
    steps=st.lists(st.sampled_from([0.0, 70.0, 300.0]), min_size=5, max_size=5),
)
def test_any_partition_of_the_columns_under_any_anchor_gives_the_truth(rows, vocabulary, shards, kept, steps):
    given = problem(Case(rows, vocabulary, 8, bias=True, dtype=torch.float32))
    with torch.no_grad():  # whole ranges of columns stand above others by up to 300 nats
        given.head.bias.add_(torch.tensor(steps).repeat_interleave(-(-vocabulary // 5))[:vocabulary])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused._Call, "columns", lambda call, weight: InTurn(weight.detach(), None, shards))
        result = run(given, "fused", memory_budget=kept * 4 * (vocabulary + 8 * shards))
    # float32 logits of 300 are rounded by 3e-5
    assert_same(result, truth(given), 1e-4)

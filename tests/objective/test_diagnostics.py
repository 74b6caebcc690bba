"""Diagnostics of a step by hand, and over micro-batches and ranks."""

import math
from dataclasses import replace

import pytest
import torch

from logitless.objective.correction import SamplerCorrection
from logitless.objective.diagnostics import effective_fraction, step_diagnostics
from logitless.objective.divergence import KLPenalty
from logitless.objective.entropy import EntropyBonus
from logitless.objective.filters import OffPolicy, TopEntropy
from logitless.objective.objective import Objective
from logitless.objective.ratio import SequenceRatio
from logitless.objective.surrogate import Clip, Nll, Reinforce
from tests.objective.batches import batch_of, double, random_batch


def by_hand():
    """Four trained tokens of two sequences (A = 1 and -1) and one of weight 0."""
    batch = batch_of(
        [0, 0, 0, 1, 1],
        advantage=[1, 1, 1, -1, -1],
        token_weight=[0.25, 0.25, 0, 0.25, 0.25],
        logp_sampler=[-0.75, -2, -1, math.nan, -1.5],
        logp_ref=[-1, -1, -1, -1, -26],
        entropy_weight=[0.25, 0.25, 0, 0.25, 0.25],
    )
    # ratios 1, 2 (cut above), -, 1/2 (cut below), 3
    log_ratio = double(0, math.log(2), 9, -math.log(2), math.log(3))
    logp = (batch.logp_old + log_ratio).requires_grad_()
    entropy = double(1, 2, 99, 3, 4).requires_grad_()
    return logp, entropy, batch


def diagnostics(objective, logp, entropy, batch, **options):
    numbers = step_diagnostics([objective(logp, entropy, batch, **options)])
    assert {value.dtype for value in numbers.values()} == {torch.float64}
    assert not any(value.requires_grad for value in numbers.values())
    return {name: value.item() for name, value in numbers.items()}


def test_clip_fractions_by_side_and_by_sign():
    numbers = diagnostics(Objective(surrogate=Clip(0.8, 1.2)), *by_hand())
    assert numbers["optimizer/tokens"] == 4
    assert numbers["clip/low_fraction"] == 0.25
    assert numbers["clip/high_fraction"] == 0.25
    assert numbers["clip/positive_fraction"] == 0.5  # 1 of the 2 tokens with A > 0
    assert numbers["clip/negative_fraction"] == 0.5
    assert numbers["head/nonzero_gradient_fraction"] == 0.5


def test_clip_fractions_by_sign_are_of_the_tokens_of_that_sign():
    # A = 1: cut above. A = -1: one of three cut, below. A = 0 is on neither side, and has no gradient either.
    batch = batch_of([0, 0, 1, 1, 1, 2], advantage=[1, 1, -1, -1, -1, 0], token_weight=[1, 0, 1, 1, 1, 1])
    log_ratio = double(math.log(2), 0, -math.log(2), 0, 0, 0)
    numbers = diagnostics(Objective(), (batch.logp_old + log_ratio).requires_grad_(), None, batch)
    assert numbers["clip/positive_fraction"] == 1
    assert numbers["clip/negative_fraction"] == pytest.approx(1 / 3)
    assert numbers["clip/low_fraction"] == numbers["clip/high_fraction"] == pytest.approx(1 / 5)
    assert numbers["head/nonzero_gradient_fraction"] == pytest.approx(2 / 5)


def test_ratio_moments_leave_hidden_rows_out():
    numbers = diagnostics(Objective(), *by_hand())
    assert numbers["ratio/min"] == pytest.approx(0.5)
    assert numbers["ratio/max"] == pytest.approx(3)
    assert numbers["ratio/mean"] == pytest.approx((1 + 2 + 0.5 + 3) / 4)
    assert numbers["ratio/std"] == pytest.approx(math.sqrt((1 + 4 + 0.25 + 9) / 4 - 1.625**2))


def test_ratio_moments_are_of_the_configured_level():
    numbers = diagnostics(Objective(SequenceRatio()), *by_hand())
    # sequence A: sqrt(2); B: sqrt(3 / 2); k1 to the old policy stays per token
    assert numbers["ratio/max"] == pytest.approx(math.sqrt(2))
    assert numbers["ratio/min"] == pytest.approx(math.sqrt(1.5))
    assert numbers["kl_old/k1_mean"] == pytest.approx(-math.log(3) / 4)


def test_divergence_from_the_old_policy_has_the_signs_of_tokens_drawn_from_it():
    numbers = diagnostics(Objective(), *by_hand())
    # d = old - new = 0, -log 2, log 2, -log 3;  k3 = r - 1 - log r
    logs = [0, math.log(2), -math.log(2), math.log(3)]
    assert numbers["kl_old/k1_mean"] == pytest.approx(-sum(logs) / 4)
    assert numbers["kl_old/k2_mean"] == pytest.approx(sum(x * x / 2 for x in logs) / 4)
    assert numbers["kl_old/k3_mean"] == pytest.approx(sum(math.exp(x) - 1 - x for x in logs) / 4)
    # 95th percentile of 4 values: 0.85 of the way from the third to the fourth
    k3 = sorted(math.exp(x) - 1 - x for x in logs)
    assert numbers["kl_old/k3_p95"] == pytest.approx(k3[2] + 0.85 * (k3[3] - k3[2]))


def test_divergence_from_the_reference_is_unclamped_and_the_penalty_is_what_the_loss_holds():
    logp, entropy, batch = by_hand()
    numbers = diagnostics(Objective(kl=KLPenalty("k2")), logp, entropy, batch, beta=0.1)
    d = [0, math.log(2), -math.log(2), math.log(3) + 25]
    assert numbers["kl_ref/k1_mean"] == pytest.approx(sum(d) / 4)
    assert numbers["kl_ref/k2_mean"] == pytest.approx(sum(x * x / 2 for x in d) / 4)
    penalty = (d[1] ** 2 / 2 + d[2] ** 2 / 2 + 200) / 4  # the last is clamped to 20
    assert numbers["kl_ref/penalty_mean"] == pytest.approx(penalty)
    assert numbers["kl_ref/clamped"] == 1
    low = d[1] ** 2 / 2
    assert numbers["kl_ref/penalty_p95"] == pytest.approx(low + 0.85 * (200 - low))


def test_entropy_and_its_bonus():
    objective = Objective(
        surrogate=Reinforce(), filters=(TopEntropy(0.5, scope="micro_batch"),), entropy_bonus=EntropyBonus(0.1)
    )
    numbers = diagnostics(objective, *by_hand())
    assert numbers["entropy/mean"] == 2.5
    assert numbers["entropy/bonus_mean"] == (3 + 4) / 4  # kept: entropies of at least the median, 2.5
    assert numbers["filter/top_entropy/dropped_fraction"] == 0.5
    assert numbers["head/nonzero_gradient_fraction"] == 0.5


def test_each_filter_counts_what_it_drops():
    logp, entropy, batch = by_hand()
    # drift of B: 0 for the NaN and -1.5 - (log 3 - 1), mean -0.799; A has A > 0
    numbers = diagnostics(Objective(filters=(OffPolicy(-0.9),)), logp, entropy, batch)
    assert numbers["filter/off_policy/dropped_fraction"] == 0.5
    numbers = diagnostics(Objective(filters=(OffPolicy(-0.7),)), logp, entropy, batch)
    assert numbers["filter/off_policy/dropped_fraction"] == 0


def test_sampler_differences_and_corrections():
    logp, entropy, batch = by_hand()
    numbers = diagnostics(Objective(correction=SamplerCorrection(max=2.0)), logp, entropy, batch)
    # D = -0.25, 1, -, 0 (missing), 0.5; c = exp(-0.25), 2 (cut from e), 1, sqrt(e)
    assert numbers["sampler/missing"] == 1
    assert numbers["sampler/logp_difference_mean"] == pytest.approx(1.75 / 4)
    assert numbers["sampler/logp_difference_p95"] == pytest.approx(0.5 + 0.85 * 0.5)
    assert numbers["sampler/logp_difference_max"] == 1
    c = [math.exp(-0.25), 2, 1, math.exp(0.5)]
    assert numbers["sampler/correction_mean"] == pytest.approx(sum(c) / 4)
    assert numbers["sampler/correction_effective_fraction"] == pytest.approx(sum(c) ** 2 / (4 * sum(x * x for x in c)))
    without = diagnostics(Objective(), logp, entropy, batch)
    assert without["sampler/logp_difference_max"] == 1
    assert "correction_mean" not in without


def test_the_effective_fraction_is_one_for_equal_weights_and_zero_for_none():
    every = torch.ones(4, dtype=torch.bool)
    assert effective_fraction(double(3, 3, 3, 3), every).item() == pytest.approx(1)
    assert effective_fraction(double(3, 3, 3, 3), ~every).item() == 0
    assert effective_fraction(double(0, 0, 0, 8), every).item() == pytest.approx(0.25)


def test_numbers_that_an_objective_does_not_have_are_left_out():
    logp, _, batch = by_hand()
    batch = replace(batch, logp_old=None, logp_sampler=None, logp_ref=None)
    always = {"loss/total", "optimizer/tokens"}
    found = diagnostics(Objective(surrogate=Nll()), logp, None, batch)
    assert set(found) == {*always, "head/nonzero_gradient_fraction"}
    with torch.no_grad():
        numbers = diagnostics(Objective(surrogate=Nll()), logp, None, batch)
    assert set(numbers) == always


FULL = Objective(
    filters=(OffPolicy(0.1), TopEntropy(0.5)),
    correction=SamplerCorrection(max=2.0),
    kl=KLPenalty("k3", clamp=0.5),
    entropy_bonus=EntropyBonus(0.1),
)


def test_numbers_do_not_depend_on_the_cut_into_micro_batches_or_ranks():
    logp, entropy, batch = random_batch((3, 0, 5, 2), seed=4)
    statistics = FULL.block_statistics(batch)

    def outputs(*parts):
        found = []
        for part in parts:
            tokens = torch.cat([torch.nonzero(batch.sequence == s)[:, 0] for s in part])
            found.append(FULL(logp[tokens], entropy[tokens], batch.take(part), beta=0.1, block=statistics))
        return found

    whole = step_diagnostics(outputs([0, 1, 2, 3]))
    cut = step_diagnostics(outputs([1], [2, 0], [3]))
    here, there = outputs([0, 1]), outputs([2], [3])
    gathered = step_diagnostics(here, gather=gather_with(here, there))
    for numbers in (cut, gathered):
        assert numbers.keys() == whole.keys()
        for name, value in whole.items():
            assert numbers[name].item() == pytest.approx(value.item(), rel=1e-12), name


def gather_with(here, there):
    """A gather that adds what another rank would send, found by asking it the same questions in the same order."""
    asked = []
    step_diagnostics(there, gather=lambda part: asked.append(part) or part)
    answers = iter(asked)
    return lambda part: torch.cat([part, next(answers)])


def test_a_step_without_tokens_has_numbers_too():
    logp, entropy, batch = random_batch((0,), seed=0)
    numbers = step_diagnostics([Objective()(logp, entropy, batch)])
    assert numbers["optimizer/tokens"].item() == 0
    assert numbers["loss/total"].item() == 0
    assert numbers["ratio/mean"].item() == 0

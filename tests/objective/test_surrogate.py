"""Each surrogate against numbers worked by hand, in value and gradient, and its corners."""

import math
from dataclasses import replace

import pytest
import torch

from logitless.errors import ConfigurationError, InputError
from logitless.objective.ranges import Ranges
from logitless.objective.surrogate import (
    Cispo,
    Clip,
    ClipCov,
    Dppo,
    Dro,
    Gmpo,
    Importance,
    KlCov,
    Nll,
    Reinforce,
    Sapo,
    SelectionInputs,
    SurrogateInputs,
    Vespo,
    bernoulli_kl,
    cispo_loss,
    clip_loss,
    dppo_loss,
    dppo_mask,
    dro_loss,
    gmpo_loss,
    importance_loss,
    kl_cov_loss,
    nll_loss,
    reinforce_loss,
    sapo_loss,
    vespo_weight,
)


def column(*values):
    return torch.tensor(values, dtype=torch.float64)


def loss_and_gradient(function, *values):
    """A loss per token, and its sum's gradient to the vector it is a function of."""
    at = column(*values).requires_grad_()
    loss = function(at)
    (gradient,) = torch.autograd.grad(loss.sum(), at)
    return loss.tolist(), gradient.tolist()


def log(*ratios):
    return [math.log(ratio) for ratio in ratios]


def one_sequence(num_tokens):
    return Ranges(torch.zeros(num_tokens, dtype=torch.long), 1, torch.ones(num_tokens, dtype=torch.bool))


# --- clip -------------------------------------------------------------------------------------------------------------


def test_clip_takes_the_pessimistic_side_and_cuts_the_gradient_there():
    # bounds 0.8, 1.2.  A = 2:  r 0.5 -> -1; r 1.1 -> -2.2; r 1.5 -> -2.4, no gradient
    #                    A = -2: r 0.5 -> 0.8 * 2 = 1.6, no gradient; r 1.1 -> 2.2; r 1.5 -> 3
    advantage = column(2, 2, 2, -2, -2, -2)
    loss, gradient = loss_and_gradient(
        lambda at: clip_loss(at, advantage, ratio_min=0.8, ratio_max=1.2), *log(0.5, 1.1, 1.5, 0.5, 1.1, 1.5)
    )
    assert loss == pytest.approx([-1, -2.2, -2.4, 1.6, 2.2, 3])
    assert gradient == pytest.approx([-1, -2.2, 0, 0, 2.2, 3])  # -A r where it is not cut


def test_clip_bounds_are_not_symmetric_unless_asked_to_be():
    # ratio_max 1.28 lets r = 1.25 through; ratio_min 0.9 does not let 0.85
    loss, gradient = loss_and_gradient(
        lambda at: clip_loss(at, column(1, -1), ratio_min=0.9, ratio_max=1.28), *log(1.25, 0.85)
    )
    assert loss == pytest.approx([-1.25, 0.9])
    assert gradient == pytest.approx([-1.25, 0])


def test_a_ratio_cap_bounds_the_loss_of_negative_advantages():
    # A = -1: min(r, 4) -> r 3: 3; r 9: 4 without gradient.  A = 1 is clipped at 1.2 long before.
    loss, gradient = loss_and_gradient(
        lambda at: clip_loss(at, column(-1, -1, 1), ratio_min=0.8, ratio_max=1.2, ratio_cap=4.0), *log(3, 9, 9)
    )
    assert loss == pytest.approx([3, 4, -1.2])
    assert gradient == pytest.approx([3, 0, 0])


def test_dual_clip_bounds_the_loss_of_negative_advantages():
    # c = 3: at most -c A = 6 for A = -2: r 2 -> 4; r 5 -> 6 without gradient
    loss, gradient = loss_and_gradient(
        lambda at: clip_loss(at, column(-2, -2, 2), ratio_min=0.8, ratio_max=1.2, dual=3.0), *log(2, 5, 5)
    )
    assert loss == pytest.approx([4, 6, -2.4])
    assert gradient == pytest.approx([4, 0, 0])


@pytest.mark.parametrize(("cap", "dual"), [(4.0, 3.0), (3.0, 4.0)])
def test_of_a_ratio_cap_and_a_dual_clip_the_lower_bounds_the_loss(cap, dual):
    # A = -2, the lower is 3: r 2.5 -> 5; r 3.5 and 9 -> 6 without gradient
    loss, gradient = loss_and_gradient(
        lambda at: clip_loss(at, column(-2, -2, -2), ratio_min=0.8, ratio_max=1.2, ratio_cap=cap, dual=dual),
        *log(2.5, 3.5, 9),
    )
    assert loss == pytest.approx([5, 6, 6])
    assert gradient == pytest.approx([5, 0, 0])


@pytest.mark.parametrize("knobs", [{}, {"ratio_cap": 3.0}, {"dual": 3.0}])
def test_a_ratio_beyond_the_range_of_floats_gives_no_nan_where_the_loss_is_constant(knobs):
    advantage = torch.tensor([1.0, 0.0, -1.0] if knobs else [1.0, 0.0])
    at = torch.full_like(advantage, 200.0).requires_grad_()  # exp(200) overflows float32
    loss = clip_loss(at, advantage, ratio_min=0.8, ratio_max=1.2, **knobs)
    (gradient,) = torch.autograd.grad(loss.sum(), at)
    assert loss.tolist() == pytest.approx([-1.2, 0.0, 3.0][: len(advantage)])
    assert gradient.tolist() == [0.0] * len(advantage)


def test_clip_says_where_it_cut_and_on_which_side():
    advantage = torch.tensor([0.5, 0.5, -1.0, -1.0, -1.0, 0.0, 0.0])
    log_ratio = torch.tensor(log(1.5, 0.5, 0.5, 1.5, 9.0, 9.0, 0.5))
    inputs = SurrogateInputs(torch.zeros(7), advantage, one_sequence(7), log_ratio=log_ratio)
    terms = Clip(0.8, 1.2)(inputs)
    assert terms.clipped_high.tolist() == [True, False, False, False, False, False, False]
    assert terms.clipped_low.tolist() == [False, False, True, False, False, False, False]
    for capped in (Clip(0.8, 1.2, ratio_cap=4.0), Clip(0.8, 1.2, dual=4.0)):
        assert capped(inputs).clipped_high.tolist() == [True, False, False, False, True, False, False]


@pytest.mark.parametrize(
    ("surrogate", "advantage"),
    [(Clip(1.0, 1.2), -1), (Clip(0.8, 1.0), 1), (Clip(0.8, 1.0, ratio_cap=1.0), -1)],
    ids=["ratio_min", "ratio_max", "ratio_cap"],
)
def test_a_ratio_on_a_bound_is_not_cut(surrogate, advantage):
    # r = 1: loss and gradient are both -A r
    inputs = SurrogateInputs(column(-1), column(advantage), one_sequence(1), log_ratio=column(0))
    assert loss_and_gradient(lambda at: surrogate(replace(inputs, log_ratio=at)).loss, 0) == ([-advantage],) * 2
    terms = surrogate(inputs)
    assert (terms.clipped_low.tolist(), terms.clipped_high.tolist()) == ([False], [False])


# --- weights on the log-likelihood ------------------------------------------------------------------------------------


def test_cispo_weighs_the_log_likelihood_by_a_truncated_ratio_without_gradient():
    # logp -2, old -2 - log r, A 2, -2, 2.  r 3 -> -3 * 2 * -2 = 12; r 9 -> ceiling 5: -20; r 0.1 -> floor 0.5: 2
    old, advantage = column(-2 - math.log(3), -2 - math.log(9), -2 - math.log(0.1)), column(2, -2, 2)
    loss, gradient = loss_and_gradient(
        lambda at: cispo_loss(at, at - old, advantage, ratio_max=5.0, ratio_min=0.5), -2, -2, -2
    )
    assert loss == pytest.approx([12, -20, 2])
    assert gradient == pytest.approx([-6, 10, -1])
    free, _ = loss_and_gradient(lambda at: cispo_loss(at, at - old, advantage, ratio_max=5.0), -2, -2, -2)
    assert free[2] == pytest.approx(0.4)  # no floor unless given


def test_cispo_counts_its_cut_weights():
    inputs = SurrogateInputs(-torch.ones(3), torch.ones(3), one_sequence(3), log_ratio=torch.tensor(log(0.5, 1, 9)))
    assert Cispo(5.0)(inputs).clipped_high.tolist() == [False, False, True]
    assert Cispo(5.0)(inputs).clipped_low.tolist() == [False, False, False]
    assert Cispo(5.0, ratio_min=0.8)(inputs).clipped_low.tolist() == [True, False, False]
    assert Cispo(5.0, ratio_min=1.0)(inputs).clipped_low.tolist() == [True, False, False]  # r = 1 is on the bound
    assert Cispo(1.0)(inputs).clipped_high.tolist() == [False, False, True]


def test_reinforce_importance_and_nll_by_hand():
    assert loss_and_gradient(lambda at: reinforce_loss(at, column(0.5, -3)), -2, -1) == ([1, -3], [-0.5, 3])
    loss, gradient = loss_and_gradient(lambda at: importance_loss(at, column(0.5, -3)), *log(4, 2))
    assert loss == pytest.approx([-2, 6])
    assert gradient == pytest.approx([-2, 6])
    assert loss_and_gradient(nll_loss, -2, -1) == ([2, 1], [-1, -1])


def test_dro_has_a_squared_log_ratio_in_place_of_a_clip():
    # A 3, logp -1, lr 2, beta 0.5: -(3 * -1 - 0.25 * 4) = 4; gradient -(3 - 0.5 * 2) = -2
    old = column(-3)
    loss, gradient = loss_and_gradient(lambda at: dro_loss(at, at - old, column(3), beta=0.5), -1)
    assert (loss, gradient) == ([4], [-2])


# --- sapo -------------------------------------------------------------------------------------------------------------


def test_sapo_is_a_sigmoid_gate_with_slope_one_at_ratio_one():
    # tau 1, r 3: -4 sigmoid(2) * 2 = -8 * 0.880797078 = -7.046376624; slope -4 p (1 - p) r A = -24 * 0.1049935854
    # tau 2, A = -1, r 0.5: 2 sigmoid(-1) = 0.5378828427; slope 4 * 0.1966119332 * 0.5 = 0.3932238665
    advantage = column(2, -1, 2, -1)
    loss, gradient = loss_and_gradient(
        lambda at: sapo_loss(at, advantage, temperature_positive=1.0, temperature_negative=2.0), *log(3, 0.5, 1, 1)
    )
    assert loss == pytest.approx([-7.046376624, 0.5378828427, -4, 1], abs=1e-8)
    assert gradient == pytest.approx([-2.519846050, 0.3932238665, -2, 1], abs=1e-8)


def test_sapo_has_no_loss_and_no_gradient_at_advantage_zero():
    loss, gradient = loss_and_gradient(
        lambda at: sapo_loss(at, column(0), temperature_positive=1.0, temperature_negative=2.0), *log(3)
    )
    assert (loss[0], gradient[0]) == (0, 0)


def test_sapo_saturates_instead_of_overflowing():
    at = torch.tensor([200.0], requires_grad=True)
    loss = sapo_loss(at, torch.ones(1), temperature_positive=1.0, temperature_negative=1.05)
    loss.sum().backward()
    assert (loss.item(), at.grad.item()) == (-4.0, 0.0)


# --- vespo ------------------------------------------------------------------------------------------------------------

VESPO = {"k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 3.0, "lambda_negative": 2.0}


def test_vespo_weighs_by_the_product_of_the_sequences_ratios():
    # w = 2 * 1.5 = 3.  A > 0: exp(3 + 2 log 3 - 9) = 9 exp(-6) = 0.0223088
    #                   A < 0: exp(2 + 3 log 3 - 6) = 27 exp(-4) = 0.4945223
    for advantage, phi in ((1.0, 9 * math.exp(-6)), (-1.0, 27 * math.exp(-4))):
        weight = vespo_weight(column(*log(2, 1.5)), column(advantage, advantage), one_sequence(2), **VESPO)
        assert weight.tolist() == pytest.approx([phi, phi])


def test_vespo_takes_advantage_zero_for_positive():
    weight = vespo_weight(column(*log(3)), column(0), one_sequence(1), **VESPO)
    assert weight.tolist() == pytest.approx([9 * math.exp(-6)])


def test_vespo_multiplies_a_token_correction_into_its_weight():
    # w = 2 * c 1.5 = 3; a masked token (c = 0) counts as 1e-8, and log w is at least log 1e-8
    weight = vespo_weight(column(*log(2)), column(1), one_sequence(1), **VESPO, correction=column(1.5))
    assert weight.item() == pytest.approx(9 * math.exp(-6))
    masked = vespo_weight(column(*log(2)), column(1), one_sequence(1), **VESPO, correction=column(0))
    assert masked.item() == pytest.approx(math.exp(3 + 2 * math.log(2e-8) - 3 * 2e-8), rel=1e-9, abs=0)
    floor = vespo_weight(column(-1, -1), column(1, 1), one_sequence(2), **VESPO, correction=column(0, 0))
    assert floor[0].item() == pytest.approx(math.exp(3 + 2 * math.log(1e-8) - 3e-8), rel=1e-9, abs=0)
    # w = 0.5 * 1, times c 2 * 3
    product = vespo_weight(column(*log(0.5, 1)), column(1, 1), one_sequence(2), **VESPO, correction=column(2, 3))
    assert product.tolist() == pytest.approx([9 * math.exp(-6)] * 2)


def test_vespo_bounds_each_log_ratio_and_their_sum():
    # lr 50 counts as 20; the sum of 20 and -19 is 1, of 20 and 20 is cut at 20, where phi underflows to 0
    weight = vespo_weight(column(50, -19), column(1, 1), one_sequence(2), **VESPO)
    assert weight[0].item() == pytest.approx(math.exp(3 + 2 - 3 * math.e))
    weight = vespo_weight(column(-50, 19), column(1, 1), one_sequence(2), **VESPO)
    assert weight[0].item() == pytest.approx(math.exp(3 - 2 - 3 / math.e))
    assert vespo_weight(column(50, 50), column(1, 1), one_sequence(2), **VESPO).tolist() == [0, 0]
    # ... unless k is just large enough to hold it: 1e-4 + 2425.9 * 20 - 1e-4 exp(20)
    knobs = {**VESPO, "k_positive": 2425.9, "lambda_positive": 0.0}
    weight = vespo_weight(column(50, 50), column(1, 1), one_sequence(2), **knobs)
    assert weight[0].item() == pytest.approx(math.exp(1e-4 + 48518 - 1e-4 * math.exp(20)), rel=1e-6)


def test_vespo_turns_a_weight_that_is_not_finite_into_zero_and_bounds_lambda_below():
    knobs = {**VESPO, "k_positive": 1000.0}
    assert vespo_weight(column(2.0), column(1), one_sequence(1), **knobs).tolist() == [0]
    assert vespo_weight(column(math.nan), column(1), one_sequence(1), **VESPO).tolist() == [0]
    knobs = {**VESPO, "k_positive": 0.0, "lambda_positive": 0.0}
    assert vespo_weight(column(2.0), column(1), one_sequence(1), **knobs).item() == pytest.approx(
        math.exp(1e-4 - 1e-4 * math.exp(2.0)), rel=1e-12
    )


def test_vespo_gives_its_weight_no_gradient():
    # logp -1, lr 0 -> phi 1: loss -phi A logp = 2, gradient -phi A = -2
    def loss(at):
        inputs = SurrogateInputs(at, column(2), one_sequence(1), token_log_ratio=at - at.detach())
        return Vespo()(inputs).loss

    assert loss_and_gradient(loss, -1) == ([2], [-2])
    correction = column(1).requires_grad_()
    assert not vespo_weight(column(0), column(1), one_sequence(1), **VESPO, correction=correction).requires_grad


# --- gmpo -------------------------------------------------------------------------------------------------------------


def test_gmpo_is_a_clipped_geometric_mean_once_a_sequence():
    # A = 2, lr 0.1 and 1 (cut at 0.4): -2 exp(0.25) for both tokens; each sums to half of the gradient of both losses:
    # d/dlr_0 = 2 tokens * -2 exp(0.25) * 1/2, d/dlr_1 = 0
    loss, gradient = loss_and_gradient(
        lambda at: gmpo_loss(at, column(2, 2), one_sequence(2), log_ratio_min=-0.4, log_ratio_max=0.4), 0.1, 1.0
    )
    assert loss == pytest.approx([-2 * math.exp(0.25)] * 2)
    assert gradient == pytest.approx([-2 * math.exp(0.25), 0])


def test_gmpo_for_a_negative_advantage_cuts_below():
    # A = -1, lr -1 (cut at -0.4) and 1 (kept): exp((−0.4 + 1) / 2) = exp(0.3)
    loss, gradient = loss_and_gradient(
        lambda at: gmpo_loss(at, column(-1, -1), one_sequence(2), log_ratio_min=-0.4, log_ratio_max=0.4), -1.0, 1.0
    )
    assert loss == pytest.approx([math.exp(0.3)] * 2)
    assert gradient == pytest.approx([0, math.exp(0.3)])


def test_gmpo_at_advantage_zero_has_neither_loss_nor_gradient():
    loss, gradient = loss_and_gradient(
        lambda at: gmpo_loss(at, column(0, 0), one_sequence(2), log_ratio_min=-0.4, log_ratio_max=0.4), -1.0, 1.0
    )
    assert (loss, gradient) == ([0, 0], [0, 0])


def test_gmpo_counts_cut_tokens_by_side():
    for advantage, low, high in ((1.0, [False, False], [False, True]), (-1.0, [True, False], [False, False])):
        inputs = SurrogateInputs(
            torch.zeros(2), torch.full((2,), advantage), one_sequence(2), token_log_ratio=torch.tensor([-1.0, 1.0])
        )
        terms = Gmpo()(inputs)
        assert (terms.clipped_low.tolist(), terms.clipped_high.tolist()) == (low, high)


def test_gmpo_cuts_neither_on_a_bound_nor_against_the_advantage():
    # each of two tokens alone: on a bound; at A = 0; where the bound is on the side that A pushes away from
    for log_ratio, advantage in (((-0.5, 0.5), (-1, 1)), ((-1, 1), (0, 0)), ((-1, 1), (0.5, -0.5))):
        inputs = SurrogateInputs(column(0, 0), column(*advantage), one_sequence(2), token_log_ratio=column(*log_ratio))
        terms = Gmpo(-0.5, 0.5)(inputs)
        assert (terms.clipped_low.tolist(), terms.clipped_high.tolist()) == ([False] * 2, [False] * 2)
    loss, gradient = loss_and_gradient(
        lambda at: gmpo_loss(at, column(-1), one_sequence(1), log_ratio_min=-0.5, log_ratio_max=0.5), -0.5
    )
    assert loss == gradient == pytest.approx([math.exp(-0.5)])


# --- dppo -------------------------------------------------------------------------------------------------------------


def test_dppo_masks_where_probability_moved_too_far_the_way_the_advantage_pushes():
    # p_old 0.5. up: p 0.7 (moved 0.2 > 0.15); within: 0.6; down: 0.3
    logp, old = column(*log(0.7, 0.6, 0.3, 0.7, 0.6, 0.3)), column(*log(*[0.5] * 6))
    inside = dppo_mask(logp, old, column(1, 1, 1, -1, -1, -1), divergence="tv", max_low=0.15, max_high=0.15)
    assert inside.tolist() == [False, True, True, True, True, False]
    wide = dppo_mask(logp, old, column(1, 1, 1, -1, -1, -1), divergence="tv", max_low=0.25, max_high=0.15)
    assert wide.tolist() == [False, True, True, True, True, True]
    other = dppo_mask(logp, old, column(1, 1, 1, -1, -1, -1), divergence="tv", max_low=0.15, max_high=0.25)
    assert other.tolist() == [True, True, True, True, True, False]
    zero = dppo_mask(logp, old, column(*[0] * 6), divergence="tv", max_low=0.15, max_high=0.15)
    assert zero.tolist() == [True, True, False] * 2  # A = 0 counts as pushing down


def test_binary_kl_by_hand():
    # 0.5 log(0.5 / 0.25) + 0.5 log(0.5 / 0.75) = 0.5 * 0.693147 - 0.5 * 0.405465 = 0.143841
    assert bernoulli_kl(column(*log(0.5)), column(*log(0.25))).item() == pytest.approx(0.143841, abs=1e-6)
    assert bernoulli_kl(column(0), column(0)).item() == 0  # both certain
    assert bernoulli_kl(column(*log(0.5)), column(0)).item() == math.inf
    assert bernoulli_kl(column(-1e-20), column(-1e-20)).item() == 0
    assert bernoulli_kl(column(1e-9), column(1e-9)).item() == 0  # above 0 by rounding counts as certain
    assert bernoulli_kl(column(*log(0.5)), column(1e-9)).item() == math.inf


def test_dppo_in_kl_form_asks_for_distance_and_direction():
    # KL(0.5 || 0.25) = 0.1438; KL(0.5 || 0.75) the same; KL(0.5 || 0.6) = 0.0204
    logp, old = column(*log(0.25, 0.75, 0.6, 0.4)), column(*log(*[0.5] * 4))
    for advantage, expected in ((1, [True, False, True, True]), (-1, [False, True, True, True])):
        inside = dppo_mask(logp, old, column(*[advantage] * 4), divergence="kl", max_low=0.05, max_high=0.05)
        assert inside.tolist() == expected


def test_dppo_keeps_a_token_on_its_bound_and_one_that_has_not_moved():
    certain, impossible = column(0), column(-math.inf)  # p = 1 and 0: moved by 1
    bounds = {"max_low": 1.0, "max_high": 1.0}
    assert dppo_mask(certain, impossible, column(1), divergence="tv", **bounds).item()
    assert dppo_mask(impossible, certain, column(-1), divergence="tv", **bounds).item()
    # exp(-1e-20) is 1 too: not moved, although log(1 - p) knows the difference and makes the KL infinite
    assert dppo_mask(certain, column(-1e-20), column(1), divergence="kl", **bounds).item()


def test_dppo_loss_weighs_the_log_likelihood_by_a_capped_ratio():
    # logp -1: r 2 -> -3 * 2 * -1 = 6, gradient -6; r 50 -> cap 20: 60; outside 0
    old = column(-1 - math.log(2), -1 - math.log(50), -1)
    inside = torch.tensor([True, True, False])
    loss, gradient = loss_and_gradient(
        lambda at: dppo_loss(at, old, column(3, 3, 3), inside, ratio_cap=20.0), -1, -1, -1
    )
    assert loss == pytest.approx([6, 60, 0])
    assert gradient == pytest.approx([-6, -60, 0])


def test_dppo_thresholds_follow_the_divergence_and_its_cuts_are_counted():
    assert (Dppo().max_low, Dppo().max_high, Dppo("kl").max_low, Dppo("kl", max_high=0.1).max_high) == (
        0.15,
        0.15,
        0.05,
        0.1,
    )
    logp, old = torch.tensor(log(0.7, 0.3, 0.3)), torch.tensor(log(0.5, 0.5, 0.5))
    terms = Dppo()(SurrogateInputs(logp, torch.tensor([1.0, -1.0, 0.0]), one_sequence(3), logp_old=old))
    assert terms.clipped_low.tolist() == [False, True, True]
    assert terms.clipped_high.tolist() == [True, False, False]


# --- covariance losses ------------------------------------------------------------------------------------------------


def test_clip_cov_is_clip_without_the_selected_tokens():
    log_ratio = torch.tensor(log(1.0, 1.0, 1.5))
    inputs = SurrogateInputs(
        torch.zeros(3),
        torch.ones(3),
        one_sequence(3),
        log_ratio=log_ratio,
        selected=torch.tensor([False, True, False]),
    )
    assert ClipCov()(inputs).loss.tolist() == pytest.approx([-1, 0, -1.2])


def test_kl_cov_adds_an_absolute_log_ratio_on_the_selected_tokens():
    # -A r + 2 |lr|: lr -0.5 selected: -exp(-0.5) + 1
    log_ratio = torch.tensor([-0.5, -0.5], dtype=torch.float64)
    inputs = SurrogateInputs(
        column(0, 0),
        column(1, 1),
        one_sequence(2),
        token_log_ratio=log_ratio,
        log_ratio=log_ratio,
        selected=torch.tensor([True, False]),
    )
    assert KlCov(coefficient=2.0)(inputs).loss.tolist() == pytest.approx([1 - math.exp(-0.5), -math.exp(-0.5)])


def test_kl_cov_pulls_a_selected_tokens_ratio_back_to_one():
    # A = 1, coefficient 2, lr -0.5, 0.5, 0: gradient -exp(lr) + 2 sgn(lr) where selected; the last is not
    at = (-0.5, 0.5, 0.0, 0.5)
    loss, gradient = loss_and_gradient(
        lambda lr: kl_cov_loss(lr, lr, column(1, 1, 1, 1), torch.tensor([True, True, True, False]), coefficient=2.0),
        *at,
    )
    assert loss == pytest.approx([1 - math.exp(-0.5), 1 - math.exp(0.5), -1, -math.exp(0.5)])
    assert gradient == pytest.approx([-math.exp(-0.5) - 2, -math.exp(0.5) + 2, -1, -math.exp(0.5)])


# --- configuration ----------------------------------------------------------------------------------------------------


def test_defaults_are_the_papers():
    assert Clip() == Clip(ratio_min=0.8, ratio_max=1.2, ratio_cap=None, dual=None)
    assert Cispo() == Cispo(ratio_max=5.0, ratio_min=None)
    assert Sapo() == Sapo(temperature_positive=1.0, temperature_negative=1.05)
    assert Vespo() == Vespo(k_positive=2.0, lambda_positive=3.0, k_negative=3.0, lambda_negative=2.0)
    assert Gmpo() == Gmpo(log_ratio_min=-0.4, log_ratio_max=0.4)
    assert Dppo() == Dppo(divergence="tv", max_low=0.15, max_high=0.15, ratio_cap=20.0)
    assert ClipCov() == ClipCov(fraction=2e-4, low=1.0, high=5.0, ratio_min=0.8, ratio_max=1.2, scope="block")
    assert KlCov() == KlCov(fraction=2e-4, coefficient=1.0, scope="block")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Clip(1.2, 0.8), "ratio_min < ratio_max"),
        (lambda: Clip(-0.2, 0.2), "Bounds are absolute"),
        (lambda: Clip(0.8, 1.2, ratio_cap=1.0), "ratio_cap of at least"),
        (lambda: Clip(0.8, 1.2, dual=1.0), "dual above 1"),
        (lambda: Cispo(0.2), "Bounds are absolute"),
        (lambda: Cispo(5.0, ratio_min=6.0), "ratio_min < ratio_max"),
        (lambda: Sapo(0.0), "temperature_positive"),
        (lambda: Sapo(1.0, -1.0), "temperature_negative"),
        (lambda: Gmpo(0.8, 1.2), "log_ratio_min <= 0"),
        (lambda: Dppo(max_low=0.0), "max_low"),
        (lambda: Dppo(max_high=-1.0), "max_high"),
        (lambda: Dppo(ratio_cap=0.0), "ratio_cap"),
        (lambda: ClipCov(fraction=0.0), "fraction"),
        (lambda: ClipCov(low=5.0, high=1.0), "low < high"),
        (lambda: ClipCov(low=1.0, high=1.0), "low < high"),
        (lambda: ClipCov(ratio_min=2.0), "ratio_min < ratio_max"),
        (lambda: KlCov(fraction=1.5), "fraction"),
        (lambda: Dro(beta=0.0), "beta"),
    ],
)
def test_a_knob_out_of_its_range_is_refused(build, message):
    with pytest.raises(ConfigurationError, match=message):
        build()


def test_the_ends_of_a_range_belong_to_it():
    assert Clip(0.0, 1.2, ratio_cap=1.2).ratio_cap == 1.2
    assert Clip(dual=1.5).dual == 1.5
    assert Cispo(1.0).ratio_max == 1.0
    assert KlCov(fraction=1.0).fraction == 1.0


@pytest.mark.parametrize(
    "surrogate",
    [Clip(), Cispo(), Sapo(), Vespo(), Gmpo(), Dppo(), ClipCov(), KlCov(), Dro(0.1), Importance()],
    ids=lambda surrogate: surrogate.name,
)
def test_a_loss_of_the_ratio_asks_for_the_old_policy(surrogate):
    inputs = SurrogateInputs(-torch.ones(1), torch.ones(1), one_sequence(1), selected=torch.tensor([False]))
    with pytest.raises(InputError, match="logp_old"):
        surrogate(inputs)


@pytest.mark.parametrize("surrogate", [ClipCov(), KlCov()], ids=lambda surrogate: surrogate.name)
def test_a_covariance_loss_asks_for_its_selection(surrogate):
    zero = torch.zeros(1)
    inputs = SurrogateInputs(zero, zero, one_sequence(1), token_log_ratio=zero, log_ratio=zero)
    with pytest.raises(InputError, match="attach"):
        surrogate(inputs)
    surrogate(replace(inputs, selected=torch.tensor([True])))


@pytest.mark.parametrize("surrogate", [Reinforce(), Nll()], ids=lambda surrogate: surrogate.name)
def test_a_loss_without_a_ratio_asks_for_nothing_old(surrogate):
    terms = surrogate(SurrogateInputs(-torch.ones(1), torch.ones(1), one_sequence(1)))
    assert terms.loss.item() == 1.0
    assert terms.clipped_low is None
    assert terms.clipped_high is None


def test_a_loss_that_treats_all_tokens_alike_cannot_be_asked_for_a_selection():
    ones = torch.ones(1)
    with pytest.raises(NotImplementedError, match="'clip' selects no tokens"):
        Clip().select(SelectionInputs(ones, ones, ones > 0))

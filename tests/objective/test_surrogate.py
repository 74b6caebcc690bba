"""Each surrogate against numbers worked by hand, in value and gradient, and its corners."""

import math
from dataclasses import replace

import pytest
import torch

from logitless.errors import InputError
from logitless.objective import surrogate as sur
from logitless.objective.surrogate import Cispo, Clip, ClipCov, Dppo, Dro, Gmpo, Importance, KlCov, SurrogateInputs
from logitless.objective.surrogate.cispo import cispo_loss
from logitless.objective.surrogate.clip import clip_loss
from logitless.objective.surrogate.dppo import bernoulli_kl, dppo_loss, dppo_mask
from logitless.objective.surrogate.gmpo import gmpo_loss
from logitless.objective.surrogate.ipo import ipo_mask, kpop_mask
from logitless.objective.surrogate.sapo import sapo_loss
from logitless.objective.surrogate.unclipped import dro_loss, importance_loss, nll_loss, reinforce_loss
from logitless.objective.surrogate.vespo import vespo_weight
from tests.objective.batches import double, one_sequence

PPO = {"ratio_min": 0.8, "ratio_max": 1.2}
SAPO = {"temperature_positive": 1.0, "temperature_negative": 2.0}
VESPO = {"k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 3.0, "lambda_negative": 2.0}


def log(*ratios):
    return [math.log(ratio) for ratio in ratios]


def check(function, at, *, loss, gradient):
    """A loss per token, and its sum's gradient to the vector it is a function of."""
    leaf = double(*at).requires_grad_()
    found = function(leaf)
    (slope,) = torch.autograd.grad(found.sum(), leaf)
    assert found.tolist() == pytest.approx(loss)
    assert slope.tolist() == pytest.approx(gradient)


def inputs(logp, advantage, **more):
    """One sequence."""
    more = {name: value if isinstance(value, torch.Tensor) else double(*value) for name, value in more.items()}
    return SurrogateInputs(double(*logp), double(*advantage), one_sequence(len(logp)), **more)


def cuts(terms):
    return terms.clipped_low.tolist(), terms.clipped_high.tolist()


# --- clip -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("advantage", "ratios", "bounds", "loss", "gradient"),
    [
        # the pessimistic side, and no gradient (-A r elsewhere) beyond the bounds:
        # A = 2: r 0.5 -> -1; r 1.1 -> -2.2; r 1.5 -> -2.4.  A = -2: r 0.5 -> 0.8 * 2; r 1.1 -> 2.2; r 1.5 -> 3
        (
            [2, 2, 2, -2, -2, -2],
            [0.5, 1.1, 1.5, 0.5, 1.1, 1.5],
            {},
            [-1, -2.2, -2.4, 1.6, 2.2, 3],
            [-1, -2.2, 0, 0, 2.2, 3],
        ),
        # not symmetric: 1.28 lets r = 1.25 through; 0.9 does not let 0.85
        ([1, -1], [1.25, 0.85], {"ratio_min": 0.9, "ratio_max": 1.28}, [-1.25, 0.9], [-1.25, 0]),
        # A = -1: min(r, 4) -> r 3: 3; r 9: 4.  A = 1 is clipped at 1.2 long before
        ([-1, -1, 1], [3, 9, 9], {"ratio_cap": 4.0}, [3, 4, -1.2], [3, 0, 0]),
        # at most -c A = 6 for A = -2: r 2 -> 4; r 5 -> 6
        ([-2, -2, 2], [2, 5, 5], {"dual": 3.0}, [4, 6, -2.4], [4, 0, 0]),
        # of both, the lower: r 2.5 -> 5; r 3.5 and 9 -> 6
        ([-2, -2, -2], [2.5, 3.5, 9], {"ratio_cap": 4.0, "dual": 3.0}, [5, 6, 6], [5, 0, 0]),
        ([-2, -2, -2], [2.5, 3.5, 9], {"ratio_cap": 3.0, "dual": 4.0}, [5, 6, 6], [5, 0, 0]),
    ],
    ids=["bounds", "asymmetric", "ratio_cap", "dual", "dual below the cap", "cap below the dual"],
)
def test_clip_by_hand(advantage, ratios, bounds, loss, gradient):
    check(lambda at: clip_loss(at, double(*advantage), **PPO | bounds), log(*ratios), loss=loss, gradient=gradient)


@pytest.mark.parametrize("knobs", [{}, {"ratio_cap": 3.0}, {"dual": 3.0}])
def test_a_ratio_beyond_the_range_of_floats_gives_no_nan_where_the_loss_is_constant(knobs):
    advantage = torch.tensor([1.0, 0.0, -1.0] if knobs else [1.0, 0.0])
    at = torch.full_like(advantage, 200.0).requires_grad_()  # exp(200) overflows float32
    loss = clip_loss(at, advantage, **PPO, **knobs)
    (gradient,) = torch.autograd.grad(loss.sum(), at)
    assert loss.tolist() == pytest.approx([-1.2, 0.0, 3.0][: len(advantage)])
    assert gradient.tolist() == [0.0] * len(advantage)


def test_clip_says_where_it_cut_and_on_which_side():
    given = inputs([0] * 7, [0.5, 0.5, -1, -1, -1, 0, 0], log_ratio=log(1.5, 0.5, 0.5, 1.5, 9.0, 9.0, 0.5))
    low, high = [False, False, True, False, False, False, False], [True, *[False] * 6]
    assert cuts(Clip(0.8, 1.2)(given)) == (low, high)
    high[4] = True
    for capped in (Clip(0.8, 1.2, ratio_cap=4.0), Clip(0.8, 1.2, dual=4.0)):
        assert cuts(capped(given)) == (low, high)


@pytest.mark.parametrize(
    ("surrogate", "advantage"),
    [(Clip(1.0, 1.2), -1), (Clip(0.8, 1.0), 1), (Clip(0.8, 1.0, ratio_cap=1.0), -1)],
    ids=["ratio_min", "ratio_max", "ratio_cap"],
)
def test_a_ratio_on_a_bound_is_not_cut(surrogate, advantage):
    # r = 1: loss and gradient are both -A r
    given = inputs([-1], [advantage], log_ratio=[0])
    check(lambda at: surrogate(replace(given, log_ratio=at)).loss, [0], loss=[-advantage], gradient=[-advantage])
    assert cuts(surrogate(given)) == ([False], [False])


# --- weights on the log-likelihood ------------------------------------------------------------------------------------


def test_cispo_weighs_the_log_likelihood_by_a_truncated_ratio_without_gradient():
    # logp -2, old -2 - log r, A 2, -2, 2.  r 3 -> -3 * 2 * -2 = 12; r 9 -> ceiling 5: -20; r 0.1 -> floor 0.5: 2
    old, advantage = -2 - double(*log(3, 9, 0.1)), double(2, -2, 2)

    def loss(at, **floor):
        return cispo_loss(at, at - old, advantage, ratio_max=5.0, **floor)

    check(lambda at: loss(at, ratio_min=0.5), [-2] * 3, loss=[12, -20, 2], gradient=[-6, 10, -1])
    assert loss(double(-2, -2, -2))[2].item() == pytest.approx(0.4)  # no floor unless given


def test_cispo_counts_its_cut_weights():
    given = inputs([-1] * 3, [1] * 3, log_ratio=log(0.5, 1, 9))
    for surrogate, low in (
        (Cispo(5.0), False),
        (Cispo(5.0, ratio_min=0.8), True),
        (Cispo(5.0, ratio_min=1.0), True),  # r = 1 is on the bound
        (Cispo(1.0), False),
    ):
        assert cuts(surrogate(given)) == ([low, False, False], [False, False, True])


def test_losses_without_a_clip_by_hand():
    check(lambda at: reinforce_loss(at, double(0.5, -3)), [-2, -1], loss=[1, -3], gradient=[-0.5, 3])
    check(lambda at: importance_loss(at, double(0.5, -3)), log(4, 2), loss=[-2, 6], gradient=[-2, 6])
    check(nll_loss, [-2, -1], loss=[2, 1], gradient=[-1, -1])
    # DRO: A 3, logp -1, lr 2, beta 0.5: -(3 * -1 - 0.25 * 4) = 4; gradient -(3 - 0.5 * 2) = -2
    check(lambda at: dro_loss(at, at + 3, double(3), beta=0.5), [-1], loss=[4], gradient=[-2])


# --- sapo -------------------------------------------------------------------------------------------------------------


def test_sapo_is_a_sigmoid_gate_with_slope_one_at_ratio_one():
    # tau 1, r 3: -4 sigmoid(2) * 2 = -8 * 0.880797078 = -7.046376624; slope -4 p (1 - p) r A = -24 * 0.1049935854
    # tau 2, A = -1, r 0.5: 2 sigmoid(-1) = 0.5378828427; slope 4 * 0.1966119332 * 0.5 = 0.3932238665
    check(
        lambda at: sapo_loss(at, double(2, -1, 2, -1, 0), **SAPO),
        log(3, 0.5, 1, 1, 3),
        loss=[-7.046376624, 0.5378828427, -4, 1, 0],
        gradient=[-2.519846050, 0.3932238665, -2, 1, 0],
    )


def test_sapo_saturates_instead_of_overflowing():
    at = torch.tensor([200.0], requires_grad=True)
    loss = sapo_loss(at, torch.ones(1), **SAPO)
    loss.sum().backward()
    assert (loss.item(), at.grad.item()) == (-4.0, 0.0)


# --- vespo ------------------------------------------------------------------------------------------------------------


def vespo(log_ratio, advantage=1.0, correction=None, **knobs):
    """The weight of a sequence whose tokens share an advantage."""
    weight = vespo_weight(
        double(*log_ratio),
        double(*[advantage] * len(log_ratio)),
        one_sequence(len(log_ratio)),
        **VESPO | knobs,
        correction=None if correction is None else double(*correction),
    )
    assert weight.unique().numel() == 1
    return weight[0].item()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # w = 2 * 1.5 = 3. A >= 0: exp(3 + 2 log 3 - 9) = 9 e^-6; A < 0: exp(2 + 3 log 3 - 6) = 27 e^-4
        ((log(2, 1.5), 1.0), 9 * math.exp(-6)),
        ((log(2, 1.5), -1.0), 27 * math.exp(-4)),
        ((log(3), 0.0), 9 * math.exp(-6)),
        # a token correction: w = 2 * 1.5; 0.5 * 1 * 2 * 3
        ((log(2), 1.0, [1.5]), 9 * math.exp(-6)),
        ((log(0.5, 1), 1.0, [2, 3]), 9 * math.exp(-6)),
        # a masked token (c = 0) counts as 1e-8, and log w is at least log 1e-8
        ((log(2), 1.0, [0]), math.exp(3 + 2 * math.log(2e-8) - 3 * 2e-8)),
        (([-1, -1], 1.0, [0, 0]), math.exp(3 + 2 * math.log(1e-8) - 3e-8)),
        # lr 50 counts as 20; the sum of 20 and -19 is 1
        (([50, -19],), math.exp(3 + 2 - 3 * math.e)),
        (([-50, 19],), math.exp(3 - 2 - 3 / math.e)),
    ],
)
def test_vespo_by_hand(given, expected):
    assert vespo(*given) == pytest.approx(expected, rel=1e-9, abs=0)


def test_vespo_bounds_the_sum_of_log_ratios_and_lambda():
    # 20 and 20 are cut at 20, where phi underflows to 0 unless k is just large enough: 1e-4 + 2425.9 * 20 - 1e-4 e^20
    assert vespo([50, 50]) == 0
    held = math.exp(1e-4 + 48518 - 1e-4 * math.exp(20))
    assert vespo([50, 50], k_positive=2425.9, lambda_positive=0.0) == pytest.approx(held, rel=1e-6)
    least = math.exp(1e-4 - 1e-4 * math.exp(2.0))
    assert vespo([2.0], k_positive=0.0, lambda_positive=0.0) == pytest.approx(least, rel=1e-12)


def test_a_vespo_weight_that_is_not_finite_is_zero():
    assert vespo([2.0], k_positive=1000.0) == 0
    assert vespo([math.nan]) == 0


def test_vespo_gives_its_weight_no_gradient():
    # logp -1, lr 0 -> phi 1: loss -phi A logp = 2, gradient -phi A = -2
    def loss(at):
        return sur.Vespo()(replace(inputs([-1], [2]), logp=at, token_log_ratio=at - at.detach())).loss

    check(loss, [-1], loss=[2], gradient=[-2])
    corrected = {"correction": double(1).requires_grad_()}
    assert not vespo_weight(double(0), double(1), one_sequence(1), **VESPO, **corrected).requires_grad


# --- gmpo -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("advantage", "at", "bound", "loss", "gradient"),
    [
        # lr 0.1 and 1 (cut at 0.4): -2 exp(0.25) for both tokens; d/dlr_0 = 2 tokens * -2 exp(0.25) * 1/2
        (2, [0.1, 1.0], 0.4, -2 * math.exp(0.25), [-2 * math.exp(0.25), 0]),
        # lr -1 (cut at -0.4) and 1 (kept): exp((-0.4 + 1) / 2) = exp(0.3)
        (-1, [-1.0, 1.0], 0.4, math.exp(0.3), [0, math.exp(0.3)]),
        (0, [-1.0, 1.0], 0.4, 0, [0, 0]),
        (-1, [-0.5], 0.5, math.exp(-0.5), [math.exp(-0.5)]),  # on the bound
    ],
)
def test_gmpo_is_a_clipped_geometric_mean_once_a_sequence(advantage, at, bound, loss, gradient):
    of, n = double(*[advantage] * len(at)), len(at)
    check(
        lambda at: gmpo_loss(at, of, one_sequence(n), log_ratio_min=-bound, log_ratio_max=bound),
        at,
        loss=[loss] * n,
        gradient=gradient,
    )


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "expected"),
    [
        ([-1, 1], [1, 1], ([False, False], [False, True])),
        ([-1, 1], [-1, -1], ([True, False], [False, False])),
        ([-0.4, 0.4], [-1, 1], ([False] * 2, [False] * 2)),  # each on its bound
        ([-1, 1], [0, 0], ([False] * 2, [False] * 2)),
        ([-1, 1], [0.5, -0.5], ([False] * 2, [False] * 2)),  # the bound is on the side that A pushes away from
    ],
)
def test_gmpo_counts_cut_tokens_by_side(log_ratio, advantage, expected):
    assert cuts(Gmpo()(inputs([0, 0], advantage, token_log_ratio=log_ratio))) == expected


# --- dppo -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_low", "max_high", "advantage", "inside"),
    [
        (0.15, 0.15, [1, 1, 1, -1, -1, -1], [False, True, True, True, True, False]),
        (0.25, 0.15, [1, 1, 1, -1, -1, -1], [False, True, True, True, True, True]),
        (0.15, 0.25, [1, 1, 1, -1, -1, -1], [True, True, True, True, True, False]),
        (0.15, 0.15, [0] * 6, [True, True, False] * 2),  # A = 0 counts as pushing down
    ],
)
def test_dppo_masks_where_probability_moved_too_far_the_way_the_advantage_pushes(max_low, max_high, advantage, inside):
    # p_old 0.5. up: p 0.7 (moved 0.2 > 0.15); within: 0.6; down: 0.3
    logp, old = double(*log(0.7, 0.6, 0.3) * 2), double(*log(*[0.5] * 6))
    found = dppo_mask(logp, old, double(*advantage), divergence="tv", max_low=max_low, max_high=max_high)
    assert found.tolist() == inside


def test_binary_kl_by_hand():
    # 0.5 log(0.5 / 0.25) + 0.5 log(0.5 / 0.75) = 0.5 * 0.693147 - 0.5 * 0.405465 = 0.143841
    assert bernoulli_kl(double(*log(0.5)), double(*log(0.25))).item() == pytest.approx(0.143841, abs=1e-6)
    # both certain; nearly; above 0 by rounding counts as certain
    assert bernoulli_kl(double(0, -1e-20, 1e-9), double(0, -1e-20, 1e-9)).tolist() == [0, 0, 0]
    assert bernoulli_kl(double(*log(0.5, 0.5)), double(0, 1e-9)).tolist() == [math.inf] * 2


def test_dppo_in_kl_form_asks_for_distance_and_direction():
    # KL(0.5 || 0.25) = 0.1438; KL(0.5 || 0.75) the same; KL(0.5 || 0.6) = 0.0204
    logp, old = double(*log(0.25, 0.75, 0.6, 0.4)), double(*log(*[0.5] * 4))
    for advantage, expected in ((1, [True, False, True, True]), (-1, [False, True, True, True])):
        inside = dppo_mask(logp, old, double(*[advantage] * 4), divergence="kl", max_low=0.05, max_high=0.05)
        assert inside.tolist() == expected


def test_dppo_keeps_a_token_on_its_bound_and_one_that_has_not_moved():
    certain, impossible = double(0), double(-math.inf)  # p = 1 and 0: moved by 1
    bounds = {"max_low": 1.0, "max_high": 1.0}
    assert dppo_mask(certain, impossible, double(1), divergence="tv", **bounds).item()
    assert dppo_mask(impossible, certain, double(-1), divergence="tv", **bounds).item()
    # exp(-1e-20) is 1 too: not moved, although log(1 - p) knows the difference and makes the KL infinite
    assert dppo_mask(certain, double(-1e-20), double(1), divergence="kl", **bounds).item()


def test_dppo_loss_weighs_the_log_likelihood_by_a_capped_ratio():
    # logp -1: r 2 -> -3 * 2 * -1 = 6, gradient -6; r 50 -> cap 20: 60; outside 0
    old, inside = -1 - double(*log(2, 50, 1)), torch.tensor([True, True, False])
    check(
        lambda at: dppo_loss(at, old, double(3, 3, 3), inside, ratio_cap=20.0),
        [-1, -1, -1],
        loss=[6, 60, 0],
        gradient=[-6, -60, 0],
    )


def test_dppo_thresholds_follow_the_divergence_and_its_cuts_are_counted():
    assert Dppo("kl") == Dppo("kl", 0.05, 0.05)
    assert Dppo("kl", max_high=0.1) == Dppo("kl", 0.05, 0.1)
    terms = Dppo()(inputs(log(0.7, 0.3, 0.3), [1, -1, 0], logp_old=log(0.5, 0.5, 0.5)))
    assert cuts(terms) == ([False, True, True], [True, False, False])


# --- ipo --------------------------------------------------------------------------------------------------------------

# p_old is 1/2. Tokens 1 to 4 have moved by 0.15; token 5 by 0.2, without an advantage.
IPO_AT, IPO_ADVANTAGE = [0.55, 0.65, 0.65, 0.35, 0.35, 0.7], [2, 2, -1, -1, 1, 0]
# prime-rl's ``default`` masks what moved the way its advantage pushes, ``ipo`` either way
IPO_INSIDE = {"advantage": [1, 0, 1, 0, 1, 1], "both": [1, 0, 0, 0, 0, 0]}


@pytest.mark.parametrize("sides", IPO_INSIDE)
def test_ipo_has_the_ratio_inside_its_region_and_the_squared_log_ratio_everywhere(sides):
    surrogate, beta = sur.Ipo(0.1, 0.5, sides), 0.5
    old, ratios = double(*log(*[0.5] * 6)), [2 * p for p in IPO_AT]
    push = [a * r * m for a, r, m in zip(IPO_ADVANTAGE, ratios, IPO_INSIDE[sides], strict=True)]
    check(
        lambda at: (
            surrogate(replace(inputs([0] * 6, IPO_ADVANTAGE, logp_old=old), logp=at, token_log_ratio=at - old)).loss
        ),
        log(*IPO_AT),
        loss=[beta * math.log(r) ** 2 - p for r, p in zip(ratios, push, strict=True)],
        gradient=[2 * beta * math.log(r) - p for r, p in zip(ratios, push, strict=True)],
    )


def test_ipo_is_prime_rl_s_in_its_own_numbers():
    # ipo_loss_fn and default_loss_fn of its trainer/rl/loss.py, threshold 0.1, kl_tau 0.5: the loss of all six tokens
    for sides, expected in (("both", -1.9427991789011272), ("advantage", -1.3427991789011275)):
        given = inputs(
            log(*IPO_AT), IPO_ADVANTAGE, logp_old=log(*[0.5] * 6), token_log_ratio=log(*[2 * p for p in IPO_AT])
        )
        assert sur.Ipo(0.1, 0.5, sides)(given).loss.sum().item() == pytest.approx(expected, rel=1e-12)


def test_ipo_counts_what_it_masks_by_the_side_it_moved_to():
    given = inputs(log(*IPO_AT), IPO_ADVANTAGE, logp_old=log(*[0.5] * 6), token_log_ratio=log(*[2 * p for p in IPO_AT]))
    low, high = [False, False, False, True, True, False], [False, True, True, False, False, True]
    assert cuts(sur.Ipo()(given)) == (low, high)
    only = [False, False, False, True, False, False], [False, True, False, False, False, False]
    assert cuts(sur.Ipo(sides="advantage")(given)) == only


def test_ipo_masks_beyond_its_bound_and_not_before():
    half, three_quarters = double(*log(0.5)), double(*log(0.75))
    for sides in ("both", "advantage"):
        for change, inside in ((0.25 + 1e-12, True), (0.25 - 1e-12, False)):
            assert ipo_mask(three_quarters, half, double(1), max_change=change, sides=sides).item() is inside


# --- kpop -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("threshold", "expected"),
    # kpop_loss_fn of prime-rl's branch feat/kpop-loss, kl_tau 0.5: the loss of all six tokens. Those that moved by 0.15
    # are 0.0457 nats away in one direction and 0.0472 in the other.
    [(0.046, -1.9427991789011272), (0.1, -3.2427991789011275)],
)
def test_kpop_is_prime_rl_s_in_its_own_numbers(threshold, expected):
    given = inputs(log(*IPO_AT), IPO_ADVANTAGE, logp_old=log(*[0.5] * 6), token_log_ratio=log(*[2 * p for p in IPO_AT]))
    assert sur.KPop(threshold, 0.5)(given).loss.sum().item() == pytest.approx(expected, rel=1e-12)


def test_kpop_keeps_a_token_whose_probability_has_become_1():
    at, old = double(0.0, -1e-3, -0.2), double(-1e-3, 0.0, 0.0)
    assert kpop_mask(at, old, max_divergence=0.1).tolist() == [True, True, False]


# --- covariance losses ------------------------------------------------------------------------------------------------


def test_clip_cov_is_clip_without_the_selected_tokens():
    given = inputs([0] * 3, [1] * 3, log_ratio=log(1.0, 1.0, 1.5), selected=torch.tensor([False, True, False]))
    assert ClipCov()(given).loss.tolist() == pytest.approx([-1, 0, -1.2])


def test_kl_cov_pulls_a_selected_tokens_ratio_back_to_one():
    # A = 1, coefficient 2, lr -0.5, 0.5, 0: -r + 2 |lr|, gradient -r + 2 sgn(lr) where selected; the last is not
    at, selected = [-0.5, 0.5, 0.0, 0.5], torch.tensor([True, True, True, False])
    given = inputs([0] * 4, [1] * 4, selected=selected)
    check(
        lambda lr: KlCov(coefficient=2.0)(replace(given, token_log_ratio=lr, log_ratio=lr)).loss,
        at,
        loss=[1 - math.exp(-0.5), 1 - math.exp(0.5), -1, -math.exp(0.5)],
        gradient=[-math.exp(-0.5) - 2, -math.exp(0.5) + 2, -1, -math.exp(0.5)],
    )


# --- what a loss asks for ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "surrogate",
    [
        Clip(),
        Cispo(),
        sur.Sapo(),
        sur.Vespo(),
        Gmpo(),
        Dppo(),
        sur.Ipo(),
        sur.KPop(),
        ClipCov(),
        KlCov(),
        Dro(0.1),
        Importance(),
    ],
    ids=lambda surrogate: surrogate.name,
)
def test_a_loss_of_the_ratio_asks_for_the_old_policy(surrogate):
    with pytest.raises(InputError, match="logp_old"):
        surrogate(inputs([-1], [1], selected=torch.tensor([False])))


@pytest.mark.parametrize("surrogate", [ClipCov(), KlCov()], ids=lambda surrogate: surrogate.name)
def test_a_covariance_loss_asks_for_its_selection(surrogate):
    with pytest.raises(InputError, match="attach"):
        surrogate(inputs([0], [0], token_log_ratio=[0], log_ratio=[0]))


@pytest.mark.parametrize("surrogate", [sur.Reinforce(), sur.Nll()], ids=lambda surrogate: surrogate.name)
def test_a_loss_without_a_ratio_asks_for_nothing_old(surrogate):
    terms = surrogate(inputs([-1], [1]))
    assert (terms.loss.item(), terms.clipped_low, terms.clipped_high) == (1.0, None, None)


def test_a_loss_that_treats_all_tokens_alike_cannot_be_asked_for_a_selection():
    with pytest.raises(NotImplementedError, match="'clip' selects no tokens"):
        Clip().select(sur.SelectionInputs(double(1), double(1), torch.tensor([True])))

"""Checks of what an objective is given."""

import math
from itertools import product

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from logitless.errors import InputError
from logitless.objective.correction import SamplerCorrection
from logitless.objective.inputs import required, shaped, shapes_of
from logitless.objective.objective import Objective
from logitless.objective.presets import trl
from logitless.objective.surrogate import Cispo, Clip, Dppo, Dro, Gmpo, Ipo, KPop
from tests.objective.batches import batch_of, double
from tests.objective.compositions import SURROGATES


@pytest.mark.parametrize(
    "name",
    [
        *("logp_old", "logp_ref", "logp_sampler", "entropy", "entropy_old", "turn", "selected", "lag"),
        *("value", "value_old", "value_target", "value_weight"),
    ],
)
def test_a_missing_tensor_is_named_with_a_remedy(name):
    with pytest.raises(InputError, match=f"needed {name} for every token; given None. .+, or choose an objective"):
        required(None, name)
    assert required(torch.ones(1), name).item() == 1.0


def test_shapes_are_checked_however_arguments_are_passed_and_defaults_are_not_asked_for():
    @shaped
    def product(some: Float[Tensor, "N"], other: Float[Tensor, "N"] | None = None, factor: float = 1.0) -> Tensor:
        return some * factor if other is None else some * other * factor

    assert product(torch.ones(2)).tolist() == [1, 1]
    assert product(torch.ones(2), factor=2.0).tolist() == [2, 2]
    assert product(torch.ones(2), torch.ones(2), 3.0).tolist() == [3, 3]
    for call in (lambda wrong: product(torch.ones(2), other=wrong), lambda wrong: product(torch.ones(2), wrong)):
        with pytest.raises(InputError, match=r"needed other \[N\] with N = 2; given a tensor \[3\]"):
            call(torch.ones(3))


def test_a_shape_of_any_rank_is_not_checked_nor_is_what_may_have_one():
    hints = {
        "any": Float[Tensor, "..."],
        "leading": Float[Tensor, "*batch N"],
        "either": Float[Tensor, "N"] | Float[Tensor, "..."],
        "fixed": Float[Tensor, "N"] | Float[Tensor, "N D"],
        "return": Float[Tensor, "N"],
    }
    assert shapes_of(hints) == {"fixed": (("N",), ("N", "D"))}


UNBOUNDED = [
    Clip(ratio_cap=math.inf),
    Clip(dual=math.inf),
    Clip(0.8, math.inf),
    Clip(0.0, math.inf, ratio_cap=math.inf, dual=math.inf),
    Cispo(math.inf),
    Gmpo(-math.inf, math.inf),
    Dppo(ratio_cap=math.inf),
    Dppo("kl", math.inf, math.inf, math.inf),
]


LOG_RATIOS = [sign * size for size in (0.0, 1.0, 20.0, 88.0, 89.0, 100.0, 720.0, 1e4) for sign in (1, -1)]
CASES = list(product(LOG_RATIOS, [0.0, 1.0, -1.0, -1e4, 1e4], [0.0, 100.0, -100.0, math.inf]))
"""Of a token each, in a sequence of its own: log ratio, advantage, and what the sampler's is further away."""


@pytest.mark.parametrize("surrogate", [*SURROGATES, *UNBOUNDED], ids=str)
@pytest.mark.parametrize("correction", [None, SamplerCorrection(max=2.0), SamplerCorrection(mode="mask")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_ratio_and_no_infinite_bound_makes_a_loss_or_gradient_nan(surrogate, dtype, correction):
    log_ratio, advantage, sampler = torch.tensor(CASES, dtype=dtype).T
    logp = -1.0 + log_ratio.clamp(max=0.0)
    batch = batch_of(
        list(range(len(CASES))),
        advantage=advantage,
        token_weight=torch.ones_like(logp),
        logp_old=logp - log_ratio,
        logp_sampler=logp - log_ratio - sampler,
        logp_ref=logp,
        selected=[False] * len(CASES),
    )
    output = Objective(surrogate=surrogate, correction=correction)(logp.requires_grad_(), None, batch)
    assert not output.token_loss.isnan().any()
    assert not output.grad_logp.isnan().any()
    if surrogate.reads_advantage and not isinstance(surrogate, Dro | Ipo | KPop):
        assert not output.grad_logp[advantage == 0].any()


def test_trls_delta_may_be_infinite_and_then_bounds_nothing():
    batch = batch_of([0, 1], advantage=[1, -1], logp_old=[-101, -1.5])
    found = [trl(delta=delta).objective(double(-1, -1).requires_grad_(), None, batch) for delta in (math.inf, None)]
    assert found[0].grad_logp.tolist() == found[1].grad_logp.tolist() == [0.0, pytest.approx(math.exp(0.5))]

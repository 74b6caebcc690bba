"""Checks of what an objective is given."""

import inspect
import math
from dataclasses import fields
from typing import get_args, get_type_hints

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Float
from torch import Tensor

from logitless.errors import ConfigurationError, InputError
from logitless.objective.advantage import Advantage, ReinforcePPBaseline
from logitless.objective.correction import SamplerCorrection
from logitless.objective.divergence import KLPenalty
from logitless.objective.entropy import AdaptiveEntropy, EntropyBonus
from logitless.objective.filters import Filter, OffPolicy, TopEntropy
from logitless.objective.inputs import required, shaped, shapes_of
from logitless.objective.kl_control import FixedKL, KLControl, LinearKL, ProportionalKL, ZieglerKL
from logitless.objective.objective import Objective
from logitless.objective.presets import trl
from logitless.objective.ratio import SequenceRatio
from logitless.objective.surrogate import Cispo, Clip, ClipCov, Dppo, Dro, Gmpo, KlCov, Sapo, Surrogate, Vespo
from logitless.objective.value import ValueLoss
from logitless.types import TokenBatch
from tests.objective.compositions import CORRECTIONS, PENALTIES, RATIOS, SURROGATES


@pytest.mark.parametrize(
    ("part", "options", "listed"),
    [
        (SequenceRatio, {"advantage_within_sequence": "average"}, "'mean', 'multiply'"),
        (SamplerCorrection, {"level": "tokens", "max": 2.0}, "'token', 'sequence', 'geometric'"),
        (SamplerCorrection, {"mode": "clip", "max": 2.0}, "'truncate', 'mask'"),
        (KLPenalty, {"estimator": "k4"}, "'k1', 'k2', 'k3', 'mse', 'low_var_kl'"),
        (KLPenalty, {"ratio_corrected": "sequence"}, "'token', 'surrogate'"),
        (TopEntropy, {"quantile": 0.2, "scope": "step"}, "'block', 'micro_batch'"),
        (EntropyBonus, {"coefficient": 0.1, "scope": "block"}, "'step', 'micro_batch'"),
        (Dppo, {"divergence": "js"}, "'tv', 'kl'"),
        (Cispo, {"ceiling_below_one": "warn"}, "'refuse', 'accept'"),
        (ClipCov, {"scope": "step"}, "'block', 'micro_batch'"),
        (KlCov, {"scope": "step"}, "'block', 'micro_batch'"),
        (ReinforcePPBaseline, {"whiten_over": "sequences"}, "'tokens', 'completions'"),
    ],
)
def test_a_choice_that_does_not_exist_is_refused_in_python_as_in_files(part, options, listed, without_shape_checks):
    with pytest.raises(ConfigurationError, match=listed):
        part(**options)


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


@pytest.mark.parametrize(
    "part",
    [*RATIOS, *SURROGATES, OffPolicy(0.1), TopEntropy(0.5), *CORRECTIONS[1:], *PENALTIES[1:], EntropyBonus(0.1)],
    ids=lambda part: part.name,
)
def test_a_name_is_given_by_keyword_only_and_is_the_parts_own(part, without_shape_checks):
    parameter = inspect.signature(type(part)).parameters["name"]
    assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
    assert parameter.default == part.name


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


OBLIGATORY = {
    "Dro": {"beta": 0.1},
    "OffPolicy": {"threshold": 0.5},
    "TopEntropy": {"quantile": 0.5},
    "SamplerRejection": {"max": 0.5},
    "Stale": {"max_lag": 1},
    "SamplerCorrection": {"max": 2.0},
    "EntropyBonus": {"coefficient": 0.1},
    "FixedKL": {"beta": 0.1},
}
PARTS = (
    *get_args(Surrogate),
    *get_args(Filter),
    *get_args(KLControl),
    *get_args(get_args(Advantage)[0]),
    *(SamplerCorrection, KLPenalty, EntropyBonus, AdaptiveEntropy, ValueLoss),
)
NUMBERS = [
    (part, name)
    for part in PARTS
    for name, hint in get_type_hints(part).items()
    if float in (hint, *get_args(hint)) and name in {each.name for each in fields(part)}
]


@pytest.mark.parametrize(("part", "name"), NUMBERS, ids=lambda each: getattr(each, "__name__", each))
def test_no_number_of_any_part_may_be_nan(part, name):
    options = OBLIGATORY.get(part.__name__, {})
    part(**options)
    with pytest.raises(ConfigurationError):
        part(**{**options, name: math.nan})


FACTORS = [
    (Vespo, "k_positive"),
    (Vespo, "lambda_negative"),
    (Sapo, "temperature_positive"),
    (Dro, "beta"),
    (KlCov, "coefficient"),
    (EntropyBonus, "coefficient"),
    (AdaptiveEntropy, "delta"),
    (ValueLoss, "coefficient"),
    *((FixedKL, "beta"), (ProportionalKL, "gain"), (LinearKL, "target"), (ZieglerKL, "horizon")),
]


@pytest.mark.parametrize(("part", "name"), FACTORS, ids=lambda each: getattr(each, "__name__", each))
def test_a_factor_is_finite(part, name):
    with pytest.raises(ConfigurationError, match=f"a finite {name}"):
        part(**{**OBLIGATORY.get(part.__name__, {}), name: math.inf})


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


@pytest.mark.parametrize("surrogate", [*SURROGATES, *UNBOUNDED], ids=str)
@given(
    log_ratio=st.sampled_from([0.0, 1.0, 20.0, 88.0, 89.0, 100.0, 720.0, 1e4]).flatmap(
        lambda size: st.sampled_from([size, -size])
    ),
    advantage=st.sampled_from([0.0, 1.0, -1.0, -1e4, 1e4]),
    sampler=st.sampled_from([0.0, 100.0, -100.0, math.inf]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    correction=st.sampled_from([None, SamplerCorrection(max=2.0), SamplerCorrection(mode="mask")]),
)
def test_no_ratio_and_no_infinite_bound_makes_a_loss_or_gradient_nan(
    surrogate, log_ratio, advantage, sampler, dtype, correction
):
    logp = torch.tensor([-1.0 + min(log_ratio, 0.0)], dtype=dtype)
    batch = TokenBatch(
        sequence=torch.tensor([0]),
        num_sequences=1,
        advantage=torch.tensor([advantage], dtype=dtype),
        token_weight=torch.ones(1, dtype=dtype),
        logp_old=logp - log_ratio,
        logp_sampler=logp - log_ratio - sampler,
        selected=torch.tensor([False]),
    )
    output = Objective(surrogate=surrogate, correction=correction)(logp.requires_grad_(), None, batch)
    assert not output.loss.isnan()
    assert not output.grad_logp.isnan().any()
    if advantage == 0 and surrogate.reads_advantage and not isinstance(surrogate, Dro):
        assert output.grad_logp.tolist() == [0.0]


def test_trls_delta_may_be_infinite_and_then_bounds_nothing():
    logp, old = torch.tensor([-1.0, -1.0]), torch.tensor([-101.0, -1.5])
    batch = TokenBatch(
        sequence=torch.tensor([0, 1]),
        num_sequences=2,
        advantage=torch.tensor([1.0, -1.0]),
        token_weight=torch.ones(2),
        logp_old=old,
    )
    found = [trl(delta=delta).objective(logp.clone().requires_grad_(), None, batch) for delta in (math.inf, None)]
    assert found[0].grad_logp.tolist() == found[1].grad_logp.tolist() == [0.0, pytest.approx(math.exp(0.5))]

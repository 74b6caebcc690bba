"""Parts of an algorithm as configuration: their defaults, how they are read from plain data, and what they refuse."""

import inspect
import math
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, get_args, get_type_hints

import pytest
from pydantic import Field, TypeAdapter, ValidationError

from logitless.errors import ConfigurationError
from logitless.objective.advantage import Advantage, Gae, PassAtK, Percentile, Raw, ReinforcePP, ReinforcePPBaseline
from logitless.objective.correction import SamplerCorrection
from logitless.objective.divergence import KLPenalty
from logitless.objective.entropy import AdaptiveEntropy, EntropyBonus
from logitless.objective.filters import (
    AdvantageOutliers,
    Filter,
    OffPolicy,
    SamplerRejection,
    SecondMoment,
    Stale,
    TopEntropy,
)
from logitless.objective.kl_control import FixedKL, KLControl, LinearKL, ProportionalKL, ZieglerKL
from logitless.objective.objective import Objective
from logitless.objective.ratio import Ratio, SequenceRatio, TurnRatio
from logitless.objective.surrogate import Cispo, Clip, ClipCov, Dppo, Dro, Gmpo, Ipo, KlCov, Sapo, Surrogate, Vespo
from logitless.objective.value import ValueLoss
from logitless.objective.weighting import ConstantLength, Weighting

OBLIGATORY = {
    "Dro": {"beta": 0.1}, "Percentile": {"q": 50.0}, "PassAtK": {"k": 4}, "OffPolicy": {"threshold": 0.5},
    "TopEntropy": {"quantile": 0.5}, "SamplerRejection": {"max": 0.5}, "Stale": {"max_lag": 1},
    "SamplerCorrection": {"max": 2.0}, "EntropyBonus": {"coefficient": 0.1}, "FixedKL": {"beta": 0.1},
}  # fmt: skip
NAMED = [kind for union in (Ratio, Surrogate, Filter, Advantage, KLControl, Weighting) for kind in get_args(union)]
PARTS = [*NAMED, SamplerCorrection, KLPenalty, EntropyBonus, AdaptiveEntropy, ValueLoss]
OF = {"ids": lambda each: getattr(each, "__name__", None)}


def of_name(union: object) -> TypeAdapter:
    return TypeAdapter(Annotated[union, Field(discriminator="name")])


def obligatory(part: type) -> dict:
    return OBLIGATORY.get(part.__name__, {})


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (Clip(), Clip(ratio_min=0.8, ratio_max=1.2, ratio_cap=None, dual=None)),
        (Cispo(), Cispo(ratio_max=5.0, ratio_min=None)),
        (Sapo(), Sapo(temperature_positive=1.0, temperature_negative=1.05)),
        (Vespo(), Vespo(k_positive=2.0, lambda_positive=3.0, k_negative=3.0, lambda_negative=2.0)),
        (Gmpo(), Gmpo(log_ratio_min=-0.4, log_ratio_max=0.4)),
        (Dppo(), Dppo(divergence="tv", max_low=0.15, max_high=0.15, ratio_cap=20.0)),
        (Ipo(), Ipo(max_change=0.1, beta=1e-3, sides="both")),
        (ClipCov(), ClipCov(fraction=2e-4, low=1.0, high=5.0, ratio_min=0.8, ratio_max=1.2, scope="block")),
        (KlCov(), KlCov(fraction=2e-4, coefficient=1.0, scope="block")),
        (Gae(), Gae(gamma=1.0, lambda_=0.95, action="token", whiten=True)),
        (ReinforcePP(), ReinforcePP(gamma=1.0)),
        (PassAtK(4), PassAtK(k=4, passing=1.0)),
        (SecondMoment(), SecondMoment(max_mean=0.04)),
        (AdvantageOutliers(), AdvantageOutliers(max=3.0)),
        (ValueLoss(), ValueLoss(coefficient=0.5, clip=0.2)),
        (AdaptiveEntropy(), AdaptiveEntropy(target=0.2, delta=0.005, coefficient_min=0.0, coefficient_max=1.0)),
        (LinearKL(), LinearKL(0.1, beta=0.05, target=0.05, beta_min=1e-4, beta_max=10.0, guardrail="raise_beta")),
        (ProportionalKL(), ProportionalKL(0.1)),
        (ZieglerKL(), ZieglerKL(1e4)),
    ],
)
def test_defaults_are_the_papers(part, expected):
    assert part == expected


@pytest.mark.parametrize("union", [Advantage, KLControl, Weighting, Surrogate, Filter])
def test_every_part_is_chosen_by_its_name(union):
    for kind in get_args(union):
        assert of_name(union).validate_python({"name": kind.name, **obligatory(kind)}) == kind(**obligatory(kind))


@pytest.mark.parametrize("part", [*get_args(Ratio), *get_args(Surrogate), *get_args(Filter), *PARTS[-5:-2]], **OF)
def test_a_name_is_given_by_keyword_only_and_is_the_parts_own(part, without_shape_checks):
    parameter = inspect.signature(part).parameters["name"]
    assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
    assert parameter.default == part(**obligatory(part)).name


@pytest.mark.parametrize(
    ("union", "config", "message"),
    [
        (Advantage, {"name": "group_centered", "q": 50}, "Unexpected keyword argument"),
        (Advantage, {"name": "reinforce_pp", "lambda_": 1}, "Unexpected keyword argument"),
        (Advantage, {"name": "percentile"}, "Field required"),
        (Advantage, {"name": "zscore"}, "expected tags"),
        (KLControl, {"name": "fixed", "beta": 0.1, "target": 0.05}, "Unexpected keyword argument"),
        (KLControl, {"name": "linear", "horizon": 5}, "Unexpected keyword argument"),
        (KLControl, {"name": "linear", "guardrail": "stop"}, "'raise_beta' or 'shorten_rollout'"),
        (Weighting, {"name": "micro_batch_token_mean", "scope": "block"}, "Unexpected keyword argument"),
        (Weighting, {"name": "token_mean", "max_new_tokens": 3}, "Unexpected keyword argument"),
        (Weighting, {"name": "token_mean", "scope": "epoch"}, "'step' or 'block'"),
        (Weighting, {"name": "sum"}, "expected tags"),
        (Surrogate, {"name": "grpo"}, "clip_cov"),
        (Filter, {"name": "stale", "max": 1}, "Unexpected keyword argument"),
    ],
)
def test_unknown_names_and_keys_are_refused_in_plain_data(union, config, message):
    with pytest.raises(ValidationError, match=message):
        of_name(union).validate_python(config)


@pytest.mark.parametrize(
    ("part", "options", "listed"),
    [
        (SequenceRatio, {"advantage_within_sequence": "average"}, "'mean', 'multiply'"),
        (SamplerCorrection, {"level": "tokens", "max": 2.0}, "'token', 'sequence', 'geometric'"),
        (SamplerCorrection, {"mode": "clip", "max": 2.0}, "'truncate', 'mask'"),
        (KLPenalty, {"estimator": "k4"}, "'k1', 'k2', 'k3', 'mse', 'low_var_kl'"),
        (KLPenalty, {"ratio_corrected": "sequence"}, "'token', 'surrogate'"),
        (TopEntropy, {"quantile": 0.2, "scope": "step"}, "'block', 'micro_batch'"),
        (SamplerRejection, {"max": 0.5, "over": "sequence"}, "'token', 'sequence_sum'"),
        (Stale, {"max_lag": 1, "over": "sequences"}, "'token', 'sequence'"),
        (EntropyBonus, {"coefficient": 0.1, "scope": "block"}, "'step', 'micro_batch'"),
        (Dppo, {"divergence": "js"}, "'tv', 'kl'"),
        (Ipo, {"sides": "up"}, "'both', 'advantage'"),
        (Cispo, {"ceiling_below_one": "warn"}, "'refuse', 'accept'"),
        (ClipCov, {"scope": "step"}, "'block', 'micro_batch'"),
        (KlCov, {"scope": "step"}, "'block', 'micro_batch'"),
        (ReinforcePPBaseline, {"whiten_over": "sequences"}, "'tokens', 'completions'"),
    ],
)
def test_a_choice_that_does_not_exist_is_refused_in_python_as_in_files(part, options, listed, without_shape_checks):
    with pytest.raises(ConfigurationError, match=listed):
        part(**options)


NUMBERS = [
    (part, name)
    for part in PARTS
    for name, hint in get_type_hints(part).items()
    if float in (hint, *get_args(hint)) and name in {each.name for each in fields(part)}
]


@pytest.mark.parametrize(("part", "name"), NUMBERS, **OF)
def test_no_number_of_any_part_may_be_nan(part, name):
    options = obligatory(part)
    part(**options)
    with pytest.raises(ConfigurationError):
        part(**{**options, name: math.nan})


FACTORS = {
    Vespo: ("k_positive", "lambda_negative"), Sapo: ("temperature_positive",), Dro: ("beta",), Ipo: ("beta",),
    KlCov: ("coefficient",), EntropyBonus: ("coefficient",), AdaptiveEntropy: ("delta",), ValueLoss: ("coefficient",),
    FixedKL: ("beta",), ProportionalKL: ("gain",), LinearKL: ("target",), ZieglerKL: ("horizon",),
}  # fmt: skip


@pytest.mark.parametrize(("part", "name"), [(part, name) for part in FACTORS for name in FACTORS[part]], **OF)
def test_a_factor_is_finite(part, name):
    with pytest.raises(ConfigurationError, match=f"a finite {name}"):
        part(**{**obligatory(part), name: math.inf})


REFUSED: dict[str, list[Callable[[], object]]] = {
    "ratio_min < ratio_max": [
        lambda: Clip(1.2, 0.8), lambda: Cispo(5.0, ratio_min=6.0), lambda: ClipCov(ratio_min=2.0),
    ],
    "ratio_min <= 1 <= ratio_max": [  # an epsilon in place of a bound
        lambda: Clip(0.2, 0.28), lambda: Clip(ratio_max=0.28, ratio_min=0.0), lambda: Clip(1.1, 1.2),
        lambda: ClipCov(ratio_min=0.2, ratio_max=0.28),
    ],
    "Bounds are absolute": [lambda: Clip(-0.2, 0.2), lambda: Cispo(0.2)],
    "ratio_cap of at least": [lambda: Clip(0.8, 1.2, ratio_cap=1.0)],
    "dual above 1": [lambda: Clip(0.8, 1.2, dual=1.0)],
    "temperature_positive": [lambda: Sapo(0.0)],
    "temperature_negative": [lambda: Sapo(1.0, -1.0)],
    "log_ratio_min <= 0": [lambda: Gmpo(0.8, 1.2)],
    "max_low": [lambda: Dppo(max_low=0.0)],
    "max_high": [lambda: Dppo(max_high=-1.0)],
    "ratio_cap": [lambda: Dppo(ratio_cap=0.0)],
    "max_change": [lambda: Ipo(max_change=0.0)],
    "beta of at least 0; given -0.1": [lambda: Ipo(beta=-0.1)],
    "k of at least 1": [lambda: PassAtK(0)],
    "fraction": [lambda: ClipCov(fraction=0.0), lambda: KlCov(fraction=1.5)],
    "low < high": [lambda: ClipCov(low=5.0, high=1.0), lambda: ClipCov(low=1.0, high=1.0)],
    "beta": [lambda: Dro(beta=0.0)],
    "max_turns": [lambda: TurnRatio(max_turns=0)],
    "ratio_corrected='token'": [lambda: KLPenalty("k1")],
    "positive clamp": [lambda: KLPenalty("k3", clamp=0.0)],
    "bound to truncate at": [lambda: SamplerCorrection()],
    "0 <= min < max": [
        lambda: SamplerCorrection(min=3.0, max=2.0), lambda: SamplerCorrection(min=-1.0, max=2.0),
        lambda: SamplerCorrection(max=0.0),
    ],
    "from 0 to 1": [
        lambda: TopEntropy(-0.1), lambda: TopEntropy(1.1), lambda: Gae(gamma=1.01), lambda: Gae(lambda_=-0.1),
        lambda: ReinforcePP(gamma=-0.1),
    ],
    r"0\.04": [lambda: SecondMoment(0.0)],
    "at least 0": [lambda: Stale(-1)],
    "a positive bound": [lambda: AdvantageOutliers(0.0)],
    "a positive max and no min": [lambda: SamplerRejection(0.0, "k2"), lambda: SamplerRejection(1.0, "tv", min=0.1)],
    "min < 0 < max": [
        lambda: SamplerRejection(1.0, min=2.0), lambda: SamplerRejection(1.0, min=0.5),
        lambda: SamplerRejection(-0.5, min=-1.0),
    ],
    "without a sign": [lambda: SamplerRejection(1.0, over="sequence_max")],
    "positive delta": [lambda: AdaptiveEntropy(delta=0.0), lambda: AdaptiveEntropy(coefficient_min=2.0)],
    "value coefficient": [
        lambda: ValueLoss(coefficient=-0.1), lambda: ValueLoss(clip=0.0), lambda: ValueLoss(clip=-1.0),
    ],
    "percentile q from 0 to 100": [lambda: Percentile(100.5), lambda: Percentile(-1.0)],
    "positive advantage clip": [
        lambda: Raw(clip=0.0),
        *(lambda kind=kind: kind(**obligatory(kind), clip=-1.0) for kind in get_args(Advantage)),
    ],
    "at least 1": [lambda: ConstantLength(0)],
    "beta of at least 0.*KL control": [lambda: FixedKL(-0.1)],
    "positive KL target": [
        lambda: ProportionalKL(target=0.0), lambda: ZieglerKL(target=-1.0), lambda: LinearKL(target=-1.0),
    ],
    "positive gain": [lambda: ProportionalKL(gain=0.0), lambda: LinearKL(gain=0.0)],
    "positive horizon": [lambda: ZieglerKL(horizon=0.0)],
    "positive beta": [lambda: ProportionalKL(beta=0.0, beta_min=0.0), lambda: ZieglerKL(beta=0.0, beta_min=0.0)],
    "0 <= beta_min": [
        lambda: LinearKL(beta_min=-0.1), lambda: LinearKL(beta=0.1, beta_min=0.2), lambda: ZieglerKL(beta=11.0),
    ],
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_a_number_out_of_its_range_is_refused(message):
    for build in REFUSED[message]:
        with pytest.raises(ConfigurationError, match=message):
            build()


def test_the_ends_of_a_range_belong_to_it():
    """Whatever is refused here raises."""
    Clip(0.0, 1.2, ratio_cap=1.2), Clip(dual=1.5), Cispo(1.0), KlCov(fraction=1.0), Gmpo(0.0, 0.0)
    (
        TurnRatio(max_turns=1),
        Ipo(beta=0.0),
        PassAtK(1),
        ConstantLength(1),
        ValueLoss(coefficient=0.0, clip=None),
        Stale(0),
        AdvantageOutliers(0.5),
    )
    Percentile(0.0), Percentile(100.0), TopEntropy(0.0), TopEntropy(1.0)
    Gae(gamma=0.0, lambda_=0.0), Gae(gamma=1.0, lambda_=1.0)
    FixedKL(0.0), ZieglerKL(horizon=1.0), LinearKL(beta=0.0, beta_min=0.0, beta_max=0.0), LinearKL(gain=0.5)


# --- an objective -----------------------------------------------------------------------------------------------------

OBJECTIVE = TypeAdapter(Objective)


def test_an_objective_is_read_from_plain_data_and_written_back():
    data = {
        "ratio": {"name": "sequence", "advantage_within_sequence": "mean"},
        "surrogate": {"name": "clip", "ratio_min": 0.9, "ratio_max": 2},
        "filters": [{"name": "off_policy", "threshold": 0.5}, {"name": "top_entropy", "quantile": 0.2}],
        "correction": {"level": "geometric", "max": 2},
        "kl": {"estimator": "low_var_kl"},
        "entropy_bonus": {"coefficient": 0.1, "adaptive": {"target": 0.4}},
    }
    objective = OBJECTIVE.validate_python(data)
    assert objective == Objective(
        SequenceRatio("mean"),
        Clip(0.9, 2.0),
        (OffPolicy(0.5), TopEntropy(0.2)),
        SamplerCorrection("geometric", max=2.0),
        KLPenalty("k3"),
        EntropyBonus(0.1, AdaptiveEntropy(0.4)),
    )
    assert OBJECTIVE.validate_python(OBJECTIVE.dump_python(objective)) == objective
    assert OBJECTIVE.validate_json(OBJECTIVE.dump_json(objective)) == objective
    assert OBJECTIVE.validate_python({}) == Objective()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"surrogate": {"name": "grpo"}}, "clip_cov"),
        ({"ratio": {"name": "token", "advantage_within_sequence": "mean"}}, "advantage_within_sequence"),
        ({"kl": {"estimator": "k1"}}, "put k1 in the reward"),
        ({"correction": {"max": 2, "cap": 3}}, "correction.cap"),
        ({"entropy_bonus": {"coefficient": 0.1, "target": 0.2}}, "entropy_bonus.target"),
        ({"clip": 0.2}, "clip"),
        ({"ratio": {"name": "sequence"}, "surrogate": {"name": "vespo"}}, "reads no other"),
    ],
)
def test_unknown_names_and_contradictions_are_refused_in_an_objective(data, message):
    with pytest.raises(ValidationError, match=message):
        OBJECTIVE.validate_python(data)

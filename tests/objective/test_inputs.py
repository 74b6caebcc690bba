"""Checks of what an objective is given."""

import inspect

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from logitless.errors import ConfigurationError, InputError
from logitless.objective.advantage import ReinforcePPBaseline
from logitless.objective.correction import SamplerCorrection
from logitless.objective.divergence import KLPenalty
from logitless.objective.entropy import EntropyBonus
from logitless.objective.filters import OffPolicy, TopEntropy
from logitless.objective.inputs import required, shaped, shapes_of
from logitless.objective.ratio import SequenceRatio
from logitless.objective.surrogate import Cispo, ClipCov, Dppo, KlCov
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

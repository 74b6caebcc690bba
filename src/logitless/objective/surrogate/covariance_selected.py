"""Clip-Cov and KL-Cov: another loss for the few tokens that cause most of the fall of entropy.

``covariance`` selects the tokens.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from logitless.errors import ConfigurationError, InputError
from logitless.objective.covariance import largest, num_chosen, random_in_band, token_covariance
from logitless.objective.inputs import check_knobs, required, shaped
from logitless.objective.surrogate.clip import clip_loss, clip_sides
from logitless.objective.surrogate.policy_loss import (
    PolicyLoss,
    Scope,
    SelectionInputs,
    SurrogateInputs,
    SurrogateTerms,
    check_fraction,
    check_trust_region,
)
from logitless.objective.surrogate.unclipped import importance_loss


@shaped
def kl_cov_loss(
    log_ratio: Float[Tensor, "N"],
    token_log_ratio: Float[Tensor, "N"],
    advantage: Float[Tensor, "N"],
    selected: Bool[Tensor, "N"],
    *,
    coefficient: float,
) -> Float[Tensor, "N"]:
    """The importance ratio, unclipped, and a penalty on the selected tokens.

    ``l = -r A, and + coefficient |lr| for the chosen``

    Gradient: ``-A r`` through ``log_ratio``, and the coefficient with the sign of lr through ``token_log_ratio`` of a
        selected token (0 at lr = 0).

    Source: KL-Cov, arXiv:2505.22617.

    Example:
        >>> up, both = torch.tensor([0.5, 0.5]), torch.tensor([1.0, 1.0])
        >>> kl_cov_loss(up, up, both, torch.tensor([True, False]), coefficient=2.0)
        tensor([-0.6487, -1.6487])
    """
    return importance_loss(log_ratio, advantage) + torch.where(selected, coefficient * token_log_ratio.abs(), 0.0)


@dataclass(frozen=True)
class ClipCov(PolicyLoss):
    """``clip_loss``, but 0 for the tokens that ``covariance.random_in_band`` chooses.

    ``l = 0 for the chosen``
    ``chosen: max(1, floor(fraction N)) at random of the tokens with low < cov < high``
    ``cov = (A - mean A)(logp - mean logp)``

    Args:
        fraction: of the trained tokens of the scope.
        low, high: band of the covariance from which tokens are selected.
        ratio_min, ratio_max: bounds of the clip.
        scope: where N, means and choice come from: ``block``, once, from the scoring pass; ``micro_batch``, from
            current values.

    Raises:
        ConfigurationError: bounds out of order or on one side of 1, or a fraction outside (0, 1].

    Source: Clip-Cov, arXiv:2505.22617.
    """

    fraction: float = 2e-4
    low: float = 1.0
    high: float = 5.0
    ratio_min: float = 0.8
    ratio_max: float = 1.2
    scope: Scope = "block"
    name: Literal["clip_cov"] = field(default="clip_cov", kw_only=True)

    def __post_init__(self) -> None:
        check_knobs(self)
        check_trust_region(self.ratio_min, self.ratio_max)
        check_fraction(self.fraction)
        if self.low >= self.high:
            raise ConfigurationError(
                needed="low < high", given=f"{self.low} and {self.high}", remedy="Use 1.0 and 5.0."
            )

    @property
    def selects(self) -> Scope:
        return self.scope

    def select(self, inputs: SelectionInputs) -> Bool[Tensor, "N"]:
        """``random_in_band`` of the trained tokens that are not clipped.

        Raises:
            InputError: no generator.
        """
        if inputs.generator is None:
            raise InputError(
                needed="a random generator to choose tokens for 'clip_cov'",
                given="None",
                remedy="Pass generator=torch.Generator().manual_seed(...), seeded differently on every rank.",
            )
        eligible = inputs.trained
        if inputs.log_ratio is not None:
            low, high = clip_sides(inputs.log_ratio, inputs.advantage, self.ratio_min, self.ratio_max)
            eligible = eligible & ~low & ~high
        return random_in_band(
            token_covariance(inputs.advantage, inputs.logp, inputs.trained, inputs.gather),
            eligible,
            num_chosen(self.fraction, inputs.gather(inputs.trained).sum()),
            low=self.low,
            high=self.high,
            generator=inputs.generator,
            gather=inputs.gather,
        )

    def __call__(self, inputs: SurrogateInputs) -> SurrogateTerms:
        log_ratio, bounds = required(inputs.log_ratio, "logp_old"), (self.ratio_min, self.ratio_max)
        loss = clip_loss(log_ratio, inputs.advantage, ratio_min=self.ratio_min, ratio_max=self.ratio_max)
        selected = required(inputs.selected, "selected")
        return SurrogateTerms(torch.where(selected, 0.0, loss), *clip_sides(log_ratio, inputs.advantage, *bounds))


@dataclass(frozen=True)
class KlCov(PolicyLoss):
    """``kl_cov_loss`` with the tokens that ``covariance.largest`` chooses.

    ``chosen: the max(1, floor(fraction N)) tokens with the largest cov``
    ``cov = (A - mean A)(logp - mean logp)``

    Args:
        fraction: of the trained tokens of the scope.
        coefficient: of the penalty on each chosen token's own log ratio.
        scope: as in ``ClipCov``.

    Raises:
        ConfigurationError: a fraction outside (0, 1].
    """

    fraction: float = 2e-4
    coefficient: float = 1.0
    scope: Scope = "block"
    name: Literal["kl_cov"] = field(default="kl_cov", kw_only=True)

    def __post_init__(self) -> None:
        check_knobs(self, "coefficient")
        check_fraction(self.fraction)

    @property
    def selects(self) -> Scope:
        return self.scope

    def select(self, inputs: SelectionInputs) -> Bool[Tensor, "N"]:
        """``largest`` of the trained tokens."""
        covariance = token_covariance(inputs.advantage, inputs.logp, inputs.trained, inputs.gather)
        number = num_chosen(self.fraction, inputs.gather(inputs.trained).sum())
        return largest(covariance, inputs.trained, number, inputs.gather)

    def __call__(self, inputs: SurrogateInputs) -> SurrogateTerms:
        loss = kl_cov_loss(
            required(inputs.log_ratio, "logp_old"),
            required(inputs.token_log_ratio, "logp_old"),
            inputs.advantage,
            required(inputs.selected, "selected"),
            coefficient=self.coefficient,
        )
        return SurrogateTerms(loss)

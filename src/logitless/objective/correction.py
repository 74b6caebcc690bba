"""Sampler correction: the importance weight of the trainer's old policy to the engine that sampled.

``c = exp(D)`` with D from ``logp_old - logp_sampler``. It multiplies the surrogate's loss, not the KL, and has no
gradient.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from logitless.errors import ConfigurationError, InputError
from logitless.objective.inputs import check_knobs, shaped
from logitless.objective.over_ranks import GatherOverRanks, one_rank
from logitless.objective.ranges import Ranges

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "mask"]


@shaped
def sampler_log_ratio(logp_old: Float[Tensor, "N"], logp_sampler: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """``D_t = logp_old_t - logp_sampler_t``; 0 where ``logp_sampler`` is NaN (the engine gave no value).

    Example:
        >>> sampler_log_ratio(torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, float("nan")]))
        tensor([0.5000, 0.0000])
    """
    return torch.where(logp_sampler.isnan(), 0.0, logp_old - logp_sampler).detach()


@shaped
def correction_log_weight(log_ratio: Float[Tensor, "N"], ranges: Ranges, level: Level) -> Float[Tensor, "N"]:
    """``log c``: D of the token, its sum over the sequence, or its mean over the sequence (geometric).

    Source: token level, https://fengyao.notion.site/off-policy-rl; sequence level, TRL's
        ``vllm_importance_sampling_mode="sequence_..."``; geometric level, verl's rollout correction.

    Example:
        >>> pair = Ranges(torch.tensor([0, 0]), 1, torch.tensor([True, True]))
        >>> correction_log_weight(torch.tensor([0.1, 0.3]), pair, "sequence")
        tensor([0.4000, 0.4000])
        >>> correction_log_weight(torch.tensor([0.1, 0.3]), pair, "geometric")
        tensor([0.2000, 0.2000])
    """
    if level == "token":
        return log_ratio
    return ranges.spread(ranges.sum(log_ratio) if level == "sequence" else ranges.mean(log_ratio))


@shaped
def bounded_weight(
    weight: Float[Tensor, "N"], mode: Mode, weight_min: float | None, weight_max: float | None
) -> Float[Tensor, "N"]:
    """``truncate``: clip to [min, max]; ``mask``: 0 outside of [min, max]. None: no bound.

    Source: truncation, Ionides 2008 and https://fengyao.notion.site/off-policy-rl; mask, Liu et al. 2025, When Speed
        Kills Stability.

    Example:
        >>> bounded_weight(torch.tensor([0.1, 1.0, 9.0]), "truncate", None, 3.0)
        tensor([0.1000, 1.0000, 3.0000])
        >>> bounded_weight(torch.tensor([0.1, 1.0, 9.0]), "mask", 0.5, 3.0)
        tensor([0., 1., 0.])
    """
    # a larger weight could overflow in a product, and 0 times infinity is NaN
    weight = weight.clamp(max=math.sqrt(torch.finfo(weight.dtype).max))
    bounded = weight if weight_min is None and weight_max is None else weight.clamp(weight_min, weight_max)
    return bounded if mode == "truncate" else torch.where(bounded == weight, weight, 0.0)


@dataclass(frozen=True)
class SamplerCorrection:
    """Multiply the surrogate's loss by ``c = exp(D)``, bounded.

    Args:
        level: ``token``; ``sequence``, the whole sequence's weight; ``geometric``, its geometric mean.
        mode: ``truncate`` clips c to [min, max]; ``mask`` drops what is outside.
        min, max: bounds of c.
        normalized: divide the bounded c by its mean over the block's tokens (above the token level: its completions).
        filtered_sampling: ``refuse`` or ``accept`` sampling with top-p, top-k, min-p or a penalty, under which
            ``logp_sampler`` and ``logp_old`` are of different distributions.

    Raises:
        ConfigurationError: ``truncate`` without a bound, or bounds out of order.

    Example:
        >>> one = Ranges(torch.tensor([0]), 1, torch.tensor([True]))
        >>> SamplerCorrection(max=2.0)(torch.tensor([3.0]), one)
        tensor([2.])
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}
    level: Level = "token"
    mode: Mode = "truncate"
    min: float | None = None
    max: float | None = None
    normalized: bool = False
    filtered_sampling: Literal["refuse", "accept"] = "refuse"
    name: Literal["sampler"] = field(default="sampler", kw_only=True)

    def __post_init__(self) -> None:
        check_knobs(self)
        if self.mode == "truncate" and self.min is None and self.max is None:
            raise ConfigurationError(
                needed="a bound to truncate at", given="min=None, max=None", remedy="Set max, to about 2.0."
            )
        low, high = (0.0 if self.min is None else self.min), (float("inf") if self.max is None else self.max)
        if not 0 <= low < high:
            raise ConfigurationError(
                needed="0 <= min < max",
                given=f"min={self.min}, max={self.max}",
                remedy="Bounds are of c itself, around 1.",
            )

    def __call__(
        self, log_ratio: Float[Tensor, "N"], sequences: Ranges, mean: Float[Tensor, ""] | None = None
    ) -> Float[Tensor, "N"]:
        """The bounded c of each token.

        Args:
            log_ratio: [N] ``sampler_log_ratio``.
            sequences: the sequences as ranges.
            mean: ``block_mean``, if normalized.

        Raises:
            InputError: the mean is missing.
        """
        weight = correction_log_weight(log_ratio, sequences, self.level).exp()
        bounded = bounded_weight(weight, self.mode, self.min, self.max)
        if not self.normalized:
            return bounded
        if mean is None:
            raise InputError(
                needed="the block's mean of the sampler correction",
                given="None",
                remedy="Pass block=objective.block_statistics(whole_block), or set normalized: false.",
            )
        return bounded / mean

    def block_mean(
        self, log_ratio: Float[Tensor, "N"], sequences: Ranges, gather: GatherOverRanks = one_rank
    ) -> Float[Tensor, ""]:
        """The mean of the bounded c over the counted tokens, or above the token level over the sequences with any; 1 if
        it is 0.

        Source: verl's ``rollout_is_batch_normalize``.

        Example:
            >>> two = Ranges(torch.tensor([0, 0, 1]), 2, torch.tensor([True, True, True]))
            >>> SamplerCorrection(max=4.0).block_mean(torch.tensor([4.0, 1.0, 1.0]).log(), two)
            tensor(2.)
            >>> SamplerCorrection(level="sequence", max=4.0).block_mean(torch.tensor([4.0, 1.0, 1.0]).log(), two)
            tensor(2.5000)
        """
        weight = bounded_weight(
            correction_log_weight(log_ratio, sequences, self.level).exp(), self.mode, self.min, self.max
        )
        share = sequences.counted.double()
        if self.level != "token":
            share = share / sequences.spread(sequences.counts.clamp(min=1.0))
        total, number = gather(share * weight.double()).sum(), gather(share).sum()
        mean = total / number.clamp(min=torch.finfo(torch.float64).tiny)
        return torch.where(mean > 0, mean, 1.0).to(log_ratio.dtype)

    def check_sampling(
        self,
        *,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        others: Sequence[str] = (),
    ) -> None:
        """Refuse a correction between two different distributions, unless ``filtered_sampling="accept"``.

        Args:
            top_p, top_k, min_p, repetition_penalty: the sampler's settings; the defaults are off.
            others: names of further settings that change the distribution.

        Raises:
            ConfigurationError: one of them is on.
        """
        used = {
            "top_p": top_p < 1,
            "top_k": top_k > 0,
            "min_p": min_p > 0,
            "repetition_penalty": repetition_penalty != 1,
        } | dict.fromkeys(others, True)
        names = ", ".join(name for name, is_used in used.items() if is_used)
        if names and self.filtered_sampling == "refuse":
            raise ConfigurationError(
                needed="sampling from the whole softmax under a sampler correction",
                given=names,
                remedy="Switch it off, or set filtered_sampling='accept' on the correction.",
            )

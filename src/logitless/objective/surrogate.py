"""The policy-gradient losses, one pure function per equation, and the configuration of each.

Every function takes vectors of length N and gives the loss per token, to be minimised: no mean is taken here (that is
``weighting``), no filter, no sampler correction and no KL (those are around it, in ``objective``). ``log_ratio`` is the
one of ``ratio``, and r its exponential. Bounds are absolute, not distances from 1. A loss has its own knobs only.
"""

import math
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from pydantic import ConfigDict, Field
from torch import Tensor

from logitless.errors import ConfigurationError
from logitless.objective.inputs import check_choices, required
from logitless.objective.ranges import Ranges

RatioLevel = Literal["any", "token", "none"]
"""What a surrogate reads: a ratio at any level, the log ratio of each token itself, or no ratio at all."""

VESPO_LOG_WEIGHT_MIN = math.log(1e-8)
VESPO_LOG_WEIGHT_MAX = 20.0
VESPO_LAMBDA_MIN = 1e-4


def clip_loss(
    log_ratio: Float[Tensor, "N"],
    advantage: Float[Tensor, "N"],
    *,
    ratio_min: float,
    ratio_max: float,
    ratio_cap: float | None = None,
    dual: float | None = None,
) -> Float[Tensor, "N"]:
    """``-min( min(r, ratio_cap) A, clip(r, ratio_min, ratio_max) A )``; with ``dual``, at most ``-dual A`` where A < 0.

    Gradient: ``-A r`` through ``log_ratio``; exactly 0 where A > 0 and r > ratio_max, where A < 0 and r < ratio_min,
    r > ratio_cap or r > dual, and where A = 0.

    Args:
        log_ratio: [N] nats.
        advantage: [N].
        ratio_min, ratio_max: bounds of the trust region, 0.8 and 1.2.
        ratio_cap: upper bound of r for negative advantages too (TRL's ``delta``), above ratio_max.
        dual: c > 1 of dual-clip.

    Source: PPO, arXiv:1707.06347, eq. 7; asymmetric bounds DAPO, arXiv:2503.14476; cap INTELLECT-2, arXiv:2505.07291;
        dual clip arXiv:1912.09729.

    Example:
        >>> up = torch.tensor([0.5, 0.5]).exp().log()
        >>> clip_loss(up, torch.tensor([1.0, -1.0]), ratio_min=0.8, ratio_max=1.2)
        tensor([-1.2000,  1.6487])
    """
    bounded_for_all = [bound for bound in (ratio_cap, dual) if bound is not None]
    constant_above = math.log1p(max([ratio_max, *bounded_for_all]))
    never_matters = torch.ones_like(advantage, dtype=torch.bool) if bounded_for_all else advantage >= 0
    # Above this the loss is constant: cutting there keeps exp finite, and 0 * inf out of its gradient.
    ratio = torch.where(never_matters, log_ratio.clamp(max=constant_above), log_ratio).exp()
    capped = ratio if ratio_cap is None else ratio.clamp(max=ratio_cap)
    loss = -torch.minimum(capped * advantage, ratio.clamp(ratio_min, ratio_max) * advantage)
    return loss if dual is None else torch.minimum(loss, dual * advantage.abs())  # the loss is not positive for A >= 0


def clip_sides(
    log_ratio: Float[Tensor, "N"],
    advantage: Float[Tensor, "N"],
    ratio_min: float,
    ratio_max: float,
    ceiling: float = math.inf,
) -> tuple[Bool[Tensor, "N"], Bool[Tensor, "N"]]:
    """Where ``clip_loss`` has no gradient: below ratio_min (A < 0); above ratio_max (A > 0) or the ceiling (A < 0).

    Args:
        log_ratio: [N] nats.
        advantage: [N].
        ratio_min, ratio_max: as in ``clip_loss``.
        ceiling: the smaller of its ``ratio_cap`` and ``dual``.

    Example:
        >>> clip_sides(torch.tensor([1.0, -1.0]), torch.tensor([1.0, -1.0]), 0.8, 1.2)
        (tensor([False,  True]), tensor([ True, False]))
    """
    ratio = log_ratio.exp()
    low = (advantage < 0) & (ratio < ratio_min)
    return low, ((advantage > 0) & (ratio > ratio_max)) | ((advantage < 0) & (ratio > ceiling))


def cispo_loss(
    logp: Float[Tensor, "N"],
    log_ratio: Float[Tensor, "N"],
    advantage: Float[Tensor, "N"],
    *,
    ratio_max: float,
    ratio_min: float | None = None,
) -> Float[Tensor, "N"]:
    """``-sg(clip(r, ratio_min, ratio_max)) A logp``.

    Gradient: ``-clip(r) A`` through ``logp``: bounded, and never cut off by the bounds.

    Source: MiniMax-M1, arXiv:2506.13585; ratio_max 5 from ScaleRL, arXiv:2510.13786.

    Example:
        >>> cispo_loss(torch.tensor([-2.0]), torch.tensor([9.0]), torch.tensor([1.0]), ratio_max=5.0)
        tensor([10.])
    """
    weight = log_ratio.detach().exp().clamp(min=ratio_min, max=ratio_max)
    return -weight * advantage * logp


def sapo_loss(
    log_ratio: Float[Tensor, "N"],
    advantage: Float[Tensor, "N"],
    *,
    temperature_positive: float,
    temperature_negative: float,
) -> Float[Tensor, "N"]:
    """``-(4 / tau) sigmoid(tau (r - 1)) A``, tau by A >= 0 or A < 0.

    Gradient: ``-4 p (1 - p) r A`` with p the sigmoid: exactly ``-A`` at r = 1, fading smoothly on both sides.

    Source: SAPO, arXiv:2511.20347.

    Example:
        >>> sapo_loss(torch.zeros(1), torch.ones(1), temperature_positive=1.0, temperature_negative=1.05)
        tensor([-2.])
    """
    tau = _by_sign(advantage, temperature_positive, temperature_negative)
    # There the sigmoid has long been 1: cutting keeps exp finite, and 0 * inf out of its gradient.
    ratio = log_ratio.clamp(max=-math.log(torch.finfo(log_ratio.dtype).tiny)).exp()
    return -4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)) * advantage


def vespo_weight(
    log_ratio: Float[Tensor, "N"],
    advantage: Float[Tensor, "N"],
    ranges: Ranges,
    *,
    k_positive: float,
    lambda_positive: float,
    k_negative: float,
    lambda_negative: float,
    correction: Float[Tensor, "N"] | None = None,
) -> Float[Tensor, "N"]:
    """``phi = exp(lambda + k log w - lambda w)``, w the sequence's whole importance weight; 1 at w = 1.

    ``log w = clamp( sum_S clamp(lr, -20, 20) + sum_S clamp(log c, log 1e-8, 20), log 1e-8, 20 )``; k and lambda by
    A >= 0 or A < 0, lambda at least 1e-4; a phi that is not finite is 0.

    Gradient: none.

    Args:
        log_ratio: [N] per token, nats.
        advantage: [N].
        ranges: the sequences.
        k_positive, lambda_positive, k_negative, lambda_negative: exponents and decays by the sign of the advantage.
        correction: [N] token-level sampler correction c after its truncation, or None.

    Source: VESPO, arXiv:2602.10693, in TRL's form.

    Example:
        >>> one = Ranges(torch.tensor([0]), 1, torch.tensor([True]))
        >>> knobs = dict(k_positive=2.0, lambda_positive=3.0, k_negative=3.0, lambda_negative=2.0)
        >>> vespo_weight(torch.zeros(1), torch.ones(1), one, **knobs)
        tensor([1.])
    """
    log_weight = ranges.sum(log_ratio.detach().clamp(-20.0, 20.0))
    if correction is not None:
        log_correction = correction.detach().log()
        log_weight = log_weight + ranges.sum(log_correction.clamp(VESPO_LOG_WEIGHT_MIN, VESPO_LOG_WEIGHT_MAX))
    log_weight = ranges.spread(log_weight.clamp(VESPO_LOG_WEIGHT_MIN, VESPO_LOG_WEIGHT_MAX))
    k = _by_sign(advantage, k_positive, k_negative)
    decay = _by_sign(advantage, lambda_positive, lambda_negative).clamp(min=VESPO_LAMBDA_MIN)
    phi = (decay + k * log_weight - decay * log_weight.exp()).exp()
    return torch.where(phi.isfinite(), phi, 0.0)


def gmpo_loss(
    log_ratio: Float[Tensor, "N"],
    advantage: Float[Tensor, "N"],
    ranges: Ranges,
    *,
    log_ratio_min: float,
    log_ratio_max: float,
) -> Float[Tensor, "N"]:
    """``-A exp( mean_S sgn(A) min(sgn(A) lr, sgn(A) clip(lr)) )``, the same for every token of a sequence.

    Weighted by ``sequence_mean`` this is counted once a sequence.

    Gradient: through every token of the sequence that is not clipped on the side its advantage pushes.

    Source: GMPO, arXiv:2507.20673.

    Example:
        >>> pair = Ranges(torch.tensor([0, 0]), 1, torch.tensor([True, True]))
        >>> gmpo_loss(torch.tensor([0.0, 2.0]), torch.ones(2), pair, log_ratio_min=-0.4, log_ratio_max=0.4)
        tensor([-1.2214, -1.2214])
    """
    clipped = log_ratio.clamp(log_ratio_min, log_ratio_max)
    sign = advantage.sign()
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * clipped)
    return -advantage * ranges.spread(ranges.mean(pessimistic)).exp()


def bernoulli_kl(logp_old: Float[Tensor, "N"], logp: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """``KL(Bernoulli(p_old) || Bernoulli(p)) = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))``.

    Source: DPPO, arXiv:2602.04879 (binary KL).

    Example:
        >>> bernoulli_kl(torch.tensor([0.5]).log(), torch.tensor([0.25]).log())
        tensor([0.1438])
    """
    rest_old, rest = -torch.expm1(logp_old.clamp(max=0.0)), -torch.expm1(logp.clamp(max=0.0))
    return logp_old.exp() * (logp_old - logp) + torch.xlogy(rest_old, rest_old) - torch.xlogy(rest_old, rest)


def dppo_mask(
    logp: Float[Tensor, "N"],
    logp_old: Float[Tensor, "N"],
    advantage: Float[Tensor, "N"],
    *,
    divergence: Literal["tv", "kl"],
    max_low: float,
    max_high: float,
) -> Bool[Tensor, "N"]:
    """True where the token is inside the trust region: the probability has not moved too far the way A pushes it.

    ``tv``: outside where A > 0 and ``p - p_old > max_high``, or A <= 0 and ``p - p_old < -max_low``. ``kl``: outside
    where the binary KL(old || new) is above the same bounds and p has moved that way.

    Source: DPPO, arXiv:2602.04879 (binary TV and KL).

    Example:
        >>> moved, old = torch.tensor([0.7, 0.7]).log(), torch.tensor([0.5, 0.5]).log()
        >>> dppo_mask(moved, old, torch.tensor([1.0, -1.0]), divergence="tv", max_low=0.15, max_high=0.15)
        tensor([False,  True])
    """
    change = logp.exp() - logp_old.exp()
    distance = change if divergence == "tv" else change.sign() * bernoulli_kl(logp_old, logp)
    outside = torch.where(advantage > 0, distance > max_high, -distance > max_low)
    return ~outside


def dppo_loss(
    logp: Float[Tensor, "N"],
    logp_old: Float[Tensor, "N"],
    advantage: Float[Tensor, "N"],
    inside: Bool[Tensor, "N"],
    *,
    ratio_cap: float,
) -> Float[Tensor, "N"]:
    """``-A sg(min(r, ratio_cap)) logp m``, m the trust region of ``dppo_mask``.

    Gradient: ``-A min(r, ratio_cap)`` through ``logp`` inside, 0 outside.

    Source: DPPO, arXiv:2602.04879.

    Example:
        >>> one = torch.tensor([-1.0])
        >>> dppo_loss(one, one, torch.tensor([2.0]), torch.tensor([True]), ratio_cap=20.0)
        tensor([2.])
    """
    weight = (logp - logp_old).detach().exp().clamp(max=ratio_cap)
    return torch.where(inside, -advantage * weight * logp, 0.0)


def dro_loss(
    logp: Float[Tensor, "N"], log_ratio: Float[Tensor, "N"], advantage: Float[Tensor, "N"], *, beta: float
) -> Float[Tensor, "N"]:
    """``-(A logp - beta/2 lr^2)``, lr per token.

    Gradient: ``-(A - beta lr)`` through ``logp``.

    Source: DRO, arXiv:2405.19107, as verl's ``dro`` writes it.

    Example:
        >>> dro_loss(torch.tensor([-1.0]), torch.tensor([2.0]), torch.tensor([3.0]), beta=0.5)
        tensor([4.])
    """
    return -(advantage * logp - 0.5 * beta * log_ratio.square())


def reinforce_loss(logp: Float[Tensor, "N"], advantage: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """``-A logp``.

    Gradient: ``-A`` through ``logp``; without a ratio, it is meant for one step on each batch.

    Source: Williams 1992; RLOO, arXiv:2402.14740.

    Example:
        >>> reinforce_loss(torch.tensor([-2.0]), torch.tensor([0.5]))
        tensor([1.])
    """
    return -advantage * logp


def importance_loss(log_ratio: Float[Tensor, "N"], advantage: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """``-A r``, unclipped.

    Gradient: ``-A r`` through ``log_ratio``, unbounded.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 6.

    Example:
        >>> importance_loss(torch.zeros(1), torch.tensor([0.5]))
        tensor([-0.5000])
    """
    return -advantage * log_ratio.exp()


def nll_loss(logp: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """``-logp``.

    Gradient: -1 through ``logp``; the advantage plays no part.

    Source: supervised warm start; VAPO's term on positive examples, arXiv:2504.05118, which is a second objective with
        its own ``token_weight``, added to the policy loss.

    Example:
        >>> nll_loss(torch.tensor([-2.0]))
        tensor([2.])
    """
    return -logp


def kl_cov_loss(
    log_ratio: Float[Tensor, "N"],
    token_log_ratio: Float[Tensor, "N"],
    advantage: Float[Tensor, "N"],
    selected: Bool[Tensor, "N"],
    *,
    coefficient: float,
) -> Float[Tensor, "N"]:
    """``-A r``, unclipped, plus ``coefficient |lr|`` on the selected tokens, lr per token.

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
class SurrogateInputs:
    """What a surrogate may read; rows of weight 0 hold 0 everywhere.

    Args:
        logp, advantage: [N].
        sequences: the sequences as ranges.
        logp_old, token_log_ratio, log_ratio: [N], None where the batch has no ``logp_old``; ``log_ratio`` is the one of
            the configured level.
        correction: [N] sampler correction, or None.
        selected: [N] tokens chosen by their covariance, or None.
    """

    logp: Float[Tensor, "N"]
    advantage: Float[Tensor, "N"]
    sequences: Ranges
    logp_old: Float[Tensor, "N"] | None = None
    token_log_ratio: Float[Tensor, "N"] | None = None
    log_ratio: Float[Tensor, "N"] | None = None
    correction: Float[Tensor, "N"] | None = None
    selected: Bool[Tensor, "N"] | None = None


@dataclass(frozen=True)
class SurrogateTerms:
    """A surrogate's loss per token, and where its bounds cut.

    Args:
        loss: [N], differentiable.
        clipped_low, clipped_high: [N] tokens whose gradient the lower or upper bound of the ratio removes or caps; None
            for a surrogate without bounds.
    """

    loss: Float[Tensor, "N"]
    clipped_low: Bool[Tensor, "N"] | None = None
    clipped_high: Bool[Tensor, "N"] | None = None


@dataclass(frozen=True)
class Clip:
    """``clip_loss`` (PPO, GRPO, DAPO, GSPO).

    Args:
        ratio_min, ratio_max: absolute bounds, 0 <= ratio_min < ratio_max.
        ratio_cap: bound of the ratio for negative advantages, at least ratio_max.
        dual: c > 1 of dual-clip.

    Raises:
        ConfigurationError: bounds out of order, a cap below ratio_max, or ``dual`` not above 1.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    reads: ClassVar[RatioLevel] = "any"
    ratio_min: float = 0.8
    ratio_max: float = 1.2
    ratio_cap: float | None = None
    dual: float | None = None
    name: Literal["clip"] = field(default="clip", kw_only=True)

    def __post_init__(self) -> None:
        _check_bounds(self.ratio_min, self.ratio_max)
        if self.ratio_cap is not None and self.ratio_cap < self.ratio_max:
            raise ConfigurationError(
                needed=f"ratio_cap of at least ratio_max ({self.ratio_max})",
                given=str(self.ratio_cap),
                remedy="Raise ratio_cap above the clip range, or leave it out.",
            )
        if self.dual is not None and self.dual <= 1:
            raise ConfigurationError(
                needed="dual above 1", given=str(self.dual), remedy="Use about 3, or leave it out."
            )

    def __call__(self, inputs: SurrogateInputs) -> SurrogateTerms:
        log_ratio = required(inputs.log_ratio, "logp_old")
        loss = clip_loss(
            log_ratio,
            inputs.advantage,
            ratio_min=self.ratio_min,
            ratio_max=self.ratio_max,
            ratio_cap=self.ratio_cap,
            dual=self.dual,
        )
        ceiling = min(bound for bound in (self.ratio_cap, self.dual, math.inf) if bound is not None)
        return SurrogateTerms(loss, *clip_sides(log_ratio, inputs.advantage, self.ratio_min, self.ratio_max, ceiling))


@dataclass(frozen=True)
class Cispo:
    """``cispo_loss`` (MiniMax-M1).

    Args:
        ratio_max, ratio_min: absolute bounds of the detached weight; no lower bound by default.
        ceiling_below_one: what to do with a ratio_max below 1, which scales every gradient down: ``refuse`` or
            ``accept``.

    Raises:
        ConfigurationError: bounds out of order, or a ratio_max below 1 that is not accepted.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    reads: ClassVar[RatioLevel] = "any"
    ratio_max: float = 5.0
    ratio_min: float | None = None
    ceiling_below_one: Literal["refuse", "accept"] = "refuse"
    name: Literal["cispo"] = field(default="cispo", kw_only=True)

    def __post_init__(self) -> None:
        check_choices(self)
        _check_bounds(0.0 if self.ratio_min is None else self.ratio_min, self.ratio_max)
        if self.ratio_max < 1 and self.ceiling_below_one == "refuse":
            raise ConfigurationError(
                needed="ratio_max of at least 1",
                given=f"{self.ratio_max}, a ceiling that scales every gradient down",
                remedy="Bounds are absolute: use ratio_max=5.0.",
            )

    def __call__(self, inputs: SurrogateInputs) -> SurrogateTerms:
        log_ratio = required(inputs.log_ratio, "logp_old")
        loss = cispo_loss(inputs.logp, log_ratio, inputs.advantage, ratio_max=self.ratio_max, ratio_min=self.ratio_min)
        ratio = log_ratio.exp()
        low = torch.zeros_like(inputs.sequences.counted) if self.ratio_min is None else ratio < self.ratio_min
        return SurrogateTerms(loss, low, ratio > self.ratio_max)


@dataclass(frozen=True)
class Sapo:
    """``sapo_loss``.

    Args:
        temperature_positive, temperature_negative: tau where A >= 0 and where A < 0.

    Raises:
        ConfigurationError: a temperature that is not positive.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    reads: ClassVar[RatioLevel] = "any"
    temperature_positive: float = 1.0
    temperature_negative: float = 1.05
    name: Literal["sapo"] = field(default="sapo", kw_only=True)

    def __post_init__(self) -> None:
        _check_positive(temperature_positive=self.temperature_positive, temperature_negative=self.temperature_negative)

    def __call__(self, inputs: SurrogateInputs) -> SurrogateTerms:
        return SurrogateTerms(
            sapo_loss(
                required(inputs.log_ratio, "logp_old"),
                inputs.advantage,
                temperature_positive=self.temperature_positive,
                temperature_negative=self.temperature_negative,
            )
        )


@dataclass(frozen=True)
class Vespo:
    """``-phi A logp`` with ``vespo_weight``; takes a token-level sampler correction into phi instead of beside it.

    Args:
        k_positive, lambda_positive, k_negative, lambda_negative: exponents and decays by the sign of the advantage.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    reads: ClassVar[RatioLevel] = "token"
    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0
    name: Literal["vespo"] = field(default="vespo", kw_only=True)

    def __call__(self, inputs: SurrogateInputs) -> SurrogateTerms:
        weight = vespo_weight(
            required(inputs.token_log_ratio, "logp_old"),
            inputs.advantage,
            inputs.sequences,
            k_positive=self.k_positive,
            lambda_positive=self.lambda_positive,
            k_negative=self.k_negative,
            lambda_negative=self.lambda_negative,
            correction=inputs.correction,
        )
        return SurrogateTerms(weight * reinforce_loss(inputs.logp, inputs.advantage))


@dataclass(frozen=True)
class Gmpo:
    """``gmpo_loss``; its geometric mean is over sequences, so one advantage a sequence.

    Args:
        log_ratio_min, log_ratio_max: bounds of each token's log ratio, in nats.

    Raises:
        ConfigurationError: bounds that do not enclose 0.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    reads: ClassVar[RatioLevel] = "token"
    log_ratio_min: float = -0.4
    log_ratio_max: float = 0.4
    name: Literal["gmpo"] = field(default="gmpo", kw_only=True)

    def __post_init__(self) -> None:
        if not self.log_ratio_min <= 0 <= self.log_ratio_max:
            raise ConfigurationError(
                needed="log_ratio_min <= 0 <= log_ratio_max",
                given=f"{self.log_ratio_min} and {self.log_ratio_max}",
                remedy="Bounds are of the log ratio, in nats: use -0.4 and 0.4.",
            )

    def __call__(self, inputs: SurrogateInputs) -> SurrogateTerms:
        log_ratio = required(inputs.token_log_ratio, "logp_old")
        loss = gmpo_loss(
            log_ratio,
            inputs.advantage,
            inputs.sequences,
            log_ratio_min=self.log_ratio_min,
            log_ratio_max=self.log_ratio_max,
        )
        low = (inputs.advantage < 0) & (log_ratio < self.log_ratio_min)
        high = (inputs.advantage > 0) & (log_ratio > self.log_ratio_max)
        return SurrogateTerms(loss, low, high)


@dataclass(frozen=True)
class Dppo:
    """``dppo_loss`` with ``dppo_mask``.

    Args:
        divergence: ``tv`` or ``kl``, of the sampled token against all others.
        max_low, max_high: thresholds for A <= 0 and A > 0; None is 0.15 for ``tv`` and 0.05 for ``kl``.
        ratio_cap: ceiling of the detached weight.

    Raises:
        ConfigurationError: a threshold or cap that is not positive.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    reads: ClassVar[RatioLevel] = "token"
    divergence: Literal["tv", "kl"] = "tv"
    max_low: float | None = None
    max_high: float | None = None
    ratio_cap: float = 20.0
    name: Literal["dppo"] = field(default="dppo", kw_only=True)

    def __post_init__(self) -> None:
        check_choices(self)
        for bound in ("max_low", "max_high"):
            if getattr(self, bound) is None:
                object.__setattr__(self, bound, 0.15 if self.divergence == "tv" else 0.05)
        _check_positive(max_low=self.max_low, max_high=self.max_high, ratio_cap=self.ratio_cap)

    def __call__(self, inputs: SurrogateInputs) -> SurrogateTerms:
        logp_old = required(inputs.logp_old, "logp_old")
        assert self.max_low is not None
        assert self.max_high is not None
        inside = dppo_mask(
            inputs.logp,
            logp_old,
            inputs.advantage,
            divergence=self.divergence,
            max_low=self.max_low,
            max_high=self.max_high,
        )
        loss = dppo_loss(inputs.logp, logp_old, inputs.advantage, inside, ratio_cap=self.ratio_cap)
        return SurrogateTerms(loss, ~inside & (inputs.advantage <= 0), ~inside & (inputs.advantage > 0))


@dataclass(frozen=True)
class ClipCov:
    """``clip_loss`` without the tokens that ``covariance.random_in_band`` chooses: their loss is 0.

    Args:
        fraction: of the trained tokens of the scope.
        low, high: band of the covariance with the advantage from which tokens are drawn.
        ratio_min, ratio_max: bounds of the clip.
        scope: where N, the means and the choice come from: ``block``, once, from the scoring pass; ``micro_batch``,
            from current values, so that the result depends on how the step is cut.

    Raises:
        ConfigurationError: bounds out of order, or a fraction outside (0, 1].

    Source: Clip-Cov, arXiv:2505.22617.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    reads: ClassVar[RatioLevel] = "any"
    fraction: float = 2e-4
    low: float = 1.0
    high: float = 5.0
    ratio_min: float = 0.8
    ratio_max: float = 1.2
    scope: Literal["block", "micro_batch"] = "block"
    name: Literal["clip_cov"] = field(default="clip_cov", kw_only=True)

    def __post_init__(self) -> None:
        check_choices(self)
        _check_bounds(self.ratio_min, self.ratio_max)
        _check_fraction(self.fraction)
        if self.low >= self.high:
            raise ConfigurationError(
                needed="low < high", given=f"{self.low} and {self.high}", remedy="Use 1.0 and 5.0."
            )

    def __call__(self, inputs: SurrogateInputs) -> SurrogateTerms:
        terms = Clip(self.ratio_min, self.ratio_max)(inputs)
        selected = required(inputs.selected, "selected")
        return SurrogateTerms(torch.where(selected, 0.0, terms.loss), terms.clipped_low, terms.clipped_high)


@dataclass(frozen=True)
class KlCov:
    """``kl_cov_loss`` with the tokens that ``covariance.largest`` chooses.

    Args:
        fraction: of the trained tokens of the scope.
        coefficient: of the penalty on each chosen token's own log ratio.
        scope: as in ``ClipCov``.

    Raises:
        ConfigurationError: a fraction outside (0, 1].
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    reads: ClassVar[RatioLevel] = "any"
    fraction: float = 2e-4
    coefficient: float = 1.0
    scope: Literal["block", "micro_batch"] = "block"
    name: Literal["kl_cov"] = field(default="kl_cov", kw_only=True)

    def __post_init__(self) -> None:
        check_choices(self)
        _check_fraction(self.fraction)

    def __call__(self, inputs: SurrogateInputs) -> SurrogateTerms:
        loss = kl_cov_loss(
            required(inputs.log_ratio, "logp_old"),
            required(inputs.token_log_ratio, "logp_old"),
            inputs.advantage,
            required(inputs.selected, "selected"),
            coefficient=self.coefficient,
        )
        return SurrogateTerms(loss)


@dataclass(frozen=True)
class Dro:
    """``dro_loss``.

    Args:
        beta: weight of the squared log ratio.

    Raises:
        ConfigurationError: a weight that is not positive.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    reads: ClassVar[RatioLevel] = "token"
    beta: float
    name: Literal["dro"] = field(default="dro", kw_only=True)

    def __post_init__(self) -> None:
        _check_positive(beta=self.beta)

    def __call__(self, inputs: SurrogateInputs) -> SurrogateTerms:
        log_ratio = required(inputs.token_log_ratio, "logp_old")
        return SurrogateTerms(dro_loss(inputs.logp, log_ratio, inputs.advantage, beta=self.beta))


@dataclass(frozen=True)
class Reinforce:
    """``reinforce_loss``; needs no ``logp_old``."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    reads: ClassVar[RatioLevel] = "none"
    name: Literal["reinforce"] = field(default="reinforce", kw_only=True)

    def __call__(self, inputs: SurrogateInputs) -> SurrogateTerms:
        return SurrogateTerms(reinforce_loss(inputs.logp, inputs.advantage))


@dataclass(frozen=True)
class Importance:
    """``importance_loss``."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    reads: ClassVar[RatioLevel] = "any"
    name: Literal["importance"] = field(default="importance", kw_only=True)

    def __call__(self, inputs: SurrogateInputs) -> SurrogateTerms:
        return SurrogateTerms(importance_loss(required(inputs.log_ratio, "logp_old"), inputs.advantage))


@dataclass(frozen=True)
class Nll:
    """``nll_loss``; needs neither ``logp_old`` nor an advantage."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    reads: ClassVar[RatioLevel] = "none"
    name: Literal["nll"] = field(default="nll", kw_only=True)

    def __call__(self, inputs: SurrogateInputs) -> SurrogateTerms:
        return SurrogateTerms(nll_loss(inputs.logp))


Surrogate = Annotated[
    Clip | Cispo | Sapo | Vespo | Gmpo | Dppo | ClipCov | KlCov | Dro | Reinforce | Importance | Nll,
    Field(discriminator="name"),
]


def _by_sign(advantage: Tensor, positive: float, negative: float) -> Tensor:
    """One number where A >= 0, another where A < 0; ``torch.where`` of Python numbers would round them to float32."""
    return torch.where(advantage >= 0, advantage.new_full((), positive), advantage.new_full((), negative))


def _check_bounds(ratio_min: float, ratio_max: float) -> None:
    if not 0 <= ratio_min < ratio_max:
        raise ConfigurationError(
            needed="0 <= ratio_min < ratio_max",
            given=f"ratio_min={ratio_min}, ratio_max={ratio_max}",
            remedy="Bounds are absolute: an epsilon of 0.2 is ratio_min=0.8, ratio_max=1.2.",
        )


def _check_fraction(fraction: float) -> None:
    if not 0 < fraction <= 1:
        raise ConfigurationError(
            needed="a fraction above 0 and at most 1", given=str(fraction), remedy="Use about 2e-4."
        )


def _check_positive(**values: float | None) -> None:
    wrong = {name: value for name, value in values.items() if value is not None and not value > 0}
    if wrong:
        raise ConfigurationError(
            needed=f"positive {', '.join(wrong)}",
            given=", ".join(str(value) for value in wrong.values()),
            remedy="Use the default, or any number above 0.",
        )

"""The composition of ratio, surrogate, filters, sampler correction, KL and entropy bonus into one loss of vectors [N].

    loss = sum_t w_t (c_t kept_t l_t + beta kl_t)  -  coefficient * sum_t v_t kept_t H_t

With score centering, ``l_t`` is ``-A log p(y) + A sum_v sg(q_v - p_v) log p_v``, q being the sampler's distribution.

Normalization is in the weights, so that the sum over any partition of a step (micro-batches, ranks) is the same. Second
derivatives are not supported.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from logitless.errors import ConfigurationError, InputError
from logitless.objective.correction import SamplerCorrection, sampler_log_ratio
from logitless.objective.divergence import KLPenalty
from logitless.objective.entropy import EntropyBonus, entropy_mean
from logitless.objective.filters import Filter, FilterInputs, WholeBlock, above_threshold
from logitless.objective.inputs import required
from logitless.objective.over_ranks import GatherOverRanks, SumOverRanks, one_rank
from logitless.objective.ranges import Level, Ranges
from logitless.objective.ratio import Ratio, TokenRatio, TurnRatio, token_log_ratio
from logitless.objective.surrogate import (
    Clip,
    PolicyLoss,
    SelectionInputs,
    Surrogate,
    SurrogateInputs,
    SurrogateTerms,
)
from logitless.second_derivative import refuse_second_derivative
from logitless.types import TokenBatch


@dataclass(frozen=True)
class BlockStatistics:
    """Statistics of a whole block, from the scoring pass.

    Args:
        thresholds: of filters, by their name.
        selected: [N] tokens that a covariance loss selected, or None.
        correction_mean: mean of the sampler correction, if it is normalized.
    """

    thresholds: Mapping[str, Float[Tensor, ""]] = field(default_factory=dict)
    selected: Bool[Tensor, "N"] | None = None
    correction_mean: Float[Tensor, ""] | None = None

    def attach(self, block: TokenBatch) -> TokenBatch:
        """The block with ``selected``, which ``TokenBatch.take`` carries into micro-batches."""
        return block if self.selected is None else replace(block, selected=self.selected)


@dataclass(frozen=True)
class ObjectiveOutput:
    """A loss, and vectors for diagnostics, which are detached. Tokens of weight 0 hold 0 or False.

    Args:
        loss: this micro-batch's part, to be summed over micro-batches and ranks, never averaged.
        token_loss: [N] ``c_t kept_t l_t + beta kl_t``, without the weight.
        grad_logp: [N] ``d loss / d logp`` with weights; None if none was needed.
        trained: [N] tokens with a weight.
        advantage: [N].
        entropy: [N] or None.
        entropy_bonus: this micro-batch's part of the bonus's mean entropy; None without a bonus.
        token_log_ratio, log_ratio: [N] per token and at the configured level; None without ``logp_old``.
        clipped_low, clipped_high: [N] see ``SurrogateTerms``; None for a surrogate without bounds.
        dropped: filter label -> [N] tokens that it dropped.
        correction: [N] sampler correction, or None.
        sampler_log_ratio, missing_sampler: [N] ``logp_old - logp_sampler`` (0 where the sampler gave none), and those
            tokens; or None.
        kl, log_ratio_ref, kl_clamped: [N] the KL term before beta, ``logp - logp_ref``, and clamped tokens; None
            without a KL.
    """

    loss: Float[Tensor, ""]
    token_loss: Float[Tensor, "N"]
    trained: Bool[Tensor, "N"]
    advantage: Float[Tensor, "N"]
    grad_logp: Float[Tensor, "N"] | None = None
    entropy: Float[Tensor, "N"] | None = None
    entropy_bonus: Float[Tensor, ""] | None = None
    token_log_ratio: Float[Tensor, "N"] | None = None
    log_ratio: Float[Tensor, "N"] | None = None
    clipped_low: Bool[Tensor, "N"] | None = None
    clipped_high: Bool[Tensor, "N"] | None = None
    dropped: Mapping[str, Bool[Tensor, "N"]] = field(default_factory=dict)
    correction: Float[Tensor, "N"] | None = None
    sampler_log_ratio: Float[Tensor, "N"] | None = None
    missing_sampler: Bool[Tensor, "N"] | None = None
    kl: Float[Tensor, "N"] | None = None
    log_ratio_ref: Float[Tensor, "N"] | None = None
    kl_clamped: Bool[Tensor, "N"] | None = None


@dataclass(frozen=True)
class Objective:
    """A policy loss, composed of parts.

    Args:
        ratio: level of the importance ratio.
        surrogate: the policy loss.
        filters: a token must pass all; each at most once, rejections once a measure and level.
        correction: of the sampler's distribution, or None.
        kl: KL to the reference in the loss, or None.
        entropy_bonus: or None.
        score_centering: whether ``advantage * centering`` is added to each token's loss (``head.score_centering``).

    Raises:
        ConfigurationError: parts that exclude each other: a ratio level that nothing reads, a correction that is not
            per token under VESPO, a filter given twice, centering of another loss than REINFORCE's or beside a
            correction.

    Example:
        >>> batch = TokenBatch(
        ...     sequence=torch.tensor([0, 0]), num_sequences=1, advantage=torch.tensor([2.0, 2.0]),
        ...     token_weight=torch.tensor([0.5, 0.5]), logp_old=torch.tensor([-1.0, -1.0]))
        >>> logp = torch.tensor([-1.0, -1.0], requires_grad=True)
        >>> output = Objective(surrogate=Clip(0.8, 1.28))(logp, None, batch)
        >>> output.loss.backward()
        >>> output.loss.item(), logp.grad
        (-2.0, tensor([-1., -1.]))
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "arbitrary_types_allowed": True}
    ratio: Ratio = field(default_factory=TokenRatio)
    surrogate: Surrogate | PolicyLoss = field(default_factory=Clip)
    filters: tuple[Filter, ...] = ()
    correction: SamplerCorrection | None = None
    kl: KLPenalty | None = None
    entropy_bonus: EntropyBonus | None = None
    score_centering: bool = False

    def __post_init__(self) -> None:
        if self.score_centering and (self.surrogate.name != "reinforce" or self.correction is not None):
            # A ratio would multiply each token's score, and their mean under the sampler be another sum.
            raise ConfigurationError(
                needed="the surrogate 'reinforce' without a correction for score centering, which is exact for "
                "-A log p alone",
                given=repr(self.surrogate.name) + ("" if self.correction is None else " with a sampler correction"),
                remedy="Set algorithm.surrogate: {name: reinforce}, and leave algorithm.correction out.",
            )
        corrects_kl = self.kl is not None and self.kl.ratio_corrected == "surrogate"
        if self.ratio.averages != "token" and self.surrogate.reads != "any" and not corrects_kl:
            raise ConfigurationError(
                needed=f"the token ratio under {self.surrogate.name!r}, which reads no other",
                given=f"ratio={self.ratio.name!r}",
                remedy="Leave the ratio out, or choose a surrogate of the ratio such as 'clip'.",
            )
        if self.ratio.advantages is not None and self.surrogate.reads != "any":
            raise ConfigurationError(
                needed=f"no advantage_within_sequence under {self.surrogate.name!r}, whose ratio is for the KL alone",
                given=repr(self.ratio.advantages),
                remedy="Leave it out.",
            )
        if self.surrogate.uses_correction and self.correction is not None and self.correction.level != "token":
            raise ConfigurationError(
                needed=f"a token-level sampler correction under {self.surrogate.name!r}, which makes a weight of it",
                given=f"level={self.correction.level!r}",
                remedy="Set correction.level='token'.",
            )
        labels = [each.label for each in self.filters]
        if len(set(labels)) < len(labels):
            raise ConfigurationError(
                needed="each filter at most once", given=", ".join(labels), remedy="Keep the stricter one."
            )

    @property
    def needs(self) -> frozenset[str]:
        """Optional fields of ``TokenBatch`` that it needs.

        Example:
            >>> sorted(Objective(kl=KLPenalty("k3")).needs)
            ['logp_old', 'logp_ref']
        """
        of_filters = frozenset[str]().union(*(each.needs for each in self.filters))
        corrects_kl = self.kl is not None and self.kl.ratio_corrected is not None
        conditions = {
            "logp_old": self.surrogate.reads != "none" or self.correction is not None or corrects_kl,
            "logp_ref": self.kl is not None or self.surrogate.reads_reference,
            "logp_sampler": self.correction is not None,
            "turn": self.ratio.averages == "turn",
            "entropy_weight": self.entropy_bonus is not None,
            "selected": self.surrogate.selects == "block",
        }
        return of_filters | {name for name, is_needed in conditions.items() if is_needed}

    @property
    def reads_scoring_pass(self) -> bool:
        """Whether a part needs ``block_statistics`` of the scoring pass.

        Example:
            >>> Objective().reads_scoring_pass
            False
        """
        return self.surrogate.selects == "block" or any(each.settles_once_a_block for each in self.filters)

    def __call__(
        self,
        logp: Float[Tensor, "N"],
        entropy: Float[Tensor, "N"] | None,
        batch: TokenBatch,
        *,
        centering: Float[Tensor, "N"] | None = None,
        beta: float | Float[Tensor, ""] = 0.0,
        entropy_coefficient: float | None = None,
        sum_over_ranks: SumOverRanks | None = None,
        block: BlockStatistics | None = None,
        gather: GatherOverRanks = one_rank,
        generator: torch.Generator | None = None,
    ) -> ObjectiveOutput:
        """The loss of a micro-batch.

        Gradient: through ``logp``, with an entropy bonus ``entropy``, and ``centering``; exactly 0 in tokens of
            weight 0. It is computed during this call (``grad_logp``), collectives included; ``loss.backward()`` only
            passes it on.

        Args:
            logp: [N] nats of the policy being trained.
            entropy: [N] nats, or None if nothing reads it.
            batch: everything else, on the same device.
            centering: [N] ``CenteredScores.centering``, with ``score_centering`` only; 0 where the sampler had the
                policy's weights.
            beta: coefficient of the KL term.
            entropy_coefficient: ``EntropyController.applied``, with an adaptive bonus only.
            sum_over_ranks: where sequences are split over ranks, the differentiable sum over those ranks.
            block: of ``block_statistics``, for parts with ``scope="block"``.
            gather: over all ranks, for parts with ``scope="micro_batch"``.
            generator: for ``clip_cov`` with ``scope="micro_batch"``, seeded differently on every rank.

        Raises:
            InputError: a vector of another length; a missing tensor; a coefficient without its part; advantages that
                differ inside a shared ratio (checked on the CPU only).
        """
        sources = {"logp": logp, "entropy": entropy, "centering": centering}
        given = {name: each for name, each in sources.items() if each is not None}
        self._check_call(given, batch, beta, entropy_coefficient)

        def evaluate(given: dict[str, Tensor]) -> ObjectiveOutput:
            step = _Step(self, given, batch, sum_over_ranks, block, gather, generator)
            return step.output(beta, entropy_coefficient)

        if not torch.is_grad_enabled() or not any(each.requires_grad for each in given.values()):
            return evaluate(given)
        leaves = {name: each.detach().requires_grad_() for name, each in given.items()}
        output = evaluate(leaves)
        gradients = torch.autograd.grad(output.loss, tuple(leaves.values()), allow_unused=True, materialize_grads=True)
        loss = _KnownGradient.apply(  # type: ignore[no-untyped-call]
            output.loss.detach(), gradients, *given.values()
        )
        return replace(output, loss=loss, grad_logp=gradients[0])

    def block_statistics(
        self,
        block: TokenBatch,
        *,
        gather: GatherOverRanks = one_rank,
        sum_over_ranks: Callable[[Tensor], Tensor] = one_rank,
        generator: torch.Generator | None = None,
    ) -> BlockStatistics | None:
        """Statistics of the scoring pass for parts with ``scope="block"``; None if no part needs any.

        Args:
            block: all sequences of the block on this rank, with weights.
            gather: over all ranks.
            sum_over_ranks: where sequences are split over ranks, sums over those that share one.
            generator: for ``clip_cov``, seeded differently on every rank.

        Returns:
            Statistics to pass to every call as ``block``; a covariance loss needs ``attach`` before the block is split.

        Raises:
            InputError: ``entropy_old``, ``logp_old`` or the generator is missing.

        Example:
            >>> from logitless.objective.filters import TopEntropy
            >>> objective = Objective(filters=(TopEntropy(0.5),))
            >>> block = TokenBatch(
            ...     sequence=torch.tensor([0, 0, 0]), num_sequences=1, advantage=torch.zeros(3),
            ...     token_weight=torch.ones(3), entropy_old=torch.tensor([0.1, 0.2, 0.9]))
            >>> objective.block_statistics(block).thresholds
            {'top_entropy': tensor(0.2000)}
        """
        trained = block.token_weight != 0
        selected = correction_mean = log_ratio = None
        if block.logp_old is not None and block.logp_sampler is not None:
            log_ratio = torch.where(trained, sampler_log_ratio(block.logp_old, block.logp_sampler), 0.0)
        settled = [each for each in self.filters if each.settles_once_a_block]
        thresholds: dict[str, Tensor] = {}
        if settled:
            entropy = block.entropy_old
            whole = WholeBlock(
                gather(trained),
                None if entropy is None else gather(entropy),
                None if log_ratio is None else gather(log_ratio),
            )
            thresholds = {each.name: each.block_threshold(whole) for each in settled}
        if self.correction is not None and self.correction.normalized:
            sequences = Ranges(block.sequence, block.num_sequences, trained, sum_over_ranks)
            correction_mean = self.correction.block_mean(required(log_ratio, "logp_sampler"), sequences, gather)
        if self.surrogate.selects == "block":
            logp_old = required(block.logp_old, "logp_old")
            selected = self.surrogate.select(
                SelectionInputs(logp_old, block.advantage, trained, gather=gather, generator=generator)
            )
        if not thresholds and selected is None and correction_mean is None:
            return None
        return BlockStatistics(thresholds, selected, correction_mean)

    def entropy_weight(
        self,
        step: TokenBatch,
        *,
        block: BlockStatistics | None = None,
        sum_over_ranks: Callable[[Tensor], Tensor] = one_rank,
    ) -> Float[Tensor, "N"]:
        """Weights of the entropy bonus for an optimizer step: ``kept_t`` over the number of kept tokens of all ranks.

        Args:
            step: every sequence of the step on this rank, with weights.
            block: as in ``__call__``.
            sum_over_ranks: of a number, over **all** ranks.

        Example:
            >>> step = TokenBatch(sequence=torch.tensor([0, 0]), num_sequences=1, advantage=torch.zeros(2),
            ...                   token_weight=torch.ones(2))
            >>> Objective(entropy_bonus=EntropyBonus(0.01)).entropy_weight(step)
            tensor([0.5000, 0.5000])
        """
        kept = step.token_weight != 0
        for each in self.filters:
            if each.narrows_entropy_bonus and each.settles_once_a_block:
                kept = kept & above_threshold(step.entropy_old, None if block is None else block.thresholds[each.name])
        number = sum_over_ranks(kept.double().sum()).clamp(min=1.0)
        return (kept.double() / number).to(step.token_weight.dtype)

    def _check_call(
        self,
        given: Mapping[str, Tensor],
        batch: TokenBatch,
        beta: float | Tensor,
        entropy_coefficient: float | None,
    ) -> None:
        shapes = [tuple(each.shape) for each in given.values()]
        if set(shapes) != {(batch.num_tokens,)}:
            raise InputError(
                needed=f"{' and '.join(given)} of the batch's {batch.num_tokens} tokens, as vectors",
                given=" and ".join(str(list(shape)) for shape in shapes),
                remedy="Score exactly the batch's targets.",
            )
        if self.score_centering != ("centering" in given):
            raise InputError(
                needed="centering exactly with score_centering=True",
                given=f"score_centering={self.score_centering} and {'one' if 'centering' in given else 'none'}",
                remedy="Pass head.score_centering(...).centering, zeros on-policy, or set score_centering=True.",
            )
        if self.kl is None and (isinstance(beta, Tensor) or beta != 0):
            raise InputError(
                needed="a KL term for beta to multiply",
                given=f"beta={beta} and kl=None",
                remedy="Set kl=KLPenalty(...), or leave beta out.",
            )
        adaptive = self.entropy_bonus is not None and self.entropy_bonus.adaptive is not None
        if adaptive != (entropy_coefficient is not None):
            raise InputError(
                needed="an entropy_coefficient exactly when the entropy bonus is adaptive",
                given=f"entropy_coefficient={entropy_coefficient}",
                remedy="Pass EntropyController.applied with an adaptive bonus, and nothing otherwise.",
            )


class _Step:
    """One evaluation of an objective: its vectors in the working dtype, 0 in tokens of weight 0."""

    def __init__(
        self,
        objective: Objective,
        given: Mapping[str, Tensor],
        batch: TokenBatch,
        sum_over_ranks: SumOverRanks | None,
        block: BlockStatistics | None,
        gather: GatherOverRanks,
        generator: torch.Generator | None,
    ) -> None:
        self.objective, self.batch, self.block = objective, batch, block
        self.gather, self.generator = gather, generator
        self.dtype = torch.float64 if given["logp"].dtype == torch.float64 else torch.float32
        self.trained = batch.token_weight != 0
        self.sequences = Ranges(batch.sequence, batch.num_sequences, self.trained, sum_over_ranks)
        self.logp = self.read(given["logp"], "logp")
        self.entropy = self.read(given["entropy"], "entropy") if "entropy" in given else None
        self.centering = self.read(given["centering"], "centering") if "centering" in given else None
        self.advantage = self.shared_advantage(self.read(batch.advantage, "advantage"))
        self.logp_old: Tensor | None = None
        self.token_log_ratio: Tensor | None = None
        self.log_ratio: Tensor | None = None
        self.sampler_log_ratio: Tensor | None = None
        self.missing_sampler: Tensor | None = None
        self.logp_sampler: Tensor | None = None
        if batch.logp_sampler is not None:
            self.logp_sampler = self.read(batch.logp_sampler, "logp_sampler")
        if batch.logp_old is not None:
            self.logp_old = self.read(batch.logp_old, "logp_old")
            self.token_log_ratio = token_log_ratio(self.logp, self.logp_old)
            self.log_ratio = objective.ratio(self.token_log_ratio, self.ratio_ranges)
            if self.logp_sampler is not None:
                self.sampler_log_ratio = sampler_log_ratio(self.logp_old, self.logp_sampler)
                self.missing_sampler = self.logp_sampler.isnan()

    def read(self, value: Tensor | None, name: str) -> Tensor:
        """Values of trained tokens, 0 elsewhere."""
        return torch.where(self.trained, required(value, name).to(self.dtype), 0.0)

    def shared_advantage(self, advantage: Tensor) -> Tensor:
        """The advantages, checked or combined where tokens share a ratio or a loss."""
        ratio, surrogate = self.objective.ratio, self.objective.surrogate
        if surrogate.level != "token":
            _check_constant(advantage, self.ranges(surrogate.level), surrogate.level)
        if surrogate.reads == "any" and ratio.level != "token":
            if ratio.advantages is None:
                _check_constant(advantage, self.ratio_ranges, ratio.level)
            elif ratio.advantages == "mean":
                return self.ratio_ranges.spread(self.ratio_ranges.mean(advantage))
        return advantage

    def ranges(self, level: Level) -> Ranges:
        """The sequences or turns of the batch."""
        return self.sequences if level == "sequence" else TurnRatio().ranges(self.sequences, self.batch.turn)

    @cached_property
    def ratio_ranges(self) -> Ranges:
        return self.objective.ratio.ranges(self.sequences, self.batch.turn)

    def output(self, beta: float | Tensor, entropy_coefficient: float | None) -> ObjectiveOutput:
        """The equation at the top of this file, term by term."""
        objective, batch = self.objective, self.batch
        correction = self.correction()
        terms = self.surrogate(correction)
        names = [each.name for each in objective.filters]
        dropped: dict[str, Tensor] = {
            (each.label if names.count(each.name) > 1 else each.name): self.trained & ~each.kept(self.filter_inputs)
            for each in objective.filters
        }
        hidden = torch.stack([~self.trained, *dropped.values()]).any(0)
        loss_of_token = terms.loss if self.centering is None else terms.loss + self.advantage * self.centering
        token_loss = torch.where(hidden, 0.0, loss_of_token)
        if correction is not None and not objective.surrogate.uses_correction:
            token_loss = token_loss * torch.where(hidden, 0.0, correction)
        kl = None
        if objective.kl is not None:
            logp_ref = self.read(batch.logp_ref, "logp_ref")
            kl = objective.kl(self.logp, logp_ref, self.token_log_ratio, self.log_ratio)
            token_loss = token_loss + beta * kl.kl
        loss = (batch.token_weight.to(self.dtype) * token_loss).sum()
        bonus = None
        if objective.entropy_bonus is not None:
            bonus = entropy_mean(
                required(self.entropy, "entropy"),
                self.read(batch.entropy_weight, "entropy_weight"),
                self.in_bonus(dropped),
                renormalized=objective.entropy_bonus.scope == "micro_batch",
            )
            static = objective.entropy_bonus.coefficient
            loss = loss - (static if entropy_coefficient is None else entropy_coefficient) * bonus
        return ObjectiveOutput(
            loss=loss,
            token_loss=token_loss.detach(),
            trained=self.trained,
            advantage=self.advantage,
            entropy=_detached(self.entropy),
            entropy_bonus=_detached(bonus),
            token_log_ratio=_detached(self.token_log_ratio),
            log_ratio=_detached(self.log_ratio),
            clipped_low=terms.clipped_low,
            clipped_high=terms.clipped_high,
            dropped=dropped,
            correction=correction,
            sampler_log_ratio=self.sampler_log_ratio,
            missing_sampler=self.missing_sampler,
            kl=None if kl is None else kl.kl.detach(),
            log_ratio_ref=None if kl is None else kl.log_ratio_ref,
            kl_clamped=None if kl is None else kl.clamped,
        )

    def correction(self) -> Tensor | None:
        if self.objective.correction is None:
            return None
        missing = "logp_old" if self.logp_old is None else "logp_sampler"
        log_ratio = required(self.sampler_log_ratio, missing)
        return self.objective.correction(
            log_ratio, self.sequences, None if self.block is None else self.block.correction_mean
        )

    def surrogate(self, correction: Tensor | None) -> SurrogateTerms:
        surrogate = self.objective.surrogate
        inputs = SurrogateInputs(
            logp=self.logp,
            advantage=self.advantage,
            sequences=self.sequences,
            logp_old=self.logp_old,
            token_log_ratio=self.token_log_ratio,
            log_ratio=self.log_ratio,
            correction=correction,
            selected=self.batch.selected,
            logp_ref=self.read(self.batch.logp_ref, "logp_ref") if surrogate.reads_reference else None,
        )
        if surrogate.selects == "micro_batch":
            now = SelectionInputs(self.logp, self.advantage, self.trained, self.log_ratio, self.gather, self.generator)
            inputs = replace(inputs, selected=surrogate.select(now))
        terms = surrogate(inputs)
        _check_terms(terms, surrogate.name, self.logp)
        return terms

    @cached_property
    def filter_inputs(self) -> FilterInputs:
        return FilterInputs(
            logp=self.logp,
            advantage=self.advantage,
            trained=self.trained,
            sequences=self.sequences,
            gather=self.gather,
            logp_old=self.logp_old,
            logp_sampler=self.logp_sampler,
            entropy=self.entropy,
            entropy_old=self.batch.entropy_old,
            sampler_log_ratio=self.sampler_log_ratio,
            lag=self.batch.lag,
            thresholds={} if self.block is None else self.block.thresholds,
        )

    def in_bonus(self, dropped: Mapping[str, Tensor]) -> Tensor:
        """Tokens of the entropy bonus."""
        left_out = [dropped[each.name] for each in self.objective.filters if each.narrows_entropy_bonus]
        return self.trained & ~torch.stack(left_out).any(0) if left_out else self.trained


class _KnownGradient(torch.autograd.Function):
    """A loss whose gradients are computed already; backward multiplies them by the incoming one."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: tuple[Tensor, ...], *sources: Tensor) -> Tensor:
        del sources
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivative(
            "an objective",
            given="Objective, whose call computes the gradient",
            remedy="Write the loss out from the functions of logitless.objective.surrogate.",
        )
        return None, None, *(grad * gradient for gradient in ctx.saved_tensors)


def _detached(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach()


def _check_terms(terms: SurrogateTerms, name: str, logp: Tensor) -> None:
    """Refuse a loss without a gradient, or of another shape, which would broadcast silently."""
    if not isinstance(terms, SurrogateTerms):
        raise InputError(
            needed=f"SurrogateTerms from the surrogate {name!r}",
            given=type(terms).__name__,
            remedy="Return SurrogateTerms(loss).",
        )
    if torch.is_grad_enabled() and logp.requires_grad and not terms.loss.requires_grad:
        raise InputError(
            needed=f"a loss that is differentiable in logp from the surrogate {name!r}",
            given="one without a gradient",
            remedy="Compute it from inputs.logp or inputs.log_ratio with torch, without detach() or item().",
        )
    for part, value in vars(terms).items():
        if value is not None and value.shape != logp.shape:
            raise InputError(
                needed=f"{part} [N] with N = {len(logp)} from the surrogate {name!r}",
                given=f"a tensor {list(value.shape)}",
                remedy="Return one number a token; weights and means are applied afterwards.",
            )


def _check_constant(advantage: Tensor, ranges: Ranges, what: Level) -> None:
    if advantage.device.type != "cpu":
        return
    values, index = advantage[ranges.counted], ranges.index[ranges.counted]
    if bool(((values.diff() != 0) & (index.diff() == 0)).any()):
        remedy = "Use the ratio 'sequence_token' for advantages per token"
        more = ", or choose advantage_within_sequence='mean' or 'multiply'." if what == "sequence" else "."
        raise InputError(
            needed=f"one advantage a {what}, whose tokens share one ratio",
            given=f"advantages that differ inside a {what}",
            remedy=remedy + more,
        )

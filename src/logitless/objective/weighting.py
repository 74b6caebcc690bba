"""Normalization as a weight for each token: ``loss = (token_weight * token_loss).sum()``.

Weights come from counts, before an optimizer step's first forward pass. So every split into micro-batches and ranks
gives the same loss and gradient; gradients are summed over both, never averaged.

    weighting(token_counts, totals, truncated=None, dtype=torch.float32) -> token_weight [N]

- ``token_counts``: scored tokens of each sequence, 0 allowed. Give a tuple: a GPU tensor costs a synchronization.
- ``totals``: ``Totals`` of the whole step or block, on all ranks.
- ``truncated``: one flag a sequence; tokens of flagged completions weigh 0 and leave N_all, not B_all.
- ``dtype``: of the weights.

Raises ``InputError`` for more tokens or sequences than the totals hold.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from logitless.errors import ConfigurationError, InputError

TokenCounts = tuple[int, ...] | Int[Tensor, "B"]
Scope = Literal["step", "block"]
_Same = TypeVar("_Same", bound="_Weighting")


@dataclass(frozen=True)
class Totals:
    """Counts that a loss is normalized by, of an optimizer step or a block, over all ranks.

    Args:
        num_tokens: N_all, trained tokens, without those of dropped truncated completions.
        num_sequences: B_all, completions, also those without a trained token.
        num_steps: optimizer steps these counts are spread over: 1 for a step, K for a block. TRL's
            ``num_items_in_batch`` is a block of ``steps_per_generation / gradient_accumulation_steps`` steps, which
            need not be whole.
        num_micro_batches: of the step, on all ranks; read by ``MicroBatchTokenMean`` only.

    Raises:
        InputError: a negative count, or no step or micro-batch.

    Example:
        >>> Totals.of((3, 0, 2), truncated=(False, False, True))
        Totals(num_tokens=3, num_sequences=3, num_steps=1.0, num_micro_batches=1)
    """

    num_tokens: int
    num_sequences: int
    num_steps: float = 1.0
    num_micro_batches: int = 1

    def __post_init__(self) -> None:
        if min(self.num_tokens, self.num_sequences) < 0 or self.num_steps <= 0 or self.num_micro_batches < 1:
            raise InputError(
                needed="counts of at least 0, spread over at least one step and one micro-batch",
                given=str(self),
                remedy="Count the completions and trained tokens of every rank.",
            )

    @classmethod
    def of(cls, token_counts: TokenCounts, truncated: Sequence[bool] | None = None) -> "Totals":
        """Totals of these sequences alone: a step on one rank in one micro-batch."""
        counts, kept = _counts(token_counts, truncated)
        return cls(num_tokens=int(counts[kept].sum()), num_sequences=len(counts))

    def over_ranks(self, sum_over_ranks: Callable[[Tensor], Tensor], device: torch.device | str = "cpu") -> "Totals":
        """The sum over all ranks.

        Args:
            sum_over_ranks: of whole numbers (``distributed.sum_over_group``); every rank calls it once.
            device: that its process group works on.

        Example:
            >>> twins = lambda part: 2 * part  # two ranks that hold as much
            >>> Totals(num_tokens=4, num_sequences=3).over_ranks(twins)
            Totals(num_tokens=8, num_sequences=6, num_steps=1.0, num_micro_batches=2)
        """
        counts = torch.tensor([self.num_tokens, self.num_sequences, self.num_micro_batches], device=device)
        num_tokens, num_sequences, num_micro_batches = sum_over_ranks(counts).tolist()
        return replace(self, num_tokens=num_tokens, num_sequences=num_sequences, num_micro_batches=num_micro_batches)


@dataclass(frozen=True)
class _Weighting(ABC):
    """A weight of ``num_steps / denominator`` for each token of a sequence."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def for_rollouts_of(self: _Same, max_new_tokens: int) -> _Same:
        """The weighting with the rollouts' length limit filled in, if it was left open."""
        del max_new_tokens
        return self

    @property
    def counts_turns(self) -> bool:
        """Whether it takes counts and totals of turns instead of sequences."""
        return False

    @property
    def spans_block(self) -> bool:
        """Whether ``Totals`` must be the block's."""
        return False

    def __call__(
        self,
        token_counts: TokenCounts,
        totals: Totals,
        truncated: Sequence[bool] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Float[Tensor, "N"]:
        counts, kept = _counts(token_counts, truncated)
        if int(counts[kept].sum()) > totals.num_tokens or len(counts) > totals.num_sequences:
            raise InputError(
                needed=f"part of {totals.num_tokens} tokens in {totals.num_sequences} sequences",
                given=f"{int(counts[kept].sum())} tokens in {len(counts)} sequences",
                remedy="Give the totals of the whole step (or block), on every rank, that these sequences belong to.",
            )
        weight = totals.num_steps / self._denominator(counts, kept, totals)
        return torch.where(kept, weight, 0).repeat_interleave(counts).to(dtype)

    @abstractmethod
    def _denominator(self, counts: Tensor, kept: Tensor, totals: Totals) -> Tensor:
        """[B] or one number, float64."""


class _Scoped(_Weighting):
    """A weighting over the optimizer step or over the block, as its ``scope`` says."""

    scope: Scope

    @property
    def spans_block(self) -> bool:
        return self.scope == "block"


@dataclass(frozen=True)
class TokenMean(_Scoped):
    """Every token counts the same.

    ``w_t = num_steps / N_all``

    Args:
        scope: what the totals are of: the optimizer ``step``, or the ``block`` (a step with more tokens then counts
            more).

    Source: DAPO, arXiv:2503.14476 eq. 8.

    Example:
        >>> TokenMean()((3, 0, 1), Totals(num_tokens=8, num_sequences=4))
        tensor([0.1250, 0.1250, 0.1250, 0.1250])
        >>> TokenMean()((1, 1), Totals(num_tokens=1, num_sequences=2), truncated=(False, True))
        tensor([1., 0.])
    """

    scope: Scope = "step"
    name: Literal["token_mean"] = "token_mean"

    def _denominator(self, _counts: Tensor, _kept: Tensor, totals: Totals) -> Tensor:
        return torch.tensor(totals.num_tokens, dtype=torch.float64)


@dataclass(frozen=True)
class SequenceMean(_Scoped):
    """Every sequence counts the same, and every token of it.

    ``w_t = num_steps / (B_all * |S(t)|)``

    Args:
        scope: as in ``TokenMean``.

    Source: GRPO, arXiv:2402.03300 eq. 3.

    Example:
        >>> SequenceMean()((3, 0, 1), Totals(num_tokens=8, num_sequences=4))
        tensor([0.0833, 0.0833, 0.0833, 0.2500])
    """

    scope: Scope = "step"
    name: Literal["sequence_mean"] = "sequence_mean"

    def _denominator(self, counts: Tensor, _kept: Tensor, totals: Totals) -> Tensor:
        return totals.num_sequences * counts.double()


@dataclass(frozen=True)
class ConstantLength(_Scoped):
    """Every sequence is divided by the same length.

    ``w_t = num_steps / (B_all * max_new_tokens)``

    Args:
        max_new_tokens: None in a recipe is the limit of its rollouts.
        scope: as in ``TokenMean``.

    Raises:
        ConfigurationError: a length that is not positive.
        InputError: called while ``max_new_tokens`` is None.

    Source: Dr. GRPO, arXiv:2503.20783.

    Example:
        >>> ConstantLength(5)((3, 0, 1), Totals(num_tokens=8, num_sequences=4))
        tensor([0.0500, 0.0500, 0.0500, 0.0500])
    """

    max_new_tokens: int | None = None
    scope: Scope = "step"
    name: Literal["constant_length"] = "constant_length"

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ConfigurationError(
                needed="max_new_tokens of at least 1",
                given=str(self.max_new_tokens),
                remedy="Give the largest number of tokens that a completion can have.",
            )

    def for_rollouts_of(self, max_new_tokens: int) -> "ConstantLength":
        return self if self.max_new_tokens is not None else replace(self, max_new_tokens=max_new_tokens)

    def _denominator(self, _counts: Tensor, _kept: Tensor, totals: Totals) -> Tensor:
        if self.max_new_tokens is None:
            raise InputError(
                needed="the length that every sequence is divided by",
                given="max_new_tokens=None",
                remedy="Fill it in with dataclasses.replace(weighting, max_new_tokens=...).",
            )
        return torch.tensor(totals.num_sequences * self.max_new_tokens, dtype=torch.float64)


@dataclass(frozen=True)
class SequenceSum(_Scoped):
    """A sequence counts in proportion to its length.

    ``w_t = num_steps / B_all``

    Args:
        scope: as in ``TokenMean``.

    Source: RLOO, arXiv:2402.14740; LUSPO, arXiv:2602.05261.

    Example:
        >>> SequenceSum()((3, 0, 1), Totals(num_tokens=8, num_sequences=4))
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """

    scope: Scope = "step"
    name: Literal["sequence_sum"] = "sequence_sum"

    def _denominator(self, _counts: Tensor, _kept: Tensor, totals: Totals) -> Tensor:
        return torch.tensor(totals.num_sequences, dtype=torch.float64)


@dataclass(frozen=True)
class TurnMean(_Scoped):
    """Every assistant turn counts the same, and every token of it.

    ``w_t = num_steps / (K_all * |turn(t)|)``

    Called with the trained tokens of every turn, and totals whose ``num_sequences`` is K_all, the turns with any.

    Args:
        scope: as in ``TokenMean``.

    Example:
        >>> TurnMean()((3, 1), Totals.of((3, 1)))  # two turns, of one sequence or of two
        tensor([0.1667, 0.1667, 0.1667, 0.5000])
    """

    scope: Scope = "step"
    name: Literal["turn_mean"] = "turn_mean"

    @property
    def counts_turns(self) -> bool:
        return True

    def _denominator(self, counts: Tensor, _kept: Tensor, totals: Totals) -> Tensor:
        return totals.num_sequences * counts.double()


@dataclass(frozen=True)
class MicroBatchTokenMean(_Weighting):
    """Token mean of each micro-batch, averaged over micro-batches; depends on the split into micro-batches.

    ``w_t = 1 / (num_micro_batches * N_micro)``, N_micro being the trained tokens of this call

    Source: TRL's ``loss_type="bnpo"``.

    Example:
        >>> MicroBatchTokenMean()((1, 3), Totals(num_tokens=8, num_sequences=4, num_micro_batches=2))
        tensor([0.1250, 0.1250, 0.1250, 0.1250])
    """

    name: Literal["micro_batch_token_mean"] = "micro_batch_token_mean"

    def _denominator(self, counts: Tensor, kept: Tensor, totals: Totals) -> Tensor:
        return totals.num_steps * totals.num_micro_batches * counts[kept].sum().double()


Weighting = TokenMean | SequenceMean | ConstantLength | SequenceSum | TurnMean | MicroBatchTokenMean


def _counts(token_counts: TokenCounts, truncated: Sequence[bool] | None) -> tuple[Int[Tensor, "B"], Bool[Tensor, "B"]]:
    """Token counts on the host, and which sequences are trained."""
    counts = torch.as_tensor(token_counts, dtype=torch.long, device="cpu")
    dropped = torch.as_tensor([False] * len(counts) if truncated is None else list(truncated), dtype=torch.bool)
    if len(dropped) != len(counts):
        raise InputError(
            needed=f"one truncated flag for each of {len(counts)} sequences",
            given=str(len(dropped)),
            remedy="Give token counts and flags of the same sequences.",
        )
    return counts, ~dropped

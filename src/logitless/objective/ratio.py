"""The log ratio of the trained policy to the policy that the batch was drawn from, at the level a surrogate uses it.

``lr_t = logp - logp_old``; the ratio is its exponential and never against the reference or the sampler (those are
``divergence`` and ``correction``). At the first step after scoring it is exactly 0, at every level.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from jaxtyping import Float, Int
from torch import Tensor

from logitless.errors import ConfigurationError
from logitless.objective.inputs import check_knobs, required, shaped
from logitless.objective.ranges import Grain, Ranges, turn_ranges


@shaped
def token_log_ratio(logp: Float[Tensor, "N"], logp_old: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """``lr_t = logp_t - logp_old_t``.

    Gradient: 1 to ``logp``; none to ``logp_old``.

    Source: PPO, arXiv:1707.06347, eq. 6.

    Example:
        >>> import torch
        >>> token_log_ratio(torch.tensor([-1.0]), torch.tensor([-1.5]))
        tensor([0.5000])
    """
    return logp - logp_old.detach()


@shaped
def sequence_log_ratio(log_ratio: Float[Tensor, "N"], ranges: Ranges) -> Float[Tensor, "N"]:
    """``s_t = mean_{u in S(t)} lr_u``, the same for every token of the range.

    Gradient: ``1 / |S|`` to every token of the range.

    Source: GSPO, arXiv:2507.18071, eq. 7. With turns as ranges, the turn-level ratio.

    Example:
        >>> import torch
        >>> pair = Ranges(torch.tensor([0, 0]), 1, torch.tensor([True, True]))
        >>> sequence_log_ratio(torch.tensor([0.0, 1.0]), pair)
        tensor([0.5000, 0.5000])
    """
    return ranges.spread(ranges.mean(log_ratio))


@shaped
def sequence_token_log_ratio(log_ratio: Float[Tensor, "N"], ranges: Ranges) -> Float[Tensor, "N"]:
    """``sg(s_t) + lr_t - sg(lr_t)``: the value of the sequence, the gradient of the token.

    Gradient: 1 to the token itself, 0 to the rest of its sequence.

    Source: GSPO-token, arXiv:2507.18071, section 4.3.

    Example:
        >>> import torch
        >>> pair = Ranges(torch.tensor([0, 0]), 1, torch.tensor([True, True]))
        >>> sequence_token_log_ratio(torch.tensor([0.0, 1.0]), pair)
        tensor([0.5000, 0.5000])
    """
    return sequence_log_ratio(log_ratio.detach(), ranges) + (log_ratio - log_ratio.detach())


class RatioRule(ABC):
    """Which log ratios are averaged, and which tokens share the result; a frozen dataclass.

    Attributes:
        name: how recipes call it.
        averages: over which tokens log ratios are averaged.
        grain: which tokens share one ratio, gradient included; their advantages must be equal unless ``advantages``
            says otherwise.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}
    name: str
    averages: ClassVar[Grain] = "token"
    grain: ClassVar[Grain] = "token"

    @property
    def advantages(self) -> Literal["mean", "multiply"] | None:
        """What becomes of advantages that differ where a ratio is shared; None: they are an error."""
        return None

    def ranges(self, sequences: Ranges, turn: Int[Tensor, "N"] | None) -> Ranges:
        """The ranges of tokens that are averaged over.

        Args:
            sequences: of the batch.
            turn: [N] turn ids, or None where the batch has none.
        """
        del turn
        return sequences

    @abstractmethod
    def __call__(self, log_ratio: Float[Tensor, "N"], ranges: Ranges) -> Float[Tensor, "N"]:
        """The log ratio that a surrogate reads, from that of each token and ``ranges``."""


@dataclass(frozen=True)
class TokenRatio(RatioRule):
    """``lr_t``, one ratio a token (PPO, GRPO)."""

    name: Literal["token"] = field(default="token", kw_only=True)

    def __call__(self, log_ratio: Float[Tensor, "N"], ranges: Ranges) -> Float[Tensor, "N"]:
        del ranges
        return log_ratio


@dataclass(frozen=True)
class SequenceRatio(RatioRule):
    """``mean_S lr``, one ratio a sequence (GSPO); its gradient reaches every token of the sequence.

    Args:
        advantage_within_sequence: what to do with advantages that differ inside a sequence: None, an error; ``mean``,
            their mean over the sequence (Fast-LLM); ``multiply``, each token's own times the shared ratio (TRL).
    """

    averages: ClassVar[Grain] = "sequence"
    grain: ClassVar[Grain] = "sequence"
    advantage_within_sequence: Literal["mean", "multiply"] | None = None
    name: Literal["sequence"] = field(default="sequence", kw_only=True)

    def __post_init__(self) -> None:
        check_knobs(self)

    @property
    def advantages(self) -> Literal["mean", "multiply"] | None:
        return self.advantage_within_sequence

    def __call__(self, log_ratio: Float[Tensor, "N"], ranges: Ranges) -> Float[Tensor, "N"]:
        return sequence_log_ratio(log_ratio, ranges)


@dataclass(frozen=True)
class SequenceTokenRatio(RatioRule):
    """The sequence's value with the token's gradient (GSPO-token); takes advantages per token."""

    averages: ClassVar[Grain] = "sequence"
    name: Literal["sequence_token"] = field(default="sequence_token", kw_only=True)

    def __call__(self, log_ratio: Float[Tensor, "N"], ranges: Ranges) -> Float[Tensor, "N"]:
        return sequence_token_log_ratio(log_ratio, ranges)


@dataclass(frozen=True)
class TurnRatio(RatioRule):
    """As ``SequenceRatio`` over each assistant turn; ``TokenBatch.turn`` holds the ids.

    Args:
        max_turns: more than the largest turn id; required only where sequences are split over ranks.

    Raises:
        ConfigurationError: a bound below 1.
    """

    averages: ClassVar[Grain] = "turn"
    grain: ClassVar[Grain] = "turn"
    max_turns: int | None = None
    name: Literal["turn"] = field(default="turn", kw_only=True)

    def __post_init__(self) -> None:
        if self.max_turns is not None and self.max_turns < 1:
            raise ConfigurationError(
                needed="max_turns of at least 1", given=str(self.max_turns), remedy="Leave it out, or raise it."
            )

    def ranges(self, sequences: Ranges, turn: Int[Tensor, "N"] | None) -> Ranges:
        return turn_ranges(
            sequences.index,
            sequences.num_ranges,
            required(turn, "turn"),
            sequences.counted,
            max_turns=self.max_turns,
            sum_over_ranks=sequences.sum_over_ranks,
        )

    def __call__(self, log_ratio: Float[Tensor, "N"], ranges: Ranges) -> Float[Tensor, "N"]:
        return sequence_log_ratio(log_ratio, ranges)


Ratio = TokenRatio | SequenceRatio | SequenceTokenRatio | TurnRatio

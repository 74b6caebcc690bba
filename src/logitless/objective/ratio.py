"""The log ratio of the trained policy to the old one, per token, turn or sequence.

``lr_t = logp - logp_old``, exactly 0 at the first step after scoring. The ratios to the reference and to the sampler
are in ``divergence`` and ``correction``.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from jaxtyping import Float, Int
from torch import Tensor

from logitless.errors import ConfigurationError
from logitless.objective.inputs import check_knobs, required, shaped
from logitless.objective.ranges import Level, Ranges, turn_ranges


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

    Source: GSPO-token, arXiv:2507.18071, section 4.3.

    Example:
        >>> import torch
        >>> pair = Ranges(torch.tensor([0, 0]), 1, torch.tensor([True, True]))
        >>> sequence_token_log_ratio(torch.tensor([0.0, 1.0]), pair)
        tensor([0.5000, 0.5000])
    """
    return sequence_log_ratio(log_ratio.detach(), ranges) + (log_ratio - log_ratio.detach())


class RatioRule(ABC):
    """Over what log ratios are averaged, and which tokens share the result; a frozen dataclass.

    Attributes:
        name: what recipes call it.
        averages: the level over which log ratios are averaged.
        level: the level at which tokens share a ratio and its gradient; their advantages must be equal unless
            ``advantages`` says otherwise.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}
    name: str
    averages: ClassVar[Level] = "token"
    level: ClassVar[Level] = "token"

    @property
    def advantages(self) -> Literal["mean", "multiply"] | None:
        """How advantages that differ inside a shared ratio are combined; None: they are an error."""
        return None

    def ranges(self, sequences: Ranges, turn: Int[Tensor, "N"] | None) -> Ranges:
        """The ranges of tokens to average over.

        Args:
            sequences: of the batch.
            turn: [N] turn ids, or None.
        """
        del turn
        return sequences

    @abstractmethod
    def __call__(self, log_ratio: Float[Tensor, "N"], ranges: Ranges) -> Float[Tensor, "N"]:
        """The log ratio that a surrogate reads."""


@dataclass(frozen=True)
class TokenRatio(RatioRule):
    """One ratio a token (PPO, GRPO).

    ``log r = lr``
    """

    name: Literal["token"] = field(default="token", kw_only=True)

    def __call__(self, log_ratio: Float[Tensor, "N"], ranges: Ranges) -> Float[Tensor, "N"]:
        del ranges
        return log_ratio


@dataclass(frozen=True)
class SequenceRatio(RatioRule):
    """One ratio a sequence (GSPO); its gradient reaches every token of the sequence.

    ``log r = mean_S lr``

    Args:
        advantage_within_sequence: for advantages that differ inside a sequence: None, an error; ``mean`` over the
            sequence (Fast-LLM); ``multiply``, each token's own times the shared ratio (TRL).
    """

    averages: ClassVar[Level] = "sequence"
    level: ClassVar[Level] = "sequence"
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
    """The sequence's value with the token's gradient (GSPO-token); takes advantages per token.

    ``log r = sg(mean_S lr) + lr - sg(lr)``
    """

    averages: ClassVar[Level] = "sequence"
    name: Literal["sequence_token"] = field(default="sequence_token", kw_only=True)

    def __call__(self, log_ratio: Float[Tensor, "N"], ranges: Ranges) -> Float[Tensor, "N"]:
        return sequence_token_log_ratio(log_ratio, ranges)


@dataclass(frozen=True)
class TurnRatio(RatioRule):
    """``SequenceRatio`` over each assistant turn.

    Args:
        max_turns: above the largest turn id; required only where sequences are split over ranks.

    Raises:
        ConfigurationError: a bound below 1.
    """

    averages: ClassVar[Level] = "turn"
    level: ClassVar[Level] = "turn"
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

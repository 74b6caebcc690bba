"""How completions are sampled: the options, and the distribution they make of a model's logits."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from logitless.errors import ConfigurationError


@dataclass(frozen=True)
class SamplingOptions:
    """Settings of generation, the same for every completion of a group.

    Args:
        max_new_tokens: tokens a completion may have, its stop token included.
        temperature: divides the logits; 0 takes the most likely token.
        top_p: smallest set of tokens with at least this probability; 1 keeps all.
        top_k: most likely tokens to keep (more where the last one ties); None keeps all.
        min_p: drops tokens less likely than this times the most likely one; 0 keeps all.
        repetition_penalty: divides positive and multiplies negative logits of tokens that the prompt or the completion
            already has; 1 is none.
        stop: strings that end a completion; the text ends before the string, the token ids include it.
        stop_token_ids: ends beside the tokenizer's and the model's own EOS tokens.

    Raises:
        ConfigurationError: a value out of range, or a filter beside temperature 0, where it would do nothing.

    Example:
        >>> SamplingOptions(max_new_tokens=64, top_p=0.9).filters_distribution
        True
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        filters = self.top_p < 1 or self.top_k is not None or self.min_p > 0
        for wrong, needed, given, remedy in (
            (self.max_new_tokens < 1, "max_new_tokens of at least 1", self.max_new_tokens, "Use for example 256."),
            (not 0 <= self.temperature < float("inf"), "a temperature >= 0", self.temperature, "Use for example 1."),
            (not 0 < self.top_p <= 1, "top_p in (0, 1]", self.top_p, "Use 1 to keep every token."),
            (self.top_k is not None and self.top_k < 1, "top_k >= 1", self.top_k, "Leave it out to keep every token."),
            (not 0 <= self.min_p <= 1, "min_p in [0, 1]", self.min_p, "Use 0 to keep every token."),
            (
                not 0 < self.repetition_penalty < float("inf"),
                "a positive repetition_penalty",
                self.repetition_penalty,
                "Use 1 for none.",
            ),
            ("" in self.stop, "stop strings with characters", "an empty one", "Leave it out."),
            (
                self.temperature == 0 and filters,
                "no filter at temperature 0, which takes the most likely token",
                f"top_p {self.top_p}, top_k {self.top_k}, min_p {self.min_p}",
                "Leave top_p, top_k and min_p out, or use the options' greedy().",
            ),
        ):
            if wrong:
                raise ConfigurationError(needed=needed, given=str(given), remedy=remedy)

    @property
    def filters_distribution(self) -> bool:
        """Whether tokens are sampled from something else than the model's softmax at this temperature."""
        return (
            self.temperature == 0
            or self.top_p < 1
            or self.top_k is not None
            or self.min_p > 0
            or self.repetition_penalty != 1
        )

    def greedy(self) -> "SamplingOptions":
        """The same, taking the most likely token.

        Example:
            >>> SamplingOptions(max_new_tokens=8, top_p=0.9).greedy().temperature
            0.0
        """
        return replace(self, temperature=0.0, top_p=1.0, top_k=None, min_p=0.0)


def sampling_logp(
    logits: Float[Tensor, "R V"], options: SamplingOptions, seen: Bool[Tensor, "R V"] | None = None
) -> Float[Tensor, "R V"]:
    """Log-probabilities of the distribution that tokens are sampled from, ``-inf`` where filtered out.

    In this order: repetition penalty, temperature, top-k, top-p, min-p, each on what the one before left.

    Args:
        logits: of the model, float32; temperature must not be 0.
        options: the settings.
        seen: tokens each row already has; needed when there is a repetition penalty.

    Example:
        >>> logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
        >>> sampling_logp(logits, SamplingOptions(max_new_tokens=1, top_k=2)).exp()
        tensor([[0.6250, 0.3750, 0.0000]])
    """
    logits = penalized(logits, options, seen) / options.temperature
    if options.top_k is not None and options.top_k < logits.shape[-1]:
        least = torch.topk(logits, options.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if options.top_p < 1:
        likely_first, order = torch.sort(logits.softmax(-1), descending=True, stable=True)
        enough_before = likely_first.cumsum(-1) - likely_first >= options.top_p
        logits = logits.masked_fill(torch.zeros_like(enough_before).scatter(-1, order, enough_before), float("-inf"))
    if options.min_p > 0:
        probability = logits.softmax(-1)
        unlikely = probability < options.min_p * probability.amax(-1, keepdim=True)
        logits = logits.masked_fill(unlikely, float("-inf"))
    return logits.log_softmax(-1)


def penalized(
    logits: Float[Tensor, "R V"], options: SamplingOptions, seen: Bool[Tensor, "R V"] | None
) -> Float[Tensor, "R V"]:
    """Logits after the repetition penalty.

    Source: Keskar et al. 2019 (CTRL), section 4.1, with negative logits multiplied.

    Example:
        >>> options = SamplingOptions(max_new_tokens=1, repetition_penalty=2.0)
        >>> penalized(torch.tensor([[4.0, -4.0, 4.0]]), options, torch.tensor([[True, True, False]]))
        tensor([[ 2., -8.,  4.]])
    """
    if options.repetition_penalty == 1:
        return logits
    assert seen is not None
    penalty = options.repetition_penalty
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def draw(logp: Float[Tensor, "R V"], uniform: Float[Tensor, "R"]) -> Int[Tensor, "R"]:
    """One token a row by inversion of the cumulative distribution: ``min {v : sum_{w <= v} p[w] > u}``.

    Accumulation: float64. A token of probability 0 is never drawn. A row of NaN gives the last token, which is a valid
    index; its log-probability tells.

    Args:
        logp: normalised, ``-inf`` allowed.
        uniform: in [0, 1), float64, multiples of 2**-32.

    Example:
        >>> logp = torch.tensor([[0.25, 0.0, 0.75]]).log().expand(3, 3)
        >>> draw(logp, torch.tensor([0.0, 0.2, 0.5], dtype=torch.float64))
        tensor([0, 0, 2])
    """
    cumulative = logp.double().exp().cumsum(-1)
    threshold = (uniform * cumulative[:, -1])[:, None]
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp(max=logp.shape[-1] - 1)

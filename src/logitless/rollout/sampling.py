"""Sampling options, and the distribution that they make of a model's logits."""

from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from logitless.errors import ConfigurationError


@dataclass(frozen=True)
class SamplingOptions:
    """Settings of sampling, the same for every completion of a group.

    Args:
        max_new_tokens: tokens a completion may have, its stop token included.
        temperature: divides the logits; 0 takes the most likely token.
        top_p: smallest set of tokens with at least this probability; 1 keeps all.
        top_k: most likely tokens to keep (more where the last one ties); None keeps all.
        min_p: drops tokens less likely than this times the most likely one; 0 keeps all.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or completion; 1 is
            none.
        presence_penalty: taken from the logits of tokens that the completion already has; 0 is none.
        frequency_penalty: the same for every time that it has them; 0 is none.
        logit_bias: (token, number) pairs, added to the token's logit.
        min_new_tokens: tokens before which no stop token is sampled; stop strings still end a completion.
        stop: strings that end a completion; the text ends before the string, the token ids include it.
        stop_token_ids: ends beside the tokenizer's and the model's own EOS tokens.
        ignore_eos: EOS tokens end nothing.

    Raises:
        ConfigurationError: a value out of range, or a filter beside temperature 0, where it would do nothing.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        given_penalties = f"presence_penalty {self.presence_penalty}, frequency_penalty {self.frequency_penalty}"
        given_filters = f"top_p {self.top_p}, top_k {self.top_k}, min_p {self.min_p}"
        biased = [token for token, _ in self.logit_bias]
        finite_penalties = abs(self.presence_penalty) < inf and abs(self.frequency_penalty) < inf
        valid_bias = all(token >= 0 and abs(bias) < inf for token, bias in self.logit_bias)
        valid_minimum = 0 <= self.min_new_tokens <= self.max_new_tokens
        for valid, needed, given, remedy in (
            (self.max_new_tokens >= 1, "max_new_tokens of at least 1", self.max_new_tokens, "Use for example 256."),
            (0 <= self.temperature < inf, "a temperature >= 0", self.temperature, "Use for example 1."),
            (0 < self.top_p <= 1, "top_p in (0, 1]", self.top_p, "Use 1 to keep every token."),
            (self.top_k is None or self.top_k >= 1, "top_k >= 1", self.top_k, "Leave it out to keep every token."),
            (0 <= self.min_p <= 1, "min_p in [0, 1]", self.min_p, "Use 0 to keep every token."),
            (
                0 < self.repetition_penalty < inf,
                "a positive repetition_penalty",
                self.repetition_penalty,
                "Use 1 for none.",
            ),
            (finite_penalties, "finite penalties", given_penalties, "Use 0 for none."),
            (
                valid_bias and len(set(biased)) == len(biased),
                "tokens of at least 0, each once, with finite numbers in logit_bias",
                self.logit_bias,
                "Use for example -100 to keep a token from being sampled.",
            ),
            (valid_minimum, "min_new_tokens from 0 to max_new_tokens", self.min_new_tokens, "Use 0 for none."),
            ("" not in self.stop, "stop strings with characters", "an empty one", "Leave it out."),
            (
                self.temperature != 0 or not self._has_filter,
                "no filter at temperature 0, which takes the most likely token",
                given_filters,
                "Leave top_p, top_k and min_p out, or use the options' greedy().",
            ),
        ):
            if not valid:
                raise ConfigurationError(needed=needed, given=str(given), remedy=remedy)

    @property
    def filters_distribution(self) -> bool:
        """Whether tokens are not sampled from the model's softmax at this temperature."""
        return self.temperature == 0 or self._has_filter or bool(self.penalties)

    @property
    def _has_filter(self) -> bool:
        return self.top_p < 1 or self.top_k is not None or self.min_p > 0

    @property
    def penalties(self) -> tuple[str, ...]:
        """Names of the settings in use that change logits before anything else.

        Example:
            >>> SamplingOptions(max_new_tokens=8, min_new_tokens=2).penalties
            ('min_new_tokens',)
        """
        used = {
            "repetition_penalty": self.repetition_penalty != 1,
            "presence_penalty": self.presence_penalty != 0,
            "frequency_penalty": self.frequency_penalty != 0,
            "logit_bias": bool(self.logit_bias),
            "min_new_tokens": self.min_new_tokens > 0,
        }
        return tuple(name for name, is_used in used.items() if is_used)

    @property
    def needs_history(self) -> bool:
        """Whether the distribution depends on the tokens so far."""
        return bool(set(self.penalties) - {"logit_bias"})

    def greedy(self) -> "SamplingOptions":
        """The same options at temperature 0.

        Example:
            >>> SamplingOptions(max_new_tokens=8, top_p=0.9).greedy().temperature
            0.0
        """
        return replace(self, temperature=0.0, top_p=1.0, top_k=None, min_p=0.0)


class History(NamedTuple):
    """The tokens so far of R sequences, as far as the options need them.

    Args:
        seen: whether prompt or completion has the token; for a repetition penalty.
        counts: how often the completion has the token; for presence and frequency penalties.
        length: tokens of the completion; for ``min_new_tokens``.
        ends: tokens that end a completion; for ``min_new_tokens``.
    """

    seen: Bool[Tensor, "R V"] | None = None
    counts: Int[Tensor, "R V"] | None = None
    length: Int[Tensor, "R"] | None = None
    ends: Int[Tensor, "E"] | None = None


def sampling_logp(
    logits: Float[Tensor, "R V"], options: SamplingOptions, history: History | None = None
) -> Float[Tensor, "R V"]:
    """Log-probabilities of the distribution that tokens are sampled from, ``-inf`` where filtered out.

    Applied in this order: penalties, bias, minimum length, temperature, top-k, top-p, min-p.

    Args:
        logits: of the model, float32.
        options: with a temperature above 0.
        history: if ``options.needs_history``.

    Example:
        >>> logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
        >>> sampling_logp(logits, SamplingOptions(max_new_tokens=1, top_k=2)).exp()
        tensor([[0.6250, 0.3750, 0.0000]])
    """
    logits = penalized(logits, options, history) / options.temperature
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


def penalized(logits: Float[Tensor, "R V"], options: SamplingOptions, history: History | None) -> Float[Tensor, "R V"]:
    """Logits after penalties, bias and minimum length, in this order.

        z > 0: z / repetition, else z * repetition, of tokens seen;   - presence [n > 0] - frequency n;   + bias

    where n counts the token in the completion. Below the minimum length, tokens that end a completion get -inf.

    Source: Keskar et al. 2019 (CTRL), section 4.1, with negative logits multiplied; OpenAI's API for the other two.

    Example:
        >>> options = SamplingOptions(max_new_tokens=1, repetition_penalty=2.0, logit_bias=((2, -1.0),))
        >>> penalized(torch.tensor([[4.0, -4.0, 4.0]]), options, History(seen=torch.tensor([[True, True, False]])))
        tensor([[ 2., -8.,  3.]])
    """
    if options.repetition_penalty != 1:
        assert history is not None
        assert history.seen is not None
        penalty = options.repetition_penalty
        logits = torch.where(history.seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    if options.presence_penalty != 0 or options.frequency_penalty != 0:
        assert history is not None
        assert history.counts is not None
        logits = logits - options.presence_penalty * (history.counts > 0) - options.frequency_penalty * history.counts
    if options.logit_bias:
        logits = logits.clone()
        for token, bias in options.logit_bias:
            logits[:, token] += bias
    if options.min_new_tokens > 0:
        assert history is not None
        assert history.length is not None
        assert history.ends is not None
        early = (history.length < options.min_new_tokens)[:, None]
        ends = torch.zeros_like(logits[0], dtype=torch.bool).index_fill_(0, history.ends, True)
        logits = logits.masked_fill(early & ends, float("-inf"))
    return logits


def sample(logp: Float[Tensor, "R V"], uniform: Float[Tensor, "R"]) -> Int[Tensor, "R"]:
    """One token a row by inversion of the cumulative distribution: ``min {v : sum_{w <= v} p[w] > u}``.

    Accumulation: float64. A token of probability 0 is never sampled. A row of NaN gives the last token, whose
    log-probability is NaN.

    Args:
        logp: normalised, ``-inf`` allowed.
        uniform: in [0, 1), float64, multiples of 2**-32.

    Example:
        >>> logp = torch.tensor([[0.25, 0.0, 0.75]]).log().expand(3, 3)
        >>> sample(logp, torch.tensor([0.0, 0.2, 0.5], dtype=torch.float64))
        tensor([0, 0, 2])
    """
    cumulative = logp.double().exp().cumsum(-1)
    threshold = (uniform * cumulative[:, -1])[:, None]
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp(max=logp.shape[-1] - 1)

"""A check after every weight transfer: trainer and sampler must give the same tokens the same log-probs.

The server samples a few tokens after a fixed prompt, long enough to be cached, and the trainer's model scores them.
This detects stale weights, stale caches, log-probs of another distribution, and another model. It cannot detect weights
that differ by less than the two implementations do, which in bfloat16 is as much as an optimizer step changes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedTokenizerBase

from logitless.errors import EngineError
from logitless.models.lm_head import causal_lm
from logitless.models.modes import evaluating, uncompiled
from logitless.rollout.engine import Score
from logitless.rollout.sampling import SamplingOptions
from logitless.rollout.vllm.api import Sampled

TEMPERATURE = 0.8
"""Not 1, so that log-probs of raw logits, a server's default, differ."""

NUM_SAMPLES = 2
"""Of a probe."""

Ask = Callable[[Sequence[int], int, SamplingOptions, int], list[Sampled]]
"""(prompt, number of samples, options, seed) -> samples."""


@dataclass(frozen=True)
class Probe:
    """A fixed prompt, and the largest allowed difference of log-probs after it.

    Args:
        prompt: token ids.
        max_difference: nats.
        new_tokens: of each sample.
        autocast: dtype of the trainer's products, or None for that of the weights.
    """

    prompt: tuple[int, ...]
    max_difference: float
    new_tokens: int = 8
    autocast: torch.dtype | None = None

    def within(self, context: int) -> "Probe":
        """The same probe with the prompt cut to leave room for the new tokens.

        Example:
            >>> Probe((4, 5, 6), 0.1, new_tokens=2).within(4).prompt
            (4, 5)
        """
        return replace(self, prompt=self.prompt[: max(1, context - self.new_tokens)])

    def check(
        self,
        ask: Ask,
        model: nn.Module,
        *,
        where: str,
        version: int,
        known: dict[tuple[int, ...], list[float]] | None = None,
        score: Score | None = None,
    ) -> float:
        """The largest difference in nats.

        Args:
            ask: samples.
            model: the trainer's, with the weights that were pushed.
            where: the sampler's name in the error.
            version: of the weights, for the error.
            known: log-probs of the trainer by tokens, from earlier probes of the same weights; this call fills it if it
                is empty. If it is not, the model is not used, because it may have been trained since: only the tokens
                that samples have in common with earlier ones are compared.
            score: computes the trainer's log-probs if ``model`` is sharded.

        Raises:
            EngineError: it is above ``max_difference``.
        """
        options = SamplingOptions(max_new_tokens=self.new_tokens, temperature=TEMPERATURE)
        worst, sampler, trainer = -1.0, 0.0, 0.0
        before, found = dict(known or {}), dict[tuple[int, ...], list[float]]()
        score = score or partial(scored_tokens, model, autocast=self.autocast)
        for sampled in ask(self.prompt, NUM_SAMPLES, options, version):
            ids = tuple(sampled.token_ids.tolist())
            if before:
                scored = max((logp[: _shared(ids, other)] for other, logp in before.items()), key=len) or [math.nan]
            else:
                scored = found[ids] = score(self.prompt, ids, TEMPERATURE)
            for a, b in zip(sampled.logp.tolist(), scored, strict=not before):
                if not abs(a - b) <= worst:  # written so that NaN is the worst
                    worst, sampler, trainer = abs(a - b), a, b
        if not worst <= self.max_difference:
            raise EngineError(
                needed=f"log-probs of {where} within {self.max_difference:g} nats of the trainer's, after weights of"
                f" version {version} were pushed",
                given=f"{sampler:.6f} there and {trainer:.6f} here, {worst:.3g} apart",
                remedy="docs/servers.md, under 'the probe', lists what it has found: weights or caches that are stale,"
                " another dtype than the trainer's, a server without --logprobs-mode processed_logprobs.",
            )
        if known is not None:
            known.update(found)
        return worst


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the common beginning of two sequences."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def probe_prompt(tokenizer: PreTrainedTokenizerBase, length: int) -> tuple[int, ...]:
    """A fixed prompt of ordinary tokens.

    Args:
        tokenizer: its special tokens are not used.
        length: tokens.
    """
    ordinary = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.added_tokens_decoder))
    return tuple(np.random.default_rng(0).choice(ordinary, length).tolist())


def scored_tokens(
    model: nn.Module,
    prompt: Sequence[int],
    completion: Sequence[int],
    temperature: float,
    autocast: torch.dtype | None = None,
) -> list[float]:
    """The model's log-probs of a completion's tokens, from full logits.

    Args:
        model: a causal LM, PEFT-wrapped or not.
        prompt, completion: token ids.
        temperature: divides the logits.
        autocast: dtype of the products, or None for that of the weights.
    """
    inner: Any = causal_lm(model)
    device = next(inner.parameters()).device
    ids = torch.tensor([[*prompt, *completion]], device=device)
    with torch.no_grad(), evaluating(inner), uncompiled():
        with torch.autocast(device.type, autocast or torch.bfloat16, enabled=autocast is not None):
            logits = inner(input_ids=ids, past_key_values=DynamicCache(), use_cache=True).logits
        logp = (logits[0, len(prompt) - 1 : -1].float() / temperature).log_softmax(-1)
    chosen: list[float] = logp.gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()
    return chosen

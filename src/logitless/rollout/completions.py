"""What all engines share: checking prompts, finding stop tokens and stop strings, and making completions of tokens."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedTokenizerBase

from logitless.errors import InputError, TrainingError
from logitless.rollout.sampling import SamplingOptions
from logitless.types import Completion, Prompt

_TEXT = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}


def check_prompts(prompts: Sequence[Prompt], num_samples: int, options: SamplingOptions, limit: int | None) -> None:
    """Check the arguments of ``Engine.sample``.

    Args:
        prompts: to complete.
        num_samples: of each.
        options: of sampling.
        limit: the model's number of positions, or None.

    Raises:
        InputError: ``num_samples`` below 1, an empty prompt, two prompts with one id, or a prompt whose completion
            would not fit into the model.
    """
    if num_samples < 1:
        raise InputError(needed="at least 1 sample a prompt", given=str(num_samples), remedy="Ask for 1 or more.")
    ids = [prompt.id for prompt in prompts]
    if len(set(ids)) < len(ids):
        raise InputError(
            needed="prompts with distinct ids, which seed their completions",
            given=f"{next(i for i in ids if ids.count(i) > 1)!r} more than once",
            remedy="Ask for more samples of the prompt instead.",
        )
    for prompt in prompts:
        if not len(prompt.token_ids):
            raise InputError(
                needed="prompts with at least one token",
                given=f"prompt {prompt.id!r} with none",
                remedy="Drop empty prompts, or start them with a BOS token.",
            )
        if limit is not None and len(prompt.token_ids) + options.max_new_tokens > limit:
            raise InputError(
                needed=f"prompt and completion within the model's {limit} positions",
                given=f"prompt {prompt.id!r} of {len(prompt.token_ids)} tokens and {options.max_new_tokens} new",
                remedy="Lower max_new_tokens or drop long prompts.",
            )


def check_batch(max_rows: int, prefill_tokens: int, most_rows: float = math.inf) -> None:
    """Check an engine's sizes of a batch.

    Raises:
        InputError: ``max_rows`` or ``prefill_tokens`` out of range.
    """
    if not 1 <= max_rows <= most_rows:
        needed = f"from 1 to {most_rows}" if most_rows < math.inf else "of at least 1"
        raise InputError(needed=f"max_rows {needed}", given=str(max_rows), remedy="Use for example 512.")
    if prefill_tokens < 1:
        raise InputError(
            needed="prefill_tokens of at least 1", given=str(prefill_tokens), remedy="Use for example 16384."
        )


def not_finite(given: str) -> TrainingError:
    """The error for logits that no token can be sampled from."""
    return TrainingError(
        needed="finite logits to sample tokens from",
        given=f"NaN or infinite ones for {given}",
        remedy="Look for weights that are not finite; lower the learning rate, clip gradients, or use bfloat16 or"
        " float32 in place of float16.",
    )


def stop_ids(tokenizer: PreTrainedTokenizerBase, model: nn.Module, options: SamplingOptions) -> list[int]:
    """Tokens that end a completion: EOS of tokenizer and generation config, and those of ``options``."""
    if options.ignore_eos:
        return sorted({*options.stop_token_ids})
    configured: Any = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    eos = {configured} if isinstance(configured, int) else set(configured or ())
    # A config made by hand has its class's default, which may be an ordinary token of this tokenizer.
    special = eos & tokenizer.added_tokens_decoder.keys()
    return sorted({tokenizer.eos_token_id, *special, *options.stop_token_ids})


def stop_window(stop: Sequence[str]) -> int:
    """How many of a completion's last tokens to search for a stop string that the newest token completes.

    Example:
        >>> stop_window(["</answer>", "."])
        17
    """
    return max(len(string.encode()) for string in stop) + 8  # a token has at least a byte; 8 to spare


def with_stop_string(
    tokenizer: PreTrainedTokenizerBase, ends: Sequence[Sequence[int]], stop: Sequence[str]
) -> list[bool]:
    """Whether the text of each run of tokens contains a stop string."""
    texts = tokenizer.batch_decode([list(ids) for ids in ends], **_TEXT)
    return [any(string in text for string in stop) for text in texts]


def made_completions(
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[str],
    tokens: Sequence[np.ndarray],
    logps: Sequence[np.ndarray],
    *,
    options: SamplingOptions,
    ends: Sequence[int],
    versions: Sequence[np.ndarray],
    logp_policies: Sequence[np.ndarray | None] | None = None,
    entropies: Sequence[np.ndarray | None] | None = None,
) -> list[Completion]:
    """Completions of sampled tokens, with their text up to the stop token or stop string. Arrays are copied.

    Args:
        tokenizer: decodes them.
        prompt_ids: id of each one's prompt.
        tokens: [L] integers of each, the stop token included.
        logps: [L] ``logp_sampler`` of each.
        options: of sampling.
        ends: result of ``stop_ids``.
        versions: [L] integers of each: which weights drew each token.
        logp_policies: [L] of each, if the engine computes it; kept only if filters or penalties make it differ from
            ``logps``.
        entropies: [L] of each, if the engine computes them.
    """
    special = set(ends)
    finished = [int(ids[-1]) in special for ids in tokens]
    shown = [(ids[:-1] if stopped else ids).tolist() for ids, stopped in zip(tokens, finished, strict=True)]
    texts = tokenizer.batch_decode(shown, **_TEXT)
    made = []
    for number, (ids, text, drawn) in enumerate(zip(tokens, texts, versions, strict=True)):
        cut = min((at for string in options.stop if (at := text.find(string)) >= 0), default=None)
        oldest = int(drawn.min())
        completion = Completion(
            prompt_id=prompt_ids[number],
            token_ids=ids,
            text=text[:cut],
            finish_reason="stop" if cut is not None or finished[number] else "length",
            logp_sampler=logps[number],
            weights_version=oldest,
            entropy_sampler=None if entropies is None else entropies[number],
            token_versions=drawn if (drawn != oldest).any() else None,
            logp_policy=logp_policies[number] if logp_policies and options.filters_distribution else None,
        )
        made.append(completion)
    return made

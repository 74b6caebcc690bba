"""What all engines share: checking prompts, finding stop tokens and stop strings, and making completions of tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedTokenizerBase

from logitless.errors import InputError
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


def stop_ids(tokenizer: PreTrainedTokenizerBase, model: nn.Module, options: SamplingOptions) -> list[int]:
    """Tokens that end a completion: EOS of tokenizer and generation config, and those of ``options``."""
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
    special, nothing = set(ends), [None] * len(tokens)
    finished = [int(ids[-1]) in special for ids in tokens]
    shown = [(ids[:-1] if stopped else ids).tolist() for ids, stopped in zip(tokens, finished, strict=True)]
    texts = tokenizer.batch_decode(shown, **_TEXT)
    oldest = [int(each.min()) for each in versions]
    cuts = [min((at for string in options.stop if (at := text.find(string)) >= 0), default=None) for text in texts]
    return [
        Completion(
            prompt_id=prompt_id,
            token_ids=ids,
            text=text[:cut],
            finish_reason="stop" if cut is not None or stopped else "length",
            logp_sampler=logp,
            weights_version=first,
            entropy_sampler=entropy,
            token_versions=drawn if (drawn != first).any() else None,
            logp_policy=logp_policy if options.filters_distribution else None,
        )
        for prompt_id, ids, logp, text, cut, stopped, drawn, first, entropy, logp_policy in zip(
            prompt_ids,
            tokens,
            logps,
            texts,
            cuts,
            finished,
            versions,
            oldest,
            entropies or nothing,
            logp_policies or nothing,
            strict=True,
        )
    ]

"""Sampling with the trained model itself, in this process: batched decoding with a key-value cache.

Prefill runs once a prompt, at most ``prefill_tokens`` tokens at a time, and the cache is repeated for the prompt's
samples. Finished sequences leave the batch. The random numbers of a completion depend on (seed, prompt id, sample
index) alone, so that it does not depend on the rest of the batch, except through the model's rounding. There is no
continuous batching: no new sequence joins until the whole batch is finished.

The state of a recurrent layer (gated delta net, Mamba, short convolution) is repeated, joined and compacted as keys and
values are. Prompts of different lengths are then prefilled apart, so that no padding enters a state.

Weights that arrive while completions are under way (``updates``) are loaded between two steps of a batch. To recompute
keys and values, prompt and tokens so far are prefilled again, whose rounding differs from decoding's.

In this file R is the number of sequences in the decode batch.
"""

import hashlib
import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedTokenizerBase
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, LinearAttentionLayer

from logitless.errors import InputError, UnavailableError
from logitless.head.contract import on_device
from logitless.models.lm_head import causal_lm
from logitless.models.mixers import RECURRENT, recurrent_mixers
from logitless.models.modes import evaluating, uncompiled
from logitless.models.packed import KINDS
from logitless.rollout.completions import (
    check_batch,
    check_prompts,
    made_completions,
    not_finite,
    stop_ids,
    stop_window,
    with_stop_string,
)
from logitless.rollout.engine import Updates, Weights
from logitless.rollout.sampling import History, SamplingOptions, penalized, sample, sampling_logp
from logitless.types import Completion, Prompt

# Without cuDNN's, which spends milliseconds on a plan for every new length, that is on every step.
_DECODING_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_COMPACT_BELOW = 0.75  # finished sequences are removed when the unfinished ones are less than this share


class TransformersEngine:
    """An ``Engine`` around a transformers causal LM.

    Args:
        model: on its device, PEFT-wrapped or not; in evaluation mode while sampling.
        tokenizer: decodes completions; its EOS token ends them and is the padding token.
        max_rows: completions decoded at once; bounds the cache.
        prefill_tokens: tokens of prompts, padding included, in one forward pass; bounds its activations. A longer
            prompt has a pass of its own.
        autocast: dtype of the products, or None for that of the weights. Log-probabilities are float32 either way.

    Raises:
        UnavailableError: the model has layers whose state is in no cache that can be repeated and compacted.
        InputError: ``max_rows`` or ``prefill_tokens`` below 1.

    Example:
        >>> from tokenizers import Tokenizer, models
        >>> from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
        >>> words = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1, "b": 2}, unk_token="<eos>"))
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")
        >>> engine = TransformersEngine(
        ...     GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=3)), tokenizer)
        >>> completions = engine.sample([Prompt("7", "a b", (1, 2))], 4, SamplingOptions(max_new_tokens=5), seed=0)
        >>> len(completions[0])
        4
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_rows: int = 512,
        prefill_tokens: int = 16384,
        autocast: torch.dtype | None = None,
    ) -> None:
        check_batch(max_rows, prefill_tokens)
        self.tokenizer, self.max_rows, self.prefill_tokens = tokenizer, max_rows, prefill_tokens
        self.autocast = autocast
        self.updates: Updates | None = None
        self.load(Weights.of(model), version=0)

    def clone(self) -> "TransformersEngine":
        """An engine with the same settings and separate state, for another thread."""
        return TransformersEngine(
            self._model,
            self.tokenizer,
            max_rows=self.max_rows,
            prefill_tokens=self.prefill_tokens,
            autocast=self.autocast,
        )

    def load(self, weights: Weights, version: int) -> None:
        """Sample with ``weights.module``, which is not copied: training it changes what is sampled.

        Raises:
            UnavailableError: the model has layers whose state is in no cache that can be repeated and compacted.
        """
        inner: Any = causal_lm(weights.module)
        config = inner.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ())
        mixers = recurrent_mixers(inner)
        unknown = kinds - KINDS if mixers else kinds - (KINDS - RECURRENT)
        if unknown or (getattr(inner, "_is_stateful", False) and not mixers):
            raise UnavailableError(
                needed="layers whose state is in a cache that can be repeated and compacted",
                given=f"{', '.join(sorted(unknown)) or 'state-space layers'} in {config.model_type}",
                remedy="Sample with another engine.",
            )
        self._has_states = bool(mixers)
        self._counts_padding = bool(getattr(config, "attn_temperature_tuning", False))
        self._model, self._config, self._version = inner, config, version
        self._arguments = frozenset(inspect.signature(type(inner).forward).parameters)
        self._switch = _rotary_switch(config)
        self._turns_each_sequence = any(getattr(module, "turns_each_sequence", False) for module in inner.modules())

    def close(self) -> None:
        """Do nothing: the model is the caller's."""

    def sample(
        self, prompts: Sequence[Prompt], num_samples: int, options: SamplingOptions, *, seed: int
    ) -> list[list[Completion]]:
        """Exactly ``num_samples`` completions of each prompt.

        ``logp_sampler`` is float32, of the distribution that was sampled from: after penalties, temperature and
        filters. At temperature 0 it is 0.

        Args:
            prompts: P, with distinct ids.
            num_samples: G.
            options: the same for all.
            seed: the same seed and weights give the same completions.

        Raises:
            InputError: an empty prompt, one whose completion would not fit into the model or would cross the length
                at which longrope changes all angles, or two with one id.
            TrainingError: the model's logits for some prompt are not finite.
        """
        self._check(prompts, num_samples, options)
        by_length = sorted(range(len(prompts)), key=lambda p: len(prompts[p].token_ids))
        rows = [(p, g) for p in by_length for g in range(num_samples)]
        completions: list[list[Completion]] = [[] for _ in prompts]
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(on_device(next(self._model.parameters()).device))
            stack.enter_context(evaluating(self._model))
            stack.enter_context(uncompiled())  # rows and lengths change with every step
            stack.enter_context(sdpa_kernel(_DECODING_KERNELS))
            if self.autocast is not None:
                stack.enter_context(torch.autocast(next(self._model.parameters()).device.type, self.autocast))
            for part in self._batches(rows, prompts, options.max_new_tokens):
                for (p, _), completion in zip(part, self._decode(prompts, part, options, seed), strict=True):
                    completions[p].append(completion)
        return completions

    def _batches(
        self, rows: list[tuple[int, int]], prompts: Sequence[Prompt], most: int
    ) -> Iterator[list[tuple[int, int]]]:
        """Rows that are decoded together: ``max_rows`` of them, of one length where padding would count (Llama 4)."""
        groups = [rows]
        if self._counts_padding:
            groups = [list(of) for _, of in groupby(rows, lambda row: len(prompts[row[0]].token_ids))]
        for group in groups:
            for start in range(0, len(group), self.max_rows):
                yield from self._parts_alike(group[start : start + self.max_rows], prompts, most)

    def _parts_alike(
        self, rows: list[tuple[int, int]], prompts: Sequence[Prompt], most: int
    ) -> Iterator[list[tuple[int, int]]]:
        """Divide rows that updates ask different versions for at some step: a batch takes steps together."""
        (p, g), updates = rows[0], self.updates
        if updates is None or updates.version(prompts[p].id, g, 0) is None:
            yield rows
            return
        part, of_part = list[tuple[int, int]](), list[int | None]()
        for p, g in rows:
            versions = [updates.version(prompts[p].id, g, step) for step in range(most)]
            if part and any(a != b and None not in (a, b) for a, b in zip(versions, of_part, strict=True)):
                yield part
                part = []
            known = of_part if part else versions
            of_part = [b if a is None else a for a, b in zip(known, versions, strict=True)]
            part.append((p, g))
        yield part

    def _check(self, prompts: Sequence[Prompt], num_samples: int, options: SamplingOptions) -> None:
        check_prompts(prompts, num_samples, options, getattr(self._config, "max_position_embeddings", None))
        for prompt in prompts:
            self._check_rotary(prompt, options)

    def _check_rotary(self, prompt: Prompt, options: SamplingOptions) -> None:
        """Refuse a sequence whose rotary factors would change while it grows: cached keys have the old ones."""
        length = len(prompt.token_ids)
        if self._switch is None or length + options.max_new_tokens <= self._switch:
            return
        if length <= self._switch:
            raise InputError(
                needed=f"prompt and completion within {self._switch} tokens, or a prompt beyond them: there longrope"
                " turns from short to long factors, and what training computes for the whole sequence is not what was"
                " sampled",
                given=f"prompt {prompt.id!r} of {length} tokens and {options.max_new_tokens} new",
                remedy="Lower max_new_tokens or drop such prompts.",
            )
        if not self._turns_each_sequence:
            raise InputError(
                needed=f"a model that turns each sequence by its own length, for prompts beyond {self._switch} tokens",
                given=f"prompt {prompt.id!r} of {length} tokens and transformers' longrope, which goes by the longest",
                remedy="Load the model with logitless.models.loading.load_model.",
            )

    def _decode(
        self, prompts: Sequence[Prompt], rows: Sequence[tuple[int, int]], options: SamplingOptions, seed: int
    ) -> list[Completion]:
        """Decode one batch of (prompt, sample) pairs, in which those of a prompt are adjacent."""
        device = next(self._model.parameters()).device
        num_rows, max_new = len(rows), options.max_new_tokens
        uniform = np.stack([_uniforms(seed, prompts[p].id, g, max_new) for p, g in rows])
        noise = torch.from_numpy(uniform).to(device)
        ends = torch.tensor(stop_ids(self.tokenizer, self._model, options), dtype=torch.long, device=device)
        tokens = torch.zeros(num_rows, max_new, dtype=torch.long, device=device)
        logps = torch.zeros(num_rows, max_new, device=device)
        lengths = torch.full((num_rows,), max_new, device=device)
        failed = torch.full((num_rows,), -1, device=device)  # the step at which a row's logits were not finite
        versions = np.zeros(max_new, np.int64)

        def needed(rows_left: Iterable[int], step: int) -> set[int | None]:
            assert self.updates is not None
            return {self.updates.version(prompts[p].id, g, step) for p, g in (rows[i] for i in rows_left)}

        if self.updates is not None and self.updates.due(lambda: needed(range(num_rows), 0)):
            self.updates.load()
        batch, logits = self._prefill_prompts(prompts, rows, options)
        for step in range(max_new):
            versions[step] = self._version
            history = batch.history(step, ends) if options.needs_history else None
            token, logp = _next_token(logits, noise[batch.row, step], options, history)
            tokens[batch.row, step] = token
            logps[batch.row, step] = logp
            without_token = ~logp.isfinite()
            failed[batch.row] = torch.where(without_token & ~batch.ended, step, failed[batch.row])
            ended = torch.isin(token, ends) | without_token
            if options.stop:
                ended |= self._stop_string_came(tokens, step, batch, options.stop)
            newly_ended = ended & ~batch.ended
            lengths[batch.row[newly_ended]] = step + 1
            batch.ended |= newly_ended
            num_unfinished = len(batch.ended) - int(batch.ended.sum())
            if num_unfinished == 0 or step + 1 == max_new:
                break
            if num_unfinished < _COMPACT_BELOW * len(batch.ended):
                token = token[batch.keep_unfinished()]
            batch.add(token)
            if self.updates is not None and self.updates.due(lambda: needed(batch.unfinished, step + 1)):  # noqa: B023
                self.updates.load()
                if self.updates.recompute:
                    of_rows = [prompts[rows[i][0]].token_ids for i in batch.row.tolist()]
                    so_far = tokens[batch.row, : step + 1].cpu().numpy()
                    sequences = [np.concatenate(each) for each in zip(of_rows, so_far, strict=True)]
                    logits = self._prefill_again(batch, sequences, options, max_new - step - 1)
                    continue
            logits = self._advance(batch, token)
        self._check_finite(prompts, rows, failed.tolist())
        cut = lengths.tolist()
        return made_completions(
            self.tokenizer,
            [prompts[p].id for p, _ in rows],
            [row[:length] for row, length in zip(tokens.cpu().numpy(), cut, strict=True)],
            [row[:length] for row, length in zip(logps.cpu().numpy(), cut, strict=True)],
            options=options,
            ends=ends.tolist(),
            versions=[versions[:length] for length in cut],
        )

    def _check_finite(self, prompts: Sequence[Prompt], rows: Sequence[tuple[int, int]], failed: Sequence[int]) -> None:
        """Raise for logits that were not finite; once a batch, so that no step waits for the device."""
        bad = [i for i, step in enumerate(failed) if step >= 0]
        if not bad:
            return
        first = min(bad, key=lambda i: (failed[i], i))
        p, g = rows[first]
        raise not_finite(
            f"{len(bad)} of {len(rows)} completions, first for token {failed[first] + 1} of prompt {prompts[p].id!r}"
            f" (sample {g}), with weights of version {self._version}"
        )

    def _prefill_prompts(
        self, prompts: Sequence[Prompt], rows: Sequence[tuple[int, int]], options: SamplingOptions
    ) -> tuple["_Batch", Float[Tensor, "R V"]]:
        """Prefill all prompts; the batch and the logits of the first new tokens."""
        num_samples = Counter(p for p, _ in rows)
        sequences = [prompts[p].token_ids for p in num_samples]
        return self._prefill_all(sequences, list(num_samples.values()), options, options.max_new_tokens)

    def _prefill_again(
        self, batch: "_Batch", sequences: Sequence[np.ndarray], options: SamplingOptions, new: int
    ) -> Float[Tensor, "R V"]:
        """Recompute a batch's keys and values from all tokens of its sequences; returns the next logits."""
        again, logits = self._prefill_all(sequences, [1] * len(sequences), options, new)
        batch.cache, batch.width, batch.mask, batch.position = again.cache, again.width, again.mask, again.position
        return logits

    def _prefill_all(
        self, sequences: Sequence[np.ndarray], num_samples: Sequence[int], options: SamplingOptions, new: int
    ) -> tuple["_Batch", Float[Tensor, "R V"]]:
        """Prefill sequences of ascending lengths, each for its number of samples with up to ``new`` tokens."""
        lengths = [len(ids) for ids in sequences]
        parts = _parts_within(lengths, self.prefill_tokens, alike=self._has_states)
        read = [self._prefill_part(sequences[part], num_samples[part], options, new) for part in parts]
        batches, logits = [batch for batch, _ in read], [each for _, each in read]
        batch = batches[0] if len(batches) == 1 else _side_by_side(batches, lengths[-1], new)
        batch.row = torch.arange(sum(num_samples), device=batch.row.device)
        return batch, logits[0] if len(logits) == 1 else torch.cat(logits)

    def _prefill_part(
        self, sequences: Sequence[np.ndarray], num_samples: Sequence[int], options: SamplingOptions, new: int
    ) -> tuple["_Batch", Float[Tensor, "R V"]]:
        """Prefill some sequences in one forward pass, and repeat the results for their samples."""
        device = next(self._model.parameters()).device
        ids, attended = _left_padded(sequences, self.tokenizer.eos_token_id, device)
        num_tokens = attended.sum(1)
        cache = self._empty_cache()
        padded = len({len(ids) for ids in sequences}) > 1
        mask = F.pad(attended, (0, new), value=1) if padded else None
        positions = (attended.cumsum(1) - 1).clamp(min=0)
        logits = self._forward(ids, None if mask is None else attended, positions, cache)
        seen = counts = None
        if options.repetition_penalty != 1:
            seen = torch.zeros(logits.shape, device=device).scatter_add_(1, ids, attended.float()) > 0
        if options.presence_penalty != 0 or options.frequency_penalty != 0:
            counts = torch.zeros(logits.shape, dtype=torch.int32, device=device)
        batch = _Batch(
            row=torch.arange(len(sequences), device=device),
            ended=torch.zeros(len(sequences), dtype=torch.bool, device=device),
            position=num_tokens,
            cache=cache,
            width=ids.shape[1],
            mask=mask,
            seen=seen,
            counts=counts,
        )
        index = torch.repeat_interleave(
            torch.arange(len(sequences), device=device), torch.tensor(num_samples, device=device)
        )
        batch.select(index)
        return batch, logits[index]

    def _empty_cache(self) -> Cache:
        """For keys and values of every layer, and for the states of those that have one."""
        if not self._has_states:
            return Cache(layer_class_to_replicate=partial(_GrowingLayer, self.autocast))
        layers: list[Any] = []
        for layer in DynamicCache(config=self._config).layers:
            attends, has_state = isinstance(layer, DynamicLayer), isinstance(layer, LinearAttentionLayer)
            if has_state:
                layers.append(_GrowingStateLayer(self.autocast) if attends else _StateLayer())
            else:
                layers.append(_GrowingLayer(self.autocast))
        return Cache(layers=layers)

    def _advance(self, batch: "_Batch", token: Int[Tensor, "R"]) -> Float[Tensor, "R V"]:
        """Append one token to every row; the logits of the next."""
        batch.width += 1
        mask = None if batch.mask is None else batch.mask[:, : batch.width]
        logits = self._forward(token[:, None], mask, batch.position[:, None], batch.cache)
        batch.position = batch.position + 1
        return logits

    def _forward(
        self,
        ids: Int[Tensor, "R L"],
        mask: Int[Tensor, "R S"] | None,
        positions: Int[Tensor, "R L"],
        cache: Cache,
    ) -> Float[Tensor, "R V"]:
        """float32 logits after the last column."""
        options: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": mask,
            "past_key_values": cache,
            "use_cache": True,
        }
        if "position_ids" in self._arguments:
            options["position_ids"] = positions
        if "logits_to_keep" in self._arguments:
            options["logits_to_keep"] = 1
        return self._model(**options).logits[:, -1].float()

    def _stop_string_came(
        self, tokens: Int[Tensor, "A S"], step: int, batch: "_Batch", stop: Sequence[str]
    ) -> Bool[Tensor, "R"]:
        """Which unfinished sequences contain a stop string; only their last tokens need to be searched."""
        unfinished = (~batch.ended).nonzero()[:, 0]
        ends = tokens[batch.row[unfinished], max(0, step + 1 - stop_window(stop)) : step + 1]
        found = torch.tensor(with_stop_string(self.tokenizer, ends.tolist(), stop), device=tokens.device)
        return torch.zeros_like(batch.ended).index_copy(0, unfinished, found)


@dataclass
class _Batch:
    """The decode batch.

    Args:
        row: [R] index of each sequence in the output.
        ended: [R] finished, and not removed yet.
        position: [R] of the next token.
        cache: keys and values so far.
        width: columns in the cache.
        mask: [R, width + new tokens] 1 for tokens, 0 for padding; None without padding.
        seen: [R, V] whether the sequence has the token; None without a repetition penalty.
        counts: [R, V] how often the token was sampled; None without presence and frequency penalties.
    """

    row: Int[Tensor, "R"]
    ended: Bool[Tensor, "R"]
    position: Int[Tensor, "R"]
    cache: Cache
    width: int
    mask: Int[Tensor, "R W"] | None
    seen: Bool[Tensor, "R V"] | None
    counts: Int[Tensor, "R V"] | None

    def history(self, step: int, ends: Int[Tensor, "E"]) -> History:
        """The history before a step."""
        return History(self.seen, self.counts, torch.full_like(self.row, step), ends)

    @property
    def unfinished(self) -> list[int]:
        """Indices in the output of the sequences that are not finished."""
        return self.row[~self.ended].tolist()

    def add(self, token: Int[Tensor, "R"]) -> None:
        """Add a token of every sequence to the history."""
        if self.seen is not None:
            self.seen.scatter_(1, token[:, None], True)
        if self.counts is not None:
            self.counts.scatter_add_(1, token[:, None], torch.ones_like(token[:, None], dtype=torch.int32))

    def keep_unfinished(self) -> Int[Tensor, "K"]:
        """Remove finished sequences; the indices of those that stay."""
        unfinished = (~self.ended).nonzero()[:, 0]
        self.select(unfinished)
        return unfinished

    def select(self, index: Int[Tensor, "K"]) -> None:
        """Keep these sequences, in this order; an index may repeat."""
        self.row, self.ended, self.position = self.row[index], self.ended[index], self.position[index]
        self.cache.batch_select_indices(index)
        self.mask = None if self.mask is None else self.mask[index]
        self.seen = None if self.seen is None else self.seen[index]
        self.counts = None if self.counts is None else self.counts[index]


def _side_by_side(batches: Sequence[_Batch], width: int, max_new_tokens: int) -> _Batch:
    """Join batches after prefill, each padded on the left to the longest prompt. Their caches are emptied.

    Args:
        batches: after prefill, with nothing sampled.
        width: tokens of the longest prompt.
        max_new_tokens: further columns of the mask.
    """
    rows = [len(batch.row) for batch in batches]
    masks = None
    if any(batch.mask is not None or batch.width < width for batch in batches):
        masks = []
        for batch in batches:
            ones = batch.row.new_ones(len(batch.row), batch.width + max_new_tokens)
            masks.append(F.pad(ones if batch.mask is None else batch.mask, (width - batch.width, 0)))
    cache = batches[0].cache
    for index, layer in enumerate(cache.layers):
        layer.replace([each.cache.layers[index].take() for each in batches], rows, width)  # type: ignore[attr-defined]
    seen = [batch.seen for batch in batches if batch.seen is not None]
    counts = [batch.counts for batch in batches if batch.counts is not None]
    return _Batch(
        row=torch.cat([batch.row for batch in batches]),
        ended=torch.cat([batch.ended for batch in batches]),
        position=torch.cat([batch.position for batch in batches]),
        cache=cache,
        width=width,
        mask=None if masks is None else torch.cat(masks),
        seen=torch.cat(seen) if seen else None,
        counts=torch.cat(counts) if counts else None,
    )


class _GrowingLayer(DynamicLayer):
    """Keys and values of one layer in a buffer with room for more tokens, so that a step copies one column only.

    Args:
        autocast: dtype of the buffer; None for that of the keys. Under autocast rotary embeddings return float32 keys,
            which attention would round to this dtype at every step.
    """

    room = 64

    def __init__(self, autocast: torch.dtype | None = None) -> None:
        super().__init__()
        self._autocast = autocast

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._buffers = [
                x.new_empty(*x.shape[:2], 0, x.shape[3], dtype=self._autocast) for x in (key_states, value_states)
            ]
            self._length = 0
        start, stop = self._length, self._length + key_states.shape[2]
        if stop > self._buffers[0].shape[2]:
            capacity = stop + (self.room if start else 0)
            self._buffers = [self._grown(buffer, capacity) for buffer in self._buffers]
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:stop] = states
        self._length = stop
        return self._view()

    def take(self) -> tuple[Tensor, ...]:
        """Remove and return keys and values."""
        taken = tuple(buffer[:, :, : self._length] for buffer in self._buffers)
        self._buffers, self.keys, self.values = [], *(buffer.new_empty(0) for buffer in taken)
        return taken

    def replace(self, parts: Sequence[tuple[Tensor, ...]], rows: Sequence[int], width: int) -> None:
        """Hold these parts, each at the right end of ``width`` columns; zeros to the left of it, which are masked."""
        self._buffers = []
        for states in zip(*parts, strict=True):
            buffer = states[0].new_zeros(sum(rows), states[0].shape[1], width, states[0].shape[3])
            for at, part in zip(buffer.split(list(rows)), states, strict=True):
                at[:, :, width - part.shape[2] :] = part
            self._buffers.append(buffer)
        self._length = width
        self._view()

    def batch_select_indices(self, indices: Tensor) -> None:
        self._buffers = [buffer.index_select(0, indices) for buffer in self._buffers]
        self._view()

    def _grown(self, buffer: Tensor, capacity: int) -> Tensor:
        grown = buffer.new_empty(*buffer.shape[:2], capacity, buffer.shape[3])
        grown[:, :, : self._length] = buffer[:, :, : self._length]
        return grown

    def _view(self) -> tuple[Tensor, Tensor]:
        self.keys, self.values = (buffer[:, :, : self._length] for buffer in self._buffers)
        return self.keys, self.values


class _StateLayer(LinearAttentionLayer):
    """State and convolution inputs of a recurrent layer, for rows that are repeated and removed.

    They have no columns for tokens: shorter prompts are prefilled apart from longer ones, without padding.
    """

    def _states(self) -> list[dict[int, Tensor | None]]:
        return [self.conv_states, self.recurrent_states]

    def take(self) -> tuple[Tensor, ...]:
        """The states, in a fixed order."""
        return tuple(state for states in self._states() for state in states.values() if state is not None)

    def replace(self, parts: Sequence[tuple[Tensor, ...]], rows: Sequence[int], width: int) -> None:
        """Hold the rows of all parts."""
        del rows, width
        joined = iter(map(torch.cat, zip(*parts, strict=True)))
        for states in self._states():
            states.update({name: next(joined) for name, state in states.items() if state is not None})

    def batch_select_indices(self, indices: Tensor) -> None:
        for states in self._states():
            states.update({name: s.index_select(0, indices) for name, s in states.items() if s is not None})


class _GrowingStateLayer(_StateLayer, _GrowingLayer):
    """A layer with attention and a state (Falcon-H1)."""

    is_compileable = False

    def __init__(self, autocast: torch.dtype | None = None) -> None:
        _GrowingLayer.__init__(self, autocast)
        _StateLayer.__init__(self)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        (_GrowingLayer if args else _StateLayer).lazy_initialization(self, *args, **kwargs)

    def take(self) -> tuple[Tensor, ...]:
        """Keys and values, which leave the layer, then the states."""
        return (*_GrowingLayer.take(self), *_StateLayer.take(self))

    def replace(self, parts: Sequence[tuple[Tensor, ...]], rows: Sequence[int], width: int) -> None:
        """Hold these rows."""
        _GrowingLayer.replace(self, [part[:2] for part in parts], rows, width)
        _StateLayer.replace(self, [part[2:] for part in parts], rows, width)

    def batch_select_indices(self, indices: Tensor) -> None:
        _GrowingLayer.batch_select_indices(self, indices)
        _StateLayer.batch_select_indices(self, indices)


def _next_token(
    logits: Float[Tensor, "R V"],
    uniform: Float[Tensor, "R"],
    options: SamplingOptions,
    history: History | None,
) -> tuple[Int[Tensor, "R"], Float[Tensor, "R"]]:
    """One token a sequence, and its log-probability in the distribution sampled from; NaN if that is not finite."""
    if options.temperature == 0:
        logits = penalized(logits, options, history)
        token = logits.argmax(-1)  # of a NaN, if there is one
        return token, torch.where(logits.gather(1, token[:, None])[:, 0].isfinite(), 0.0, torch.nan)
    logp = sampling_logp(logits, options, history)
    token = sample(logp, uniform)
    return token, logp.gather(1, token[:, None])[:, 0]


def _rotary_switch(config: Any) -> int | None:
    """The sequence length beyond which longrope changes all angles; None for other models."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return parameters.get("original_max_position_embeddings") if parameters.get("rope_type") == "longrope" else None


def _parts_within(lengths: Sequence[int], budget: int, *, alike: bool = False) -> list[slice]:
    """Split ascending lengths into runs of at most ``budget`` tokens each, padding included.

    Args:
        lengths: of prompts.
        budget: in tokens.
        alike: whether all lengths of a run must be equal, so that nothing is padded.
    """
    parts, start = [], 0
    for i, length in enumerate(lengths):
        if i > start and ((i + 1 - start) * length > budget or (alike and length > lengths[start])):
            parts.append(slice(start, i))
            start = i
    return [*parts, slice(start, len(lengths))]


def _uniforms(seed: int, prompt_id: str, sample: int, count: int) -> np.ndarray:
    """Random numbers in [0, 1) that depend on these arguments alone; ``count`` does not change the first ones."""
    key = hashlib.blake2b(f"{seed}/{sample}/{prompt_id}".encode(), digest_size=16).digest()
    raw = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(count)
    return (raw >> np.uint64(32)).astype(np.float64) * 2.0**-32


def _left_padded(
    sequences: Sequence[np.ndarray], padding: int, device: torch.device
) -> tuple[Int[Tensor, "P L"], Int[Tensor, "P L"]]:
    """Token ids and mask, padded on the left."""
    width = max(len(ids) for ids in sequences)
    rows, mask = np.full((len(sequences), width), padding), np.zeros((len(sequences), width), np.int64)
    for row, attended, ids in zip(rows, mask, sequences, strict=True):
        row[width - len(ids) :], attended[width - len(ids) :] = ids, 1
    return torch.from_numpy(rows).to(device), torch.from_numpy(mask).to(device)

"""Sampling on a GPU with the trained model itself, with the bits of its training.

The decoding step reads the live parameters through the layers that training runs (``models/row_invariant.py``), so
nothing is copied or merged after a step of training, and what is sampled is what is trained in every bit. One step is
one CUDA graph for its number of rows: tokens are drawn on the device, and rows that end stop writing there. The host
looks every few steps: it takes out rows that have ended, lets others begin (``schedule.py``) and reads prompts on.

Log-probs come from the head, on the hidden states that were drawn from, once a look for all its steps: the same call
that training makes. With filters, a penalty or temperature 0, tokens are drawn from something else than the model's
softmax; ``logp_sampler`` is of that distribution then, and promises no bits.

It gives up: models whose layers are not covered, an adapter on the LM head, and autocast. On the CPU, under Triton's
interpreter, the same code runs without graphs; that is for tests.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from logitless.errors import InputError, TrainingError, UnavailableError
from logitless.head.api import token_scores, why_not
from logitless.models.attention import AttentionLayout
from logitless.models.decoding import decode_step, prefill
from logitless.models.linear import product
from logitless.models.lm_head import backbone, causal_lm, lm_head
from logitless.models.paged_attention import PAGE, Chunk, DecodeLayout, PagedCache, PrefillLayout, SharedPages
from logitless.models.row_invariant import Installation, install_row_invariant, uncovered
from logitless.rollout.completions import (
    check_prompts,
    evaluating,
    made_completions,
    stop_ids,
    stop_window,
    with_stop_string,
)
from logitless.rollout.drawing import draw_tokens, key_of
from logitless.rollout.engine import Weights
from logitless.rollout.pool import Pool, PromptPages, pages_for, pages_within
from logitless.rollout.sampling import SamplingOptions
from logitless.rollout.schedule import Reading, Row, Schedule
from logitless.types import Completion, LMHead, Prompt

logger = logging.getLogger("logitless")

STEPS = 8
"""Steps of decoding between two looks of the host."""

BUCKETS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Numbers of rows for which there is a graph; rows in between are empty."""


class GpuEngine:
    """An ``Engine`` whose log-probs are those of training, bit for bit.

    Args:
        model: a causal LM whose layers the row-invariant forward pass covers, PEFT-wrapped or not. Where the layers are
            not installed yet, they are here, and ``close`` takes them back.
        tokenizer: decodes completions; its EOS token ends them.
        max_rows: completions decoded at once, at most 2048.
        prefill_tokens: tokens of prompts read between two looks.
        memory: bytes for keys and values while sampling; None takes half of what is free then.

    Raises:
        UnavailableError: there is no Triton, the model has layers that are not covered (it names them), or an adapter
            on its LM head.
        InputError: ``max_rows`` or ``prefill_tokens`` out of range.

    Equals: ``TransformersEngine`` in distribution, not in its tokens: the noise is another.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_rows: int = 512,
        prefill_tokens: int = 16384,
        memory: int | None = None,
    ) -> None:
        if not 1 <= max_rows <= BUCKETS[-1]:
            raise InputError(needed=f"max_rows from 1 to {BUCKETS[-1]}", given=str(max_rows), remedy="Use 512.")
        if prefill_tokens < 1:
            raise InputError(
                needed="prefill_tokens of at least 1", given=str(prefill_tokens), remedy="Use for example 16384."
            )
        self.tokenizer, self.max_rows, self.prefill_tokens, self.memory = tokenizer, max_rows, prefill_tokens, memory
        self._installations: list[Installation] = []
        self._checked: tuple[Any, ...] = ()
        self._kept_bits = True
        self.load(Weights.of(model), version=0)

    def load(self, weights: Weights, version: int) -> None:
        """Sample with ``weights.module``, which is not copied: training it changes what is sampled."""
        model = weights.module
        if not hasattr(backbone(model), "row_invariant"):
            if missing := uncovered(model):
                raise UnavailableError(
                    needed="a model whose layers have one set of bits",
                    given=", ".join(missing),
                    remedy="Sample with rollout.engine: {name: transformers}.",
                )
            if next(model.parameters()).device.type != "meta":
                self._installations.append(install_row_invariant(model))
        self._model, self._version = model, version

    def close(self) -> None:
        """Give the model its own layers back where they were exchanged here."""
        for installation in self._installations:
            installation.remove()
        self._installations = []

    @property
    def exact(self) -> bool:
        """Whether log-probs sampled without filters have the bits that training gives them here."""
        head = lm_head(self._model)
        like = torch.empty(0, head.weight.shape[1], dtype=self._weight.dtype, device=self._weight.device)
        return self._kept_bits and why_not("fused", like, head) is None

    @property
    def _weight(self) -> Tensor:
        decoder: Any = backbone(self._model)
        return decoder.norm.weight

    def sample(
        self, prompts: Sequence[Prompt], num_samples: int, options: SamplingOptions, *, seed: int
    ) -> list[list[Completion]]:
        """Exactly ``num_samples`` completions of each prompt.

        A completion is a function of the weights, its prompt, ``options``, ``seed``, its prompt's id and its number
        among the samples: what else is sampled, in what order and in how much memory, changes no bit of it.

        Args:
            prompts: P, with distinct ids.
            num_samples: G.
            options: the same for all.
            seed: with the same weights, the same completions.

        Raises:
            InputError: an empty prompt, one whose completion would not fit into the model, or two with one id.
            ConfigurationError: the memory does not hold one completion; it names what would fit.
            TrainingError: the model's logits for some prompt are not finite.
        """
        inner: Any = causal_lm(self._model)
        limit = getattr(inner.config.get_text_config(), "max_position_embeddings", None)
        check_prompts(prompts, num_samples, options, limit)
        self._check_model()
        wanted = _Wanted(prompts, num_samples, options, seed, tuple(stop_ids(self.tokenizer, inner, options)))
        rows, tokens = min(self.max_rows, len(prompts) * num_samples), self.prefill_tokens
        with torch.no_grad(), evaluating(self._model), _on(self._weight.device):
            while wanted.unfinished:
                try:
                    _Session(self, wanted, max_rows=rows, read_at_once=tokens).run()
                except torch.OutOfMemoryError as error:
                    if rows == 1:
                        raise
                    rows, tokens = rows // 2, max(1, tokens // 2)
                    logger.warning("sampling ran out of memory (%s): going on with at most %d rows", error, rows)
                if self._weight.is_cuda:
                    torch.cuda.empty_cache()  # the pool and the graphs, for training
        return self._completions(wanted)

    def _check_model(self) -> None:
        """Look at this machine's kernels once for a model, and again when it was moved, resized or cast."""
        if lm_head(self._model).lora_a is not None:
            raise UnavailableError(
                needed="an LM head without an adapter",
                given="LoRA on it",
                remedy="Leave the LM head out of the adapter's targets, or sample with rollout.engine: {name:"
                " transformers}.",
            )
        facts = tuple((p.shape, p.dtype, p.device) for p in self._model.parameters())
        if facts != self._checked and self._weight.is_cuda:
            from logitless.models.self_check import self_check

            self._kept_bits = self_check(self._model).exact
            if not self._kept_bits:
                logger.warning("attention here has not one set of bits: what is sampled will be scored again")
        self._checked = facts

    def _completions(self, wanted: "_Wanted") -> list[list[Completion]]:
        done = [wanted.done[p, g] for p in range(len(wanted.prompts)) for g in range(wanted.num_samples)]
        made = made_completions(
            self.tokenizer,
            [prompt.id for prompt in wanted.prompts for _ in range(wanted.num_samples)],
            [each.tokens for each in done],
            [each.logp for each in done],
            entropies=None if wanted.options.filters_distribution else [each.entropy for each in done],
            options=wanted.options,
            ends=wanted.ends,
            version=self._version,
        )
        count = wanted.num_samples
        return [made[start : start + count] for start in range(0, len(made), count)]


@dataclass
class _Sample:
    """What was drawn of one completion; its scores come when all is drawn.

    Args:
        key: of its randomness.
        tokens: drawn.
        logp, entropy: of each token, where they have been taken to the host.
    """

    key: int
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)


@dataclass
class _Wanted:
    """What a call asks for, and what there is of it.

    Args:
        prompts: of the call.
        num_samples: of each.
        options: of all.
        seed: of the call.
        ends: tokens that end a completion.
        done: finished completions by (prompt, sample).
    """

    prompts: Sequence[Prompt]
    num_samples: int
    options: SamplingOptions
    seed: int
    ends: tuple[int, ...]
    done: dict[tuple[int, int], _Sample] = field(default_factory=dict)

    @property
    def unfinished(self) -> list[list[int]]:
        """Samples of each prompt that are missing; an empty list where none is."""
        left = [[g for g in range(self.num_samples) if (p, g) not in self.done] for p in range(len(self.prompts))]
        return left if any(left) else []


class _State:
    """What the decoding step reads and writes: tensors at fixed addresses, as long as the most rows need.

    ``log`` keeps what happened in the steps since the last look. Position -1 says that a row is empty or has ended.
    """

    def __init__(
        self, rows: int, pages: int, groups: tuple[int, int] | None, width: int, columns: int | None, like: Tensor
    ) -> None:
        def ints(*shape: int, fill: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(shape, fill, dtype=dtype, device=like.device)

        self.token, self.key = ints(rows, dtype=torch.long), ints(rows, dtype=torch.long)
        self.position, self.last = ints(rows, fill=-1), ints(rows)
        self.slot, self.page_table = ints(rows, fill=rows, dtype=torch.long), ints(rows, pages)
        self.row_pages = ints(rows)
        self.members = self.group_pages = None
        if groups is not None:
            self.members, self.group_pages = ints(*groups, fill=-1), ints(groups[0])
        self.step = ints(1, dtype=torch.long)
        self.log = ints(STEPS, 3, rows)  # token, position that it was drawn at, whether there was one to draw
        self.log_hidden = torch.zeros(STEPS, rows, width, dtype=like.dtype, device=like.device)
        self.log_logp = torch.zeros(STEPS, rows, dtype=torch.float32, device=like.device)
        self.seen = None  # [rows + 1, V] by slot; the last is that of empty rows
        if columns is not None:
            self.seen = torch.zeros(rows + 1, columns, dtype=torch.bool, device=like.device)

    def layout(self, rows: int) -> DecodeLayout:
        """Of the first rows."""
        shared = None
        if self.members is not None and self.group_pages is not None:
            shared = SharedPages(self.members, self.group_pages, self.row_pages[:rows])
        return DecodeLayout(self.page_table[:rows], self.position[:rows], shared)


class _Session:
    """One pass over what is missing, in a pool of its own, which is given back at its end."""

    def __init__(self, engine: GpuEngine, wanted: _Wanted, *, max_rows: int, read_at_once: int) -> None:
        self.engine, self.wanted, self.model = engine, wanted, engine._model
        self.options, self.head = wanted.options, lm_head(engine._model)
        like = engine._weight
        self.device, self.graphed = like.device, like.is_cuda
        missing, new = wanted.unfinished, wanted.options.max_new_tokens
        chosen = [p for p, samples in enumerate(missing) if samples]
        self.lengths = [len(prompt.token_ids) for prompt in wanted.prompts]
        decoder: Any = backbone(self.model)
        heads = [layer.row_invariant_form.heads for layer in decoder.layers]
        if len({(h.key, h.width) for h in heads}) > 1:
            raise UnavailableError(
                needed="layers with heads of one shape", given="several", remedy="Sample with the transformers engine."
            )
        row_bytes = 2 * len(heads) * heads[0].key * heads[0].width * like.element_size()
        needs = [PromptPages.of(self.lengths[p], new) for p in chosen]
        num_pages = pages_within(
            _budget(self.device) if engine.memory is None else engine.memory,
            PAGE * row_bytes,
            needs,
            [self.lengths[p] for p in chosen],
            new,
            wanted.num_samples,
            max_rows,
        )
        self.cache = torch.empty(
            len(heads), 2, num_pages * PAGE, heads[0].key, heads[0].width, dtype=like.dtype, device=self.device
        )
        self.caches = [PagedCache(layer[0], layer[1]) for layer in self.cache]
        self.schedule = Schedule(
            self.lengths, missing, max_new_tokens=new, pool=Pool(num_pages), max_rows=max_rows,
            read_at_once=read_at_once,
        )  # fmt: skip
        sharing = wanted.num_samples > 1 and any(need.shared for need in needs)
        groups = (max(1, min(len(chosen), max_rows // 2)), wanted.num_samples) if sharing else None
        columns = self.head.weight.shape[0] if wanted.options.repetition_penalty != 1 else None
        pages = max(pages_for(self.lengths[p] + new - 1) for p in chosen)
        rows = _bucket(max_rows) if self.graphed else max_rows
        self.state = _State(rows, pages, groups, len(like), columns, like)
        self.ends = torch.tensor(wanted.ends, device=self.device)
        self.graphs: dict[int, Callable[[], None]] = {}
        self.graph_memory: Any = None  # one for all: they run in turn, and leave nothing in it
        self.samples: dict[Row, _Sample] = {}
        self.pages = torch.zeros(max_rows, pages, dtype=torch.int32)  # of the rows, by slot
        self.scores: list[tuple[list[_Sample], list[int], Tensor]] = []

    def run(self) -> None:
        """Rounds until nothing is missing; what is finished by then is kept where it stops early."""
        ended: dict[tuple[int, int], _Sample] = {}
        try:
            while self.schedule.unfinished:
                self._read(self.schedule.read())
                for row in self.schedule.begin():
                    self._begin(row)
                rows = self.schedule.rows
                if not rows:
                    continue
                rows.sort(key=lambda row: (row.prompt, row.sample))
                count = _bucket(len(rows)) if self.graphed else len(rows)
                self._place(rows, count)
                step = self._step_for(count)
                for _ in range(STEPS):
                    step()
                for row in self._look(list(rows)):
                    ended[row.prompt, row.sample] = self.samples.pop(row)
                    self.schedule.end(row)
        finally:
            self.graphs.clear()
            self._take_scores()
            self.wanted.done.update(ended)

    def _read(self, readings: Sequence[Reading]) -> None:
        """Chunks of prompts into their pages."""
        if not readings:
            return
        ids = [self.wanted.prompts[r.prompt].token_ids[r.start : r.start + r.length] for r in readings]
        tokens = torch.tensor([token for part in ids for token in part], device=self.device)
        layout = PrefillLayout([Chunk(r.start, r.length, r.pages) for r in readings], self.device)
        prefill(self.model, tokens, layout, self.caches)

    def _begin(self, row: Row) -> None:
        """The page in which the prompt ends into the row's own; what it has seen."""
        self.samples[row] = _Sample(key_of(self.wanted.seed, self.wanted.prompts[row.prompt].id, row.sample))
        self.pages[row.slot, : len(row.pages)] = torch.tensor(row.pages, dtype=torch.int32)
        if row.copy is not None:
            source, target = row.copy
            pages = self.cache.view(*self.cache.shape[:2], -1, PAGE, *self.cache.shape[3:])
            pages[:, :, target] = pages[:, :, source]
        if self.state.seen is not None:
            ids = torch.tensor(self.wanted.prompts[row.prompt].token_ids, device=self.device)
            self.state.seen[row.slot] = False
            self.state.seen[row.slot, ids] = True

    def _place(self, rows: Sequence[Row], count: int) -> None:
        """Rows into the first ``count`` of the state, those of a prompt next to each other, and the rest empty."""
        state, empty = self.state, count - len(rows)
        samples = [self.samples[row] for row in rows]
        lengths = [self.lengths[row.prompt] for row in rows]
        prompts = [self.wanted.prompts[row.prompt] for row in rows]
        shared = [0] * count
        if state.members is not None and state.group_pages is not None:
            shared = self._share(rows, count)
        for tensor, values, rest in (
            (state.token, [(s.tokens or p.token_ids)[-1] for s, p in zip(samples, prompts, strict=True)], 0),
            (state.key, [s.key for s in samples], 0),
            (state.position, [n - 1 + len(s.tokens) for s, n in zip(samples, lengths, strict=True)], -1),
            (state.last, [n + self.options.max_new_tokens - 2 for n in lengths], 0),
            (state.slot, [row.slot for row in rows], len(state.slot)),
            (state.row_pages, shared[: len(rows)], 0),
        ):
            tensor[:count].copy_(torch.tensor([*values, *[rest] * empty], dtype=tensor.dtype))
        state.page_table[: len(rows)].copy_(self.pages[[row.slot for row in rows]])
        state.page_table[len(rows) : count].zero_()
        state.step.zero_()

    def _share(self, rows: Sequence[Row], count: int) -> list[int]:
        """Says which rows read pages together; returns how many pages each does."""
        members: dict[int, list[int]] = {}
        for i, row in enumerate(rows):
            members.setdefault(row.prompt, []).append(i)
        assert self.state.members is not None, "there is sharing"
        assert self.state.group_pages is not None, "there is sharing"
        group_rows = torch.full(self.state.members.shape, -1, dtype=torch.int32)
        group_pages, shared = [0] * len(group_rows), [0] * count
        for g, of in enumerate(of for of in members.values() if len(of) > 1 and rows[of[0]].shared):
            group_rows[g, : len(of)] = torch.tensor(of, dtype=torch.int32)
            group_pages[g] = rows[of[0]].shared
            for i in of:
                shared[i] = group_pages[g]
        self.state.members.copy_(group_rows)
        self.state.group_pages.copy_(torch.tensor(group_pages, dtype=torch.int32))
        return shared

    def _step_for(self, rows: int) -> Callable[[], None]:
        """A step of so many rows: a graph, captured at its first use while all rows are empty; without CUDA a call."""
        if not self.graphed:
            return lambda: self._step(rows)
        if rows not in self.graphs:
            position, token = self.state.position.clone(), self.state.token.clone()
            self.state.position.fill_(-1)
            stream, graph = _side_stream(self.device), torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                self._step(rows)  # compiles what is not compiled yet; empty rows write nothing
                torch.cuda.synchronize()
                graph.capture_begin(self.graph_memory, capture_error_mode="thread_local")
                try:
                    self._step(rows)
                finally:
                    graph.capture_end()
            self.graph_memory = graph.pool()
            self.state.step.zero_()
            self.state.position.copy_(position)
            self.state.token.copy_(token)
            self.graphs[rows] = graph.replay
        return self.graphs[rows]

    def _step(self, rows: int) -> None:
        """One token for each row: hidden states, logits, a draw, and what follows from it, all on the device."""
        state, options = self.state, self.options
        token, position = state.token[:rows], state.position[:rows]
        hidden = decode_step(self.model, token, state.layout(rows), self.caches)
        logits = logits_of(hidden, self.head)
        seen = None if state.seen is None else state.seen[state.slot[:rows]]
        drawn = draw_tokens(logits, state.key[:rows], position, options, seen)
        alive = position >= 0
        entry = torch.stack([drawn.token.int(), position, drawn.finite.int()])
        state.log[:, :, :rows].index_copy_(0, state.step, entry[None])
        state.log_hidden[:, :rows].index_copy_(0, state.step, hidden[None])
        if drawn.logp is not None:
            state.log_logp[:, :rows].index_copy_(0, state.step, drawn.logp[None])
        if state.seen is not None:
            slot = torch.where(alive, state.slot[:rows], len(state.seen) - 1)
            state.seen.view(-1).index_fill_(0, slot * state.seen.shape[1] + drawn.token, True)
        ended = (drawn.token[:, None] == self.ends).any(1) | (position >= state.last[:rows]) | ~drawn.finite
        position.copy_(torch.where(alive & ~ended, position + 1, -1))
        token.copy_(drawn.token)
        state.step.add_(1)

    def _look(self, rows: Sequence[Row]) -> list[Row]:
        """What the last steps drew; returns the rows that have ended."""
        tokens, positions, finite = self.state.log[:, :, : len(rows)].cpu().permute(1, 2, 0)  # [rows, steps] each
        alive = positions >= 0
        samples = [self.samples[row] for row in rows]
        if bool((alive & (finite == 0)).any()):
            faults = (alive & (finite == 0)).nonzero().tolist()
            raise self._fault([(rows[i], len(samples[i].tokens) + step) for i, step in faults], len(rows))
        counts, drawn = alive.sum(1).tolist(), tokens.tolist()
        ended: list[Row] = []
        for i, (row, sample) in enumerate(zip(rows, samples, strict=True)):
            cut = self._cut(sample.tokens, drawn[i][: counts[i]])
            sample.tokens += drawn[i][: counts[i]][: len(drawn[i]) if cut is None else cut]
            counts[i] = counts[i] if cut is None else cut
            if (
                cut is not None
                or len(sample.tokens) == self.options.max_new_tokens
                or sample.tokens[-1] in self.wanted.ends
            ):
                ended.append(row)
        self._score(samples, counts, tokens)
        return ended

    def _cut(self, before: Sequence[int], new: Sequence[int]) -> int | None:
        """New tokens up to the one with which a stop string came, that one included; None where none came."""
        if not self.options.stop:
            return None
        all_of_it, window = [*before, *new], stop_window(self.options.stop)
        stops = range(len(before) + 1, len(all_of_it) + 1)
        came = with_stop_string(
            self.engine.tokenizer, [all_of_it[max(0, stop - window) : stop] for stop in stops], self.options.stop
        )
        return came.index(True) + 1 if True in came else None

    def _score(self, samples: list[_Sample], counts: list[int], tokens: Int[Tensor, "R S"]) -> None:
        """Log-prob and entropy of the first tokens of each row; launched now, taken to the host later."""
        kept = torch.arange(STEPS)[None] < torch.tensor(counts)[:, None]
        row, step = kept.nonzero().T.to(self.device)
        if self.options.filters_distribution:
            logp = self.state.log_logp[step, row]
            self.scores.append((samples, counts, torch.stack([logp, torch.full_like(logp, torch.nan)])))
            return
        target, hidden = tokens[kept].long().to(self.device), self.state.log_hidden[step, row]
        scores = token_scores(hidden, self.head, target, temperature=self.options.temperature)
        self.scores.append((samples, counts, torch.stack([scores.logp, scores.entropy]).float()))

    def _take_scores(self) -> None:
        for samples, counts, scores in self.scores:
            logp, entropy = scores.tolist()
            start = 0
            for sample, count in zip(samples, counts, strict=True):
                sample.logp += logp[start : start + count]
                sample.entropy += entropy[start : start + count]
                start += count
        self.scores = []

    def _fault(self, faults: Sequence[tuple[Row, int]], num_rows: int) -> TrainingError:
        row, number = min(faults, key=lambda fault: (fault[1], fault[0].prompt, fault[0].sample))
        prompt = self.wanted.prompts[row.prompt]
        ids = [*prompt.token_ids, *self.samples[row].tokens]
        where = first_bad_layer(self.model, torch.tensor(ids, device=self.device))
        return TrainingError(
            needed="finite logits to draw tokens from",
            given=f"NaN or infinite ones for {len(faults)} of {num_rows} rows, first for token {number + 1} of prompt"
            f" {prompt.id!r} (sample {row.sample}), with weights of version {self.engine._version}; {where}",
            remedy="Look for weights that are not finite; lower the learning rate, clip gradients, or use bfloat16 or"
            " float32 in place of float16.",
        )


def logits_of(hidden: Float[Tensor, "R D"], head: LMHead) -> Float[Tensor, "R V"]:
    """float32 logits; each row's bits are its own.

    Example:
        >>> logits_of(torch.zeros(0, 4), LMHead(torch.zeros(3, 4))).shape
        torch.Size([0, 3])
    """
    logits = product(hidden, head.weight.to(hidden.dtype), out_dtype=torch.float32)
    if head.bias is not None:
        logits = logits + head.bias.float()
    if head.scale != 1:
        logits = logits * head.scale
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


def first_bad_layer(model: nn.Module, ids: Int[Tensor, "T"]) -> str:
    """The first layer that gives numbers that are not finite for a sequence, in words."""
    decoder: Any = backbone(model)
    found: list[int] = []

    def look(number: int) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if not all(bool(x.isfinite().all()) for x in output if x is not None):
                found.append(number)

        return hook

    handles = [layer.register_forward_hook(look(i)) for i, layer in enumerate(decoder.layers)]
    try:
        positions = torch.arange(len(ids), device=ids.device)
        layout = AttentionLayout.of_sequences([len(ids)], ids.device)
        decoder(input_ids=ids[None], position_ids=positions[None], packed_layout=layout)
    finally:
        for handle in handles:
            handle.remove()
    return f"layer {found[0]} is the first to give them" if found else "the decoder's layers give finite numbers"


def _bucket(rows: int) -> int:
    return next(bucket for bucket in BUCKETS if bucket >= rows)


def _budget(device: torch.device) -> int:
    """Bytes for keys and values where none are named: half of what is free; without CUDA a GiB."""
    if device.type != "cuda":
        return 2**30
    free, _ = torch.cuda.mem_get_info(device)
    return (free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)) // 2


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures: a library keeps a workspace for every stream that it has met."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """Kernels and graphs of this device."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        yield

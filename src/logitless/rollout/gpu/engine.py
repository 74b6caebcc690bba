"""Sampling on a GPU with the trained model itself; log-probs are bitwise identical to training's.

Decoding runs the layers of training (``models/row_invariant/``) on the parameters being trained, so that nothing is
copied or merged after a training step. One step is one CUDA graph for its number of rows (``steps.py``); tokens are
sampled on the device, and finished rows stop writing. A round is ``STEPS`` steps. While the device runs a round, the
host handles the results of the one before: it removes finished rows, starts others (``schedule.py``) and prefills
further prompts.

Log-probs come from the head, called as in training on the hidden states of a whole round. With filters, penalties or
temperature 0, tokens are not sampled from the model's softmax: ``logp_sampler`` is then of the distribution sampled
from, and ``logp_policy`` is bitwise identical to training's.

Weights that arrive while completions are under way (``updates``) are loaded when the device has finished a round, so
that a round's tokens are of one version. Keys and values are recomputed by prefill, whose bits are those of decoding.

Not supported: layers that the row-invariant forward pass does not cover, and autocast. In tests the same code runs on
the CPU, under Triton's interpreter and without graphs.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from logitless.errors import ConfigurationError, TrainingError, UnavailableError
from logitless.head.api import why_not
from logitless.head.contract import on_device
from logitless.models.attention import AttentionLayout
from logitless.models.lm_head import backbone, causal_lm, lm_head
from logitless.models.modes import evaluating, every_parameter
from logitless.models.row_invariant.coverage import uncovered
from logitless.models.row_invariant.delta_net import CHUNK
from logitless.models.row_invariant.layers import Installation, install_row_invariant
from logitless.models.row_invariant.paged_attention import PAGE, Chunk, PrefillLayout
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
from logitless.rollout.gpu.page_pool import Pool, PromptPages, pages_for, pages_within
from logitless.rollout.gpu.schedule import PromptChunk, Row, Schedule
from logitless.rollout.gpu.state_memory import prompt_slots, slot_bytes, slots_for
from logitless.rollout.gpu.steps import (
    BUCKETS,
    MOST_ROWS,
    Begin,
    Log,
    Place,
    Steps,
    TokenSampling,
    bucket,
    facts_of,
    forms_of,
)
from logitless.rollout.gpu.token_sampling import key_of
from logitless.rollout.sampling import SamplingOptions
from logitless.types import Completion, Prompt

logger = logging.getLogger("logitless")


class GpuEngine:
    """An ``Engine`` whose log-probs are bitwise identical to training's.

    Args:
        model: a causal LM whose layers the row-invariant forward pass covers, PEFT-wrapped or not. If its row-invariant
            layers are not installed, this installs them, and ``close`` removes them.
        tokenizer: decodes completions; its EOS token ends them.
        max_rows: completions decoded at once, at most 2048.
        prefill_tokens: prompt tokens to prefill in a round.
        memory: bytes for keys, values and recurrent states while sampling; None takes half of the free memory.

    Raises:
        UnavailableError: Triton is absent, or the model has layers that are not covered (named).
        InputError: ``max_rows`` or ``prefill_tokens`` out of range.

    Equals: ``TransformersEngine`` in distribution; the tokens differ, because the random numbers do.
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
        check_batch(max_rows, prefill_tokens, MOST_ROWS)
        self.tokenizer, self.max_rows, self.prefill_tokens, self.memory = tokenizer, max_rows, prefill_tokens, memory
        self.updates: Updates | None = None
        self._installations: list[Installation] = []
        self._checked: tuple[Any, ...] = ()
        self._kept_bits = True
        self._steps: Steps | None = None
        self.load(Weights.of(model), version=0)

    def load(self, weights: Weights, version: int) -> None:
        """Sample with ``weights.module``, which is not copied: training it changes what is sampled."""
        model = weights.module
        if not hasattr(backbone(model), "row_invariant"):
            if missing := uncovered(model):
                raise UnavailableError(
                    needed="a model that row-invariant layers cover (docs/bits.md)",
                    given=", ".join(missing),
                    remedy="Sample with rollout.engine: {name: transformers}.",
                )
            if next(model.parameters()).device.type != "meta":
                self._installations.append(install_row_invariant(model))
        self._model, self._version = model, version
        if self._steps is not None and self._steps.model is not model:
            self._steps = None

    def close(self) -> None:
        """Restore the model's own layers if this engine replaced them."""
        for installation in self._installations:
            installation.remove()
        self._installations, self._steps = [], None

    @property
    def exact(self) -> bool:
        """Whether log-probs are bitwise identical to training's on this machine."""
        head = lm_head(self._model)
        like = torch.empty(0, head.weight.shape[1], dtype=self._weight.dtype, device=self._weight.device)
        return self._kept_bits and why_not("fused", like, head) is None

    @property
    def _weight(self) -> Tensor:
        decoder: Any = backbone(self._model)
        return decoder.norm.weight

    def sample(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        options: SamplingOptions,
        *,
        seed: int,
        adapters: Sequence[int] = (),
    ) -> list[list[Completion]]:
        """Exactly ``num_samples`` completions of each prompt.

        A completion depends on the weights, its prompt, ``options``, ``seed``, the prompt's id and the sample's number
        alone. It is bitwise identical whatever else is sampled, in any order and with any amount of memory.

        Args:
            prompts: P, with distinct ids; with ``adapters``, among those of one.
            num_samples: G.
            options: the same for all.
            seed: the same seed and weights give the same completions.
            adapters: of each prompt, its place in the stack of the model's row-invariant layers, if they have one.

        Raises:
            InputError: an empty prompt, one whose completion would not fit into the model, or two with one id.
            ConfigurationError: one completion does not fit into the memory; names what would.
            TrainingError: the model's logits for some prompt are not finite.
        """
        inner: Any = causal_lm(self._model)
        limit = getattr(inner.config.get_text_config(), "max_position_embeddings", None)
        places = tuple(adapters) or (0,) * len(prompts)
        for place in dict.fromkeys(places) or (0,):
            own = [prompt for prompt, its in zip(prompts, places, strict=True) if its == place]
            check_prompts(own, num_samples, options, limit)
        ends = tuple(stop_ids(self.tokenizer, inner, options))
        wanted = _Wanted(prompts, num_samples, options, seed, ends, places, self.updates)
        rows, tokens, part = min(self.max_rows, len(prompts) * num_samples), self.prefill_tokens, 1
        with torch.no_grad(), evaluating(self._model), on_device(self._weight.device):
            rows = self._rows_within_memory(rows)
            self._check_model(wanted, rows)
            while any(wanted.unfinished):
                try:
                    _Session(self, wanted, max_rows=rows, prefill_tokens=tokens, part=part).run()
                    continue
                except torch.OutOfMemoryError as error:
                    if rows == 1:
                        raise
                    reason = str(error)
                # Outside of `except`: the error refers to its frames, which keep the session and its graphs alive.
                rows, tokens, part = rows // 2, max(1, tokens // 2), 2 * part
                logger.warning("sampling ran out of memory (%s): going on with at most %d rows", reason, rows)
                self._steps = None
                if self._weight.is_cuda:
                    torch.cuda.empty_cache()
        return [[wanted.done[p, g] for g in range(num_samples)] for p in range(len(prompts))]

    def _steps_for(self, max_rows: int, max_pages: int, group_size: int) -> Steps:
        """The state and graphs of the previous call; new ones if they are too small or the model was moved."""
        wanted = {"max_rows": max_rows, "max_pages": max_pages, "group_size": group_size}
        kept = self._steps
        if kept is None or not kept.serves(**wanted):
            if kept is not None and kept.facts == facts_of(self._model):  # large enough for both calls
                had = {"max_rows": kept.max_rows, "max_pages": kept.max_pages, "group_size": kept.group_size}
                wanted = {name: max(value, had[name]) for name, value in wanted.items()}
            self._steps = kept = None  # frees the old state before the new one is allocated
            self._steps = kept = Steps(self._model, **wanted)
        return kept

    @property
    def _budget(self) -> int:
        """Bytes for keys, values and states."""
        return _budget(self._weight.device) if self.memory is None else self.memory

    def _rows_within_memory(self, rows: int) -> int:
        """At most so many rows, whose recurrent states take at most half of the memory.

        Raises:
            ConfigurationError: there is not enough for one.
        """
        _, forms = forms_of(self._model)
        if not forms:
            return rows
        each, half = slot_bytes(forms, self._weight.dtype), self._budget // 2
        fit = [count for count in BUCKETS if each * slots_for(count) <= half]
        if not fit:
            least = 2 * each * slots_for(1)
            raise ConfigurationError(
                needed=f"{least:,} bytes to sample, half of them for the recurrent states of one completion",
                given=f"a budget of {2 * half:,}",
                remedy=f"Raise rollout.engine.memory to {least}.",
            )
        if self._steps is not None and self._steps.max_rows > fit[-1]:  # of a larger budget: less memory is free now
            self._steps = None
        if fit[-1] < rows:
            logger.warning("recurrent states fit for %d of %d rows at once (rollout.engine.memory)", fit[-1], rows)
        return min(rows, fit[-1])

    def _limit(self, prompt: Prompt, sample: int, options: SamplingOptions) -> int:  # noqa: ARG002
        """The most new tokens of a completion; benchmarks override it to set each one's length."""
        return options.max_new_tokens

    def _check_model(self, wanted: "_Wanted", max_rows: int) -> None:
        """Check this machine's kernels, once for a model and again after it was moved, resized or cast.

        The kernels of the check and of the steps are compiled together.
        """
        facts = tuple((p.shape, p.dtype, p.device) for p in every_parameter(self._model))
        if facts != self._checked and self._weight.is_cuda:
            from logitless.models.row_invariant.self_check import self_check

            steps = self._steps_for(max_rows, wanted.max_pages, wanted.num_samples)
            try:
                steps.open(1)
                beside = steps.launches({bucket(max_rows), 1}, wanted.reaches, wanted.sampling)
                self._kept_bits = self_check(self._model, beside=beside).exact
            finally:
                steps.close()
            if not self._kept_bits:
                logger.warning(
                    "attention, experts or gated delta nets here are not row-invariant: what is sampled will be scored"
                    " again"
                )
        self._checked = facts


@dataclass
class _Wanted:
    """A call of ``sample``: its arguments, and the completions that are finished, by (prompt, sample)."""

    prompts: Sequence[Prompt]
    num_samples: int
    options: SamplingOptions
    seed: int
    ends: tuple[int, ...]
    adapters: tuple[int, ...]
    updates: Updates | None = None
    done: dict[tuple[int, int], Completion] = field(default_factory=dict)

    @property
    def sampling(self) -> TokenSampling:
        """The sampling options that a graph depends on. The host handles lengths and stop strings."""
        options = replace(self.options, max_new_tokens=max(1, self.options.min_new_tokens), stop=())
        return TokenSampling(options, self.ends)

    @property
    def max_pages(self) -> int:
        """Number of pages of the longest completion, its prompt included."""
        return pages_for(max(len(prompt.token_ids) for prompt in self.prompts) + self.options.max_new_tokens - 1)

    @property
    def reaches(self) -> tuple[int, int]:
        """The smallest and largest number of positions that a step attends to."""
        lengths = [len(prompt.token_ids) for prompt in self.prompts]
        return min(lengths) + 1, max(lengths) + self.options.max_new_tokens

    @property
    def unfinished(self) -> list[list[int]]:
        """The missing samples of each prompt."""
        return [[g for g in range(self.num_samples) if (p, g) not in self.done] for p in range(len(self.prompts))]

    def version(self, prompt: int, sample: int, token: int) -> int | None:
        """The version of the weights that must sample a token; None for whichever is loaded."""
        updates = self.updates
        return None if updates is None else updates.version(self.prompts[prompt].id, sample, token)

    @property
    def to_begin(self) -> tuple[int | None, list[list[int]]]:
        """The oldest version that must sample a first token, and the missing samples of each prompt that begin with
        it.
        """
        left = [[(g, self.version(p, g, 0)) for g in samples] for p, samples in enumerate(self.unfinished)]
        first = min((version for of in left for _, version in of if version is not None), default=None)
        return first, [[g for g, version in of if version == first] for of in left]


@dataclass
class _Round:
    """A round on the device: its rows, the version of its weights, and a call that waits for the results."""

    rows: list[Row]
    version: int
    wait: Callable[[], Log]


class _ToPrefill(NamedTuple):
    """Tokens to prefill: a chunk, all tokens of its sequence, and the index of its prompt."""

    tokens: np.ndarray
    chunk: Chunk
    prompt: int


class _Session:
    """Samples all missing completions that begin with one version, with a pool of pages that is freed at the end.

    The host is a round behind: while the device runs a round, the host handles the results of the one before. A
    finished row is therefore empty for up to a round before another takes its place.

    Args:
        engine: that samples.
        wanted: the call.
        max_rows: completions decoded at once.
        prefill_tokens: prompt tokens to prefill in a round.
        part: after running out of memory, allocate the pages of ``part * max_rows`` rows divided by ``part``, but no
            fewer than one completion needs. So half the rows get half the pages, not a quarter.
    """

    def __init__(
        self, engine: GpuEngine, wanted: _Wanted, *, max_rows: int, prefill_tokens: int, part: int = 1
    ) -> None:
        self.engine, self.wanted, self.model = engine, wanted, engine._model
        self.options, self.sampling = wanted.options, wanted.sampling
        (self.first, missing), new = wanted.to_begin, wanted.options.max_new_tokens
        chosen = [p for p, samples in enumerate(missing) if samples]
        self.lengths = [len(prompt.token_ids) for prompt in wanted.prompts]
        lengths = [self.lengths[p] for p in chosen]
        needs = [PromptPages.of(length, new) for length in lengths]
        max_rows = min(max_rows, sum(map(len, missing)))
        steps = engine._steps_for(max_rows, wanted.max_pages, wanted.num_samples)
        self.steps, self.device = steps, steps.device
        num_pages = pages_within(
            engine._budget - steps.state_bytes,
            steps.page_bytes,
            needs,
            lengths,
            new,
            wanted.num_samples,
            max_rows * part,
        )
        self.num_pages = num_pages = max(num_pages // part, *(need.to_begin for need in needs))
        self.schedule = Schedule(
            self.lengths, missing, max_new_tokens=new, pool=Pool(num_pages), max_rows=max_rows,
            prefill_tokens=prefill_tokens, unit=1 if steps.states is None else CHUNK,
            num_states=None if steps.states is None else prompt_slots(steps.max_rows),
        )  # fmt: skip
        self.prefill_tokens = prefill_tokens
        self.placed: Place | None = None
        self.count = 0
        self.ended: set[Row] = set()
        shape = (max_rows, new)
        self.tokens = np.zeros(shape, np.int32)  # this and all below are indexed by slot
        self.versions = np.zeros(shape, np.int64)
        self.scores = [np.zeros(shape, np.float32) for _ in range(3)]  # logp, logp_policy, entropy
        self.sampled, self.launched = np.zeros(max_rows, np.int64), np.zeros(max_rows, np.int64)
        self.limit = np.zeros(max_rows, np.int64)

    def run(self) -> None:
        """Run rounds until nothing is missing; completions finished before an exception are kept."""
        before: _Round | None = None
        try:
            self.steps.open(self.num_pages)
            self.steps.compile(len(self.sampled), self.wanted.reaches, self.sampling)
            while self.schedule.unfinished or before is not None:
                after = self._launch(is_drained=before is None)
                if before is not None:
                    self._take_results(before)
                before = after
        finally:
            self.steps.close()

    def _launch(self, *, is_drained: bool) -> _Round | None:
        """Prefill further chunks, start samples, and launch the next round; before it, load weights that are due.

        Args:
            is_drained: whether the results of all rounds so far were taken.
        """
        if self.wanted.updates is not None and self.wanted.updates.due(self._needed):
            if not is_drained:
                return None
            self._update(self.wanted.updates)
        if self.first in (None, self.engine._version):
            self._prefill_prompts(self.schedule.next_chunks())
            if new := self.schedule.begin():
                self._begin(new)
                self.placed = None  # a slot may have other pages now
        rows = [row for row in self._under_way() if self._version(row) in (None, self.engine._version)]
        if not rows:
            return None
        rows.sort(key=lambda row: (self.wanted.adapters[row.prompt], row.prompt, row.sample))
        self.launched[[row.slot for row in rows]] += self.steps.num_steps
        place = self._place(rows)
        if place != self.placed:
            self.placed, self.count = place, self.steps.place(place)
        return _Round(rows, self.engine._version, self.steps.run(place, self.count, self.sampling))

    def _under_way(self) -> list[Row]:
        return [row for row in self.schedule.rows if self.launched[row.slot] < self.limit[row.slot]]

    def _version(self, row: Row) -> int | None:
        """The version that must sample a row's next round."""
        return self.wanted.version(row.prompt, row.sample, int(self.launched[row.slot]))

    def _needed(self) -> set[int | None]:
        return {self._version(row) for row in self._under_way()} or {self.first}

    def _update(self, updates: Updates) -> None:
        """Load the weights that are due. Prompts of samples that have not started are prefilled again."""
        self.schedule.prefill_again()
        updates.load()
        if not updates.recompute:
            return
        parts, prompts_done = list[_ToPrefill](), set[int]()
        for row in self.schedule.rows:
            prompt, known, start = self.wanted.prompts[row.prompt].token_ids, int(self.sampled[row.slot]), 0
            if self.steps.states is None:  # a state is of the whole sequence, pages are shared
                start = row.shared * PAGE
                if start and row.pages[0] not in prompts_done:
                    prompts_done.add(row.pages[0])
                    parts.append(_ToPrefill(prompt, Chunk(0, start, row.pages), row.prompt))
            length = len(prompt) + known - 1 - start  # the last token is the next step's
            if length > 0:
                ids = np.concatenate([prompt, self.tokens[row.slot, :known]])
                parts.append(_ToPrefill(ids, Chunk(start, length, row.pages, row.slot), row.prompt))
        for part in _parts(parts, max(self.prefill_tokens, CHUNK)):
            self._prefill(part)

    def _prefill_prompts(self, chunks: Sequence[PromptChunk]) -> None:
        """Prefill chunks of prompts into their pages."""
        first = self.steps.max_rows + 1  # slots of prompts are behind those of rows and the empty one
        prompts = self.wanted.prompts
        self._prefill(
            [
                _ToPrefill(prompts[r.prompt].token_ids, Chunk(r.start, r.length, r.pages, first + r.state), r.prompt)
                for r in chunks
            ]
        )

    def _prefill(self, parts: Sequence[_ToPrefill]) -> None:
        """Prefill chunks of sequences."""
        if not parts:
            return
        ids = [tokens[chunk.start : chunk.start + chunk.length] for tokens, chunk, _ in parts]
        adapter = np.repeat([self.wanted.adapters[each.prompt] for each in parts], [len(part) for part in ids])
        tokens, adapters = (torch.from_numpy(each).to(self.device) for each in (np.concatenate(ids), adapter))
        self.steps.prefill(tokens, PrefillLayout([each.chunk for each in parts], self.device), adapters)

    def _begin(self, rows: Sequence[Row]) -> None:
        prompts = self.wanted.prompts
        slots = [row.slot for row in rows]
        self.sampled[slots] = self.launched[slots] = 0
        self.limit[slots] = [self.engine._limit(prompts[row.prompt], row.sample, self.options) for row in rows]
        self.steps.begin(
            [
                Begin(
                    row.slot,
                    int(prompts[row.prompt].token_ids[-1]),
                    self.lengths[row.prompt] - 1,
                    self.lengths[row.prompt] + int(self.limit[row.slot]) - 2,
                    key_of(self.wanted.seed, prompts[row.prompt].id, row.sample),
                    row.pages,
                    row.copy,
                    prompts[row.prompt].token_ids,
                    row.state,
                    self.wanted.adapters[row.prompt],
                )
                for row in rows
            ],
            self.sampling,
        )

    def _place(self, rows: Sequence[Row]) -> Place:
        """The rows' slots, with those of a prompt adjacent, and the pages that they share."""
        slots = tuple(row.slot for row in rows)
        starts = np.array([self.lengths[row.prompt] for row in rows])
        reach = int((starts + np.minimum(self.launched[list(slots)], self.options.max_new_tokens)).max())
        members: dict[int, list[int]] = {}  # by the first page: a prompt may have been read twice
        for i, row in enumerate(rows):
            if row.shared:
                members.setdefault(row.pages[0], []).append(i)
        groups = tuple((tuple(of), rows[of[0]].shared) for of in members.values() if len(of) > 1)
        return Place(slots, self.steps.reach(reach), groups, tuple(self.wanted.adapters[row.prompt] for row in rows))

    def _take_results(self, of: _Round) -> None:
        """Keep the results of a round, and finish rows that have ended."""
        log = of.wait()
        rows = [(i, row) for i, row in enumerate(of.rows) if row not in self.ended]
        if not rows:
            return
        columns, slots = np.array([i for i, _ in rows]), np.array([row.slot for _, row in rows])
        token, flags, *scores = (values.numpy()[:, columns] for values in log)  # [steps, rows]
        alive: np.ndarray = (flags & 1) > 0
        unsound = np.argwhere((flags & 3) == 1).tolist()
        if unsound:
            faults = [(rows[i][1], int(self.sampled[rows[i][1].slot]) + step) for step, i in unsound]
            raise self._fault(faults, len(of.rows), token, rows)
        before = self.sampled[slots]
        for step in range(len(token)):
            on = alive[step]
            where = slots[on], before[on] + step
            for kept, sampled in zip((self.tokens, *self.scores), (token, *scores), strict=True):
                kept[where] = sampled[step, on]
            self.versions[where] = of.version
        self.sampled[slots] = before + alive.sum(0)
        over: np.ndarray = np.bitwise_or.reduce(flags, 0) & 4
        cut = self._cut([row for _, row in rows], before.tolist())
        ended = []
        for i, (_, row) in enumerate(rows):
            if cut[i]:
                self.sampled[row.slot] = cut[i]
            if cut[i] or over[i]:
                ended.append(row)
        self._finish(ended)

    def _finish(self, rows: Sequence[Row]) -> None:
        """Make the completions of rows that have ended; the device is running the next round meanwhile."""
        if not rows:
            return
        wanted, values = self.wanted, list[np.ndarray]([self.tokens, self.versions, *self.scores])
        counts = [int(self.sampled[row.slot]) for row in rows]
        sampled = [[of[row.slot, :count] for row, count in zip(rows, counts, strict=True)] for of in values]
        tokens, versions, logp, logp_policy, entropy = sampled
        greedy = self.options.temperature == 0  # there is no softmax at temperature 0
        made = made_completions(
            self.engine.tokenizer,
            [wanted.prompts[row.prompt].id for row in rows],
            tokens,
            logp,
            logp_policies=None if greedy else logp_policy,
            entropies=None if greedy else entropy,
            options=self.options,
            ends=wanted.ends,
            versions=versions,
        )
        for row, completion in zip(rows, made, strict=True):
            wanted.done[row.prompt, row.sample] = completion
            self.ended.add(row)
            self.schedule.end(row)

    def _cut(self, rows: Sequence[Row], before: Sequence[int]) -> list[int]:
        """The number of tokens up to the one that completes a stop string, inclusive; 0 if no string is complete."""
        cut = [0] * len(rows)
        if not self.options.stop:
            return cut
        window, tokenizer = stop_window(self.options.stop), self.engine.tokenizer

        def text_with_stop(ends: Sequence[tuple[int, int, int]]) -> list[bool]:
            """For (slot, start, stop): whether tokens ``start`` to ``stop`` of a slot complete a stop string."""
            ids = [self.tokens[slot, max(0, start - window) : stop].tolist() for slot, start, stop in ends]
            return with_stop_string(tokenizer, ids, self.options.stop)

        new = [(row.slot, start, int(self.sampled[row.slot])) for row, start in zip(rows, before, strict=True)]
        for i, came in enumerate(text_with_stop(new)):
            if came:
                slot, start, stop = new[i]
                stops = range(start + 1, stop + 1)
                cut[i] = stops[text_with_stop([(slot, at - 1, at) for at in stops]).index(True)]
        return cut

    def _fault(
        self,
        faults: Sequence[tuple[Row, int]],
        num_rows: int,
        token: np.ndarray,
        rows: Sequence[tuple[int, Row]],
    ) -> TrainingError:
        row, number = min(faults, key=lambda fault: (fault[1], fault[0].prompt, fault[0].sample))
        prompt, known = self.wanted.prompts[row.prompt], int(self.sampled[row.slot])
        column = [each for _, each in rows].index(row)
        ids = np.concatenate([prompt.token_ids, self.tokens[row.slot, :known], token[: number - known, column]])
        where = first_bad_layer(self.model, torch.from_numpy(ids).to(self.device))
        return not_finite(
            f"{len(faults)} of {num_rows} rows, first for token {number + 1} of prompt {prompt.id!r} (sample"
            f" {row.sample}), with weights of version {self.engine._version}; {where}"
        )


def _parts(parts: Iterable[_ToPrefill], most: int) -> Iterator[list[_ToPrefill]]:
    """The chunks in parts of at most ``most`` tokens; a chunk may be divided, at a multiple of ``CHUNK``."""
    part, room = list[_ToPrefill](), most
    for whole in parts:
        start, end = whole.chunk.start, whole.chunk.start + whole.chunk.length
        while start < end:
            length = end - start if end - start <= room else room - room % CHUNK
            if length:
                part.append(whole._replace(chunk=whole.chunk._replace(start=start, length=length)))
            start, room = start + length, room - length
            if start < end:
                yield part
                part, room = [], most
    if part:
        yield part


def first_bad_layer(model: nn.Module, ids: Int[Tensor, "T"]) -> str:
    """A message naming the first layer whose output for a sequence is not finite."""
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


def _budget(device: torch.device) -> int:
    """Default bytes for keys, values and recurrent states: half of what this process may still allocate; 1 GiB without
    CUDA."""
    if device.type != "cuda":
        return 2**30
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return (min(free + torch.cuda.memory_reserved(device), allowed) - torch.cuda.memory_allocated(device)) // 2

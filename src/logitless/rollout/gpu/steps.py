"""Decoding steps on the device: their state, and the CUDA graphs that replay them.

While a completion is decoded, its state is in a slot. The rows of a step are the slots that the host named last, so
that a small upload is enough when rows leave and join. There is one graph for each combination of number of rows,
reach and sampling options in use. It is captured at its first use, with every row empty, and kept from call to call
while the memory that it refers to stays in place (for pages ``PageMemory`` ensures that).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from logitless.errors import UnavailableError
from logitless.graph_capture import captured, refuse_unwritten, side_stream
from logitless.head.api import token_scores
from logitless.models.attention import prepare_tables
from logitless.models.kernels.attention_tiles import SPLIT
from logitless.models.kernels.linear import fixed_order_product
from logitless.models.kernels.rows import divided_up, power_of_two
from logitless.models.lm_head import backbone, lm_head
from logitless.models.modes import every_parameter
from logitless.models.row_invariant.adapters import AdapterStack
from logitless.models.row_invariant.decoding import PagedRows, prefill
from logitless.models.row_invariant.delta_net import DecodedStates, DeltaForm, DeltaSlots
from logitless.models.row_invariant.layers import AttentionForm
from logitless.models.row_invariant.linear import _tile_of_any_length, product
from logitless.models.row_invariant.paged_attention import (
    PAGE,
    Chunk,
    DecodeLayout,
    PagedCache,
    PrefillLayout,
    SharedPages,
)
from logitless.rollout.gpu.page_memory import PageMemory
from logitless.rollout.gpu.page_pool import pages_for
from logitless.rollout.gpu.state_memory import StateMemory, slot_bytes, slots_for
from logitless.rollout.gpu.token_sampling import sample_tokens
from logitless.rollout.sampling import History, SamplingOptions
from logitless.transfer import sent
from logitless.types import LMHead

STEPS = 8
"""Decoding steps in a round, between two results for the host."""

BUCKETS: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
BUCKETS += (640, 768, 896, 1024, 1280, 1536, 1792, 2048)
"""Numbers of rows with a graph of their own; other numbers are rounded up with empty rows."""

MOST_ROWS = BUCKETS[-1]

_UNLIKE = (1, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Numbers of rows that together use every variant of the kernels."""

LOGIT_ROWS = 512
"""Rows whose logits are in memory at once."""

ALONE_BELOW = 1056
"""With fewer programs of attention each row reads shared pages by itself: all programs run at once then."""


class Begin(NamedTuple):
    """A completion that starts.

    Args:
        slot: where its state is kept.
        token: the last token of its prompt, with its position.
        position: of ``token``.
        last: position at which its last token is sampled.
        key: of its random numbers.
        pages: from position 0 on.
        copy: (page in which the prompt ends, this completion's copy of it); None if the prompt ends with a page.
        prompt: [L] the prompt's tokens.
        state: slot of the prompt's recurrent state among those of prompts; -1 without one.
        adapter: place in the model's stack of adapters, if it has one.
    """

    slot: int
    token: int
    position: int
    last: int
    key: int
    pages: tuple[int, ...]
    copy: tuple[int, int] | None
    prompt: np.ndarray
    state: int = -1
    adapter: int = 0


class Place(NamedTuple):
    """The slots that are rows of the next steps, and the rows that share pages.

    Args:
        slots: one a row.
        reach: larger than any row's position in these steps.
        groups: (rows, number of leading pages that they share) of each group.
        adapters: place of each row's adapter; rows of one adapter are adjacent.
    """

    slots: tuple[int, ...]
    reach: int
    groups: tuple[tuple[tuple[int, ...], int], ...]
    adapters: tuple[int, ...] = ()


@dataclass(frozen=True)
class TokenSampling:
    """Sampling options, and the tokens that end a completion."""

    options: SamplingOptions
    stop_tokens: tuple[int, ...]


class Log(NamedTuple):
    """The results of a round on the host, [steps, rows] each.

    Args:
        token: sampled tokens.
        flags: see ``kernels.step.end_kernel``.
        logp: in the distribution that was sampled from.
        logp_policy, entropy: of the model's softmax at the temperature; NaN at temperature 0.
    """

    token: Tensor
    flags: Tensor
    logp: Tensor
    logp_policy: Tensor
    entropy: Tensor


class Steps:
    """The state of at most ``max_rows`` completions of a model, and its steps.

    Args:
        model: with row-invariant layers.
        max_rows: completions at once.
        max_pages: of a completion.
        group_size: the most completions that share pages.

    Raises:
        UnavailableError: layers with heads of different shapes.
    """

    def __init__(self, model: nn.Module, *, max_rows: int, max_pages: int, group_size: int) -> None:
        decoder: Any = backbone(model)
        self.model, self.head, weight = model, lm_head(model), decoder.norm.weight
        self.stack: AdapterStack | None = decoder.row_invariant.stack
        self.forms, deltas = forms_of(model)
        if len({(form.heads.key, form.heads.width) for form in self.forms}) > 1 or len(set(deltas)) > 1:
            raise UnavailableError(
                needed="layers with heads of one shape",
                given="several",
                remedy="Sample with rollout.engine: {name: transformers}.",
            )
        self.facts = facts_of(model)
        self.max_rows, self.max_pages, self.group_size = bucket(max_rows), max_pages, group_size
        self.device, self.on_gpu = weight.device, weight.is_cuda
        # sharded layers are gathered by the host, which has to know what the other ranks do
        self.graphed = self.on_gpu and decoder.row_invariant.shards is None
        self.heads, self.layers, self.dtype = self.forms[0].heads, len(self.forms), weight.dtype
        kinds = [layer.row_invariant_kind for layer in decoder.layers]
        self._num_unlike = 1 + max(map(kinds.index, set(kinds)))  # the first so many layers include every kind
        self.memory = PageMemory(2 * self.layers, self.device)
        self.states = StateMemory(deltas, self.dtype, self.max_rows, self.device) if deltas else None
        self._has_states = [isinstance(layer.row_invariant_form, DeltaForm) for layer in decoder.layers]
        self.cache, self.caches = torch.empty(0), list[PagedCache | DeltaSlots]()
        self._graphs: dict[Any, Callable[[], None]] = {}
        self._graph_memory: Any = None  # shared by all graphs: they never run at the same time
        self._held: list[Any] = []  # tensors that graphs refer to
        self._histories: dict[str, Tensor] = {}
        self._ends_of: dict[tuple[int, ...], Tensor] = {}
        self._compiled: set[tuple[Any, ...]] = set()
        rows, width, like = self.max_rows, len(weight), weight

        def ints(*shape: int, fill: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(shape, fill, dtype=dtype, device=self.device)

        # by slot; the last slot is for empty rows
        self.slot_token, self.slot_key = ints(rows + 1, dtype=torch.long), ints(rows + 1, dtype=torch.long)
        self.slot_position, self.slot_last = ints(rows + 1, fill=-1), ints(rows + 1)
        self.slot_pages, self.slot_adapter = ints(rows + 1, max_pages), ints(rows + 1)
        # by row
        self.slot, self.page_table, self.row_pages = ints(rows, fill=rows), ints(rows, max_pages), ints(rows)
        self.token, self.key = ints(rows, dtype=torch.long), ints(rows, dtype=torch.long)
        self.position, self.place_of = ints(rows, fill=-1), ints(rows)
        self.cache_row, self.adapter = ints(rows, dtype=torch.long), ints(rows)
        self.members, self.group_pages = ints(max(1, rows // 2), group_size, fill=-1), ints(max(1, rows // 2))
        # by step of a round
        self.step = ints(1, fill=-1, dtype=torch.long)
        self.log = ints(STEPS, 2, rows)
        self.log_hidden = torch.zeros(STEPS, rows, width, dtype=like.dtype, device=self.device)
        self.log_logp = torch.zeros(STEPS, rows, dtype=torch.float32, device=self.device)
        self._turn = 0
        pin = self.on_gpu
        self._logs = [torch.zeros(STEPS * 2 * rows, dtype=torch.int32, pin_memory=pin) for _ in range(2)]
        self._scores = [torch.zeros(3 * STEPS * rows, dtype=torch.float32, pin_memory=pin) for _ in range(2)]

    @property
    def num_steps(self) -> int:
        return STEPS

    def reach(self, positions: int) -> int:
        """``positions`` rounded up to a number that graphs are made for."""
        return _splits(positions) * SPLIT

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, all layers together."""
        return 2 * self.layers * PAGE * self.heads.key * self.heads.width * self.dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes of all slots of recurrent states."""
        return 0 if self.states is None else slots_for(self.max_rows) * slot_bytes(self.states.forms, self.dtype)

    def serves(self, *, max_rows: int, max_pages: int, group_size: int) -> bool:
        """Whether this state is large enough, and the model was not moved since."""
        room = max_rows <= self.max_rows and max_pages <= self.max_pages and group_size <= self.group_size
        return room and facts_of(self.model) == self.facts

    # --- pages

    def open(self, num_pages: int) -> None:
        """Allocate ``num_pages`` pages and the slots of states, and empty every slot."""
        shape = (num_pages * PAGE, self.heads.key, self.heads.width)
        part = shape[0] * shape[1] * shape[2] * self.dtype.itemsize
        parts = self.memory.open(part).view(self.dtype)
        self.cache = parts.as_strided(
            (self.layers, 2, *shape),
            (2 * parts.stride(0), parts.stride(0), shape[1] * shape[2], shape[2], 1),
        )
        pages = (PagedCache(layer[0], layer[1]) for layer in self.cache)
        if self.states is not None:
            self.states.open()
        slots = iter(() if self.states is None else self.states.slots)
        self.caches = [next(slots) if has_states else next(pages) for has_states in self._has_states]
        self.slot_position.fill_(-1)
        self.step.fill_(-1)

    def close(self) -> None:
        """Free pages and states; graphs stay valid."""
        self.cache, self.caches = torch.empty(0), []
        self.memory.close()
        if self.states is not None:
            self.states.close()

    def compile(self, rows: int, reaches: tuple[int, int], sampling: TokenSampling) -> None:
        """Compile the kernels of steps and of prefill in parallel, once for these arguments; nothing is executed.

        A kernel that is missed here is compiled at its first launch.

        Args:
            rows: the most rows of a step.
            reaches: the smallest and largest number of positions that a step attends to.
            sampling: of the steps.
        """
        key = bucket(rows), *{_splits(reach) for reach in reaches}, sampling
        if not self.on_gpu or key in self._compiled:
            return
        from logitless.models.kernels.compiling import compiled_together  # needs Triton

        self._compiled.add(key)
        launch_all = self.launches({bucket(min(rows, count)) for count in _UNLIKE}, reaches, sampling)
        with compiled_together(self.device):
            launch_all()

    def launches(
        self, counts: Collection[int], reaches: tuple[int, int], sampling: TokenSampling
    ) -> Callable[[], None]:
        """A function that launches every kernel of steps and of prefill, for ``compiled_together``.

        Tensors that are copied from the host or kept for later steps are made here, before it is called.

        Args:
            counts: numbers of rows, from ``BUCKETS``.
            reaches, sampling: see ``compile``.
        """
        from logitless.models.kernels.rotary import MANY  # needs Triton

        splits = sorted({_splits(reach) for reach in reaches})
        prompts = []
        for length in (MANY, MANY + 1):  # an even number of tokens and an odd one
            prompts.append(PrefillLayout([Chunk(0, length, tuple([0] * pages_for(length)))], self.device))
            if self.states is not None:
                prompts[-1].states(self.states.forms[0].taps)
            for form in dict.fromkeys(self.forms):
                prepare_tables(prompts[-1], form, self.dtype)
        backbone(self.model).row_invariant.reach(max(self.max_pages * PAGE, MANY + 1))
        self._stop_tokens(sampling.stop_tokens)
        self._histories_of(sampling.options)
        return partial(self._launch_all, sorted(counts), splits, sampling, prompts)

    def _launch_all(
        self, counts: Sequence[int], splits: Sequence[int], sampling: TokenSampling, prompts: Sequence[PrefillLayout]
    ) -> None:
        for count in counts:
            for size in splits:
                for groups in (0, 1) if self._together(count, size) else (0,):
                    self._step(count, size * SPLIT, groups, sampling, self._num_unlike)
            self._scores_of(self.log[:, 0, :count], count, sampling.options)
        for prompt in prompts:
            self.prefill(torch.zeros_like(prompt.slots), prompt, torch.zeros_like(prompt.slots), self._num_unlike)
        first = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._copy_pages(first, first)
        if self.states is not None:
            self.states.copy(first, first)

    # --- rows

    def prefill(
        self, tokens: Int[Tensor, "T"], layout: PrefillLayout, adapter: Int[Tensor, "T"], num_layers: int | None = None
    ) -> None:
        """Prefill chunks of prompts into their pages; ``adapter`` is each token's place in the stack."""
        own = None if self.stack is None else self.stack.rows(adapter.int())
        prefill(self.model, tokens, layout, self.caches, num_layers=num_layers, adapters=own)

    def begin(self, new: Sequence[Begin], sampling: TokenSampling) -> None:
        """Write the state of completions that start, on the device's stream. No step under way uses their slots."""
        table = torch.tensor([(b.slot, b.token, b.position, b.last, b.key, b.adapter) for b in new])
        pages = torch.zeros(len(new), self.max_pages, dtype=torch.int32)
        for i, b in enumerate(new):
            pages[i, : len(b.pages)] = torch.tensor(b.pages, dtype=torch.int32)
        slot, token, position, last, key, adapter = sent(table, self.device).T
        self.slot_adapter[slot] = adapter.int()
        self.slot_token[slot], self.slot_key[slot] = token, key
        self.slot_position[slot], self.slot_last[slot] = position.int(), last.int()
        self.slot_pages[slot] = sent(pages, self.device)
        if copies := [b.copy for b in new if b.copy is not None]:
            source, target = sent(torch.tensor(copies, dtype=torch.int32), self.device).T.contiguous()
            self._copy_pages(source, target)
        if self.states is not None:  # of their prompts, which are behind those of rows; or the empty one
            states = [(b.state + self.max_rows + 1, b.slot) for b in new]
            source, target = sent(torch.tensor(states, dtype=torch.int32), self.device).T.contiguous()
            self.states.copy(source, target)
        for name, history in self._histories_of(sampling.options).items():
            history[slot] = 0
            if name == "seen":
                for b in new:
                    history[b.slot, sent(torch.tensor(b.prompt), self.device)] = True
            if name == "first":
                history[slot] = position.int()

    def _copy_pages(self, source: Tensor, target: Tensor) -> None:
        from logitless.rollout.gpu.kernels.step import copy_pages  # needs Triton

        copy_pages(self.cache, source, target, page=PAGE)

    def place(self, place: Place) -> int:
        """Assign slots to rows; returns the number of rows of the steps."""
        count, slots, groups = bucket(len(place.slots)), place.slots, place.groups
        empty = count - len(slots)
        row_pages, members = [0] * count, [-1] * (len(groups) * self.group_size)
        for g, (of, shared) in enumerate(groups):
            members[g * self.group_size : g * self.group_size + len(of)] = of
            for row in of:
                row_pages[row] = shared
        group_pages = [shared for _, shared in groups] + [0] * (len(self.group_pages) - len(groups))
        lists = [*slots, *[self.max_rows] * empty], row_pages, group_pages, members
        numbers = sent(torch.tensor([n for each in lists for n in each], dtype=torch.int32), self.device)
        moved = numbers.split([len(each) for each in lists])  # type: ignore[no-untyped-call]
        self.slot[:count], self.row_pages[:count] = moved[:2]
        self.group_pages.copy_(moved[2])
        self.members[: len(groups)] = moved[3].view(-1, self.group_size)
        torch.index_select(self.slot_pages, 0, self.slot[:count], out=self.page_table[:count])
        torch.index_select(self.slot_key, 0, self.slot[:count], out=self.key[:count])
        torch.index_select(self.slot_adapter, 0, self.slot[:count], out=self.adapter[:count])
        return count

    # --- steps

    def run(self, place: Place, rows: int, sampling: TokenSampling) -> Callable[[], Log]:
        """Launch a round on the rows placed last, and its scores; the returned function waits for the results.

        Args:
            place: of the rows.
            rows: the result of ``place``.
            sampling: of the steps.
        """
        step = self._step_for(rows, place, sampling)
        for _ in range(STEPS):
            step()
        return self._results(len(place.slots), sampling.options, place.adapters)

    def _results(self, rows: int, options: SamplingOptions, adapters: Sequence[int]) -> Callable[[], Log]:
        """Launch the scores and the copies to the host, after the steps; returns a function that waits for them."""
        log = self.log[:, :, :rows].contiguous()
        scores = self._scores_of(log[:, 0], rows, options, adapters)
        self._turn = 1 - self._turn
        log_host = self._logs[self._turn][: log.numel()].view(log.shape)
        scores_host = self._scores[self._turn][: scores.numel()].view(3, STEPS, rows)
        log_host.copy_(log, non_blocking=True)
        scores_host.copy_(scores.view(3, STEPS, rows), non_blocking=True)
        done = None
        if self.on_gpu:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()

        def wait() -> Log:
            if done is not None:
                done.synchronize()
            return Log(log_host[:, 0], log_host[:, 1], *scores_host)

        return wait

    def _scores_of(
        self, token: Int[Tensor, "S R"], rows: int, options: SamplingOptions, adapters: Sequence[int] = ()
    ) -> Float[Tensor, "3 S*R"]:
        """Log-probs in the distribution sampled from, log-probs of the policy, entropies of the policy."""
        sampled_from = self.log_logp[:, :rows].flatten()
        policy = torch.full((2, len(sampled_from)), torch.nan, device=self.device)
        if options.temperature > 0:
            parts, start = [], 0
            for place, of_place in groupby(adapters or (0,)):
                stop = start + len(list(of_place)) if adapters else rows
                head = self.head if self.stack is None else self.stack.head_of(place, self.head)
                hidden, own = self.log_hidden[:, start:stop].flatten(0, 1), token[:, start:stop].flatten().long()
                scored = token_scores(hidden, head, own, temperature=options.temperature)
                parts.append(torch.stack([scored.logp, scored.entropy]).float().view(2, STEPS, stop - start))
                start = stop
            policy = torch.cat(parts, 2).flatten(1)
        return torch.cat([sampled_from[None] if options.filters_distribution else policy[:1], policy])

    def _step_for(self, rows: int, place: Place, sampling: TokenSampling) -> Callable[[], None]:
        """A step of ``rows`` rows: a graph, captured at its first use; without CUDA a function."""
        splits = place.reach // SPLIT
        groups = 0
        if place.groups and self._together(rows, splits):
            groups = min(power_of_two(len(place.groups)), len(self.group_pages))

        def step() -> None:
            self._step(rows, splits * SPLIT, groups, sampling)

        if not self.graphed:
            return step
        key = (rows, splits, groups, sampling)
        if key not in self._graphs:
            self._graphs[key] = self._captured(step)
        return self._graphs[key]

    def _together(self, rows: int, splits: int) -> bool:
        """Whether a group's rows read their shared pages together, each page once."""
        return self.group_size > 1 and rows * self.heads.key * splits > ALONE_BELOW

    def _captured(self, step: Callable[[], None]) -> Callable[[], None]:
        position = self.slot_position.clone()
        self.slot_position.fill_(-1)  # with all rows empty a step writes nothing
        main, side, graph = torch.cuda.current_stream(), side_stream(self.device), torch.cuda.CUDAGraph()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            step()  # compiles what is not compiled yet
            side.synchronize()
            with captured(graph, self._graph_memory):
                step()
        main.wait_stream(side)
        self._graph_memory = graph.pool()
        self._hold_tables()
        self.slot_position.copy_(position)
        self.step.fill_(-1)
        return graph.replay

    def _hold_tables(self) -> None:
        """Keep the position tables alive: the model replaces them when training needs longer ones."""
        decoder: Any = backbone(self.model)
        self._held.append(decoder.row_invariant.reach(self.max_pages * PAGE).all)

    def _step(self, rows: int, reach: int, groups: int, sampling: TokenSampling, num_layers: int | None = None) -> None:
        """Sample one token for each row, and update its state, all on the device."""
        from logitless.rollout.gpu.kernels import step as kernels

        decoder: Any = backbone(self.model)
        options, slot = sampling.options, self.slot[:rows]
        token, position, page_table = self.token[:rows], self.position[:rows], self.page_table[:rows]
        kernels.begin(
            slot, self.slot_token, self.slot_position, page_table, token, position, self.place_of[:rows],
            self.cache_row[:rows], self.step, num_steps=STEPS, page=PAGE,
        )  # fmt: skip
        shared = None
        if groups:
            shared = SharedPages(self.members[:groups], self.group_pages[:groups], self.row_pages[:rows])
        tables = decoder.row_invariant.reach(self.max_pages * PAGE)
        layout = DecodeLayout(page_table, position, shared, reach)
        states = None if self.states is None else DecodedStates.of(slot, position)
        adapters = None if self.stack is None else self.stack.rows(self.adapter[:rows])
        paged = PagedRows(self.caches, layout, self.cache_row[:rows], self.place_of[:rows], tables, states, adapters)
        hidden = decoder(input_ids=token, rows=paged, num_layers=num_layers).last_hidden_state
        ends = self._stop_tokens(sampling.stop_tokens)
        histories = self._histories_of(options)
        for start in range(0, rows, LOGIT_ROWS):
            part = slice(start, min(rows, start + LOGIT_ROWS))
            logits = logits_of(hidden[part], self.head, adapters=(self.stack, self.adapter[part]))
            history = None
            if histories:
                own = {name: values[slot[part]] for name, values in histories.items()}
                length = self.position[part] - own["first"] if "first" in own else None
                history = History(own.get("seen"), own.get("counts"), length, ends)
            sampled = sample_tokens(logits, self.key[part], self.position[part], options, history)
            if sampled.logp is not None:
                self.log_logp[:, part].index_copy_(0, self.step, sampled.logp[None])
            if histories:
                self._remember(histories, slot[part], self.position[part], sampled.token)
            kernels.end(
                slot[part], self.slot_token, self.slot_position, self.slot_last, self.position[part], sampled.token,
                sampled.finite, ends, self.step, self.log[:, :, start:], hidden[part], self.log_hidden[:, start:],
            )  # fmt: skip

    def _remember(self, histories: dict[str, Tensor], slot: Tensor, position: Tensor, token: Tensor) -> None:
        """Add the sampled tokens to the histories; empty rows write to the slot for them."""
        at = torch.where(position >= 0, slot, self.max_rows).long()
        if "seen" in histories:
            seen = histories["seen"]
            seen.view(-1).index_fill_(0, at * seen.shape[1] + token, True)
        if "counts" in histories:
            counts = histories["counts"]
            counts.view(-1).index_add_(0, at * counts.shape[1] + token, torch.ones_like(token, dtype=counts.dtype))

    def _histories_of(self, options: SamplingOptions) -> dict[str, Tensor]:
        """The histories that penalties need, by slot; allocated at their first use."""
        columns, rows = self.head.weight.shape[0], self.max_rows + 1
        wanted = {
            "seen": (options.repetition_penalty != 1, (rows, columns), torch.bool),
            "counts": (options.presence_penalty != 0 or options.frequency_penalty != 0, (rows, columns), torch.int32),
            "first": (options.min_new_tokens > 0, (rows,), torch.int32),
        }
        for name, (needed, shape, dtype) in wanted.items():
            if needed and name not in self._histories:
                refuse_unwritten("the history of sampled tokens", self.device)
                self._histories[name] = torch.zeros(shape, dtype=dtype, device=self.device)
        return {name: self._histories[name] for name, (needed, *_) in wanted.items() if needed}

    def _stop_tokens(self, ends: tuple[int, ...]) -> Tensor:
        if ends not in self._ends_of:
            refuse_unwritten("the list of stop tokens", self.device)
            self._ends_of[ends] = torch.tensor(ends, dtype=torch.long).to(self.device)
        return self._ends_of[ends]


def logits_of(
    hidden: Float[Tensor, "R D"], head: LMHead, *, adapters: tuple[AdapterStack | None, Tensor | None] = (None, None)
) -> Float[Tensor, "R V"]:
    """float32 logits, row-invariant; ``adapters`` are a stack and the place in it of each row."""
    logits = product(hidden, head.weight.to(hidden.dtype), out_dtype=torch.float32)
    if head.lora_a is not None and head.lora_b is not None:
        low, tile = product(hidden, head.lora_a.to(hidden.dtype)), _tile_of_any_length(hidden)
        fixed_order_product(low, head.lora_b.to(hidden.dtype), tile, out=logits, add_to_out=head.lora_scale)
    stack, index = adapters
    if stack is not None and index is not None:
        stack.add_to_logits(hidden, index, logits)
    if head.bias is not None:
        logits = logits + head.bias.float()
    if head.scale != 1:
        logits = logits * head.scale
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


def forms_of(model: nn.Module) -> tuple[list[AttentionForm], list[DeltaForm]]:
    """Forms of the layers with attention, and of those with a gated delta net."""
    decoder: Any = backbone(model)
    forms = [layer.row_invariant_form for layer in decoder.layers]
    return (
        [form for form in forms if isinstance(form, AttentionForm)],
        [form for form in forms if isinstance(form, DeltaForm)],
    )


def facts_of(model: nn.Module) -> tuple[Any, ...]:
    """Address, shape, dtype and device of every parameter, and of adapters: graphs are valid while they are equal."""
    decoder: Any = backbone(model)
    stack: AdapterStack | None = decoder.row_invariant.stack
    of_stack = () if stack is None else stack.facts
    return (*((p.data_ptr(), p.shape, p.dtype, p.device) for p in every_parameter(model)), of_stack)


def bucket(rows: int) -> int:
    """The smallest of ``BUCKETS`` that holds so many rows.

    Example:
        >>> bucket(3), bucket(513)
        (4, 640)
    """
    return next(each for each in BUCKETS if each >= rows)


def _splits(reach: int) -> int:
    """Splits of attention for ``reach`` positions, rounded up by at most a third to one of few numbers."""
    splits = divided_up(reach, SPLIT)
    size = 1
    while size < splits:
        if size >= 2 and size + size // 2 >= splits:
            return size + size // 2
        size *= 2
    return size

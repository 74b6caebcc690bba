"""Continuous batching: which prompts to prefill next, which samples to start, and their pages. No tensors.

A round is ``next_chunks`` (to prefill), ``begin`` (samples whose prompt is prefilled and that have room), some decoding
steps, and ``end`` for each finished sample. The longest prompts start first, so that no long one runs alone at the end.

There is no deadlock. A prompt starts only with the pages of a whole first sample, and only if each prompt started
before it could still get the pages of another sample: so each has a sample that can finish. Samples start in order, as
soon as there is room. All pages that a sample may need are reserved when it starts: it is never preempted.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from logitless.rollout.gpu.page_pool import Pool, PromptPages


class PromptChunk(NamedTuple):
    """A chunk of a prompt, to prefill into its pages and its state."""

    prompt: int
    start: int
    length: int
    pages: tuple[int, ...]
    state: int = -1


@dataclass(frozen=True, eq=False)
class Row:
    """A sample that is being decoded.

    Args:
        prompt, sample: their indices.
        slot: a number below ``max_rows`` that no other row has.
        pages: from position 0 on; the first ``shared`` are the prompt's.
        shared: number of pages shared with the prompt's other samples.
        copy: (page in which the prompt ends, this row's copy of it); None if the prompt ends with a page.
        state: slot of the prompt's recurrent state; -1 without one.
    """

    prompt: int
    sample: int
    slot: int
    pages: tuple[int, ...]
    shared: int
    copy: tuple[int, int] | None
    state: int = -1


@dataclass
class _Begun:
    """A prompt that has pages.

    Args:
        prompt: its index.
        need: numbers of pages.
        pages: the prompt's, with the one that it ends in last.
        first: pages reserved for the first sample, until it starts.
        waiting: samples that have not started.
        state: its number among prompts with waiting samples; -1: none.
        prefilled: number of its tokens that are prefilled.
        running: samples being decoded.
    """

    prompt: int
    need: PromptPages
    pages: tuple[int, ...]
    first: tuple[int, ...]
    waiting: deque[int]
    state: int = -1
    prefilled: int = 0
    running: set[int] = field(default_factory=set)


class Schedule:
    """Schedules the samples of one call.

    Args:
        lengths: of the prompts, in tokens.
        samples: numbers of the samples to make of each prompt; may be empty.
        max_new_tokens: of a sample.
        pool: with room for any one sample and its prompt.
        max_rows: samples decoded at once.
        prefill_tokens: prompt tokens to prefill in a round.
        unit: prompts are prefilled in multiples of so many tokens, but to their end; more than ``prefill_tokens`` if it
            is less.
        num_states: prompts that may have a state at once; None: prompts have none.

    Example:
        >>> schedule = Schedule([3], [[0, 1]], max_new_tokens=4, pool=Pool(8), max_rows=1, prefill_tokens=16)
        >>> schedule.next_chunks()
        [PromptChunk(prompt=0, start=0, length=2, pages=(0,), state=-1)]
        >>> [row.sample for row in schedule.begin()], schedule.begin()
        ([0], [])
        >>> schedule.end(schedule.rows[0])
        >>> [row.sample for row in schedule.begin()]
        [1]
    """

    def __init__(
        self, lengths: Sequence[int], samples: Sequence[Sequence[int]], *, max_new_tokens: int, pool: Pool,
        max_rows: int, prefill_tokens: int, unit: int = 1, num_states: int | None = None,
    ) -> None:  # fmt: skip
        self._lengths, self._samples, self._new, self._pool = lengths, list(samples), max_new_tokens, pool
        self._prefill_tokens, self._unit = max(unit, prefill_tokens), unit
        self._states = None if num_states is None else list(range(num_states))[::-1]
        order = sorted((p for p in range(len(lengths)) if samples[p]), key=lambda p: (-lengths[p], p))
        self._waiting = deque(order)
        self._begun: list[_Begun] = []
        self._slots = list(range(max_rows))[::-1]
        self.rows: list[Row] = []

    @property
    def unfinished(self) -> bool:
        """Whether a sample has not finished."""
        return bool(self._waiting or self._begun)

    def next_chunks(self) -> list[PromptChunk]:
        """The next prefill chunks: at most ``prefill_tokens`` tokens, of prompts whose samples will have room."""
        room = self._prefill_tokens
        found: list[PromptChunk] = []
        for begun in self._begun:
            room -= self._next_chunk(begun, room, found)
        while room >= self._unit and self._waiting and self._wanted() and self._states != []:
            prompt = self._waiting[0]
            need = PromptPages.of(self._lengths[prompt], self._new)
            kept = sum(begun.need.own for begun in self._begun if begun.waiting and not begun.first)
            if need.to_begin + kept > self._pool.free:
                break
            pages = self._pool.take(need.to_begin)
            assert pages is not None, "counted above"
            self._waiting.popleft()
            stored = need.shared + need.ends_within
            state = -1 if not self._states or self._lengths[prompt] == 1 else self._states.pop()
            begun = _Begun(prompt, need, pages[:stored], pages[stored:], deque(self._samples[prompt]), state)
            self._begun.append(begun)
            room -= self._next_chunk(begun, room, found)
        return found

    def _next_chunk(self, begun: _Begun, room: int, found: list[PromptChunk]) -> int:
        length = min(room, rest := self._lengths[begun.prompt] - 1 - begun.prefilled)
        if length < rest:
            length -= length % self._unit
        if length > 0:
            found.append(PromptChunk(begun.prompt, begun.prefilled, length, begun.pages, begun.state))
            begun.prefilled += length
        return max(0, length)

    def _wanted(self) -> bool:
        """Whether there are more free rows than waiting samples of started prompts."""
        return sum(len(begun.waiting) for begun in self._begun) < len(self._slots)

    def begin(self) -> list[Row]:
        """The samples that start now; all chunks of their prompts must be prefilled before they run."""
        found: list[Row] = []
        for begun in self._begun:
            if begun.prefilled < self._lengths[begun.prompt] - 1:
                break
            while begun.waiting and self._slots:
                own = begun.first or self._pool.take(begun.need.own)
                if own is None:
                    return found
                begun.first = ()
                found.append(self._row(begun, own))
            if not begun.waiting:  # every sample has its copy
                self._free_state(begun)
        return found

    def prefill_again(self) -> None:
        """Have the prompts of all samples that have not started prefilled again, by other weights."""
        for begun in [each for each in reversed(self._begun) if each.waiting]:
            self._samples[begun.prompt] = list(begun.waiting)
            self._waiting.appendleft(begun.prompt)
            begun.waiting.clear()
            self._pool.give_back(begun.first)
            begun.first = ()
            self._free_state(begun)
            if not begun.running:
                self._pool.give_back(begun.pages)
                self._begun.remove(begun)

    def _free_state(self, begun: _Begun) -> None:
        if begun.state >= 0:
            assert self._states is not None
            self._states.append(begun.state)
            begun.state = -1

    def _row(self, begun: _Begun, own: tuple[int, ...]) -> Row:
        shared = begun.need.shared
        row = Row(
            begun.prompt,
            begun.waiting.popleft(),
            self._slots.pop(),
            begun.pages[:shared] + own,
            shared,
            (begun.pages[shared], own[0]) if begun.need.ends_within else None,
            begun.state,
        )
        begun.running.add(row.sample)
        self.rows.append(row)
        return row

    def end(self, row: Row) -> None:
        """Free a finished sample's slot and pages, and its prompt's pages after the last sample."""
        self.rows.remove(row)
        self._slots.append(row.slot)
        self._pool.give_back(row.pages[row.shared :])
        begun = next(each for each in self._begun if each.prompt == row.prompt and row.sample in each.running)
        begun.running.remove(row.sample)
        if not begun.running and not begun.waiting:
            self._pool.give_back(begun.pages)
            self._begun.remove(begun)

"""Continuous batching: which prompts are read next, which samples begin, whose pages they get. Lists and numbers only.

A round is ``read`` (a chunk of prompts), ``begin`` (samples whose prompt is read and for which there is room), some
steps of decoding, and ``end`` for each sample that is finished. Prompts wait in the order of their cost, the longest
first, so that none of the longest is left to run alone at the end.

Nobody waits for ever. A prompt is begun only with the pages of a whole first sample, and only where every prompt begun
before it could still have those of another: so each has a sample that can run to its end. Samples begin in order, each
as soon as there is room. What one may need at most is reserved for it when it begins: it never has to be stopped.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from logitless.rollout.gpu.page_pool import Pool, PromptPages


class Reading(NamedTuple):
    """Some tokens of a prompt, to be read into its pages."""

    prompt: int
    start: int
    length: int
    pages: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Row:
    """A sample that is being decoded.

    Args:
        prompt, sample: which.
        slot: a number below ``max_rows`` that no other row has.
        pages: from position 0 on; the first ``shared`` are the prompt's.
        shared: how many are.
        copy: the page in which the prompt ends and the row's own that takes its place; None where it ends with a page.
    """

    prompt: int
    sample: int
    slot: int
    pages: tuple[int, ...]
    shared: int
    copy: tuple[int, int] | None


@dataclass
class _Begun:
    """A prompt that has pages.

    Args:
        prompt: which.
        need: pages.
        pages: the prompt's, the one that it ends in last.
        first: pages of the first sample, until it has them.
        waiting: samples that have not begun.
        read: tokens read.
        running: samples being decoded.
    """

    prompt: int
    need: PromptPages
    pages: tuple[int, ...]
    first: tuple[int, ...]
    waiting: deque[int]
    read: int = 0
    running: set[int] = field(default_factory=set)


class Schedule:
    """Of the samples of one call.

    Args:
        lengths: of the prompts, in tokens.
        samples: those of each prompt that are wanted; a prompt may have none.
        max_new_tokens: of a sample.
        pool: with room for any one sample and its prompt.
        max_rows: samples at once.
        read_at_once: tokens of prompts a round.

    Example:
        >>> schedule = Schedule([3], [[0, 1]], max_new_tokens=4, pool=Pool(8), max_rows=1, read_at_once=16)
        >>> schedule.read()
        [Reading(prompt=0, start=0, length=2, pages=(0,))]
        >>> [row.sample for row in schedule.begin()], schedule.begin()
        ([0], [])
        >>> schedule.end(schedule.rows[0])
        >>> [row.sample for row in schedule.begin()]
        [1]
    """

    def __init__(
        self, lengths: Sequence[int], samples: Sequence[Sequence[int]], *, max_new_tokens: int, pool: Pool,
        max_rows: int, read_at_once: int,
    ) -> None:  # fmt: skip
        self._lengths, self._samples, self._new, self._pool = lengths, samples, max_new_tokens, pool
        self._read_at_once = read_at_once
        order = sorted((p for p in range(len(lengths)) if samples[p]), key=lambda p: (-lengths[p], p))
        self._waiting = deque(order)
        self._begun: list[_Begun] = []
        self._slots = list(range(max_rows))[::-1]
        self.rows: list[Row] = []

    @property
    def unfinished(self) -> bool:
        """Whether there is a sample that has not ended."""
        return bool(self._waiting or self._begun)

    def read(self) -> list[Reading]:
        """The next chunks, at most ``read_at_once`` tokens of as many prompts as there will be room for."""
        room = self._read_at_once
        found: list[Reading] = []
        for begun in self._begun:
            room -= self._read(begun, room, found)
        while room and self._waiting and self._wanted():
            prompt = self._waiting[0]
            need = PromptPages.of(self._lengths[prompt], self._new)
            kept = sum(begun.need.own for begun in self._begun if begun.waiting and not begun.first)
            if need.to_begin + kept > self._pool.free:
                break
            pages = self._pool.take(need.to_begin)
            assert pages is not None, "counted above"
            self._waiting.popleft()
            stored = need.shared + need.ends_within
            begun = _Begun(prompt, need, pages[:stored], pages[stored:], deque(self._samples[prompt]))
            self._begun.append(begun)
            room -= self._read(begun, room, found)
        return found

    def _read(self, begun: _Begun, room: int, found: list[Reading]) -> int:
        length = min(room, self._lengths[begun.prompt] - 1 - begun.read)
        if length > 0:
            found.append(Reading(begun.prompt, begun.read, length, begun.pages))
            begun.read += length
        return max(0, length)

    def _wanted(self) -> bool:
        """Whether samples that wait leave rows for more."""
        return sum(len(begun.waiting) for begun in self._begun) < len(self._slots)

    def begin(self) -> list[Row]:
        """Samples that begin now; what their prompts' last chunks hold must be in the pages by then."""
        found: list[Row] = []
        for begun in self._begun:
            if begun.read < self._lengths[begun.prompt] - 1:
                break
            while begun.waiting and self._slots:
                own = begun.first or self._pool.take(begun.need.own)
                if own is None:
                    return found
                begun.first = ()
                found.append(self._row(begun, own))
        return found

    def _row(self, begun: _Begun, own: tuple[int, ...]) -> Row:
        shared = begun.need.shared
        row = Row(
            begun.prompt,
            begun.waiting.popleft(),
            self._slots.pop(),
            begun.pages[:shared] + own,
            shared,
            (begun.pages[shared], own[0]) if begun.need.ends_within else None,
        )
        begun.running.add(row.sample)
        self.rows.append(row)
        return row

    def end(self, row: Row) -> None:
        """A sample is finished: its pages and its slot are free, and its prompt's once no sample needs them."""
        self.rows.remove(row)
        self._slots.append(row.slot)
        self._pool.give_back(row.pages[row.shared :])
        begun = next(each for each in self._begun if each.prompt == row.prompt)
        begun.running.remove(row.sample)
        if not begun.running and not begun.waiting:
            self._pool.give_back(begun.pages)
            self._begun.remove(begun)

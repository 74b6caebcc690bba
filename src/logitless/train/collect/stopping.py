"""A signal to one of several ranks ends sampling on all of them, between two decoding steps.

A rank that ended alone would leave the others in their next collective. So a rank that was told to stop says so in a
counter of the ranks' store, at which all of them look between two steps, and what each has sampled is discarded where
they exchange their completions (``GroupSampler``). Only a rank that samples looks: a signal to one that has finished
its share is heard where they exchange. Other engines, such as servers, sample to their end, and so do harnesses, whose
calls come from a thread of their own.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from signal import Signals

from logitless.distributed.ranks import Ranks
from logitless.rollout.engine import Engine, InFlightEngine

STOPPED = "sampling/stopped"
"""Counter: ranks that were told to stop while all sampled."""

LOOK_SECONDS = 0.5
"""Between two looks of a rank at ``STOPPED``."""


class StoppedTogether(KeyboardInterrupt):
    """Some rank was told to stop: all ranks raise this, and discard what they have sampled."""


@contextmanager
def stopping_together(engines: Iterable[Engine], ranks: Ranks, signal: Callable[[], Signals | None]) -> Iterator[None]:
    """Inside, a signal to any rank that samples ends the engines' calls on all. A collective at its beginning.

    Args:
        engines: of this rank; those that can look between two steps do.
        ranks: several.
        signal: that this rank got; None so far.

    Raises:
        StoppedTogether: a rank has got one before.
    """
    before = ranks.count(STOPPED)  # an earlier run of this process may have left some
    if number := next((each for each in ranks.all_gather_object(signal()) if each is not None), None):
        raise StoppedTogether(number)
    looking = [engine for engine in engines if isinstance(engine, InFlightEngine)]
    try:
        for engine in looking:
            engine.updates = _Looking(ranks, signal, before)
        yield
    finally:
        for engine in looking:
            engine.updates = None


class _Looking:
    """``Updates`` that never bring weights, and end the call once a rank was told to stop.

    Args:
        ranks, signal: of ``stopping_together``.
        before: of ``STOPPED``, before any rank could add to it.
    """

    recompute = False

    def __init__(self, ranks: Ranks, signal: Callable[[], Signals | None], before: int) -> None:
        self._ranks, self._signal, self._before, self._next_look = ranks, signal, before, 0.0

    def version(self, prompt_id: str, sample: int, token: int) -> None:
        """Whichever is loaded."""

    def due(self, needed: Callable[[], Collection[int | None]]) -> bool:  # noqa: ARG002 - no weights are awaited
        """False.

        Raises:
            StoppedTogether: some rank was told to stop.
        """
        told = self._signal() is not None
        if told or time.monotonic() >= self._next_look:
            if self._ranks.count(STOPPED, int(told)) > self._before:
                raise StoppedTogether
            self._next_look = time.monotonic() + LOOK_SECONDS
        return False

    def load(self) -> None:
        """Nothing is ever due."""

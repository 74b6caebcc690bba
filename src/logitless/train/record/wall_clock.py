"""Seconds of a run by phase, from the start of its process to its end; each second belongs to one phase."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

UNNAMED = "unnamed"
COMPILATION = "compilation"


class WallClock:
    """Seconds by phase. They add up to the time since the clock was made, plus ``imports``.

    A second belongs to the innermost open phase, or to ``compilation`` if kernels were being compiled; outside of every
    phase it belongs to ``unnamed``, or to the phase that ``outside`` names. One thread opens phases; any thread may
    report compilations.

    Args:
        imports: seconds from the start of the process until now.

    Example:
        >>> now = iter([0.0, 1.0, 3.0, 7.0, 8.0, 9.0])
        >>> clock = WallClock(imports=4.0, clock=lambda: next(now))
        >>> with clock.phase("training"):
        ...     with clock.phase("checkpoint"):
        ...         pass
        >>> clock.seconds()
        {'imports': 4.0, 'training': 3.0, 'checkpoint': 4.0, 'unnamed': 2.0}
    """

    def __init__(self, imports: float = 0.0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._seconds = {"imports": imports} if imports else {}
        self._phases, self._outside = list[str](), UNNAMED
        self._compiled: list[tuple[float, float]] = []
        self._last = clock()

    @classmethod
    def of_process(cls) -> "WallClock":
        """A clock that began with this process; the seconds until now are ``imports``."""
        return cls(imports=_seconds_of_process())

    @contextmanager
    def phase(self, name: str) -> Iterator[list[float]]:
        """Inside, seconds belong to this phase; the list holds their number afterwards."""
        self._charge()
        before, spent = self._seconds.setdefault(name, 0.0), [0.0]
        self._phases.append(name)
        try:
            yield spent
        finally:
            self._charge()
            self._phases.pop()
            spent[0] = self._seconds[name] - before

    def outside(self, name: str) -> None:
        """From now on, seconds outside of every phase belong to this one."""
        self._charge()
        self._outside = name

    def compiled(self, seconds: float) -> None:
        """Report a compilation that has just ended; overlapping ones count once."""
        with self._lock:
            now = self._clock()
            self._compiled.append((now - seconds, now))

    def seconds(self) -> dict[str, float]:
        """Seconds by phase; ``unnamed`` comes last.

        Those before a resume are included, up to the earlier process's summary, or its last checkpoint if it was
        killed; what is sampled or trained again counts each time.
        """
        self._charge()
        return {name: self._seconds[name] for name in sorted(self._seconds, key=UNNAMED.__eq__)}

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add seconds, for example those before a resume."""
        for name, value in seconds.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + value

    def _charge(self) -> None:
        """Assign the seconds since the last call to compilations and to the current phase."""
        with self._lock:
            now, compiled, self._compiled = self._clock(), sorted(self._compiled), []
        compiling, reached = 0.0, self._last
        for begin, end in compiled:
            compiling += max(0.0, end - max(begin, reached))
            reached = max(reached, end)
        if compiling:
            self.add({COMPILATION: compiling})
        self.add({self._phases[-1] if self._phases else self._outside: now - self._last - compiling})
        self._last = now


def _seconds_of_process() -> float:
    """Seconds since this process began; its processor time where the system does not tell."""
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began = int(after_name[19]) / os.sysconf("SC_CLK_TCK")  # the 22nd field: ticks after the machine's start
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, ValueError, IndexError, AttributeError):
        return time.process_time()


@contextmanager
def compilations_counted(clock: WallClock) -> Iterator[None]:
    """Inside, the clock counts the seconds that Triton and torch.compile compile."""
    from torch._dynamo.callback import callback_handler

    begun: list[float] = []

    def begin(*_: Any) -> None:
        begun.append(time.perf_counter())

    def end(*_: Any) -> None:
        if begun:  # empty for a compilation that began before the callbacks were registered
            clock.compiled(time.perf_counter() - begun.pop())

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
    try:
        with _triton_counted(clock):
            yield
    finally:
        callback_handler.remove_start_callback(begin)
        callback_handler.remove_end_callback(end)


@contextmanager
def _triton_counted(clock: WallClock) -> Iterator[None]:
    try:
        from triton import knobs
    except ImportError:
        yield
        return
    other = knobs.compilation.listener

    def listen(*, times: Any, **rest: Any) -> None:
        clock.compiled(times.total / 1e6)
        if other is not None:
            other(times=times, **rest)

    knobs.compilation.listener = listen
    try:
        yield
    finally:
        knobs.compilation.listener = other

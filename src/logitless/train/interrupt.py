"""Ctrl-C, SIGTERM and SIGHUP stop a run after the current step, or at once where nothing would be lost.

Schedulers and preempted machines send SIGTERM, a closed terminal SIGHUP. A process that ignores SIGHUP (``nohup``)
keeps ignoring it.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from logitless.distributed.ranks import restores_sigterm

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt:
    """Whether a stop was asked for.

    Args:
        say: called with a message when a stop is requested.

    Attributes:
        requested: True from the first signal on. A second Ctrl-C raises ``KeyboardInterrupt``; schedulers repeat
            SIGTERM, which changes nothing.
        signal: the first signal, or None.

    Example:
        >>> interrupt = Interrupt(print)
        >>> with interrupt.heard():
        ...     signal.raise_signal(signal.SIGINT)
        SIGINT: stopping after this step; Ctrl-C again stops at once without saving
        >>> interrupt.requested
        True
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.requested = False
        self.signal: signal.Signals | None = None
        self._say, self._at_once = say, False

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Inside, signals request a stop. Outside the main thread, where no handlers can be set, nothing changes.

        An error among several ranks leaves SIGTERM ignored, until ``ranks_of_environment`` ends: torchrun sends it once
        a rank has ended, and this one must still say which one is lost.
        """
        previous: dict[signal.Signals, Any] = {}
        try:
            for number in _SIGNALS:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    previous[number] = signal.signal(number, self._note)
        except ValueError:
            yield
            return
        try:
            yield
        except Exception:
            if restores_sigterm():
                previous[signal.SIGTERM] = signal.SIG_IGN
            raise
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, the first signal raises ``KeyboardInterrupt``, with its number: for work that can be discarded."""
        self._at_once = True
        try:
            if self.requested:  # just before
                raise KeyboardInterrupt(self.signal)
            yield
        finally:
            self._at_once = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        first, self.requested = not self.requested, True
        if first:
            self.signal = signal.Signals(number)
        if self._at_once or (number == signal.SIGINT and not first):
            self._at_once = False  # a further signal must not interrupt the cleanup
            raise KeyboardInterrupt(number)
        if first:
            words = (
                f"{signal.Signals(number).name}: stopping after this step; Ctrl-C again stops at once without saving"
            )
            try:
                self._say(words)
            except RuntimeError:  # the signal came while a line was printed: Python's streams are not reentrant
                with suppress(OSError):  # the terminal may be gone
                    os.write(2, f"{words}\n".encode())

"""Ctrl-C as a request: heard at the next step, or at once where nothing would be lost."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Whether a stop was asked for.

    Args:
        say: told that the request was heard.

    Attributes:
        requested: True from the first Ctrl-C on; a second one raises ``KeyboardInterrupt``.

    Example:
        >>> interrupt = Interrupt(print)
        >>> with interrupt.heard():
        ...     signal.raise_signal(signal.SIGINT)
        stopping after this step; Ctrl-C again stops at once without saving
        >>> interrupt.requested
        True
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.requested = False
        self._say, self._at_once = say, False

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Inside, Ctrl-C is a request. Outside the main thread whoever owns it handles Ctrl-C."""
        try:
            previous = signal.signal(signal.SIGINT, self._note)
        except ValueError:
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, the first Ctrl-C raises ``KeyboardInterrupt``: for work that can be given up."""
        self._at_once = True
        try:
            yield
        except KeyboardInterrupt:
            self.requested = True
            raise
        finally:
            self._at_once = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self._at_once or self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._say("stopping after this step; Ctrl-C again stops at once without saving")

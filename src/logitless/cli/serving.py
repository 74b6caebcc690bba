"""What the commands that serve have in common."""

import argparse
import os
import signal
import sys
import threading
from types import FrameType


def add_port(parser: argparse.ArgumentParser, default: int) -> None:
    """``--port N``."""
    parser.add_argument(
        "--port", type=int, default=default, help=f"on 127.0.0.1; 0 takes a free one (default {default})"
    )


def wait_for_end(*, then_at_once: bool = False) -> None:
    """Wait for Ctrl-C or SIGTERM, which then ends the process as Ctrl-C does: clients that wait are answered first.

    Schedulers repeat SIGTERM, which changes nothing.

    Args:
        then_at_once: whether a Ctrl-C after that ends the process without waiting for anything, for a command whose
            files are whole at any time.
    """

    def end(number: int, frame: FrameType | None) -> None:
        del frame
        signal.signal(signal.SIGTERM, lambda *_: None)
        if then_at_once:
            # Not by an exception: a thread that Python's end finds in C++ would abort the process.
            signal.signal(signal.SIGINT, lambda number, _: os._exit(128 + number))
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as in a job in the background, which keeps ignoring it
        signal.signal(signal.SIGINT, end)
    threading.Event().wait()

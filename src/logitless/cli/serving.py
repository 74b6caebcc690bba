"""What the commands that serve have in common."""

import argparse
import signal
import sys
import threading


def add_port(parser: argparse.ArgumentParser, default: int) -> None:
    """``--port N``."""
    parser.add_argument(
        "--port", type=int, default=default, help=f"on 127.0.0.1; 0 takes a free one (default {default})"
    )


def wait_for_end() -> None:
    """Wait for Ctrl-C or SIGTERM, which then ends the process as Ctrl-C does: clients that wait are answered first."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    threading.Event().wait()

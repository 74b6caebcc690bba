"""A search for races: each test once more for every line that it runs in the files named, with a pause at that line.

    python -m pytest -p tests.races --races rollout/vllm/server.py,concurrent/futures tests/rollout/vllm/test_server.py

A test whose outcome depends on which of two threads is first fails where one of them stops long enough. Each thread
pauses the first two times that it comes by. What fails is reported with its line; what hangs ends with all stacks, and
``-v`` shows where. It takes the pause and the test's own time a line: choose few files, and tests by ``-k``. Files of
Python's own library may be named too (``concurrent/futures``, ``http/client``, ``threading.py``).
"""

import faulthandler
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

Place = tuple[str, int]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("races")
    group.addoption("--races", help="parts of paths, with commas between: pause at the lines of these files")
    group.addoption("--race-seconds", type=float, default=0.4, help="how long a thread pauses")
    group.addoption("--race-hang", type=float, default=300.0, help="seconds after which one run of a test has hung")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("races"):
        config.pluginmanager.register(Races(config))


class Races:
    """Runs each test again and again."""

    def __init__(self, config: pytest.Config) -> None:
        self._files = tuple(config.getoption("races").split(","))
        self._seconds, self._hang = config.getoption("race_seconds"), config.getoption("race_hang")
        self._visited: dict[Place, None] | None = None  # in order, while lines are looked for
        self._pause_at: Place | None = None
        self._pauses: Counter[int] = Counter()  # by thread
        self._stderr = os.dup(2)  # which pytest keeps from tests
        config.option.timeout = 0  # of pytest-timeout, which counts all runs of a test as one

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        self._visited = {}
        healthy = self._run(item, _Neighbour(item), "")
        places, self._visited = sorted(self._visited), None
        for place in places if healthy else ():
            self._pause_at, self._pauses = place, Counter()
            self._run(item, _Neighbour(item), f" paused at {place[0]}:{place[1]}")
        self._pause_at = None
        self._run(item, nextitem, " at last")
        return True

    def _run(self, item: pytest.Item, nextitem: Any, how: str) -> bool:
        """Report a run of a test, which is followed by another one; True where it passed."""
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid + how, location=item.location)
        faulthandler.dump_traceback_later(self._hang, exit=True, file=self._stderr)
        with self._traced():
            reports = runtestprotocol(item, log=False, nextitem=nextitem)
        faulthandler.cancel_dump_traceback_later()
        for report in reports:
            report.nodeid += how
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid + how, location=item.location)
        return all(report.passed for report in reports)

    @contextmanager
    def _traced(self) -> Iterator[None]:
        threading.settrace(self._called)
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]

    def _called(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if any(part in frame.f_code.co_filename for part in self._files) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        place = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and self._visited is not None:
            self._visited[place] = None
        elif event == "line" and place == self._pause_at:
            me = threading.get_ident()
            self._pauses[me] += 1
            if self._pauses[me] <= 2:
                time.sleep(self._seconds)
        return self._line


class _Neighbour:
    """Stands for a next test of the same module: what belongs to the test alone is torn down, and no more."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item

    def listchain(self) -> list[Any]:
        return self._item.listchain()[:-1]

"""The tests that need GPUs, counted.

    python benchmarks/gpu_tests.py                       # those that need several: results/multi-gpu.json
    python benchmarks/gpu_tests.py --marker gpu          # those that need one: results/gpu.json
    python benchmarks/gpu_tests.py --workers 8           # several tests at a time, on the same GPUs
    python benchmarks/gpu_tests.py --marker gpu --workers 28 --spread    # each worker has one of the machine's GPUs
    python benchmarks/gpu_tests.py --workers 16 --spread # each begins with another pair of them
    python benchmarks/gpu_tests.py --continue            # what an interrupted run of this commit here has not ended

The caches of compiled kernels are empty at the start, as on a machine that has never run logitless. What fails beside
other tests, which share the GPU's memory, runs once more alone; what passes then is named under ``passed_alone``. The
file is rewritten after every test and failures are printed at once, so that an interrupted run still shows which tests
failed; until all have run, it names those that ended well. ``parts`` counts the runs, each from empty caches.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from logitless.bench.machine import environment, write_result
from logitless.errors import ConfigurationError
from script import caches_in, commit

RESULTS = Path(__file__).parent / "results"
MARKERS = {"gpu": "gpu and not multi_gpu", "multi_gpu": "multi_gpu"}


class Counted:
    """A plugin of pytest: how many tests passed, failed and were skipped, why the last, and which ones failed.

    Args:
        path: of the JSON file, written after every test.
        environment: of the run.

    Attributes:
        complete: whether all tests ran, whatever came of them.
        passed_alone: failed beside others, and passed alone.
        ended: tests that passed or were skipped.
        parts: runs that the numbers are of.
    """

    def __init__(self, path: Path, environment: dict[str, Any]) -> None:
        self.path, self.environment, self.complete = path, environment, False
        self.passed = 0
        self.skipped: dict[str, int] = {}
        self.failures: list[str] = []
        self.passed_alone: list[str] = []
        self.ended: list[str] = []
        self.parts = 1

    def go_on(self) -> None:
        """Take the counts of the interrupted run in the file.

        Raises:
            ConfigurationError: it is complete, or of another commit, machine or version.
        """
        found = json.loads(self.path.read_text())
        known = self.environment["commit"] is not None
        if found["complete"] or not known or found["environment"] != self.environment:
            raise ConfigurationError(
                needed=f"in {self.path} an interrupted run with {self.environment}",
                given="a complete one" if found["complete"] else str(found["environment"]),
                remedy="Leave --continue out.",
            )
        self.passed, self.skipped, self.passed_alone = found["passed"], found["skipped"], found["passed_alone"]
        self.ended, self.parts = found["ended"], found["parts"] + 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test's set-up, call or end; with several workers, of any of them."""
        if report.failed and report.nodeid not in self.failures:
            self.failures.append(report.nodeid)
            if report.nodeid in self.ended:  # its end failed after it passed
                self.ended.remove(report.nodeid)
                self.passed -= 1
            print(f"\n{report.nodeid} failed in its {report.when}:\n{report.longreprtext}", flush=True)
        elif report.skipped:
            reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.skipped[reason] = self.skipped.get(reason, 0) + 1
            self.ended.append(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed += 1
            self.ended.append(report.nodeid)
            if report.nodeid in self.failures:
                self.failures.remove(report.nodeid)
                self.passed_alone.append(report.nodeid)
        if report.when == "teardown" or report.failed:
            self.write()

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """The end, which a run that is cut off does not reach; pytest comes here also where it cannot read a file."""
        self.complete = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)

    def write(self) -> None:
        """What came of the tests so far."""
        counts = {"passed": self.passed, "failed": len(self.failures), "skipped": self.skipped}
        found = {"complete": self.complete, **counts, "failures": self.failures, "passed_alone": self.passed_alone}
        found |= {"parts": self.parts} if self.complete else {"parts": self.parts, "ended": self.ended}
        write_result(self.path, {"environment": self.environment, **found})


class Collected:
    """A plugin of pytest: the names of the tests that it found."""

    names: Sequence[str] = ()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """What is left of them after markers."""
        self.names = [item.nodeid for item in session.items]


def visible(gpus: int, marker: str) -> list[str]:
    """What workers see, in turn: one GPU each, or all of them from another pair on.

    Example:
        >>> visible(4, "multi_gpu")
        ['0,1,2,3', '2,3,0,1']
        >>> visible(2, "gpu")
        ['0', '1']
    """
    if marker == "gpu":
        return [str(gpu) for gpu in range(gpus)]
    return [",".join(str((first + gpu) % gpus) for gpu in range(gpus)) for first in range(0, gpus, 2)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a marker and write what came of it; the exit status of pytest."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--marker", choices=MARKERS, default="multi_gpu", help="one GPU, or several")
    parser.add_argument("--workers", type=int, default=1, help="tests at a time (pytest-xdist)")
    parser.add_argument("--spread", action="store_true", help="other GPUs for each worker, by its number")
    parser.add_argument("--continue", dest="goes_on", action="store_true", help="with what the JSON file lacks")
    parser.add_argument("--output", type=Path, help="the JSON file")
    parser.add_argument("tests", nargs="*", default=["tests"], help="files or folders")
    options = parser.parse_args(arguments)
    here = environment("cuda" if torch.cuda.is_available() else "cpu", ("triton", "transformers", "peft"))
    path = options.output or RESULTS / f"{options.marker.replace('_', '-')}.json"
    counted = Counted(path, here | {"gpus": torch.cuda.device_count(), "caches": "empty", "commit": commit()})
    command = ["-p", "no:cacheprovider", "-p", "no:benchmark", "-v", "-rfEs", "--tb=short", "--durations=15"]
    command += ["-m", MARKERS[options.marker]]
    command += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]  # by this script
    at_once = ["-n", str(options.workers)] if options.workers > 1 else []
    if options.spread:
        os.environ["GPUS_OF_WORKERS"] = " ".join(visible(torch.cuda.device_count(), options.marker))
    if options.goes_on:
        counted.go_on()
    with tempfile.TemporaryDirectory() as caches, tempfile.NamedTemporaryFile("w", suffix=".txt") as named:
        os.environ.update(caches_in(Path(caches)))
        tests = options.tests
        if options.goes_on:
            pytest.main([*command, "--collect-only", "-qq", *tests], plugins=[collected := Collected()])
            tests = [name for name in collected.names if name not in counted.ended]
        named.writelines(f"{each}\n" for each in tests)
        named.flush()
        if tests:
            status = pytest.main([*command, *at_once, f"@{named.name}"], plugins=[counted])
        else:  # it was interrupted behind the last one
            status, counted.complete = pytest.ExitCode.OK, True
        if at_once and counted.failures:
            status = pytest.main([*command, *counted.failures], plugins=[counted])
    counted.write()
    return int(status)


if __name__ == "__main__":
    sys.exit(main())

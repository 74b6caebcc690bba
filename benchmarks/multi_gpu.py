"""The tests that need several GPUs, counted: ``python benchmarks/multi_gpu.py`` writes ``results/multi-gpu.json``.

python benchmarks/multi_gpu.py --workers 8      # several tests at a time, on the same GPUs
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from logitless.bench.machine import environment, write_result

RESULT = Path(__file__).parent / "results" / "multi-gpu.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the marker and write what came of it; the exit status of pytest."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=1, help="tests at a time (pytest-xdist)")
    parser.add_argument("--output", type=Path, default=RESULT, help="the JSON file")
    parser.add_argument("tests", nargs="*", default=["tests"], help="files or folders")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:benchmark", "-v", "-rfEs"]
        command += ["--tb=short", "-m", "multi_gpu", "--junitxml", str(xml), *options.tests]
        command += ["-n", str(options.workers)] if options.workers > 1 else []
        status = subprocess.run(command, check=False).returncode
        found = counts(ElementTree.parse(xml).getroot())
    here = environment("cuda" if torch.cuda.is_available() else "cpu", ("triton", "transformers", "peft"))
    write_result(options.output, {"environment": here | {"gpus": torch.cuda.device_count()}, **found})
    return status


def counts(root: ElementTree.Element) -> dict[str, Any]:
    """How many tests passed, failed and were skipped, why the last, and the names of those that failed.

    Example:
        >>> report = '<r><testcase name="a"/><testcase name="b"><skipped message="needs 3"/></testcase></r>'
        >>> counts(ElementTree.fromstring(report))
        {'passed': 1, 'failed': 0, 'skipped': {'needs 3': 1}, 'failures': []}
    """
    cases = list(root.iter("testcase"))
    skipped: dict[str, int] = {}
    failures = []
    for case in cases:
        if (reason := case.find("skipped")) is not None:
            words = reason.get("message", "")
            skipped[words] = skipped.get(words, 0) + 1
        elif case.find("failure") is not None or case.find("error") is not None:
            failures.append(f"{case.get('classname')}::{case.get('name')}")
    passed = len(cases) - len(failures) - sum(skipped.values())
    return {"passed": passed, "failed": len(failures), "skipped": skipped, "failures": failures}


if __name__ == "__main__":
    sys.exit(main())

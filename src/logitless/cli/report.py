"""``logitless report RUN``: the self-contained report of a run, finished or not. ``RUN RUN ...`` compares several."""

import argparse
from pathlib import Path

from logitless.cli.loading import loading


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run folders."""
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folder, for example runs/quickstart")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("comparison.html"),
        help="page of several runs, made anew each time (default: comparison.html)",
    )


def run(options: argparse.Namespace) -> int:
    """Write ``report.html`` into the run folder, or a comparison, and say where it is."""
    with loading("report"):
        from logitless.train.record.run_folder import open_run_folder
        from logitless.train.report.compare import write_comparison
        from logitless.train.report.page import write_report
    for folder in options.runs:
        open_run_folder(folder)
    if len(options.runs) == 1:
        print(write_report(options.runs[0]))
    else:
        print(write_comparison(options.runs, options.out))
    return 0

"""``logitless report RUN``: the self-contained report of a run, finished or not."""

import argparse
from pathlib import Path

from logitless.errors import ConfigurationError
from logitless.train.report import write_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run folder."""
    parser.add_argument("run", type=Path, help="run folder, for example runs/quickstart")


def run(options: argparse.Namespace) -> int:
    """Write ``report.html`` into the run folder and say where it is."""
    folder: Path = options.run
    if not (folder / "config.yaml").is_file():
        raise ConfigurationError(
            needed=f"a run folder with a config.yaml at {folder}",
            given="none",
            remedy="Name a folder that `logitless train` wrote.",
        )
    print(write_report(folder))
    return 0

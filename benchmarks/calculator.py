"""Runs the calculator recipe at several seeds and records what came of it.

python benchmarks/calculator.py --seeds 0 1 2
"""

from pathlib import Path
from typing import Any

from logitless.train.record.run_folder import open_run_folder
from script import main_at_seeds


def two_turns(folder: Path) -> dict[str, Any]:
    """How many completions asked the calculator in the first and in the last block."""
    blocks = open_run_folder(folder).rollout_blocks()
    return {"two_turns_first_block": _share(folder, blocks[0]), "two_turns_last_block": _share(folder, blocks[-1])}


def _share(folder: Path, block: int) -> float:
    turns = [row["num_turns"] for row in open_run_folder(folder).read_block(block)]
    return sum(number == 2 for number in turns) / len(turns)


if __name__ == "__main__":
    main_at_seeds(__doc__, "calculator", two_turns)

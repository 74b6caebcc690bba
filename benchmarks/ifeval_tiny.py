"""Runs the ifeval-tiny recipe at several seeds and records what came of it.

python benchmarks/ifeval_tiny.py --seeds 0 1 2
"""

from pathlib import Path
from typing import Any

from script import main_at_seeds, metrics_of


def pass_rates(folder: Path) -> dict[str, Any]:
    """The pass rate of every constraint in the first and in the last block."""
    rates = [
        {name.split("/")[1]: rate for name, rate in line.items() if name.endswith("/pass_rate") and ":" in name}
        for line in metrics_of(folder)
    ]
    rates = [each for each in rates if each]
    return {"pass_rates_first_block": rates[0], "pass_rates_last_block": rates[-1]}


if __name__ == "__main__":
    main_at_seeds(__doc__, "ifeval-tiny", pass_rates)

"""Compares `logitless doctor`'s forecast of a block with blocks of a real run: seconds and peak memory.

    python benchmarks/forecast.py                          # length-toy on this machine
    python benchmarks/forecast.py recipes/X.yaml --set KEY=VALUE

Forecast and run have a process each, so that neither finds memory or kernels that the other left. The run's block is
the median over all but the first, which compiles. Both are repeated in turn, because a machine is not equally fast all
the time, and the medians are compared.
"""

import argparse
import json
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from logitless.bench.machine import environment, short_name, write_result
from logitless.doctor.forecast import Forecast, forecast_of
from logitless.train.plan import plan_of
from logitless.train.recipe import load_recipe
from logitless.train.run import start

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def forecast(recipe: Path, overrides: list[str]) -> Forecast:
    """The forecast, in this process."""
    checked = load_recipe(recipe, overrides)
    return forecast_of(checked, plan_of(checked))


def real(recipe: Path, overrides: list[str], blocks: int) -> tuple[float, int]:
    """Median seconds of a block, and the peak, of a run of so many blocks."""
    with tempfile.TemporaryDirectory() as output:
        overrides = [*overrides, f"train.blocks={blocks}", f"output={output}", "writers=[]", "data.held_out=null"]
        folder, _ = start(load_recipe(recipe, [*overrides, "rollout.zero_signal=keep"]))
        records = [record for record in folder.read_metrics() if record["step"]]
    seconds: dict[int, float] = {}
    for record in records:
        phases = (record.get(f"time/{phase}_seconds") or 0.0 for phase in ("rollout", "scoring", "training"))
        seconds[record["block"]] = seconds.get(record["block"], 0.0) + sum(phases)
    return statistics.median([value for block, value in seconds.items() if block > 1]), records[-1]["memory/peak_bytes"]


def compared(recipe: Path, overrides: list[str], blocks: int, repeats: int) -> dict[str, Any]:
    """Both, and how far the forecast is off, as a fraction of the run's."""
    foretold, ran = list[Forecast](), list[tuple[float, int]]()
    for _ in range(repeats):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as processes:
            foretold.append(processes.submit(forecast, recipe, overrides).result())
            ran.append(processes.submit(real, recipe, overrides, blocks).result())
    expected = statistics.median(each.block_seconds for each in foretold)
    seconds = statistics.median(each for each, _ in ran)
    held, peak = (statistics.median(each) for each in ([f.peak_bytes for f in foretold], [p for _, p in ran]))
    return {
        "recipe": recipe.stem,
        "overrides": overrides,
        "repeats": repeats,
        "forecast_block_seconds": expected,
        "run_block_seconds": seconds,
        "seconds_off": expected / seconds - 1,
        "forecast_peak_bytes": held,
        "planned_bytes": foretold[0].planned_bytes,
        "run_peak_bytes": peak,
        "peak_off": held / peak - 1,
    }


def main() -> None:
    """Measure one recipe and keep the row beside those of others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, nargs="?", default=ROOT / "recipes" / "length-toy.yaml")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--blocks", type=int, default=8, help="of a run")
    parser.add_argument("--repeats", type=int, default=3, help="forecasts and runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    machine = environment(device, ("triton", "transformers"))
    row = compared(options.recipe, options.overrides, options.blocks, options.repeats)
    print(json.dumps(row, indent=1))
    path, rows = options.out / f"forecast-{short_name(device)}.json", list[dict[str, Any]]()
    if path.exists() and (before := json.loads(path.read_text()))["environment"] == machine:
        rows = [other for other in before["rows"] if other["recipe"] != row["recipe"]]
    write_result(path, {"environment": machine, "rows": [*rows, row]})


if __name__ == "__main__":
    main()

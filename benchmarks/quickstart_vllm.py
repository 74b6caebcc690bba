"""Runs the quickstart recipe with vLLM as the sampler, beside the recorded runs that sample in the trainer's process.

make .venv-vllm/.installed
python benchmarks/quickstart_vllm.py --seeds 0 --out benchmarks/results/quickstart_vllm.json
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from logitless.bench.machine import environment, write_result
from logitless.bench.rollout_run import model_folder
from logitless.bench.vllm_process import vllm_server
from logitless.train.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "quickstart_vllm.json"
HERE = ROOT / "benchmarks" / "results" / "quickstart.json"
FLAGS = ("--dtype", "float32", "--load-format", "dummy", "--max-model-len", "128", "--enforce-eager")


def run(seed: int, url: str, output: Path, settings: list[str]) -> dict[str, Any]:
    """The summary of one run, and the largest numbers of its probes and its gate."""
    engine = json.dumps({"name": "vllm_server", "urls": [url], "model": "policy"})
    given = [f"seed={seed}", f"name=seed-{seed}", f"output={output}", "model.device=cpu", f"rollout.engine={engine}"]
    words = [word for each in (*given, *settings) for word in ("--set", each)]
    subprocess.run(
        [sys.executable, "-m", "logitless.cli.main", "train", "recipes/quickstart.yaml", *words], cwd=ROOT, check=True
    )
    folder = output / f"seed-{seed}"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    largest = {
        name: max((line[name] for line in lines if name in line), default=None)
        for name in ("weights/probe_difference_max", "parity/difference_max", "parity/sequence_difference_max")
    }
    accuracies = [line["evaluation/accuracy"] for line in lines if "evaluation/accuracy" in line]
    summary = json.loads((folder / "summary.json").read_text())
    return {"seed": seed, **summary, "largest": largest, "accuracies": accuracies}


def compared(runs: list[dict[str, Any]], here: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each run beside the one of its seed that sampled in the trainer's process, and what noise allows.

    The same seed draws other tokens on a server, so that two runs differ as two seeds do: by the square root of twice
    the variance between the recorded runs, which has the noise of 400 held-out completions in it.

    Args:
        runs: on a server.
        here: in the trainer's process.
    """
    finals = [run["accuracy_after"] for run in here]
    mean = sum(finals) / len(finals)
    noise = math.sqrt(2 * sum((x - mean) ** 2 for x in finals) / (len(finals) - 1))
    found = []
    for each in runs:
        a, b = each["accuracy_after"], next(run for run in here if run["seed"] == each["seed"])["accuracy_after"]
        found.append(
            {"seed": each["seed"], "server": a, "here": b, "difference": a - b, "two_standard_errors": 2 * noise}
        )
    return found


def main() -> None:
    """One run a seed on one server, and a file with all summaries."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--vllm", type=Path, default=ROOT / ".venv-vllm" / "bin" / "vllm")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = model_folder(load_recipe(ROOT / "recipes" / "quickstart.yaml"), folder / "model")
        with vllm_server(model, options.vllm, folder / "server.log", FLAGS) as server:
            runs = [run(seed, server.url, folder, options.set) for seed in options.seeds]
    here = json.loads(HERE.read_text())
    machine = {**environment("cpu", ("transformers",)), "threads": torch.get_num_threads(), "vllm": "0.32.0+cpu"}
    result = {"machine": machine, "settings": options.set, "runs": runs}
    result["compared"] = compared(runs, here["runs"])
    write_result(options.out, result, indent=2)
    for each in result["compared"]:
        print(each)


if __name__ == "__main__":
    main()

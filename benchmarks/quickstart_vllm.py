"""Runs the quickstart recipe with vLLM as the sampler, beside the recorded runs that sample in the trainer's process.

make .venv-vllm/.installed
python benchmarks/quickstart_vllm.py --seeds 0 --out benchmarks/results/quickstart_vllm.json
"""

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from logitless.bench.machine import environment, write_result
from logitless.models.loading import load_tokenizer
from logitless.train.recipe.config import Recipe
from logitless.train.recipe.loading import load_recipe
from script import RESULTS, ROOT, command_line, metrics_of, summary_of, trained
from vllm_process import vllm_server

RESULT = RESULTS / "quickstart_vllm.json"
HERE = RESULTS / "quickstart.json"
FLAGS = ("--dtype", "float32", "--load-format", "dummy", "--max-model-len", "128", "--enforce-eager")


def model_folder(recipe: Recipe, folder: Path) -> Path:
    """A recipe's model as a server reads it, without weights: the first push brings them.

    Args:
        recipe: whose model is a configuration.
        folder: made.
    """
    source = dict(recipe.model.source) if isinstance(recipe.model.source, dict) else {}
    kind = transformers.AutoConfig.for_model(**source)
    kind.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(kind)].__name__]
    kind.save_pretrained(folder)
    load_tokenizer(str(recipe.model.tokenizer)).save_pretrained(str(folder))
    return folder


def run(seed: int, url: str, output: Path, settings: list[str]) -> dict[str, Any]:
    """The summary of one run, and the largest numbers of its probes and its gate."""
    engine = json.dumps({"name": "vllm_server", "urls": [url], "model": "policy"})
    folder = trained("quickstart", f"seed-{seed}", output, f"seed={seed}", f"rollout.engine={engine}", *settings)
    lines = metrics_of(folder)
    largest = {
        name: max((line[name] for line in lines if name in line), default=None)
        for name in ("weights/probe_difference_max", "parity/difference_max", "parity/sequence_difference_max")
    }
    accuracies = [line["evaluation/accuracy"] for line in lines if "evaluation/accuracy" in line]
    return {"seed": seed, **summary_of(folder), "largest": largest, "accuracies": accuracies}


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
    parser = command_line(__doc__)
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

"""How long a run takes from the start of its process to its first optimizer step, and where those seconds go.

    python benchmarks/first_step.py --out benchmarks/results/first-step-H200.json    # the shape of SmolLM2-135M
    python benchmarks/first_step.py --toy --out /tmp/first-step.json                 # anywhere

``logitless train`` with default settings on a checkpoint of random bfloat16 weights, in processes of their own.
``empty``: Triton's, the driver's and the self-check's caches are empty. ``full``: they hold what the process before it
left.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from logitless.bench.machine import environment, write_result
from script import caches_in

ROOT = Path(__file__).resolve().parents[1]
SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TOY = SHAPE | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
RECIPE: dict[str, Any] = {
    "name": "first-step",
    "data": {"max_prompt_tokens": 64},
    "rollout": {"prompts_per_block": 32, "completions_per_prompt": 16, "sampling": {"max_new_tokens": 64}},
    "rewards": [{"name": "length", "cap": 32, "unit": "tokens"}],
    "train": {"blocks": 4},
}


def prepare(folder: Path, shape: dict[str, Any]) -> Path:
    """A checkpoint, prompts and the recipe that names them; its path."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**shape)).to(torch.bfloat16).save_pretrained(folder / "model")
    prompts = [{"prompt": "".join("abcdefgh"[(i // 8**k) % 8] for k in range(8))} for i in range(512)]
    (folder / "train.jsonl").write_text("".join(json.dumps(each) + "\n" for each in prompts))
    tokenizer = str(ROOT / "recipes" / "quickstart" / "tokenizer")
    recipe = RECIPE | {"model": {"source": str(folder / "model"), "tokenizer": tokenizer}}
    recipe["data"] = RECIPE["data"] | {"train": {"name": "file", "path": str(folder / "train.jsonl")}}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def measured(recipe: Path, name: str, caches: Path, settings: list[str]) -> dict[str, Any]:
    """One process: seconds to the end of its first step, of its phases, and of all of it."""
    given = [f"name={name}", f"output={recipe.parent / 'runs'}", *settings]
    command = [sys.executable, "-m", "logitless", "train", str(recipe)]
    variables = {**os.environ, **caches_in(caches)}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)  # without bytecode each process would compile every module
    began = time.perf_counter()
    subprocess.run([*command, *(w for each in given for w in ("--set", each))], env=variables, check=True)
    took = time.perf_counter() - began
    folder = recipe.parent / "runs" / name
    summary = json.loads((folder / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    elapsed = {line["step"]: line["time/elapsed_seconds"] for line in reversed(lines) if line["step"]}
    return {
        "first_step_seconds": round(elapsed[1], 2),
        "block_seconds": [round(line["time/elapsed_seconds"], 2) for line in lines],
        "seconds": {phase: round(value, 2) for phase, value in summary["seconds"].items()},
        "process_seconds": round(took, 2),
        "trained_dtype": yaml.safe_load((folder / "config.yaml").read_text())["model"]["trained_dtype"],
    }


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=2, help="each with empty caches, then with full ones")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--toy", action="store_true", help="a model of toy size")
    options = parser.parse_args()
    import torch

    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as name:
        recipe = prepare(Path(name), TOY if options.toy else SHAPE)
        for run in range(options.runs):
            caches = Path(name) / f"caches-{run}"
            for state in ("empty", "full"):
                found = measured(recipe, f"{state}-{run}", caches, options.settings)
                rows.append({"run": run, "caches": state, **found})
                print(
                    f"{state} caches: first step after {found['first_step_seconds']} s, {found['seconds']}", flush=True
                )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    machine = environment("cuda" if torch.cuda.is_available() else "cpu", ("triton", "transformers"))
    write_result(options.out, {"machine": machine, "rows": rows})


if __name__ == "__main__":
    main()

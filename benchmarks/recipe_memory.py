"""Runs two blocks of each small-card recipe under its card's limit and records the peaks beside the plan's.

    python benchmarks/recipe_memory.py
    python benchmarks/recipe_memory.py --table       # writes the results into docs/small_cards.md
    python benchmarks/recipe_memory.py --recipes qwen3-1.7b-gsm8k-24gb --keep-others

No weights are downloaded: ``recipes/dry-run`` has shapes and a tokenizer, and weights are random. Every prompt and
every completion is as long as the recipe allows and, with a constant reward and raw rewards as advantages, every token
has a gradient: this is a run's largest memory. There are fewer completions than in the recipe, but as many as are
decoded at once and as two micro-batches need. The second block is trained by another process, which resumes from the
checkpoint.
"""

import gc
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from logitless.bench.machine import environment, write_result
from logitless.data.prompts import load_prompts
from logitless.data.sources import FileData
from logitless.train.assembly import model as assembly_model
from logitless.train.assembly.model import tokenizer_of
from logitless.train.assembly.process import set_allocator
from logitless.train.plan.run_plan import plan_of
from logitless.train.recipe.config import Recipe
from logitless.train.recipe.loading import load_recipe
from logitless.train.run import run_recipe
from script import command_line, needs_gpu, parsed, weights_drawn_on

GIB = 2**30
RESULT = "recipe-memory.json"
LIMITS = {
    "qwen2.5-0.5b-gsm8k": 24 * GIB,
    "llama3.1-8b-ifeval-24gb": 24 * GIB,
    "qwen3-1.7b-gsm8k-24gb": 24 * GIB,
    "llama3.1-8b-ifeval-16gb": 16 * GIB,
}
"""What the card of each recipe has."""
STAND_INS = {
    "qwen2.5-0.5b-gsm8k": ["model.source=recipes/dry-run/qwen2.5-0.5b", "rollout.completions_per_prompt=32"],
    "llama3.1-8b-ifeval-24gb": ["model.source=recipes/dry-run/llama3.1-8b", "rollout.completions_per_prompt=4"],
    "qwen3-1.7b-gsm8k-24gb": ["model.source=recipes/dry-run/qwen3-1.7b", "rollout.completions_per_prompt=12"],
    "llama3.1-8b-ifeval-16gb": ["model.source=recipes/dry-run/llama3.1-8b", "rollout.completions_per_prompt=4"],
}
EVERYTHING_AT_ITS_LONGEST = [
    "model.random_weights=true",
    "model.tokenizer=recipes/dry-run/tokenizer",
    "data.held_out=null",
    "rollout.prompts_per_block=8",
    "rollout.zero_signal=keep",
    "rewards=[{name: regex, pattern: '.*'}]",
    "algorithm.advantage={name: raw}",
    "checkpoint.every_blocks=1",
    "writers=[]",
]


def longest_prompts(recipe: Recipe, path: Path) -> int:
    """Leave a file of as many prompts as a block has, each as long as the recipe allows; returns their tokens."""
    most = recipe.data.max_prompt_tokens
    path.write_text("".join(json.dumps({"id": str(n), "prompt": "x" * n}) + "\n" for n in range(1, most + 1)))
    found = load_prompts(FileData(path=path), tokenizer_of(recipe.model), max_prompt_tokens=most).prompts
    longest = max(found, key=lambda prompt: len(prompt.token_ids))
    text = "x" * int(longest.id)
    rows = [{"id": str(n), "prompt": text} for n in range(recipe.rollout.prompts_per_block)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return len(longest.token_ids)


@contextmanager
def drawn_on_the_device(limit: int, *, rounded_there: bool) -> Iterator[None]:
    """Generate random weights on the GPU, because on the CPU eight billion take minutes.

    Args:
        limit: bytes that the process may use.
        rounded_there: weights are rounded to four bits on the GPU; the limit applies only afterwards, because weights
            that are read from files are rounded from host memory.
    """
    load = assembly_model.load_model
    if not torch.cuda.is_available():
        yield
        return
    fraction = min(1.0, limit / torch.cuda.get_device_properties(0).total_memory)

    def loaded(*arguments: Any, **options: Any) -> Any:
        torch.cuda.set_per_process_memory_fraction(1.0 if rounded_there else fraction)
        model = load(*arguments, **options)
        if rounded_there:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_per_process_memory_fraction(fraction)
        return model

    with weights_drawn_on("cuda"), patch.object(assembly_model, "load_model", loaded):
        yield


def measure(recipe: Path, overrides: list[str], limit: int, folder: Path, *, blocks: int) -> dict[str, Any]:
    """The plan and the peak of one run, which has this process to itself; no peak without a GPU.

    Args:
        recipe: file.
        overrides: of its keys.
        limit: bytes of the card.
        folder: of the run; with more than one block the run that is there is resumed.
        blocks: that it has at the end.
    """
    prompts = folder / "prompts.jsonl"
    overrides = [*overrides, f"data.train={{name: file, path: {prompts}}}"]
    prompts.write_text(json.dumps({"prompt": "x"}) + "\n")  # for the first reading
    places = [f"output={folder}", f"train.blocks={blocks}"]
    num_tokens = longest_prompts(load_recipe(recipe, [*overrides, *places]), prompts)
    checked = load_recipe(recipe, [*overrides, *places])
    set_allocator(checked.model.allocator)  # as a run sets it, and before anything here asks for the device
    plan = plan_of(checked)
    cuda = torch.cuda.is_available()
    began = time.perf_counter()
    with drawn_on_the_device(limit, rounded_there=checked.model.quantize is not None):
        result = run_recipe(checked, resume=blocks > 1)
    run = result.folder
    summary = json.loads(run.summary.read_text())
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    lengths = [line["length/mean"] for line in lines if "length/mean" in line]
    return {
        "recipe": checked.name,
        "limit_bytes": limit,
        "overrides": [*overrides[:-1], *places[1:]],
        "resumed": blocks > 1,
        "complete": result.complete,
        "prompt_tokens": num_tokens,
        "completion_tokens_mean": lengths[-1] if lengths else None,
        "planned_bytes": dict(plan.memory_bytes),
        "planned_total_bytes": plan.total_bytes,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved() if cuda else None,
        "halvings": max((line.get("optimizer/halvings", 0) for line in lines), default=0),
        "wall_clock_seconds": time.perf_counter() - began,
        "seconds": summary["seconds"],
    }


def tables(results: Path) -> dict[str, str]:
    """Planned and measured memory of each run, in GiB."""
    document = json.loads((results / RESULT).read_text())
    recipes = defaultdict[str, dict[str, None]](dict)  # by machine and versions
    for row in document["rows"]:
        machine = row.get("environment", document["environment"])
        versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "transformers", "peft", "bitsandbytes"))
        recipes[f"{machine['gpu']}, {versions}"][row["recipe"]] = None
    lines = [
        "PyTorch was limited to what the card has. GiB.",
        "",
        *(f"- {', '.join(names)}: {machine}" for machine, names in recipes.items()),
        "",
        "| Recipe | Card | Prompt, completion (tokens) | | Planned | Allocated, peak | Reserved, peak |",
        "|---|--:|--:|---|--:|--:|--:|",
    ]
    for row in document["rows"]:
        numbers = [row[f"{name}_bytes"] / GIB for name in ("planned_total", "peak_allocated", "peak_reserved")]
        lines.append(
            f"| {row['recipe']} | {row['limit_bytes'] / GIB:.0f} | {row['prompt_tokens']}, "
            f"{row['completion_tokens_mean']:.0f} | {'resumed' if row['resumed'] else 'first block'} | "
            f"{' | '.join(f'{number:.1f}' for number in numbers)} |"
        )
    return {"": "\n".join(lines)}


def main() -> None:
    """Each recipe, a block and its resume in processes of their own."""
    parser = command_line(__doc__)
    parser.add_argument("--recipes", nargs="+", choices=STAND_INS, default=list(STAND_INS))
    parser.add_argument("--keep-others", action="store_true", help="keep the file's rows of other recipes")
    options = parsed(parser, tables)
    needs_gpu("Use --dry-run of the recipes for the plan.")
    path = options.output / RESULT
    kept = json.loads(path.read_text()) if options.keep_others and path.exists() else {"rows": []}
    rows = [
        {**row, "environment": row.get("environment", kept["environment"])}
        for row in kept["rows"]
        if row["recipe"] not in options.recipes
    ]
    machine = environment("cuda", ("triton", "transformers", "peft", "bitsandbytes"))
    for name in options.recipes:
        overrides = [*EVERYTHING_AT_ITS_LONGEST, *STAND_INS[name]]
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            spawn = get_context("spawn")
            alone = [stack.enter_context(ProcessPoolExecutor(1, mp_context=spawn)) for _ in range(2)]
            alone[1].submit(int)  # its imports meanwhile
            for blocks, process in enumerate(alone, start=1):
                work = process.submit(
                    measure, Path(f"recipes/{name}.yaml"), overrides, LIMITS[name], Path(folder), blocks=blocks
                )
                rows.append(work.result())
                process.shutdown()
                found = rows[-1]
                print(f"{name}, block {blocks}: planned {found['planned_total_bytes'] / GIB:.1f} GiB, peak", end=" ")
                print(f"{found['peak_allocated_bytes'] / GIB:.1f}", end=", ")
                print(f"reserved {found['peak_reserved_bytes'] / GIB:.1f}", flush=True)
                write_result(path, {"environment": machine, "rows": rows})


if __name__ == "__main__":
    main()

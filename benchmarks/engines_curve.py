"""Trains the quickstart's task on a GPU at ten million parameters with either engine, and draws both curves.

python benchmarks/engines_curve.py --seeds 0 1

Only the engine differs: layers, data, steps and seeds are the same. The task is reasoning-gym's, written here so that
the package is not needed.
"""

import json
import random
import string
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from logitless.bench.machine import environment, write_result
from logitless.train.report.plots import line_plot
from script import RESULTS, ROOT, command_line, completed, metrics_of, reward_curve, summary_of

RESULT = RESULTS / "engines-curve.json"
ENGINES = ("gpu", "transformers")
SIZE = {"hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 6}
SIZE |= {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64}
ASKED = (
    "Your task is, given a list of letters, to form a valid palindrome.\n\nA palindrome is a phrase that reads the same"
    " forwards and backwards.\n\nIf there are multiple possible answers, only respond with one of them. You must use"
    " all the letters provided.\n\nYour output should be a single string, with no spaces or punctuation.\n\nNow, form a"
    " valid palindrome using the following letters: {letters}\n"
)


def palindromes(size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Rows of the task: 3 to 10 letters of a palindrome, shuffled.

    Example:
        >>> row = next(palindromes(1, 1))
        >>> row["answer"], sorted(row["answer"]) == sorted(row["letters"])
        ('oucuo', True)
    """
    for index in range(size):
        chance = random.Random(seed + index)
        length = chance.randint(3, 10)
        half = chance.choices(string.ascii_lowercase, k=length // 2)
        middle = [chance.choice(string.ascii_lowercase)] if length % 2 else []
        letters = [*half, *middle, *half[::-1]]
        shuffled = chance.sample(letters, len(letters))
        yield {"prompt": ASKED.format(letters=", ".join(shuffled)), "answer": "".join(letters), "letters": shuffled}


def whole(completions: Sequence[str], letters: Sequence[Sequence[str]], **_: Any) -> list[float]:
    """1 for a palindrome of just these letters.

    Example:
        >>> whole(["abba ", "abab", "aa"], [["a", "b", "a", "b"]] * 3)
        [1.0, 0.0, 0.0]
    """
    answers = [completion.strip().lower() for completion in completions]
    return [float(a == a[::-1] and sorted(a) == sorted(given)) for a, given in zip(answers, letters, strict=True)]


def recipe(engine: str, seed: int, blocks: int, folder: Path, device: str) -> dict[str, Any]:
    """The quickstart's recipe, larger and with this engine; its data is written into the folder."""
    raw: dict[str, Any] = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())
    for name, size, start in (("train", 15000, 1), ("held_out", 1000, 100_000), ("warm", 20000, 50_000)):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in palindromes(size, start)))
        if name == "warm":
            raw["warm_start"]["data"] = {"name": "file", "path": str(path)}
        else:
            raw["data"][name] = {"name": "file", "path": str(path)}
    raw |= {"name": f"{engine}-{seed}", "seed": seed, "output": str(folder), "writers": []}
    raw["model"] |= {"device": device, "dtype": "float32", "trained_dtype": "bfloat16", "layers": "row_invariant"}
    raw["model"]["source"] |= SIZE
    raw["model"]["tokenizer"] = str(ROOT / "recipes" / "quickstart" / "tokenizer")
    raw["warm_start"] |= {"steps": 200, "learning_rate": 1.0e-3}
    raw["rollout"]["engine"] = {"name": engine}
    raw["rewards"] = [{"name": "function", "path": "engines_curve:whole", "process": "kept"}]
    raw["train"] |= {"blocks": blocks, "optimizer": {"learning_rate": 4.0e-4, "schedule": "linear", "warmup_steps": 5}}
    raw["evaluation"]["every_blocks"] = raw["checkpoint"]["every_blocks"] = blocks
    return raw


def run(folder: Path, engine: str, seed: int, blocks: int, device: str) -> dict[str, Any]:
    """One run: its mean reward a block, held-out accuracy before and after, and seconds."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe(engine, seed, blocks, folder, device)))
    command = [sys.executable, "-m", "logitless.cli.main", "train", str(path)]
    subprocess.run(command, cwd=ROOT / "benchmarks", check=True)
    made = folder / f"{engine}-{seed}"
    lines, summary = metrics_of(made), summary_of(made)
    of_blocks = [line for line in lines if "reward/mean" in line]
    return {
        **{key: summary[key] for key in ("accuracy_before", "accuracy_after")},
        "seconds": {phase: round(x, 1) for phase, x in summary["seconds"].items()},
        "mismatched_tokens": sum(line.get("sampler/mismatched_tokens", 0) for line in lines),
        "reward": [round(line["reward/mean"], 5) for line in of_blocks],
        "entropy": [round(line["entropy/mean"], 5) for line in of_blocks if "entropy/mean" in line],
    }


def draw(runs: list[dict[str, Any]], out: Path) -> None:
    """The mean reward of each run, smoothed over ten blocks."""
    lines = [reward_curve(f"{found['engine']}, seed {found['seed']}", found["reward"]) for found in runs]
    out.write_text(line_plot(lines, x_label="block", y_label="mean reward, over ten blocks"))


def main() -> None:
    """Both engines at every seed that the result file lacks, and the picture of all."""
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--blocks", type=int, default=120)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    wanted = [
        {"engine": engine, "seed": seed, "blocks": options.blocks}
        for seed in options.seeds
        for engine in options.engines
    ]
    machine = environment(options.device, ("triton", "transformers"))
    runs = completed(
        options.out,
        wanted,
        partial(run, device=options.device),
        lambda runs, out: write_result(out, {"environment": machine, "runs": runs}),
    )
    draw(runs, options.out.with_suffix(".svg"))
    for found in runs:
        print(
            f"{found['engine']}, seed {found['seed']}: {found['accuracy_before']:.3f} -> {found['accuracy_after']:.3f},"
            f" rollouts {found['seconds']['rollout']:.0f} s"
        )


if __name__ == "__main__":
    main()

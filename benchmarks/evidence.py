"""Does it learn, and as TRL does? One model, one task, equal weights, prompts and settings; and what a choice changes.

    python benchmarks/evidence.py comparison --seeds 0 1 2
    python benchmarks/evidence.py ablations
    python benchmarks/evidence.py draw

The task is to sort letters. A model made from a config learns it by imitation until a sample is right about three
times in ten; GRPO does the rest, with a reward for the whole answer alone. Accuracy is not estimated from samples: it
is the probability that a sample is right, ``mean exp(sum logp of the answer)`` over held-out prompts, by the same code
for every contender. What the result files lack is run, each run in a process of its own. ``--size tiny`` is for a CPU.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from logitless.bench.machine import environment, write_result
from logitless.data.packing import pack
from logitless.data.prompts import PromptOrder
from logitless.models.char_tokenizer import character_tokenizer
from logitless.models.loading import load_model
from logitless.rollout.engine import Weights
from logitless.rollout.transformers import TransformersEngine
from logitless.seeds import derived_seed
from logitless.train import policy as policy_module
from logitless.train.config import Recipe
from logitless.train.engines import Engines
from logitless.train.policy import Policy
from logitless.train.recipe import parse_recipe
from logitless.train.run import start
from logitless.types import Completion, Prompt

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PROMPTS_PER_BLOCK, SAMPLES, EPOCHS, LENGTH = 32, 16, 2, 24
SIZES: dict[str, dict[str, Any]] = {
    "116m": {
        "config": {"hidden_size": 896, "intermediate_size": 2432, "num_hidden_layers": 12, "num_attention_heads": 14},
        "letters": (10, 16),
        "rows": 60_000,
        "learning_rate": 1e-5,
        "imitation_rate": 2e-4,
        "blocks": 120,
    },
    "tiny": {
        "config": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 1},
        "letters": (3, 4),
        "rows": 8_000,
        "learning_rate": 3e-4,
        "imitation_rate": 3e-3,
        "blocks": 20,
    },
}
HERE = {"rollout": {"engine": {"name": "transformers"}}}
ABLATIONS: dict[str, dict[str, Any]] = {
    "logitless": {},
    "log-probs rounded to bfloat16": {},
    "sampler in bfloat16": HERE,
    "sampler in bfloat16, corrected": {
        **HERE,
        "algorithm": {"correction": {"level": "token", "mode": "truncate", "max": 2.0}},
    },
    "transformers' layers and sampler": {"model": {"layers": "transformers"}, **HERE},
    **{name: {"algorithm": {"preset": name}} for name in ("dr_grpo", "gspo", "cispo", "dapo", "ppo")},
}
"""What each changes of the recipe. A sampler in bfloat16 reads a rounded copy of float32 weights, trained as such."""


def questions(count: int, letters: tuple[int, int], seed: int) -> list[dict[str, str]]:
    """Distinct texts to sort, each with its answer."""
    draw, found = random.Random(seed), {}
    while len(found) < count:
        text = "".join(draw.choices(LETTERS, k=draw.randint(*letters)))
        found[text] = {"id": text, "prompt": text + "=", "answer": "".join(sorted(text))}
    return list(found.values())


def data_of(size: str) -> dict[str, list[dict[str, str]]]:
    """Rows to imitate, to train on and to judge by; none to judge by is in the others."""
    rows = questions(SIZES[size]["rows"], SIZES[size]["letters"], seed=1)
    return {"held_out": rows[:512], "train": rows[512:5_512], "imitated": rows[512:]}


def letters() -> PreTrainedTokenizerBase:
    """A token a letter."""
    return character_tokenizer(LETTERS + "=")


def answered(rows: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> list[tuple[Prompt, Completion]]:
    """Prompts with the right answer, its EOS included."""
    pairs = []
    for row in rows:
        answer = (*tokenizer(row["answer"])["input_ids"], int(tokenizer.eos_token_id))
        prompt = Prompt(row["id"], row["prompt"], tuple(tokenizer(row["prompt"])["input_ids"]))
        pairs.append((prompt, Completion(row["id"], answer, row["answer"], "stop")))
    return pairs


@torch.no_grad()
def accuracy(policy: Policy, pairs: list[tuple[Prompt, Completion]]) -> float:
    """The probability that a sample at temperature 1 is the answer, mean over the pairs."""
    batch = pack(pairs)
    logp = policy.scores(batch, temperature=1.0, backend="auto").logp.double().cpu()
    return float(torch.zeros(len(pairs), dtype=torch.float64).index_add_(0, batch.sequence.cpu(), logp).exp().mean())


def device() -> str:
    """A GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def policy_from(source: Any, *, seed: int = 0) -> Policy:
    """The model of a config or a folder, in float32, its products in bfloat16 on a GPU."""
    model = load_model(
        source, random_weights=isinstance(source, dict), seed=seed, dtype=torch.float32, device=torch.device(device())
    )
    return Policy(model, autocast=torch.bfloat16 if device() == "cuda" else None)


def imitate(size: str, folder: Path) -> None:
    """Leave a model that sorts about three times in ten, its tokenizer, and the data of all runs."""
    settings, tokenizer, rows = SIZES[size], letters(), data_of(size)
    config = {"model_type": "qwen3", "vocab_size": 30, "head_dim": 64, "max_position_embeddings": 64}
    config |= {"tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config |= {**settings["config"], "num_key_value_heads": settings["config"]["num_attention_heads"]}
    policy = policy_from(config)
    pairs, judged = answered(rows["imitated"], tokenizer), answered(rows["held_out"], tokenizer)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=settings["imitation_rate"], weight_decay=0.0)
    order, steps = PromptOrder(len(pairs), seed=0), 0
    while (reached := accuracy(policy, judged)) < 0.3:
        for _ in range(10):
            batch = pack([pairs[number] for number in order.next(256)])
            loss = -policy.scores(batch, temperature=1.0, backend="auto").logp.mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
            optimizer.step()
        steps += 10
        print(f"imitation {steps}: {float(loss):.3f} nat a token, {reached:.3f} right", flush=True)
        if steps == 4_000:
            raise SystemExit("The model did not learn the task by imitation; change SIZES.")
    policy.model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for name in ("train", "held_out"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
    (folder / "base.json").write_text(json.dumps({"accuracy": accuracy(policy, judged), "imitation_steps": steps}))


def recipe(size: str, folder: Path, name: str, seed: int) -> Recipe:
    """What one run of logitless does; TRL is given the same settings in ``trl_run``."""
    settings, on_gpu = SIZES[size], device() == "cuda"
    raw: dict[str, Any] = {
        "name": "run",
        "seed": seed,
        "output": str(folder / "runs" / f"{name.replace(' ', '-').replace(',', '').replace(chr(39), '')}-{seed}"),
        "model": {"source": str(folder / "model"), "device": device()},
        "data": {"train": {"name": "file", "path": str(folder / "train.jsonl")}},
        "rollout": {
            "prompts_per_block": PROMPTS_PER_BLOCK,
            "completions_per_prompt": SAMPLES,
            "sampling": {"max_new_tokens": LENGTH, "temperature": 1.0},
            "zero_signal": "keep",
        },
        "rewards": [{"name": "exact"}],
        "algorithm": {"preset": "grpo"},
        "train": {
            "blocks": settings["blocks"],
            "epochs_per_block": EPOCHS,
            "tokens_per_step": 10**6,
            "optimizer": {"learning_rate": settings["learning_rate"], "betas": [0.9, 0.999]},
        },
        "checkpoint": {"every_blocks": 10**6},
        "writers": [],
    }
    in_bfloat16 = "sampler in bfloat16" in name
    if on_gpu and not in_bfloat16:
        raw["model"] |= {"trained_dtype": "bfloat16", "layers": "row_invariant"}
        raw["rollout"]["engine"] = {"name": "gpu"}
    for section, change in ABLATIONS.get(name, {}).items():
        raw[section] = {**raw[section], **change}
    return parse_recipe(raw)


def bfloat16_sampler(recipe: Recipe, _model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Engines:
    """An engine with a copy of the weights rounded to bfloat16, taken after every step."""

    class Copying(TransformersEngine):
        def load(self, weights: Weights, version: int) -> None:
            with torch.no_grad():
                for mine, theirs in zip(self._model.parameters(), weights.module.parameters(), strict=True):
                    mine.copy_(theirs)
            super().load(replace(weights, module=self._model), version)

    copy = load_model(recipe.model.source, dtype=torch.bfloat16, device=torch.device(device()))
    engine = Copying(copy.eval(), tokenizer)
    return Engines(engine, engine)


def logitless_run(size: str, folder: Path, name: str, seed: int) -> dict[str, Any]:
    """The recipe, trained."""
    made = recipe(size, folder, name, seed)
    shutil.rmtree(made.output, ignore_errors=True)
    arguments: dict[str, Any] = {"open_engines": bfloat16_sampler} if "sampler in bfloat16" in name else {}
    if "rounded" in name:
        exact = policy_module.token_scores

        def rounded(*args: Any, **kwargs: Any) -> Any:
            scores = exact(*args, **kwargs)
            step = (scores.logp.to(torch.bfloat16).float() - scores.logp).detach()
            return replace(scores, logp=scores.logp + step)

        policy_module.token_scores = rounded
    run, _ = start(made, **arguments)
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    blocks = [line for line in lines if line.get("epoch") == 1]
    summary = json.loads((run.path / "summary.json").read_text())
    return {
        "reward": [line["reward/mean"] for line in blocks],
        "seconds": summary["seconds"],
        "train_seconds": sum(summary["seconds"].values()),
        "weights": str(run.path / "model"),
    }


def trl_run(size: str, folder: Path, seed: int) -> dict[str, Any]:
    """TRL's trainer with the recipe's settings: its own layers, its own sampler, its own loss."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    settings = SIZES[size]
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    order = PromptOrder(len(rows), derived_seed(seed, "order"))
    rows = [rows[number] for number in order.next(settings["blocks"] * PROMPTS_PER_BLOCK)]

    def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [float(text.strip() == expected) for text, expected in zip(completions, answer, strict=True)]

    arguments = GRPOConfig(
        output_dir=str(folder / "runs" / f"trl-{seed}"),
        seed=seed,
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        per_device_train_batch_size=PROMPTS_PER_BLOCK * SAMPLES,
        gradient_accumulation_steps=1,
        num_generations=SAMPLES,
        num_iterations=EPOCHS,
        max_steps=settings["blocks"] * EPOCHS,
        max_completion_length=LENGTH,
        temperature=1.0,
        loss_type="grpo",
        scale_rewards="group",
        epsilon=0.2,
        beta=0.0,
        bf16=device() == "cuda",
        use_cpu=device() == "cpu",
        gradient_checkpointing=False,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        reward_funcs=right,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder / "model", padding_side="left"),
    )
    began = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    weights = Path(arguments.output_dir) / "model"
    trainer.model.save_pretrained(weights)
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    return {"reward": rewards, "train_seconds": seconds, "weights": str(weights)}


def one(size: str, folder: Path, name: str, seed: int) -> None:
    """One run, in this process: its row as JSON in the folder."""
    row = trl_run(size, folder, seed) if name == "trl" else logitless_run(size, folder, name, seed)
    judged = answered([json.loads(x) for x in (folder / "held_out.jsonl").read_text().splitlines()], letters())
    row["accuracy"] = accuracy(policy_from(row.pop("weights")), judged)
    (folder / "row.json").write_text(json.dumps(row))


def missing(size: str, folder: Path, names: list[str], seeds: list[int], out: Path) -> None:
    """Every run that the file lacks, one after the other, each added to it when it is done."""
    folder.mkdir(parents=True, exist_ok=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    if not (folder / "base.json").exists():
        imitate(size, folder)
    base = json.loads((folder / "base.json").read_text())
    document = json.loads(out.read_text()) if out.exists() else {"rows": []}
    document |= {"machine": environment(device(), ["torch", "transformers", "trl"]), "size": size, "base": base}
    settings = ("letters", "learning_rate", "blocks", "config")
    document["settings"] = {key: SIZES[size][key] for key in settings} | {"prompts": PROMPTS_PER_BLOCK}
    document["settings"] |= {"samples": SAMPLES, "epochs": EPOCHS, "max_new_tokens": LENGTH}
    for seed in seeds:
        for name in names:
            if any((row["run"], row["seed"]) == (name, seed) for row in document["rows"]):
                continue
            command = [sys.executable, __file__, "one", "--name", name, "--seeds", str(seed), "--size", size]
            finished = subprocess.run([*command, "--folder", str(folder)], check=False)
            if finished.returncode:
                print(f"{name}, seed {seed}: failed, not recorded", flush=True)
                continue
            row = {"run": name, "seed": seed, **json.loads((folder / "row.json").read_text())}
            document["rows"].append(row)
            write_result(out, document)
            print(f"{name}, seed {seed}: {base['accuracy']:.3f} -> {row['accuracy']:.3f}, {row['train_seconds']:.0f} s")


def draw(out: Path) -> None:
    """Mean reward of every run in a file over its seeds, with the band from the lowest to the highest."""
    from matplotlib.figure import Figure

    rows = json.loads(out.read_text())["rows"]
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for name in dict.fromkeys(row["run"] for row in rows):
        curves = torch.tensor([row["reward"] for row in rows if row["run"] == name])
        smooth = torch.stack([curves[:, max(0, b - 4) : b + 1].mean(1) for b in range(curves.shape[1])], dim=1)
        x = range(1, curves.shape[1] + 1)
        [line] = axes.plot(x, smooth.mean(0), label=name, linewidth=1.5)
        axes.fill_between(x, smooth.amin(0), smooth.amax(0), color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set(xlabel="block", ylabel="mean reward, five blocks", ylim=(0, 1.02))
    figure.legend(loc="outside upper left", ncols=2, fontsize=8)
    figure.savefig(out.with_suffix(".svg"))


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["comparison", "ablations", "draw", "one"])
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--size", choices=list(SIZES), default="116m")
    parser.add_argument("--folder", type=Path, default=Path("runs/evidence"), help="models and data of the runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--name", help="of the one run")
    options = parser.parse_args()
    files = {what: options.results / f"evidence-{what}.json" for what in ("comparison", "ablations")}
    folder = options.folder / options.size if options.what != "one" else options.folder
    match options.what:
        case "one":
            one(options.size, folder, options.name, options.seeds[0])
        case "comparison":
            missing(options.size, folder, ["logitless", "trl"], options.seeds or [0, 1, 2], files["comparison"])
        case "ablations":
            missing(options.size, folder, list(ABLATIONS), options.seeds or [0], files["ablations"])
    for file in files.values():
        if options.what != "one" and file.exists():
            draw(file)


if __name__ == "__main__":
    main()

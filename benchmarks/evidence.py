"""Learning curves against TRL's on one model and task, with equal weights, prompts and settings; and ablations.

    python benchmarks/evidence.py comparison                  # a run at a time on each GPU: wall clocks count
    python benchmarks/evidence.py ablations --at-once 4       # what is still missing, four side by side on each GPU
    python benchmarks/evidence.py draw                        # plots again; --table: tables of docs/evidence.md

The task is to sort letters. A model with random weights learns it by imitation until about three samples in ten are
right; then GRPO trains it with a reward for the whole answer. Accuracy is the probability that a sample is right,
``mean exp(sum logp of the answer)`` over held-out prompts, by the same code for every contender. Runs that the result
files lack are made, each in a process of its own, on all visible GPUs; its row is written as soon as it ends. Each row
has the digest of its initial weights, and only rows with equal digests are compared. ``--size tiny`` is for a CPU.
"""

import json
import os
import queue
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedTokenizerBase

from logitless.bench.machine import environment, write_result
from logitless.data.packing import pack
from logitless.data.prompts import PromptOrder
from logitless.models.char_tokenizer import character_tokenizer
from logitless.models.loading import load_model
from logitless.rollout.engine import Engine, Weights
from logitless.rollout.sampling import SamplingOptions
from logitless.rollout.transformers import TransformersEngine
from logitless.seeds import derived_seed
from logitless.train.assembly.engines import Engines, open_engines
from logitless.train.assembly.model import policy_model
from logitless.train.assembly.process import sdpa_allowed
from logitless.train.learn import policy as policy_module
from logitless.train.learn.policy import Policy
from logitless.train.optim.optimizer import adamw, take_step
from logitless.train.recipe.config import Recipe
from logitless.train.recipe.loading import parse_recipe
from logitless.train.recipe.model import ModelSection
from logitless.train.recipe.training import OptimizerSection
from logitless.train.run import run_recipe
from logitless.types import Completion, LMHead, Prompt, TokenScores
from script import command_line, commit, digest, parsed

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PROMPTS_PER_BLOCK, SAMPLES, EPOCHS, LENGTH = 32, 16, 2, 24
SIZES: dict[str, dict[str, Any]] = {
    "116m": {
        "config": {"hidden_size": 896, "intermediate_size": 2432, "num_hidden_layers": 12, "num_attention_heads": 14},
        "letters": (10, 16),
        "rows": 60_000,
        "learning_rate": 1e-5,
        "imitation_rate": 2e-4,
        "warm_up": 50,
        "blocks": 100,
    },
    "tiny": {
        "config": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 1},
        "letters": (3, 4),
        "rows": 8_000,
        "learning_rate": 3e-4,
        "imitation_rate": 3e-3,
        "warm_up": 1,
        "blocks": 40,
    },
}
HERE = {"rollout": {"engine": {"name": "transformers"}}}
SAVINGS = ("share_prompts", "pack_by_cost", "skip_zero_advantage", "reuse_logp")
CORRECTION = {"level": "token", "mode": "truncate", "max": 2.0}
ABLATIONS: dict[str, dict[str, Any]] = {
    "log-probs in bfloat16": {},
    "log-probs rounded to bfloat16": {},
    "sampler in bfloat16": HERE,
    "sampler in bfloat16, corrected": {**HERE, "algorithm": {"correction": CORRECTION}},
    "every saving off": {"train": dict.fromkeys(SAVINGS, False)},
    **{name: {"algorithm": {"preset": name}} for name in ("dr_grpo", "gspo", "cispo", "dapo", "ppo")},
    **{f"{name} off": {"train": {name: False}} for name in SAVINGS[:3]},
    "transformers' layers and sampler": {"model": {"layers": "transformers"}, **HERE},
}
"""What each changes of the recipe. A sampler in bfloat16 reads a rounded copy of float32 weights, trained as such.
``reuse_logp`` has nothing to save where a block is used twice, so it is off in "every saving off" alone."""
FIGURES = {
    "precision": ("logitless", "log-probs in bfloat16", "log-probs rounded to bfloat16"),
    "sampler": ("logitless", "sampler in bfloat16", "sampler in bfloat16, corrected"),
    "savings": ("logitless", "every saving off", *(f"{name} off" for name in SAVINGS[:3])),
    "algorithms": ("logitless", "dr_grpo", "gspo", "cispo", "dapo", "ppo"),
    "layers": ("logitless", "transformers' layers and sampler"),
}
"""What one plot shows beside each other; runs of "logitless" are those of the comparison."""
CONTENDERS = ("logitless", "trl")


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
    prompts, answers = (tokenizer([row[key] for row in rows])["input_ids"] for key in ("prompt", "answer"))
    end = int(tokenizer.eos_token_id)
    return [
        (Prompt(row["id"], row["prompt"], tuple(asked)), Completion(row["id"], (*said, end), row["answer"], "stop"))
        for row, asked, said in zip(rows, prompts, answers, strict=True)
    ]


@torch.no_grad()
def accuracy(policy: Policy, pairs: list[tuple[Prompt, Completion]]) -> float:
    """The probability that a sample at temperature 1 is the answer, mean over the pairs."""
    batch = pack(pairs)
    logp = policy.scores(batch, temperature=1.0, backend="auto").logp.double().cpu()
    return float(torch.zeros(len(pairs), dtype=torch.float64).index_add_(0, batch.sequence.cpu(), logp).exp().mean())


def device() -> str:
    """A GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def policy_from(folder: str | Path) -> Policy:
    """The model of a folder, in float32 throughout, for evaluation."""
    return Policy(load_model(str(folder), dtype=torch.float32, device=torch.device(device())))


def imitate(size: str, folder: Path) -> None:
    """Leave a model that sorts about three times in ten, its tokenizer, and the data of all runs.

    On a GPU through row-invariant layers, whose kernels have one order of every sum: the same weights each time.
    """
    settings, tokenizer, rows = SIZES[size], letters(), data_of(size)
    config = {"model_type": "qwen3", "vocab_size": 30, "head_dim": 64, "max_position_embeddings": 64}
    config |= {"tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config |= {**settings["config"], "num_key_value_heads": settings["config"]["num_attention_heads"]}
    section = ModelSection(source=config, random_weights=True, **in_products_of_bfloat16())
    policy = Policy(policy_model(section, tokenizer, seed=0, device=torch.device(device())))
    pairs, judged = answered(rows["imitated"], tokenizer), answered(rows["held_out"], tokenizer)
    optimizer = adamw(policy.model.parameters(), OptimizerSection(betas=(0.9, 0.999)), policy.device)
    order, steps, curve, began = PromptOrder(len(pairs), seed=0), 0, [], time.perf_counter()
    while (reached := accuracy(policy, judged)) < 0.3:
        curve.append([steps, reached])
        for _ in range(10):
            batch = pack([pairs[number] for number in order.next(256)])
            loss = -policy.scores(batch, temperature=1.0, backend="auto").logp.mean()
            loss.backward()
            rate = settings["imitation_rate"] * min(1.0, (steps + 1) / settings["warm_up"])
            take_step(optimizer, rate=rate, max_grad_norm=1.0)
            steps += 1
        seconds = time.perf_counter() - began
        print(f"imitation {steps}: {reached:.3f} right before, loss {loss:.3f}, {seconds:.0f} s", flush=True)
        if steps == 3_000:
            raise SystemExit("The model did not learn the task by imitation; change SIZES.")
    policy.save(folder / "model", tokenizer)
    for name in ("train", "held_out"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
    begun = policy_from(folder / "model")
    found = {"accuracy": accuracy(begun, judged), "imitation_steps": steps}
    found["digest"] = digest(dict(begun.model.named_parameters()))
    found |= {"parameters": sum(p.numel() for p in begun.model.parameters()), "curve": curve}
    found["seconds"] = time.perf_counter() - began
    print(found, flush=True)
    (folder / "base.part").write_text(json.dumps(found))
    (folder / "base.part").rename(folder / "base.json")


def in_products_of_bfloat16() -> dict[str, Any]:
    """Of a model section on a GPU: bfloat16 weights with float32 masters, and row-invariant layers."""
    return (
        {"trained_dtype": "bfloat16", "layers": "row_invariant"} if device() == "cuda" else {"trained_dtype": "float32"}
    )


def file_name(name: str, seed: int) -> str:
    """Of what a run leaves.

    Example:
        >>> file_name("transformers' layers", 0)
        'transformers-layers-0'
    """
    return "-".join("".join(c for c in name if c.isalnum() or c in " _-").split()) + f"-{seed}"


def recipe(size: str, folder: Path, name: str, seed: int) -> Recipe:
    """What one run of logitless does; TRL is given the same settings in ``trl_run``."""
    settings, on_gpu = SIZES[size], device() == "cuda"
    raw: dict[str, Any] = {
        "name": "run",
        "seed": seed,
        "output": str(folder / "runs" / file_name(name, seed)),
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
    if on_gpu and in_bfloat16:
        raw["model"] |= {"trained_dtype": "float32", "matmul_precision": "high"}
    elif on_gpu:
        raw["model"] |= in_products_of_bfloat16()
        raw["rollout"]["engine"] = {"name": "gpu", "memory": 2**31}  # several runs may share the GPU
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


def rescoring(recipe: Recipe, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Engines:
    """The recipe's engine without the promise that its log-probs are the trainer's: each block is scored anew."""

    @dataclass(frozen=True)
    class Rescored:
        engine: Engine

        def sample(
            self, prompts: Sequence[Prompt], num_samples: int, options: SamplingOptions, *, seed: int
        ) -> list[list[Completion]]:
            return self.engine.sample(prompts, num_samples, options, seed=seed)

        def load(self, weights: Weights, version: int) -> None:
            self.engine.load(weights, version)

        def close(self) -> None:
            self.engine.close()

    engine = Rescored(open_engines(recipe, model, tokenizer).training)
    return Engines(engine, engine)


def rounded(hidden: torch.Tensor, head: LMHead, target: torch.Tensor, **options: Any) -> TokenScores:
    """The head's scores, each log-prob rounded to bfloat16; its gradient stays the exact one."""
    scores = EXACT(hidden, head, target, **options)
    return replace(scores, logp=scores.logp + (scores.logp.bfloat16().float() - scores.logp).detach())


def in_bfloat16(
    hidden: torch.Tensor, head: LMHead, target: torch.Tensor, *, temperature: float, **_: Any
) -> TokenScores:
    """Logits and their log-softmax in bfloat16, as of trainers that leave the model's dtype as it is."""
    logits = (hidden.bfloat16() @ head.weight.bfloat16().T) / temperature
    logp = logits.log_softmax(-1)
    entropy = -(logp.float().exp() * logp.float()).sum(-1)
    return TokenScores(logp.gather(-1, target[:, None]).squeeze(-1).float(), entropy)


EXACT = policy_module.token_scores
HEADS = {"log-probs in bfloat16": in_bfloat16, "log-probs rounded to bfloat16": rounded}
"""Replacements of the library's head in these ablations, for scoring and for training."""


def logitless_run(size: str, folder: Path, name: str, seed: int) -> dict[str, Any]:
    """The recipe, trained."""
    made = recipe(size, folder, name, seed)
    shutil.rmtree(made.output, ignore_errors=True)
    arguments: dict[str, Any] = {"open_engines": bfloat16_sampler} if "sampler in bfloat16" in name else {}
    policy_module.token_scores = HEADS.get(name, EXACT)
    if name in HEADS:
        arguments["open_engines"] = rescoring
    run = run_recipe(made, **arguments).folder
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run.path / "summary.json").read_text())
    by_block = {line["block"]: line for line in lines}  # the last line of each
    ended = [lines[0]["time/elapsed_seconds"], *(by_block[block]["time/elapsed_seconds"] for block in sorted(by_block))]
    return {
        "reward": [line["reward/mean"] for line in lines if "reward/mean" in line],
        "block_seconds": [after - before for before, after in pairwise(ended)],
        "phases": summary["seconds"],
        "weights": str(run.path / "model"),
    }


def trl_arguments(output: Path, *, micro_batches: int = 1, **settings: Any) -> Any:
    """A ``GRPOConfig`` with these settings, and nothing else of TRL's defaults that would make it another algorithm.

    Args:
        micro_batches: of a step.
    """
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(output),
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_accumulation_steps=micro_batches,
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
        **settings,
    )


def train_in_trl(trainer: Any) -> list[str]:
    """Train without cuDNN's attention; returns the kernels that attention could choose from.

    On H100 and H200 torch 2.11 takes cuDNN's first. Under a mask its backward has NaN in the queries' gradient if rows,
    padding included, have 64, 192, 320, ... tokens and a query sees no key, as padding on the left does.

    Source: https://github.com/pytorch/pytorch/issues/196678, https://github.com/huggingface/trl/issues/7181
    """
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        trainer.train()
        return sdpa_allowed()


def trl_run(size: str, folder: Path, seed: int, until: float) -> dict[str, Any]:
    """TRL's trainer with the recipe's settings: its own layers, its own sampler, its own loss."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    class Clock(TrainerCallback):
        """When each optimizer step ended."""

        def __init__(self) -> None:
            self.ended: list[float] = []

        def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
            self.ended.append(time.perf_counter())
            control.should_training_stop |= time.time() > until and state.global_step % EPOCHS == 0

    settings = SIZES[size]
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    order = PromptOrder(len(rows), derived_seed(seed, "order"))
    rows = [rows[number] for number in order.next(settings["blocks"] * PROMPTS_PER_BLOCK)]

    def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [float(text.strip() == expected) for text, expected in zip(completions, answer, strict=True)]

    arguments = trl_arguments(
        folder / "runs" / f"trl-{seed}",
        seed=seed,
        learning_rate=settings["learning_rate"],
        per_device_train_batch_size=PROMPTS_PER_BLOCK * SAMPLES,
        num_generations=SAMPLES,
        num_iterations=EPOCHS,
        max_steps=settings["blocks"] * EPOCHS,
        max_completion_length=LENGTH,
        temperature=1.0,
        loss_type="grpo",
        scale_rewards="group",
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        reward_funcs=right,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder / "model", padding_side="left"),
        callbacks=[clock := Clock()],
    )
    began = time.perf_counter()
    sdpa = train_in_trl(trainer)
    weights = Path(arguments.output_dir) / "model"
    trainer.model.save_pretrained(weights)
    ended = [began, *clock.ended[EPOCHS - 1 :: EPOCHS]]
    return {
        "reward": [line["reward"] for line in trainer.state.log_history if "reward" in line],
        "block_seconds": [after - before for before, after in pairwise(ended)],
        "sdpa": sdpa,
        "weights": str(weights),
    }


class Run(NamedTuple):
    """A name of ``CONTENDERS`` or ``ABLATIONS`` and a seed."""

    name: str
    seed: int

    @classmethod
    def of(cls, text: str) -> "Run":
        """From ``name:seed``.

        Example:
            >>> Run.of("trl:0")
            Run(name='trl', seed=0)
        """
        name, _, seed = text.rpartition(":")
        return cls(name, int(seed))

    def file(self, size: str) -> str:
        """That its row belongs to."""
        return f"evidence-{size}-{'comparison' if self.name in CONTENDERS else 'ablations'}.json"


def work(size: str, folder: Path, run: Run, *, at_once: int, until: float) -> None:
    """One run in this process: its row as JSON in the folder when it is done.

    Args:
        size: of ``SIZES``.
        folder: with the model to begin with and the data.
        run: to make.
        at_once: processes that share the device, for the row.
        until: time from which TRL's trainer ends with the block that it is in.
    """
    base = json.loads((folder / "base.json").read_text())
    judged = answered([json.loads(x) for x in (folder / "held_out.jsonl").read_text().splitlines()], letters())
    row = {"run": run.name, "seed": run.seed, "at_once": at_once, "base": base["digest"]}
    began = time.perf_counter()
    row |= trl_run(size, folder, run.seed, until) if run.name == "trl" else logitless_run(size, folder, *run)
    row["run_seconds"] = time.perf_counter() - began
    row["train_seconds"] = sum(row["block_seconds"])
    row["accuracy"] = accuracy(policy_from(row.pop("weights")), judged)
    leave_row(row, folder, file_name(*run))
    print(f"{base['accuracy']:.3f} -> {row['accuracy']:.3f}, blocks {row['train_seconds']:.0f} s", flush=True)


def leave_row(row: dict[str, Any], folder: Path, name: str) -> None:
    """Put a row into a folder, as a whole."""
    (folder / "rows").mkdir(exist_ok=True)
    part = folder / "rows" / f"{name}.part"
    part.write_text(json.dumps(row))
    part.rename(part.with_suffix(".json"))


def gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES names one by one; on a CPU one place without any."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())] or [""]


def in_processes(
    commands: Mapping[str, Sequence[str]], folder: Path, *, at_once: int, until: float, ended: Callable[[], None]
) -> bool:
    """Run commands, each in a process, so many side by side on each GPU; whether all of them ended well.

    One that fails leaves its log in the folder; those after it are run. They share the CPUs: threads of each that spin
    on every core would slow the others down.

    Args:
        commands: by the name of their log, the first ones first.
        folder: of the logs.
        at_once: processes on each GPU.
        until: time from which none is begun.
        ended: called after each.
    """
    places: queue.Queue[str] = queue.Queue()
    for gpu in gpus() * at_once:
        places.put(gpu)
    threads = str(max(1, (os.cpu_count() or 1) // places.qsize()))

    def process(name: str, command: Sequence[str]) -> bool:
        gpu, path = places.get(), folder / f"{name}.txt"
        try:
            if time.time() > until:
                return False
            with path.open("w") as output:
                settings = {"OMP_NUM_THREADS": threads} | os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
                status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=settings).returncode
            last = path.read_text().splitlines()[-15 if status else -1 :]
            print(f"{name} ends with status {status}:", *last, sep="\n", flush=True)
            return status == 0
        finally:
            places.put(gpu)

    with ThreadPoolExecutor(places.qsize()) as pool:
        well = True
        for done in as_completed([pool.submit(process, *each) for each in commands.items()]):
            well &= done.result()
            ended()
    return well


def missing(size: str, folder: Path, results: Path, runs: Sequence[Run], *, at_once: int, until: float) -> None:
    """Make runs, and before them the model to begin with, where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)

    def command(*arguments: str) -> list[str]:
        return [sys.executable, __file__, *arguments, "--size", size, "--folder", str(folder)]

    if not (folder / "base.json").exists():
        in_processes({"base": command("base")}, folder, at_once=1, until=until, ended=lambda: None)
    if not (folder / "base.json").exists():
        raise SystemExit("There is no model to begin with.")
    shared = ("--at-once", str(at_once), "--until", str(until))
    commands = {
        file_name(*run): command("work", "--run", f"{run.name}:{run.seed}", *shared)
        for run in sorted(runs, key=lambda run: run.name != "trl")  # the longest first
    }
    in_processes(commands, folder, at_once=at_once, until=until, ended=lambda: gather(size, folder, results))


def gather(size: str, folder: Path, results: Path) -> None:
    """Put the rows of a folder into the result files; an unfinished row gives place to a longer one.

    Raises:
        SystemExit: a file has rows that began with other weights.
    """
    results.mkdir(parents=True, exist_ok=True)
    base = json.loads((folder / "base.json").read_text())
    rows = [json.loads(path.read_text()) for path in sorted(folder.glob("rows/*.json"))]
    for file in sorted({Run(row["run"], row["seed"]).file(size) for row in rows}):
        out = results / file
        document = json.loads(out.read_text()) if out.exists() else {"rows": []}
        if any(row["base"] != base["digest"] for row in document["rows"]):
            raise SystemExit(f"{out} has rows that began with other weights: remove it, or run where it was begun.")
        found = {(row["run"], row["seed"]): row for row in document["rows"]}
        for row in rows:
            key = Run(row["run"], row["seed"])
            if key.file(size) == file and len(row["reward"]) > len(found.get(key, {"reward": []})["reward"]):
                found[key] = row
        document |= {"machine": environment(device(), ["triton", "transformers", "trl"]), "size": size, "base": base}
        document["commit"] = commit()
        settings = {key: SIZES[size][key] for key in ("letters", "learning_rate", "blocks", "config")}
        settings |= {"prompts": PROMPTS_PER_BLOCK, "samples": SAMPLES, "epochs": EPOCHS, "max_new_tokens": LENGTH}
        order = [*CONTENDERS, *ABLATIONS]
        document |= {
            "settings": settings,
            "rows": sorted(found.values(), key=lambda r: (order.index(r["run"]), r["seed"])),
        }
        write_result(out, document)


def lacking(size: str, results: Path, runs: Sequence[Run]) -> list[Run]:
    """Those of the runs that the result files do not have, or not with all their blocks."""
    there = set()
    for file in {run.file(size) for run in runs}:
        if (results / file).exists():
            rows = json.loads((results / file).read_text())["rows"]
            there |= {(row["run"], row["seed"]) for row in rows if len(row["reward"]) >= SIZES[size]["blocks"]}
    return [run for run in runs if run not in there]


def five_blocks(curve: torch.Tensor) -> torch.Tensor:
    """The mean of each value and the four before it, of fewer at the beginning."""
    return torch.stack([curve[max(0, b - 4) : b + 1].mean() for b in range(len(curve))])


def draw(rows: list[dict[str, Any]], path: Path, *, compared: bool, seconds: bool) -> None:
    """Mean reward of each name with the band of its seeds; the line is their mean, or seed 0, as ablations have.

    Args:
        rows: of one plot.
        path: of the SVG file.
        compared: whether the line is the mean over the seeds.
        seconds: whether a second panel has runs that were alone on a device, over the seconds that their blocks took.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.4 if seconds else 6.4, 3.6), layout="constrained")
    panels = figure.subplots(1, 1 + seconds, sharey=True, squeeze=False)[0]
    for name in dict.fromkeys(row["run"] for row in rows):
        found = [row for row in rows if row["run"] == name]
        curves = torch.tensor([row["reward"][: min(len(other["reward"]) for other in found)] for row in found])
        smooth = torch.stack([five_blocks(curve) for curve in curves])
        x = range(1, curves.shape[1] + 1)
        label = name if len(curves) == 1 else f"{name}, {len(curves)} seeds"
        shown = smooth.mean(0) if compared else smooth[0]
        [line] = panels[0].plot(x, shown, label=label, linewidth=1.5)
        panels[0].fill_between(x, smooth.amin(0), smooth.amax(0), color=line.get_color(), alpha=0.2, linewidth=0)
        for row, rewards in zip(found, smooth, strict=True):
            if seconds and row["at_once"] == 1:
                ended = list(accumulate(row["block_seconds"]))[: len(rewards)]
                panels[1].plot(ended, rewards, color=line.get_color(), linewidth=1)
    panels[0].set(xlabel="block", ylabel="mean reward, five blocks", ylim=(0, 1.02))
    if seconds:
        panels[1].set(xlabel="seconds, runs alone on a device", xlim=(0, None))
    figure.legend(loc="outside upper left", ncols=2, fontsize=8)
    save_plot(figure, path)


def save_plot(figure: Any, path: Path) -> None:
    """As SVG: the same file for the same rows."""
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": path.name}):
        figure.savefig(path, metadata={"Date": None})


def table(document: dict[str, Any]) -> str:
    """What each run of a file reached."""
    lines = ["| Run | Held out, at the end | Mean reward |", "|---|--:|--:|"]
    for row in document["rows"]:
        lines.append(f"| {row['run']} | {row['accuracy']:.3f} | {fmean(row['reward']):.3f} |")
    return "\n".join(lines)


STUDENT = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306}
"""Student's quantile of 97.5% by degrees of freedom."""
MEASURES: dict[str, Callable[[dict[str, Any]], float]] = {
    "Mean reward, all blocks": lambda row: fmean(row["reward"]),
    "Mean reward, last ten blocks": lambda row: fmean(row["reward"][-10:]),
    "Held out, at the end": lambda row: row["accuracy"],
}


def difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Of the means, theirs less ours, and half of its 95% interval; the spread is taken to be the same.

    Example:
        >>> [round(number, 4) for number in difference([0.80, 0.82, 0.84], [0.83, 0.85, 0.87])]
        [0.03, 0.0453]
    """
    freedom = len(ours) + len(theirs) - 2
    pooled = ((len(ours) - 1) * stdev(ours) ** 2 + (len(theirs) - 1) * stdev(theirs) ** 2) / freedom
    half = STUDENT[freedom] * (pooled * (1 / len(ours) + 1 / len(theirs))) ** 0.5
    return fmean(theirs) - fmean(ours), half


def seeds_of(document: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The comparison's rows of logitless, and those of TRL."""
    ours, theirs = ([row for row in document["rows"] if row["run"] == name] for name in CONTENDERS)
    return ours, theirs


def verdict(document: dict[str, Any]) -> str:
    """Both trainers' seeds: mean and spread, the difference with its 95% interval, and the ratio of the times."""
    ours, theirs = seeds_of(document)
    if min(len(ours), len(theirs)) < 2:
        return ""
    lines = ["| | logitless | TRL | TRL less logitless, 95% |", "|---|--:|--:|--:|"]
    for what, measure in MEASURES.items():
        a, b = ([measure(row) for row in found] for found in (ours, theirs))
        apart, half = difference(a, b)
        spreads = " | ".join(f"{fmean(each):.3f} ± {stdev(each):.3f}" for each in (a, b))
        lines.append(f"| {what} | {spreads} | {apart:+.3f} ± {half:.3f} |")
    lines += ["", "| Alone on a device | logitless | TRL | TRL / logitless |", "|---|--:|--:|--:|"]
    times: dict[str, Callable[[dict[str, Any]], float]] = {
        "A block, median": lambda row: median(row["block_seconds"]),
        "All blocks": lambda row: row["train_seconds"],
        "The run, with loading and first calls": lambda row: row["run_seconds"],
    }
    alone = [[row for row in found if row["at_once"] == 1 and "run_seconds" in row] for found in (ours, theirs)]
    if not all(alone):
        return "\n".join(lines[:-3])
    for what, measure in times.items():
        a, b = ([measure(row) for row in found] for found in alone)
        lines.append(f"| {what} | {fmean(a):.2f} s | {fmean(b):.2f} s | {fmean(b) / fmean(a):.1f} |")
    return "\n".join(lines)


def tables(results: Path) -> dict[str, str]:
    """What the comparison comes to, and the ablations."""
    documents = documents_in(results, "116m")
    return {
        "verdict": verdict(documents["evidence-116m-comparison"]),
        "ablations": table(documents["evidence-116m-ablations"]),
    }


def documents_in(results: Path, size: str) -> dict[str, dict[str, Any]]:
    """The result files that are there, by name."""
    found = [results / f"evidence-{size}-{what}.json" for what in ("comparison", "ablations")]
    return {path.stem: json.loads(path.read_text()) for path in found if path.exists()}


def plot(results: Path, size: str) -> None:
    """Draw the curves of the result files beside them."""
    documents = documents_in(results, size)
    rows = [row for document in documents.values() for row in document["rows"]]
    for figure, names in {"comparison": CONTENDERS, **FIGURES}.items():
        shown = [row for name in names for row in rows if row["run"] == name]
        if {row["run"] for row in shown} > {"logitless"}:
            timed = figure == "comparison" and {row["run"] for row in shown if row["at_once"] == 1} == {*CONTENDERS}
            draw(shown, results / f"evidence-{size}-{figure}.svg", compared=figure == "comparison", seconds=timed)


def main() -> None:
    """See the top of the file."""
    parser = command_line(__doc__)
    parser.add_argument("what", choices=["comparison", "ablations", "draw", "base", "work"], nargs="*")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 0 1 2 of the comparison, 0 of ablations")
    parser.add_argument(
        "--only", choices=list(ABLATIONS), nargs="+", metavar="NAME", default=list(ABLATIONS), help="of the ablations"
    )
    parser.add_argument("--at-once", type=int, default=1, help="processes side by side on each GPU, or on the CPU")
    parser.add_argument("--size", choices=list(SIZES), default="116m")
    parser.add_argument("--folder", type=Path, help="models and data of the runs; default: runs/evidence/SIZE")
    parser.add_argument("--run", type=Run.of, help="of the work: NAME:SEED")
    parser.add_argument("--until", type=float, default=float("inf"), help="time (of `date +%%s`) of the last begin")
    options = parsed(parser, tables)
    if not options.what:
        parser.error("name what to run")
    size, folder = options.size, options.folder or Path("runs/evidence") / options.size
    if options.what == ["work"]:
        work(size, folder, options.run, at_once=options.at_once, until=options.until)
        return
    if options.what == ["base"]:
        folder.mkdir(parents=True, exist_ok=True)
        imitate(size, folder)
        return
    runs: list[Run] = []
    if "comparison" in options.what:
        runs += [Run(name, seed) for seed in options.seeds or [0, 1, 2] for name in CONTENDERS]
    if "ablations" in options.what:
        runs += [Run(name, seed) for seed in options.seeds or [0] for name in options.only]
    if runs := lacking(size, options.output, runs):
        missing(size, folder, options.output, runs, at_once=options.at_once, until=options.until)
    if folder.exists():
        gather(size, folder, options.output)
    plot(options.output, size)


if __name__ == "__main__":
    main()

"""Recipes of the Tinker cookbook, unmodified, against the service on a GPU; the same loops in `logitless train`.

    python benchmarks/evidence_smollm2.py base --folder FOLDER --weights FILE.gguf
    python benchmarks/tinker_recipes.py --models smollm2 --base FOLDER/base  # learning curves of a pretrained model
    python benchmarks/tinker_recipes.py --models qwen2.5-0.5b,llama-3.1-8b   # random weights, drawn on the GPU
    python benchmarks/tinker_recipes.py --models tiny                        # tries the script itself, on a CPU

Needs tinker-cookbook==0.6.1 (`make .venv-tinker/.installed`). A row is a recipe's run to its end: seconds and reward
(or loss) of each step, and ``kl``, the largest ``optim/kl_sample_train_*`` that the cookbook found: on a GPU 0. Recipes
that are timed have the service to themselves; the rest run at once, as its tenants. Random weights sample a text that
holds numbers (``speaking``), so that some of it is rewarded. Rows are written as they come; those that the file has are
not run again.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from logitless.errors import UnavailableError
from script import RESULTS, Rows, among, main, short_name

NAME = "Qwen/Qwen3-4B-Instruct-2507"
"""What every model is called here: the cookbook chooses its chat format, ChatML without thinking, by this name."""

CHAT = "renderer_name=qwen3_instruct"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
SPECIAL += ("<tool_response>", "</tool_response>")
BOXED = " Provide a numerical answer without units, written inside \\boxed{}."
"""Of ``rl_loop``."""

COMPILING = 2
"""Steps before those that are timed."""

_TEXTS = [f"\n\nHuman: Say {i}.\n\nAssistant: {i}" for i in range(8)]
DATA: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "openai/gsm8k": ("main", [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(8)]),
    "HuggingFaceH4/no_robots": (
        "default",
        [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}] * 8,
    ),
    "Salesforce/wikitext": ("wikitext-103-raw-v1", [{"text": "after that time many were over, until then " * 20}] * 60),
    "Anthropic/hh-rlhf": ("default", [{"chosen": text + " yes", "rejected": text + " no"} for text in _TEXTS]),
    "hicai-zju/SciKnowEval": (
        "default",
        [
            {
                "domain": "Chemistry",
                "details": {"level": "L3"},
                "type": "mcq-4-choices",
                "answerKey": "A",
                "question": f"What is {i}?",
                "choices": {"label": ["A", "B"], "text": [str(i), "no"]},
            }
            for i in range(8)
        ],
    ),
    "zwhe99/DeepMath-103K": ("default", [{"question": f"What is {i} + 1?"} for i in range(8)]),
}
"""By name of the hub: configuration and rows."""


class Recipe(NamedTuple):
    """A run of the cookbook: its module, and settings without model and folder."""

    name: str
    settings: str
    tokens: int | None = None  # sampled in a step, where the cookbook does not count them

    @property
    def command(self) -> list[str]:
        """Of the process, without ``log_path``."""
        module = f"tinker_cookbook.recipes.{self.name}"
        return [sys.executable, "-W", "ignore", "-m", module, f"model_name={NAME}", *self.settings.split()]

    def smaller(self, settings: str) -> "Recipe":
        """With other numbers."""
        new = dict(word.split("=") for word in settings.split())
        kept = dict(word.split("=") for word in self.settings.split())
        return self._replace(settings=" ".join(f"{name}={value}" for name, value in (kept | new).items()))


_ON_POLICY = "loss_fn=importance_sampling learning_rate=0.0004"
LOOP = Recipe("rl_loop", f"{_ON_POLICY} batch_size=64 group_size=8 max_tokens=128 lora_rank=16 max_steps=5", 65536)
ARITHMETIC = Recipe(
    "math_rl.train",
    f"{_ON_POLICY} {CHAT} groups_per_batch=32 group_size=8 max_tokens=5 lora_rank=32 max_steps=6 eval_every=0",
)
NUMERICS = Recipe(
    "rl_numerics_check.train",
    f"{_ON_POLICY} {CHAT} groups_per_batch=8 group_size=8 max_tokens=64 lora_rank=16 max_steps=3 "
    "max_trajectory_tokens=6000 task.num_pages_min=2 task.num_pages_max=3 task.page_chars=200",
)
GUESSES = Recipe(
    "multiplayer_rl.guess_number.train",
    f"{CHAT} learning_rate=0.0004 batch_size=4 group_size=4 max_tokens=8 max_steps=2 eval_every=0",
)
OTHERS = (
    NUMERICS,
    GUESSES,
    ARITHMETIC,
    Recipe("sl_loop", "batch_size=4 max_length=256 lora_rank=16"),
    Recipe("preference.dpo.train", "renderer_name=role_colon batch_size=4 max_length=256"),
    Recipe(
        "distillation.on_policy_distillation",
        f"{CHAT} teacher_model={NAME} groups_per_batch=2 group_size=2 max_tokens=8 lora_rank=16 max_steps=2",
    ),
    Recipe(
        "sdft.train",
        f"{CHAT} groups_per_batch=3 max_tokens=8 topk=5 lora_rank=16 max_steps=2 eval_every=0 max_context_length=3000",
    ),
)
LEARNT, LOOPED = 12, 40
"""Steps of a supervised loop, and of the loop that goes on from what it has saved: they share a folder."""

FOLLOWED = (
    Recipe("sl_loop", f"batch_size=32 max_length=512 lora_rank=32 learning_rate=0.0004 max_steps={LEARNT}"),
    Recipe(
        "rl_loop", f"{_ON_POLICY} batch_size=64 group_size=16 max_tokens=24 lora_rank=32 max_steps={LEARNT + LOOPED}"
    ),
)


class Served(NamedTuple):
    """A model, and what is run with it.

    Args:
        options: of `logitless serve-tinker`.
        alone: one after the other, timed.
        together: at once.
        workload: of rollout.py, for the same loop in `logitless train`.
    """

    options: tuple[str, ...]
    alone: tuple[Recipe, ...]
    together: tuple[Recipe, ...]
    workload: str = ""


MODELS = {
    "smollm2": Served(("--tokens-per-row", "32768"), FOLLOWED, OTHERS[:3]),
    "qwen2.5-0.5b": Served(("--tokens-per-row", "32768"), (LOOP,), OTHERS, "64x8-512-128"),
    "llama-3.1-8b": Served(
        ("--tokens-per-row", "4096"),
        (LOOP.smaller("batch_size=32 max_steps=3")._replace(tokens=32768),),
        (NUMERICS, GUESSES.smaller("batch_size=2 group_size=2"), *OTHERS[2:4]),
        "32x8-512-128",
    ),
    "tiny": Served(
        (),
        (LOOP.smaller("batch_size=4 group_size=4 max_tokens=16 max_steps=3")._replace(tokens=256),),
        (
            NUMERICS.smaller("groups_per_batch=2 group_size=4 max_tokens=32 max_steps=2"),
            GUESSES.smaller("batch_size=2 group_size=2"),
            ARITHMETIC.smaller("groups_per_batch=4 group_size=4 max_steps=2"),
        ),
    ),
}


# --- models and data


def byte_tokenizer(speaking: int = 0) -> Any:
    """One token a byte, the special tokens behind them; ``<|im_end|>`` ends a completion.

    Args:
        speaking: number of all tokens; those behind the special ones are texts with numbers, which no text is read as.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    for i in range(len(letters) + len(SPECIAL), speaking):
        said = f"Guess: {i % 1024}\n" if i % 2 else ""  # half of them in the format that guess_number wants
        said += f"\\boxed{{{i % 10}}} {i} {i % 201}\n"
        vocabulary["".join(piece for piece, _ in byte_level.pre_tokenize_str(said))] = i
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def write_data(folder: Path, data: Mapping[str, tuple[str, list[dict[str, Any]]]]) -> None:
    """Data sets where ``datasets.load_dataset`` finds them by their names, from this folder."""
    for name, (config, rows) in data.items():
        (folder / name).mkdir(parents=True)
        splits = ["train", "test"]
        files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in splits)
        (folder / name / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n")
        for split in splits:
            (folder / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def digits(count: int) -> list[dict[str, str]]:
    """Questions for ``rl_loop`` whose answer is a digit; each is as long as makes its prompt 512 bytes."""
    fill = " Say it." * 14
    return [
        {"question": f"Which digit is it this time, of number {i:03}?{fill}", "answer": f"#### {i % 10}"}
        for i in range(count)
    ]


def sums() -> tuple[list[dict[str, str]], list[dict[str, Any]]]:
    """Sums of two numbers up to 20 for ``rl_loop``, and conversations for ``sl_loop`` that answer others in a box."""
    draws = random.Random(0)
    pairs = [(draws.randint(0, 20), draws.randint(0, 20)) for _ in range((LEARNT + LOOPED) * 64 + LEARNT * 32)]
    asked = [{"question": f"What is {a} + {b}?", "answer": f"#### {a + b}"} for a, b in pairs[LEARNT * 32 :]]
    said = [
        {
            "messages": [
                {"role": "user", "content": f"What is {a} + {b}?{BOXED}"},
                {"role": "assistant", "content": f"\\boxed{{{a + b}}}"},
            ]
        }
        for a, b in pairs[: LEARNT * 32]
    ]
    return asked, said


def prepare(model: str, folder: Path, base: Path | None) -> None:
    """Tokenizer, data and, of a pretrained model, weights, in a new folder that recipes run in."""
    shutil.rmtree(folder, ignore_errors=True)
    if model == "smollm2":
        if base is None:
            raise UnavailableError("--base", "none", "Make it with evidence_smollm2.py base.")
        (folder / NAME).parent.mkdir(parents=True)
        shutil.copytree(base, folder / NAME)
        asked, said = sums()
        data = DATA | {"openai/gsm8k": ("main", asked), "HuggingFaceH4/no_robots": ("default", said)}
    else:
        byte_tokenizer(vocabulary_of(model)).save_pretrained(folder / NAME)
        data = DATA | {"openai/gsm8k": ("main", digits(5 * 64))}
    write_data(folder, data)


def vocabulary_of(model: str) -> int:
    """Number of tokens of a model with random weights."""
    from bits_cases import MODELS as SHAPES
    from tinker_cycle import TINY

    return int((TINY | {"vocab_size": 1024} if model == "tiny" else SHAPES[model])["vocab_size"])


def serve(model: str, arguments: Sequence[str]) -> int:
    """`logitless serve-tinker`, but for the weights, which are drawn on the device: no disk holds them."""
    import torch

    from logitless.cli import serve_tinker
    from logitless.tinker import trainer
    from tinker_cycle import TINY

    def drawn(*_: Any, **options: Any) -> Any:
        if model == "tiny":
            fields = TINY | {"vocab_size": vocabulary_of(model), "max_position_embeddings": 32768}
            return loaded(fields, random_weights=True, **options)
        from bits_measured import build

        return build(model, torch.bfloat16)

    loaded, trainer.load_model = trainer.load_model, drawn
    parser = argparse.ArgumentParser()
    serve_tinker.add_arguments(parser)
    return serve_tinker.run(parser.parse_args(arguments))


@contextmanager
def served(model: str, folder: Path) -> Iterator[tuple[str, float]]:
    """URL of the service, and the seconds until it was there."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "logitless.cli.main", "serve-tinker"]
    if model != "smollm2":
        command = [sys.executable, __file__, "--serve", model, "--"]
    command += [NAME, "--port", "0", "--folder", "saved", *MODELS[model].options]
    with (folder / "service.txt").open("w") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=folder)
    with server:
        try:
            assert server.stdout is not None
            if not (url := server.stdout.readline().strip()):
                raise UnavailableError("the service", f"an error ({folder / 'service.txt'})", "Read it.")
            yield url, time.perf_counter() - began
        finally:
            server.kill()


# --- runs


def started(recipe: Recipe, folder: Path, url: str) -> tuple[subprocess.Popen[bytes], Path]:
    """Its process, in a group of its own, and its folder."""
    log = folder / ("log-loops" if recipe in FOLLOWED else f"log-{recipe.name}")
    given = {"TINKER_API_KEY": "tml-local", "TINKER_BASE_URL": url, "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    given |= {"HF_DATASETS_CACHE": str(folder / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    with (folder / f"{recipe.name}.txt").open("w") as output:
        process = subprocess.Popen(
            [*recipe.command, f"log_path={log}"],
            cwd=folder,
            env={**os.environ, **given},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return process, log


def ended(recipe: Recipe, process: subprocess.Popen[bytes], folder: Path, until: float) -> dict[str, Any]:
    """Waits; its status and, where it failed, its last words."""
    try:
        status: int | str = process.wait(max(0.0, until - time.time()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        status = "out of time"
    if status == 0:
        return {"status": 0}
    return {"status": status, "said": (folder / f"{recipe.name}.txt").read_text()[-1500:]}


def seen(recipe: Recipe, log: Path, skip: int) -> dict[str, Any]:
    """What its metrics say of each step behind the first ``skip`` lines.

    ``tokens_per_second`` is of sampled tokens, without the first ``COMPILING`` steps.
    """
    path = log / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()][skip:] if path.exists() else []
    lines = [line for line in lines if "time/total" in line or "time_total" in line]
    kl = [abs(v) for line in lines for k, v in line.items() if k.startswith("optim/kl_sample_train")]
    found: dict[str, Any] = {"steps": len(lines)}
    for name, keys in {
        "reward": ("reward/total", "env/all/reward/total"),
        "correct": ("env/all/correct",),
        "loss": ("train_mean_nll", "dpo_loss"),
        "entropy": ("optim/entropy",),
        "step_seconds": ("time/total", "time_total"),
        "tokens": ("env/all/total_ac_tokens",),
    }.items():
        values = [line[key] for line in lines for key in keys if key in line]
        if values:
            found[name] = [round(value, 5) for value in values]
    if recipe.tokens:
        found["tokens"] = [recipe.tokens] * len(lines)
    if len(lines) > COMPILING and "tokens" in found:
        taken = sum(found["tokens"][COMPILING:]) / sum(found["step_seconds"][COMPILING:])
        found["tokens_per_second"] = round(taken)
    return found | ({"kl": max(kl)} if kl else {})


def reward(completions: list[str], answer: list[str]) -> list[float]:
    """Of ``rl_loop``: 1 for the right number in the last box."""
    found = []
    for text, right in zip(completions, answer, strict=True):
        boxes = re.findall(r"\\boxed{([^{}]*)}", text)
        found.append(float(boxes[-1:] == [right]))
    return found


def same_loop(folder: Path, *, steps: int = LOOPED, prompts: int = 64, samples: int = 16) -> dict[str, Any]:
    """``FOLLOWED`` in `logitless train`: its data, LoRA, centred advantages, one step a block, the same Adam."""
    asked, said = sums()
    train = [{"prompt": row["question"], "answer": row["answer"].removeprefix("#### ")} for row in asked]
    warm = [dict(zip(("prompt", "answer"), (each["content"] for each in row["messages"]), strict=True)) for row in said]
    for name, rows in (("train", train), ("warm", warm)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    boxed = BOXED.replace("{", "{{").replace("}", "}}")
    example = (
        "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. "
    )
    example += "We have r's at positions 3, 8, and 9. \\boxed{{3}}<|im_end|>\n"
    before = turn.format(f"How many r's are in strawberry?{boxed}") + example
    recipe = {
        "name": "same-loop",
        "output": str(folder / "runs"),
        "model": {"source": str(folder / NAME), "lora": {"rank": 32, "alpha": 32}},
        "data": {
            "train": _file(folder / "train.jsonl", before + turn.format("{prompt}" + boxed)),
            "max_prompt_tokens": 256,
        },
        "warm_start": {
            "data": _file(folder / "warm.jsonl", turn.format("{prompt}")),
            "steps": LEARNT,
            "sequences_per_step": 32,
            "learning_rate": 0.0004,
        },
        "rollout": {
            "prompts_per_block": prompts,
            "completions_per_prompt": samples,
            "sampling": {"max_new_tokens": 24},
            "zero_signal": "keep",
        },
        "rewards": [{"name": "function", "path": f"{__file__}:reward"}],
        "algorithm": {"preset": "dr_grpo"},
        "train": {
            "blocks": steps,
            "tokens_per_step": 1_000_000,
            "tokens_per_micro_batch": 32768,
            "max_grad_norm": None,
            # the cookbook's 1e-8 is of a sum over what is here a mean
            "optimizer": {"learning_rate": 0.0004, "betas": [0.9, 0.95], "eps": 1e-8 / (prompts * samples * 24)},
        },
        "checkpoint": {"every_blocks": 1_000_000},
        "writers": [],
    }
    (folder / "same-loop.yaml").write_text(json.dumps(recipe))
    shutil.rmtree(folder / "runs", ignore_errors=True)
    command = [sys.executable, "-m", "logitless.cli.main", "train", "same-loop.yaml"]
    with (folder / "same-loop.txt").open("w") as output:
        status = subprocess.run(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT).returncode
    if status:
        return {"status": status, "said": (folder / "same-loop.txt").read_text()[-1500:]}
    lines = [json.loads(line) for line in (folder / "runs" / "same-loop" / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "reward/mean" in line]
    elapsed = [line["time/elapsed_seconds"] for line in lines]
    tokens = [round(line["length/mean"] * prompts * samples) for line in lines]
    seconds = [round(b - a, 4) for a, b in pairwise(elapsed)]
    timed = sum(tokens[1 + COMPILING :]), sum(seconds[COMPILING:])
    return {
        "status": 0,
        "steps": len(lines),
        "reward": [round(line["reward/mean"], 5) for line in lines],
        "step_seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": round(timed[0] / timed[1]) if timed[0] else None,
    }


def _file(path: Path, template: str) -> dict[str, str]:
    return {"name": "file", "path": str(path), "template": template}


def same_block(model: str, workload: str) -> dict[str, Any]:
    """A block of `logitless train` in the shape of ``LOOP``."""
    from rollout_contenders import block
    from rollout_workloads import Workload

    found = block(f"{model}-lora", "gpu", Workload.parse(workload))
    seconds = sum(value for name, value in found.items() if name.endswith("_seconds"))
    return {"status": 0, **found, "step_seconds": [seconds], "tokens_per_second": round(found["tokens"] / seconds)}


def measure(model: str, rows: Rows, folder: Path, base: Path | None, until: float) -> None:
    """Run what the file lacks of a model."""
    import torch

    wanted = MODELS[model]
    place = {"model": model, "status": 0}
    lacking = [each for each in (*wanted.alone, *wanted.together) if not rows.has(**place, recipe=each.name)]
    if FOLLOWED[1] in lacking and FOLLOWED[0] not in lacking:
        lacking.append(FOLLOWED[0])
    if lacking or not folder.exists():
        prepare(model, folder, base)
    if lacking:
        with served(model, folder) as (url, seconds):
            print(f"{model} is served after {seconds:.0f} s", flush=True)
            for some in (*([each] for each in wanted.alone), wanted.together):
                left = [recipe for recipe in some if recipe in lacking and time.time() < until]
                begun = [(recipe, *started(recipe, folder, url), time.perf_counter()) for recipe in left]
                for recipe, process, log, began in begun:
                    skip = LEARNT if recipe == FOLLOWED[1] else 0
                    found = ended(recipe, process, folder, until)
                    row = {"model": model, "recipe": recipe.name, "settings": recipe.settings, "at_once": len(begun)}
                    row |= found | seen(recipe, log, skip) | {"seconds": round(time.perf_counter() - began, 1)}
                    rows.add(row)
    place["recipe"] = "logitless train"
    if not rows.has(**place) and time.time() < until and torch.cuda.is_available():
        if model == "smollm2":
            rows.add(place | same_loop(folder))
        elif wanted.workload:
            rows.add(place | same_block(model, wanted.workload))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Models, and where things are."""
    parser.add_argument("--models", default="qwen2.5-0.5b,llama-3.1-8b", help=f"by commas, of {', '.join(MODELS)}")
    parser.add_argument("--base", type=Path, help="weights of smollm2: the folder of evidence_smollm2.py base")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no recipe is begun, and none goes on")
    parser.add_argument("--folder", type=Path, default=Path("runs/tinker-recipes"), help="logs, and saved weights")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--serve", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    """Measure, and write rows as they come; 1 where one failed."""
    if options.serve:
        return serve(options.serve, options.arguments)
    import torch

    from logitless.bench.machine import environment

    until = time.time() + options.seconds
    device = "cuda" if (on_gpu := torch.cuda.is_available()) else "cpu"
    here = environment(device, ("torch", "triton", "transformers", "tinker", "tinker-cookbook"))
    rows = Rows(options.output / f"tinker-recipes-{short_name(device)}.json", here, ("model", "recipe"))
    chosen = among("a model", options.models, tuple(MODELS))
    for model in chosen:
        measure(model, rows, (options.folder / model).absolute(), options.base, until)
    of_these = [row for row in rows.rows if row["model"] in chosen]
    return int(any(row["status"] != 0 or (on_gpu and row.get("kl")) for row in of_these))


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))

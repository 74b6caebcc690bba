"""A recipe small enough to run in a second: one layer, eight prompts, a length reward."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from torch import Tensor, nn

from logitless.models.char_tokenizer import character_tokenizer
from logitless.rollout.recorded import write_completions
from logitless.train.assembly.engines import open_engines
from logitless.train.assembly.model import policy_model, tokenizer_of
from logitless.train.recipe.config import Recipe
from logitless.train.recipe.loading import parse_recipe
from logitless.train.record.metrics import repeatable
from logitless.train.record.run_folder import RunFolder
from logitless.train.run import run_recipe
from logitless.train.store.checkpoint import Checkpoint, checkpoints, load_checkpoint, read_checkpoint
from logitless.types import Completion

ALPHABET = "abcdefgh"
SHORT = {"train__blocks": 1, "train__epochs_per_block": 1, "kl": None, "data__held_out": None}
ONE_STEP = {"train__tokens_per_step": 1000, "train__tokens_per_micro_batch": 1000}
"""All completions of a block in one step and one micro-batch."""

TINY_LLAMA = {
    "model_type": "llama", "vocab_size": 11, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 64, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip

# LayerNorm and learned positions: unlike RMSNorm and rotary embeddings they stay in float64 when the weights are.
TINY_GPT2 = {
    "model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 11, "n_positions": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip


def tiny_model(recipe: Recipe, device: str = "cpu", *, seed: int = 0, **options: Any) -> nn.Module:
    """The policy's model as a run makes it."""
    return policy_model(recipe.model, tokenizer_of(recipe.model), seed=seed, device=torch.device(device), **options)


def finished_run(folder: Path, *, resume: bool = False, open_engines: Any = open_engines, **changes: Any) -> RunFolder:
    """A run of the tiny recipe with changes, at its end."""
    return completed(tiny_recipe(folder, **changes), resume=resume, open_engines=open_engines)


def completed(recipe: Recipe, **options: Any) -> RunFolder:
    """Run a recipe to its end."""
    result = run_recipe(recipe, **options)
    assert result.complete
    return result.folder


def start(recipe: Recipe, **options: Any) -> tuple[RunFolder, bool]:
    """Run a recipe; returns the folder, and whether the run is complete."""
    result = run_recipe(recipe, **options)
    return result.folder, result.complete


def start_without_report(recipe: Recipe, **options: Any) -> tuple[RunFolder, bool]:
    """``start`` in a process that ``conftest.py`` does not reach, such as that of a rank."""
    with mock.patch("logitless.train.run.write_report"):
        return start(recipe, **options)


def tiny_raw(folder: Path) -> dict[str, Any]:
    """The recipe as a mapping; its tokenizer and data are written into ``folder``."""
    tokenizer = folder / "tokenizer"
    if not tokenizer.exists():
        character_tokenizer(ALPHABET).save_pretrained(str(tokenizer))
        rows = [
            {"id": i, "prompt": pair, "answer": pair[::-1]}
            for i, pair in enumerate(["ah", "bg", "cf", "de", "ed", "fc", "gb", "ha"])
        ]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "held_out.jsonl").write_text(json.dumps({"id": "h", "prompt": "ca", "answer": "ac"}) + "\n")
    return {
        "name": "tiny",
        "output": str(folder / "runs"),
        "model": {
            "source": dict(TINY_LLAMA),
            "random_weights": True,
            "tokenizer": str(tokenizer),
            "device": "cpu",
        },
        "data": {
            "train": {"name": "file", "path": str(folder / "train.jsonl")},
            "held_out": {"name": "file", "path": str(folder / "held_out.jsonl")},
            "max_prompt_tokens": 8,
        },
        "rollout": {
            "prompts_per_block": 4,
            "completions_per_prompt": 4,
            "sampling": {"max_new_tokens": 6},
        },
        "rewards": [{"name": "length", "cap": 6}],
        "train": {
            "blocks": 3,
            "epochs_per_block": 2,
            "tokens_per_step": 40,
            "tokens_per_micro_batch": 32,
            "optimizer": {"learning_rate": 1e-2},
        },
        "kl": {"placement": "loss", "control": {"name": "proportional", "beta": 0.02, "target": 0.05}},
        "evaluation": {"every_blocks": 2},
        "checkpoint": {"every_blocks": 1, "keep": 100},
        "writers": [],
    }


def give_chat_template(folder: Path) -> None:
    """The tiny recipe's tokenizer gets a chat template: under ``mood: good`` the policy's turn begins after ``gd``."""
    tiny_raw(folder)
    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt and mood is defined and mood == 'good' %}gd{% endif %}"
    )
    tokenizer.save_pretrained(str(folder / "tokenizer"))


def tiny_recipe(folder: Path, **changes: Any) -> Recipe:
    """The tiny recipe with values replaced by dotted key (``train__blocks=5``)."""
    raw = tiny_raw(folder)
    for key, value in changes.items():
        at = raw
        *parents, last = key.split("__")
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = value
    return parse_recipe(raw)


def warm_start(folder: Path, **more: Any) -> dict[str, Any]:
    """A warm start of three steps on what the tiny recipe trains on."""
    tiny_raw(folder)
    return {"data": {"name": "file", "path": str(folder / "train.jsonl")}, "steps": 3, **more}


def recorded_engine(folder: Path, completions: Iterable[Completion]) -> dict[str, Any]:
    """The engine that gives these completions."""
    write_completions(folder / "recorded.jsonl", completions)
    return {"name": "recorded", "path": str(folder / "recorded.jsonl")}


def held_out_set(folder: Path, **more: Any) -> dict[str, Any]:
    """A held-out set of one prompt."""
    (folder / "more.jsonl").write_text('{"id": "m", "prompt": "db", "answer": "bd"}\n')
    return {"more": {"data": {"name": "file", "path": str(folder / "more.jsonl")}, **more}}


def stored(run: RunFolder) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """All tensors of a run's first and last checkpoint."""
    found = checkpoints(run.checkpoints)
    first, last = (dict(read_checkpoint(folder).tensors) for folder in (found[0], found[-1]))
    return first, last


def blocks_of(run: RunFolder) -> list[dict[str, Any]]:
    """The lines of metrics that begin a block."""
    return [record for record in run.read_metrics() if "reward/mean" in record]


def steps_of(run: RunFolder) -> list[dict[str, Any]]:
    """The lines of metrics that have an optimizer step."""
    return [record for record in run.read_metrics() if "loss/total" in record]


def repeated(run: RunFolder) -> list[dict[str, Any]]:
    """All metrics that the same run has again: without times, speeds and memory."""
    return [repeatable(record) for record in run.read_metrics()]


def assert_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """The same names, and the same numbers of each."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def assert_same_tensors(one: Checkpoint, other: Checkpoint) -> None:
    """Weights, optimizer and random state, bit for bit."""
    assert one.folder.name == other.folder.name
    assert_equal(one.tensors, other.tensors)


def assert_same_end(one: RunFolder, other: RunFolder) -> None:
    """The last checkpoints are the same bit for bit."""
    assert_same_tensors(load_checkpoint(one.checkpoints), load_checkpoint(other.checkpoints))


def assert_same_run(one: RunFolder, other: RunFolder) -> None:
    """The same end, and so all checkpoints that both have; metrics and rollouts number for number."""
    assert_same_end(one, other)
    for folder in checkpoints(one.checkpoints):
        if (again := other.checkpoints / folder.name).is_dir():
            assert_same_tensors(read_checkpoint(folder), read_checkpoint(again))
    assert repeated(one) == repeated(other)
    assert list(one.read_rollouts()) == list(other.read_rollouts())


def program_in(folder: Path, text: str, recipe: Mapping[str, Any], *arguments: str) -> list[str]:
    """The arguments that run a program which trains a recipe; both are written to the folder."""
    (folder / "recipe.yaml").write_text(yaml.safe_dump(dict(recipe)))
    (folder / "program.py").write_text(text)
    return [str(folder / "program.py"), *arguments, "train", str(folder / "recipe.yaml")]

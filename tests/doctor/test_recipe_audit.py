"""The audit of a recipe: each known mistake is found by its setting, and the shipped recipes have none."""

import json
from pathlib import Path
from typing import Any

import pytest

from logitless.doctor.recipe_audit import audit_recipe
from logitless.train.assembly.data import Data, data_of
from logitless.train.assembly.model import tokenizer_of
from logitless.train.recipe.loading import load_recipe, parse_recipe
from logitless.train.recipe.shipped import shipped_recipes
from logitless.types import Prompt
from tests.train.tiny import tiny_raw


def practice(folder: Path) -> dict[str, Any]:
    """A recipe of a pretrained model in which nothing is found."""
    raw = tiny_raw(folder)
    raw["model"] |= {"source": "some/model", "random_weights": False}
    raw["rollout"] |= {"prompts_per_block": 64, "completions_per_prompt": 8, "sampling": {"max_new_tokens": 256}}
    raw["train"] |= {"tokens_per_micro_batch": 2048, "optimizer": {"learning_rate": 1e-6}}
    return raw


HELD = dict.fromkeys(("beta", "beta_min", "beta_max"), 0.1)


WIDE = {"epsilon_low": 0.2, "epsilon_high": 0.28}


def rules(raw: dict[str, Any]) -> list[str]:
    return [finding.rule for finding in audit_recipe(parse_recipe(raw))]


def test_a_recipe_as_papers_have_it_has_no_finding(tmp_path: Path) -> None:
    assert rules(practice(tmp_path)) == []
    assert rules(practice(tmp_path) | {"algorithm": {"preset": "gspo"}}) == []
    assert rules(practice(tmp_path) | {"algorithm": {"preset": "dapo", "parameters": WIDE}}) == []


@pytest.mark.parametrize(
    ("rule", "section", "change"),
    [
        ("normalisation across groups", "algorithm", {"advantage": {"name": "batch_standardized"}}),
        ("normalisation by micro-batch", "algorithm", {"weighting": {"name": "micro_batch_token_mean"}}),
        ("clip range of a shared ratio", "algorithm", {"preset": "gspo", "parameters": WIDE}),
        ("clip range of a shared ratio", "algorithm", {"preset": "grpo", "ratio": {"name": "sequence_token"}}),
        ("filtered sampling", "rollout", {"sampling": {"max_new_tokens": 256, "top_p": 0.95}}),
        ("filtered sampling", "rollout", {"sampling": {"max_new_tokens": 256, "repetition_penalty": 1.1}}),
        ("reference without effect", "kl", {"control": {"name": "fixed", "beta": 0.0}}),
        ("KL target without control", "kl", {"control": {"name": "proportional", "target": 0.05} | HELD}),
        ("learning rate", "train", {"optimizer": {"learning_rate": 1e-4}}),
        ("learning rate", "train", {"optimizer": {"learning_rate": 1e-9}}),
        ("learning rate", "model", {"lora": {"rank": 8}}),
        ("epochs", "train", {"epochs_per_block": 5}),
        ("block size", "rollout", {"prompts_per_block": 8}),
        ("block size", "rollout", {"prompts_per_block": 8192}),
        ("group size", "rollout", {"completions_per_prompt": 2, "prompts_per_block": 256}),
        ("nothing held out", "data", {"held_out": None}),
    ],
)
def test_a_known_mistake_is_found_by_its_setting(
    rule: str, section: str, change: dict[str, Any], tmp_path: Path
) -> None:
    raw = practice(tmp_path)
    raw[section] = raw.get(section, {}) | change
    assert rules(raw) == [rule]


def test_a_toy_from_random_weights_is_not_held_to_practice_with_pretrained_ones(tmp_path: Path) -> None:
    assert rules(tiny_raw(tmp_path)) == []


def test_held_out_prompts_that_differ_in_spelling_alone_are_found(tmp_path: Path) -> None:
    train, held = (Prompt(id=text, text=text, token_ids=(3,)) for text in ("What is  2+2?", "what is 2 + 2"))
    data = Data(train=(train,), held_out=(held,), warm_start=(), counts={})
    found = audit_recipe(parse_recipe(tiny_raw(tmp_path)), data)
    assert [finding.rule for finding in found] == ["evaluation on training prompts"]


def test_recorded_completions_that_repeat_their_prompt_are_found(tmp_path: Path) -> None:
    raw = tiny_raw(tmp_path)
    recipe = parse_recipe(raw)
    data = data_of(recipe, tokenizer_of(recipe.model))
    answer = {"text": "b", "finish_reason": "stop"}
    rows = [
        answer | {"prompt_id": p.id, "token_ids": [*(() if n else p.token_ids.tolist()), 4, 2]}
        for p in data.train
        for n in range(4)
    ]
    (tmp_path / "recorded.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw["rollout"]["engine"] = {"name": "recorded", "path": str(tmp_path / "recorded.jsonl")}
    (finding,) = audit_recipe(parse_recipe(raw), data)
    assert finding.rule == "prompt tokens in the loss"
    assert finding.said.startswith("8 of 32 ")


def test_instructions_that_are_rewarded_and_held_out_are_found() -> None:
    recipe = load_recipe(Path("recipes/ifeval-tiny.yaml"))
    with pytest.warns(match="trained on and evaluated"):
        data = data_of(recipe, tokenizer_of(recipe.model))
    assert [finding.rule for finding in audit_recipe(recipe, data)] == ["reward and evaluation overlap"]


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_settings_of_the_shipped_recipes_have_no_finding(name: str) -> None:
    # 135 million weights whose answers have a few tokens: small blocks and a high rate are meant there
    meant = {"block size", "learning rate"} if name.startswith("smollm2-") else set()
    assert {finding.rule for finding in audit_recipe(load_recipe(Path(f"recipes/{name}.yaml")))} <= meant

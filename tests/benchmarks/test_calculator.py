"""The data of the calculator's recipe, and that its two turns are what the warm start shows."""

import importlib.util
import json
from pathlib import Path

from logitless.models.loading import load_tokenizer
from logitless.rollout.environments.options import environment_of
from logitless.rollout.environments.tools import Calculator
from logitless.rollout.tool_calls import tool_calls
from logitless.train.recipe.loading import load_recipe
from logitless.types import Completion

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "calculator"


def _rows(name):
    return [json.loads(line) for line in (RECIPE / f"{name}.jsonl").read_text().splitlines()]


def test_the_committed_files_are_those_that_the_script_writes(tmp_path):
    spec = importlib.util.spec_from_file_location("make_calculator_data", RECIPE / "make_data.py")
    make_data = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_data)
    make_data.main(tmp_path)
    for name in ("train.jsonl", "held_out.jsonl", "warm_start.jsonl", "tokenizer/tokenizer.json"):
        assert (tmp_path / name).read_text() == (RECIPE / name).read_text(), name


def test_no_question_is_in_two_files_and_the_warm_start_is_careless():
    asked = {name: {row["prompt"] for row in _rows(name)} for name in ("train", "held_out")}
    shown = _rows("warm_start")
    asked["warm_start"] = {row["prompt"][0]["content"] for row in shown}
    assert not asked["train"] & asked["held_out"]
    assert not asked["warm_start"] & (asked["train"] | asked["held_out"])
    first = [row["answer"] for row in shown if len(row["prompt"]) == 1]
    called = sum(bool(tool_calls(text, ["calculator"], "tags")) for text in first) / len(first)
    assert 0.6 < called < 0.7


def test_a_right_first_turn_is_answered_with_the_answer_as_the_warm_start_shows_it():
    recipe = load_recipe(ROOT / "recipes" / "calculator.yaml")
    tokenizer = load_tokenizer(str(RECIPE / "tokenizer"))
    environment = environment_of(recipe.rollout.environment, tokenizer)
    shown = next(row for row in _rows("warm_start") if len(row["prompt"]) == 3)
    _, call, result = shown["prompt"]
    assert Calculator().run([{"": call["content"].split(">")[1].split("<")[0]}])[0].text == result["content"]
    ids = tokenizer(call["content"], add_special_tokens=False)["input_ids"]
    turn = Completion("7", (*ids, tokenizer.eos_token_id), call["content"], "stop")
    reply = environment.reply(None, turn)
    assert reply.messages[0]["content"] == result["content"] == shown["answer"]
    before = tokenizer.apply_chat_template(shown["prompt"][:1], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(shown["prompt"], tokenize=False, add_generation_prompt=True)
    read = (*tokenizer(before, add_special_tokens=False)["input_ids"], *turn.token_ids, *reply.token_ids)
    assert list(read) == tokenizer(whole, add_special_tokens=False)["input_ids"]

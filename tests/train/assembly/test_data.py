"""Prompts and rewards of a recipe: nothing held out is trained on, and what does not fit is refused."""

import json

import pytest

from logitless.errors import ConfigurationError, DataError
from logitless.rewards import reward
from logitless.rewards.instructions.suites import OverlapWarning
from logitless.rollout.environment import Reply
from logitless.rollout.transformers import TransformersEngine
from logitless.train.assembly.data import data_of, rewards_of
from logitless.train.assembly.engines import Engines
from logitless.train.assembly.model import tokenizer_of
from logitless.train.assembly.teacher import teacher_prompts_of
from logitless.types import Completion, Group, Prompt
from tests.train.tiny import give_chat_template, held_out_set, start, tiny_recipe, warm_start


def test_every_prompt_and_turn_is_rendered_with_the_recipes_variables_of_the_chat_template(tmp_path):
    give_chat_template(tmp_path)
    changes = {
        "model__chat_template_kwargs": {"mood": "good"},
        "warm_start": {"data": {"name": "file", "path": str(tmp_path / "train.jsonl")}, "steps": 1},
        "evaluation__sets": {"more": {"data": {"name": "file", "path": str(tmp_path / "held_out.jsonl")}}},
        "rollout__environment": {"name": "own", "factory": "tests.train.assembly.test_data:_Hums"},
        "rollout__limits": {"max_turns": 2, "max_tokens": 20},
        "rollout__sampling": {"max_new_tokens": 6},
        "train__blocks": 1,
    }
    recipe = tiny_recipe(tmp_path, **changes)
    data = data_of(recipe, tokenizer_of(recipe.model))
    read = [*data.train, *data.held_out, *data.warm_start, *data.held_out_sets["more"]]
    assert len(read) > 10
    assert all(prompt.text.endswith("gd") and len(prompt.token_ids) == 4 for prompt in read)
    asked = []

    class Noting(TransformersEngine):
        def sample(self, prompts, *arguments, **options):
            asked.extend(prompts)
            return super().sample(prompts, *arguments, **options)

    def open_noting(recipe, model, tokenizer):
        engine = Noting(model, tokenizer)
        return Engines(engine, engine)

    start(recipe, open_engines=open_noting)
    assert all(prompt.text.endswith("gd") for prompt in asked if prompt.text)
    later = [tokenizer_of(recipe.model).decode(prompt.token_ids) for prompt in asked if not prompt.text]
    assert later  # second turns, which have no text of their own
    assert all(text.endswith("hgd") for text in later)
    with pytest.raises(ConfigurationError, match=r"another model.chat_template_kwargs"):
        start(tiny_recipe(tmp_path, **changes | {"model__chat_template_kwargs": {}}), resume=True)


def test_a_teachers_own_prompt_is_rendered_with_the_recipes_variables_of_the_chat_template(tmp_path):
    give_chat_template(tmp_path)
    teacher = {"source": "self", "template": "{{ answer }}{{ prompt }}", "divergence": "reverse_kl", "advantage": 0.5}
    for variables, end in (({}, ""), ({"mood": "good"}, "gd")):
        recipe = tiny_recipe(tmp_path, model__chat_template_kwargs=variables, teacher=teacher)
        tokenizer = tokenizer_of(recipe.model)
        prompt = data_of(recipe, tokenizer).train[0]
        group = Group(prompt, (Completion(prompt.id, (4,), "a", "stop"),), ({},), (0.0,))
        [rendered] = teacher_prompts_of(recipe, tokenizer, None)([group])
        assert rendered.text == f"{prompt.columns['answer']}{prompt.columns['answer'][::-1]}{end}"


class _Hums:
    """Answers every turn."""

    def start(self, prompt, *, seed):
        return None

    def reply(self, state, turn):
        return Reply(messages=({"role": "user", "content": "h"},))


def test_fewer_prompts_than_a_block_needs_is_an_error_with_the_account(tmp_path):
    recipe = tiny_recipe(tmp_path, rollout__prompts_per_block=9)
    with pytest.raises(DataError, match=r"prompts_per_block = 9.*given train: 8 prompts of 8 rows\."):
        data_of(recipe, tokenizer_of(recipe.model))


def test_rewards_are_checked_against_every_row(tmp_path):
    recipe = tiny_recipe(tmp_path, rewards=[{"name": "exact", "column": "solution"}])
    data = data_of(recipe, tokenizer_of(recipe.model))
    with pytest.raises(ConfigurationError, match="'solution'"):
        rewards_of(recipe, data.train)


def test_instructions_that_are_trained_on_and_held_out_give_a_warning_that_names_them(tmp_path):
    recipe = tiny_recipe(tmp_path, rewards=[{"name": "instructions"}])

    def write(name, *ids):
        rows = [{"prompt": pair, "instruction_id_list": list(ids), "kwargs": [{}] * len(ids)} for pair in name[1]]
        (tmp_path / name[0]).write_text("".join(json.dumps(row) + "\n" for row in rows))

    write(("train.jsonl", ["ah", "bg", "cf", "de"]), "punctuation:no_comma", "startend:quotation")
    write(("held_out.jsonl", ["ca"]), "format:title_case", "startend:quotation")
    with pytest.warns(OverlapWarning, match=r"1 instruction ids .*: startend:quotation\. "):
        data_of(recipe, tokenizer_of(recipe.model))
    write(("held_out.jsonl", ["ca"]), "format:title_case")
    data_of(recipe, tokenizer_of(recipe.model))


def test_held_out_texts_are_neither_trained_nor_warmed_up_on(tmp_path):
    recipe = tiny_recipe(tmp_path, warm_start=warm_start(tmp_path))
    (tmp_path / "held_out.jsonl").write_text(json.dumps({"id": "x", "prompt": "ah", "answer": "ha"}) + "\n")
    data = data_of(recipe, tokenizer_of(recipe.model))
    assert "ah" not in {p.text for p in (*data.train, *data.warm_start)}
    assert (len(data.train), data.counts["train"]["held_out"]) == (7, 1)


def test_keys_of_an_evaluation_without_its_data_are_told_of_and_no_others(tmp_path, caplog):
    without = {"data__held_out": None, "evaluation__samples_per_prompt": 1}
    for changes in ({}, without, {**without, "evaluation": {"sets": held_out_set(tmp_path)}}):
        recipe = tiny_recipe(tmp_path, **changes)
        data_of(recipe, tokenizer_of(recipe.model))
    [told] = caplog.messages
    assert told.startswith("evaluation: every_blocks without effect, for there is no data.held_out")


def test_the_check_of_a_reward_whose_module_takes_its_time_says_what_it_waits_for(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(reward, "SLOW_SECONDS", 0.05)
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(1)\n\ndef sluggish(completions):\n    return [1.0]\n")
    recipe = tiny_recipe(tmp_path, rewards=[{"name": "function", "path": f"{tmp_path}/slow.py:sluggish"}])
    rewards_of(recipe, [Prompt("7", "?", (4,))])
    assert caplog.messages == ["waiting for reward 'sluggish' to pass its check: 0.05 s so far, imports included"]


def test_a_column_that_a_reward_reads_and_only_the_held_out_rows_lack_is_refused_by_the_name_of_the_data(tmp_path):
    (tmp_path / "own.py").write_text("def same(completions, answer):\n    return [1.0]\n")
    recipe = tiny_recipe(tmp_path, rewards=[{"name": "function", "path": f"{tmp_path}/own.py:same"}])
    (tmp_path / "held_out.jsonl").write_text(json.dumps({"prompt": "ca"}) + "\n")
    data = data_of(recipe, tokenizer_of(recipe.model))
    with pytest.raises(ConfigurationError, match=r"'same' and the data 'held_out'.*given answer"):
        rewards_of(recipe, data.judged)

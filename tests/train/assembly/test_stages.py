"""A run is put together in one place, and what comes of it is what a run trains with."""

import torch

from logitless.train.assembly.data import data_of
from logitless.train.assembly.engines import open_engines
from logitless.train.assembly.stages import Parts, assemble, load, read
from logitless.train.loop import next_block
from logitless.train.recipe.loading import load_recipe
from logitless.train.record.journal import Journal
from logitless.train.record.live_view import LiveView
from logitless.train.record.run_folder import create_run_folder
from tests.train.tiny import start, tiny_recipe


def _parts(recipe) -> Parts:
    inputs = read(recipe)
    loaded = load(inputs)
    return assemble(inputs, loaded, open_engines(loaded.recipe, loaded.model, inputs.tokenizer))


def _trained_on_a_block(parts, folder) -> list[dict]:
    """The numbers of each step."""
    journal = Journal(create_run_folder(folder, "parts"), LiveView(1, silent=True), (), parts.learner.policy.device)
    parts.engines.load_all(parts.learner.weights(), parts.learner.version)
    _, block, _ = next_block(parts.collector, parts.learner, journal)
    parts.learner.begin(block)
    steps = []
    while parts.learner.in_training:
        steps.append(parts.learner.step())
    return steps


def test_the_parts_of_a_recipe_train_on_a_block_as_the_run_does(tmp_path):
    recipe = tiny_recipe(tmp_path, train__blocks=1)
    run, _ = start(recipe)
    written = [line for line in run.read_metrics() if "loss/total" in line]
    steps = _trained_on_a_block(_parts(recipe), tmp_path)
    assert len(steps) == len(written) > 1
    for step, line in zip(steps, written, strict=True):
        assert {name: line[name] for name in step} == step


def test_prompts_tell_of_the_environments_tools(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr("logitless.train.assembly.stages.tools_of", lambda environment: ["a tool"])
    monkeypatch.setattr(
        "logitless.train.assembly.stages.data_of",
        lambda recipe, tokenizer, tools: told.append(tools) or data_of(recipe, tokenizer),
    )
    read(tiny_recipe(tmp_path))
    assert told == [["a tool"]]


def test_everything_after_the_model_reads_a_recipe_without_auto_and_what_is_written_down_is_what_was_given(tmp_path):
    recipe = tiny_recipe(tmp_path, train__blocks=1)
    assert (recipe.model.layers, recipe.rollout.engine.name) == ("auto", "auto")
    parts = _parts(recipe)
    for read_by_a_part in (parts.recipe, parts.learner.recipe):
        assert (read_by_a_part.model.layers, read_by_a_part.rollout.engine.name) == ("transformers", "transformers")
    assert parts.collector.options == parts.recipe.rollout
    assert parts.inputs.recipe == recipe
    run, _ = start(recipe)
    assert load_recipe(run.config) == recipe


def test_a_model_for_a_plan_has_no_weights(tmp_path):
    loaded = load(read(tiny_recipe(tmp_path)), device=torch.device("meta"))
    assert all(parameter.is_meta for parameter in loaded.model.parameters())


def test_parts_under_other_settings_share_all_but_those(tmp_path):
    recipe = tiny_recipe(tmp_path)
    other = tiny_recipe(tmp_path, rollout__prompts_per_block=2, train__epochs_per_block=1)
    parts = _parts(recipe)
    first = _trained_on_a_block(parts, tmp_path / "first")
    changed = parts.under(other)
    steps = _trained_on_a_block(changed, tmp_path / "second")
    assert steps[0]["step"] == len(first) + 1
    assert {step["epoch"] for step in steps} == {1}
    assert changed.learner.optimizer is parts.learner.optimizer
    assert parts.learner.progress.step == len(first) + len(steps)
    assert (parts.collector.options, parts.learner.recipe) == (parts.recipe.rollout, parts.recipe)
    assert parts.recipe.rollout.prompts_per_block == recipe.rollout.prompts_per_block == 4


def test_gradients_are_checked_for_the_device_that_trains_wherever_the_weights_are_now(tmp_path, monkeypatch):
    checked = []
    monkeypatch.setattr(
        "logitless.train.assembly.stages.check_delta_gradients", lambda model, device: checked.append(device)
    )
    load(read(tiny_recipe(tmp_path)), device=torch.device("meta"))
    assert checked == [torch.device("cpu")]

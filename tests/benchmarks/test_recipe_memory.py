"""The memory of the 24 GB recipes: the benchmark runs a recipe, and what was measured fits."""

from pathlib import Path

import pytest

import recipe_memory as benchmark
from logitless.train.plan.run_plan import plan_of
from logitless.train.recipe.loading import load_recipe

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def repository_root(monkeypatch):
    """The paths inside recipes start there."""
    monkeypatch.chdir(ROOT)


@pytest.mark.slow
def test_a_block_and_its_resume_are_measured_beside_the_plan_at_the_longest_prompts(tmp_path):
    small = ["rollout.prompts_per_block=2", "model.device=cpu", "checkpoint.every_blocks=1"]
    toy, limit = Path("recipes/length-toy.yaml"), 24 * benchmark.GIB
    first, second = (benchmark.measure(toy, small, limit, tmp_path, blocks=blocks) for blocks in (1, 2))
    assert (first["resumed"], second["resumed"]) == (False, True)
    assert first["prompt_tokens"] == load_recipe(toy, small).data.max_prompt_tokens
    for found in (first, second):
        assert found["recipe"] == "length-toy"
        assert found["complete"]
        assert found["planned_total_bytes"] == sum(found["planned_bytes"].values()) > 0
        assert found["wall_clock_seconds"] > found["seconds"]["training"] > 0


@pytest.mark.parametrize("name", benchmark.STAND_INS)
def test_every_recipe_takes_the_overrides_and_decodes_as_many_rows_as_it_may(name):
    overrides = [*benchmark.EVERYTHING_AT_ITS_LONGEST, *benchmark.STAND_INS[name]]
    data = "data.train={name: file, path: recipes/dry-run/gsm8k.jsonl, columns: {prompt: question}}"
    recipe = load_recipe(Path(f"recipes/{name}.yaml"), [*overrides, data])
    plan = plan_of(recipe)
    assert plan.completions_per_block >= recipe.rollout.max_rows
    assert plan.tokens_per_block >= 2 * recipe.train.tokens_per_micro_batch
    assert plan.total_bytes < benchmark.LIMITS[name]

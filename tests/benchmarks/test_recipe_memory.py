"""The memory of the 24 GB recipes: the benchmark runs a recipe, and what was measured fits."""

import importlib.util
import json
from pathlib import Path

import pytest

from logitless.train.plan import GIB, plan_of
from logitless.train.recipe import load_recipe

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("recipe_memory", ROOT / "benchmarks/recipe_memory.py")
benchmark = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(benchmark)


@pytest.fixture(autouse=True)
def repository_root(monkeypatch):
    """The paths inside recipes start there."""
    monkeypatch.chdir(ROOT)


def test_a_run_is_measured_beside_its_plan():
    small = ["train.blocks=1", "rollout.prompts_per_block=2", "model.device=cpu", "checkpoint.every_blocks=1"]
    found = benchmark.measure(Path("recipes/length-toy.yaml"), small)
    assert found["recipe"] == "length-toy"
    assert found["planned_total_bytes"] == sum(found["planned_bytes"].values()) > 0
    assert found["wall_clock_seconds"] > found["seconds"]["training"] > 0


@pytest.mark.parametrize("name", benchmark.STAND_INS)
def test_both_recipes_take_the_overrides_and_decode_as_many_rows_as_they_may(name):
    overrides = [*benchmark.EVERYTHING_AT_ITS_LONGEST, *benchmark.STAND_INS[name]]
    recipe = load_recipe(Path(f"recipes/{name}.yaml"), overrides)
    plan = plan_of(recipe)
    assert plan.completions_per_block >= recipe.rollout.max_rows
    assert plan.tokens_per_block >= 2 * recipe.train.tokens_per_micro_batch


def test_what_was_measured_fits_24_gib():
    if not benchmark.RESULT.is_file():
        pytest.skip("not measured yet: python benchmarks/recipe_memory.py on a GPU")
    found = json.loads(benchmark.RESULT.read_text())
    assert found["rows"]
    for row in found["rows"]:
        assert row["peak_reserved_bytes"] < found["limit_bytes"] == 24 * GIB

"""The quickstart's task on a GPU with either engine: it is reasoning-gym's, and the committed curves are the same."""

import pytest

import engines_curve
from logitless.train.recipe.loading import parse_recipe


def test_the_task_is_made_and_judged_as_reasoning_gym_does():
    reasoning_gym = pytest.importorskip("reasoning_gym")
    theirs = reasoning_gym.create_dataset("palindrome_generation", size=50, seed=1)
    for mine, entry in zip(engines_curve.palindromes(50, 1), theirs, strict=True):
        assert (mine["prompt"], mine["answer"]) == (entry["question"], entry["answer"])
        assert mine["letters"] == entry["metadata"]["letters"]
        for answer in (mine["answer"], "abc", mine["answer"][1:], mine["answer"].upper()):
            wanted = float(theirs.score_answer(answer, entry) == 1)
            assert engines_curve.whole([answer], [mine["letters"]]) == [wanted]


@pytest.mark.parametrize("engine", ["gpu", "transformers"])
def test_recipes_differ_in_the_engine_alone(tmp_path, engine):
    raw = engines_curve.recipe(engine, 0, 10, tmp_path, "cuda")
    recipe = parse_recipe(raw)
    assert recipe.rollout.engine.name == engine
    assert recipe.model.layers == "row_invariant"
    size = engines_curve.SIZE
    heads = (2 * size["num_attention_heads"] + 2 * size["num_key_value_heads"]) * size["head_dim"]
    layer = size["hidden_size"] * (heads + 3 * size["intermediate_size"])
    assert 9e6 < size["num_hidden_layers"] * layer < 11e6
    other = engines_curve.recipe("gpu" if engine == "transformers" else "transformers", 0, 10, tmp_path, "cuda")
    other["rollout"]["engine"], other["name"] = raw["rollout"]["engine"], raw["name"]
    assert raw == other

"""``parallel.sampling: auto`` chooses the same number for the same recipe and number of processes, and says why."""

import pytest
import yaml

from logitless.cli.main import main
from logitless.train.assembly.checks import arrangement_of
from logitless.train.assembly.sampling import with_sampling
from tests.train.tiny import tiny_raw, tiny_recipe

AUTO = {"parallel__sampling": "auto", "rollout__staleness": 1}
SERVER = {"rollout__engine": {"name": "vllm_server", "urls": ["http://127.0.0.1:1"], "model": "a"}}


@pytest.mark.parametrize(
    ("changes", "world", "says"),
    [
        ({"rollout__staleness": 0}, 4, "0 of 4, for at rollout.staleness 0 sampling and training wait for each other"),
        ({}, 1, "0 of 1, half, rounded down"),
        ({}, 2, "1 of 2, half"),
        ({}, 5, "2 of 5, half, rounded down"),
        ({"parallel__deterministic": True}, 6, "4 of 6, for 3 cannot: 3"),  # two train, in order
        ({"parallel__replicate": 3}, 4, "1 of 4, for 2 cannot: 3 * auto * 1"),
        ({"parallel__shard": 2}, 4, "2 of 4, half"),
        (SERVER, 4, "0 of 4, for 2 cannot: rollout.engine: vllm_server"),
    ],
)
def test_half_sample_where_blocks_are_sampled_ahead_or_as_near_as_the_recipe_allows(tmp_path, changes, world, says):
    recipe, line = with_sampling(tiny_recipe(tmp_path, **{**AUTO, **changes}), world)
    number = recipe.parallel.num_sampling
    assert line == says
    assert number == int(says[0])
    if number:
        assert arrangement_of(recipe, world).world == world - number


def test_a_number_of_the_recipe_stays(tmp_path):
    recipe = tiny_recipe(tmp_path, parallel__sampling=1)
    assert with_sampling(recipe, 4) == (recipe, "")


def test_the_dry_run_and_the_plan_say_what_auto_chose(tmp_path, capsys):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(tiny_raw(tmp_path)))
    asked = [str(path), "--set", "parallel.sampling=auto", "--set", "rollout.staleness=1"]
    assert main(["train", *asked, "--dry-run"]) == main(["plan", *asked, "--gpus", "6"]) == 0
    said = capsys.readouterr().out
    assert "\n  parallel.sampling: 0 of 1, half, rounded down\n" in said
    assert "on 3 processes: 3 copies of the weights\n  parallel.sampling: 3 of 6, half\n" in said

"""``logitless plan``: a forecast for any number of GPUs."""

import pytest
import yaml

from logitless.cli.main import main
from tests.train.tiny import tiny_raw


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(tiny_raw(tmp_path)))
    return path


def test_memory_and_messages_are_said_for_any_number(recipe, capsys):
    assert main(["plan", str(recipe), "--gpus", "64", "--set", "parallel.replicate=8"]) == 0
    said = capsys.readouterr().out
    assert "on 64 processes: 8 copies of the weights, each sharded over 8" in said
    assert "gradients of copies" in said
    assert " 0.000" not in said  # a small model has KiB
    assert "host, for all its processes (8)" in said
    assert main(["plan", str(recipe), "--gpus", "64", "--gpus-per-machine", "4"]) == 0
    assert "host, for all its processes (4)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "0"], "needed at least one GPU"),
        (["--gpus", "2", "--gpus-per-machine", "0"], "given --gpus-per-machine 0"),
        (["--gpus", "3", "--set", "parallel.replicate=2"], "the number of processes"),
        (["--gpus", "3", "--set", "parallel.deterministic=true"], "1, 2, 4, 8, ... processes"),
    ],
)
def test_what_cannot_be_is_refused_with_status_2(recipe, capsys, arguments, message):
    assert main(["plan", str(recipe), *arguments]) == 2
    assert message in capsys.readouterr().err

"""``logitless plan``: a forecast for any number of GPUs, times only from what was measured."""

import json

import pytest
import yaml

from logitless.cli.main import main
from tests.train.tiny import tiny_raw


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(tiny_raw(tmp_path)))
    return path


def test_memory_and_messages_are_said_for_any_number_and_times_from_speeds(recipe, capsys):
    assert main(["plan", str(recipe), "--gpus", "64", "--set", "parallel.replicate=8"]) == 0
    said = capsys.readouterr().out
    assert "on 64 processes: 8 copies of the weights, each sharded over 8" in said
    assert "gradients of copies" in said
    assert "time: not forecast" in said
    assert "host, for all its processes (8)" in said
    assert main(["plan", str(recipe), "--gpus", "64", "--gpus-per-machine", "4"]) == 0
    assert "host, for all its processes (4)" in capsys.readouterr().out
    speeds = ["--tokens-per-second", "1e5", "--gigabytes-per-second", "200"]
    assert main(["plan", str(recipe), "--gpus", "2", *speeds]) == 0
    assert "at 100,000 tokens/s" in capsys.readouterr().out


def test_a_file_of_the_bench_says_speeds_and_what_is_not_hidden(recipe, tmp_path, capsys):
    alone = {"gpus": 1, "layout": "shard", "tokens": 800, "length": 8, "micro_batches": 1, "head_budget": None}
    alone |= {"tokens_per_second": 800.0, "bytes_per_second": None, "sent_bytes": 0}
    # 1.25 s a step instead of 1 s; the messages take 5e9 / 1e10 s
    two = alone | {"gpus": 2, "tokens_per_second": 1280.0, "bytes_per_second": 1e10, "sent_bytes": 5e9}
    head = {"gpus": 2, "layout": "head"}
    (tmp_path / "scale.json").write_text(json.dumps({"rows": [alone, head, two]}))
    measured = ["--measured", str(tmp_path / "scale.json")]
    assert main(["plan", str(recipe), "--gpus", "64", *measured]) == 0
    assert "at 800 tokens/s, and 50% of 0.000 s of messages at 10 GB/s" in capsys.readouterr().out
    assert main(["plan", str(recipe), "--gpus", "64", *measured, "--gigabytes-per-second", "3"]) == 0
    assert "messages at 3 GB/s" in capsys.readouterr().out
    (tmp_path / "scale.json").write_text(json.dumps({"rows": [alone]}))
    assert main(["plan", str(recipe), "--gpus", "64", *measured]) == 2
    assert "benchmarks/scale.py --gpus 1,2" in capsys.readouterr().err
    assert main(["plan", str(recipe), "--gpus", "64", "--measured", str(recipe)]) == 2
    assert "needed a file that `benchmarks/scale.py` wrote" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "0"], "needed at least one GPU"),
        (["--gpus", "2", "--gpus-per-machine", "0"], "given --gpus-per-machine 0"),
        (["--gpus", "3", "--set", "parallel.replicate=2"], "the number of processes"),
        (["--gpus", "2", "--tokens-per-second", "5"], "both speeds"),
        (["--gpus", "3", "--set", "parallel.deterministic=true"], "1, 2, 4, 8, ... processes"),
    ],
)
def test_what_cannot_be_is_refused_with_status_2(recipe, capsys, arguments, message):
    assert main(["plan", str(recipe), *arguments]) == 2
    assert message in capsys.readouterr().err

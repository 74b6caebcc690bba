"""Runs over a base in four bits: what they say, what they refuse, and that they go on where they stopped."""

import json
from pathlib import Path

from logitless.train.recipe.loading import load_recipe
from logitless.train.record.metrics import repeatable
from tests.train.tiny import start

RECIPE = Path(__file__).parents[2] / "recipes" / "length-toy.yaml"
FOUR_BITS = ["model.quantize=nf4", "model.lora={rank: 2}", "model.device=cpu", "writers=[]"]


def test_a_run_over_four_bits_goes_on_bit_for_bit_and_says_that_sampling_has_other_bits(tmp_path, capsys):
    def lines(folder, *blocks):
        for number, count in enumerate(blocks):
            changes = [f"output={folder}", f"train.blocks={count}", "checkpoint.every_blocks=1"]
            run, _ = start(load_recipe(RECIPE, [*FOUR_BITS, *changes]), resume=number > 0)
        return [repeatable(json.loads(line)) for line in (run.path / "metrics.jsonl").read_text().splitlines()]

    straight = lines(tmp_path / "a", 2)
    assert "not bitwise identical" in capsys.readouterr().out
    assert lines(tmp_path / "b", 1, 2) == straight

"""The smallest run with a known end, from its recipe to its metrics: every token up to the 20th is worth 1."""

import json
from pathlib import Path

import pytest

from logitless.train.recipe.loading import load_recipe
from tests.train.tiny import completed

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_mean_length_rises_to_the_cap_of_its_reward_and_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    overrides = [f"output={tmp_path}", "train.blocks=14", "writers=[]", "checkpoint.every_blocks=100"]
    folder = completed(load_recipe(ROOT / "recipes/length-toy.yaml", overrides))
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    blocks = [line for line in lines if "reward/mean" in line]
    lengths = [line["length/mean"] for line in blocks]
    rewards = [line["reward/mean"] for line in blocks]
    assert len(blocks) == 14
    assert rewards[0] < 16  # random weights end a completion at each of its tokens alike
    assert min(lengths[-5:]) > 20
    assert min(rewards[-5:]) > 18.5

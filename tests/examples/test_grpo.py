"""The whole algorithm in one file: it runs, it learns to answer in the task's form, and it stays short."""

import importlib.util
from pathlib import Path

import pytest
import torch

FILE = Path(__file__).parents[2] / "examples" / "grpo.py"


def example():
    spec = importlib.util.spec_from_file_location("grpo_example", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_runs_from_warm_start_to_evaluation(capsys):
    accuracy = example().main(warm_steps=2, blocks=2, num_held_out=4)
    assert len(accuracy) == 3
    assert all(0 <= a <= 1 for a in accuracy)
    assert "after 2 blocks: held-out accuracy" in capsys.readouterr().out


@pytest.mark.slow
def test_the_same_seed_gives_the_same_weights(monkeypatch):
    module = example()
    trained = []

    def kept(*arguments, **options):
        trained.append(load_model(*arguments, **options))
        return trained[-1]

    load_model = module.load_model
    monkeypatch.setattr(module, "load_model", kept)
    for _ in range(2):
        module.main(warm_steps=1, blocks=1, num_held_out=1)
    first, second = (dict(model.named_parameters()) for model in trained)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_example_fits_on_three_screens():
    assert len(FILE.read_text(encoding="utf-8").splitlines()) <= 165

"""The quickstart on a vLLM server learns what it learns in the trainer's process, and the committed result shows it."""

from pathlib import Path

import pytest

import quickstart_vllm
from logitless.train.recipe.loading import load_recipe

ROOT = Path(__file__).parents[2]


def test_noise_is_that_between_two_seeds():
    here = [{"seed": s, "accuracy_after": a} for s, a in ((0, 0.9), (1, 0.92), (2, 0.88))]
    [found] = quickstart_vllm.compared([{"seed": 0, "accuracy_after": 0.9}], here)
    assert found["two_standard_errors"] == pytest.approx(
        2 * (2 * 0.0004) ** 0.5
    )  # variance 0.0004 between seeds, twice
    assert found["difference"] == 0


def test_a_server_finds_the_quickstarts_model_and_tokenizer_in_the_folder(tmp_path):
    from transformers import AutoConfig, AutoTokenizer

    recipe = load_recipe(quickstart_vllm.ROOT / "recipes" / "quickstart.yaml")
    folder = quickstart_vllm.model_folder(recipe, tmp_path / "model")
    assert AutoConfig.from_pretrained(folder).architectures == ["Qwen3ForCausalLM"]
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == 2

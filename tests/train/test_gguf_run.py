"""A run whose model is a GGUF file: started by a recipe, exported, and read by plain transformers."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from logitless.cli.main import main
from logitless.train.recipe.loading import load_recipe
from tests.models.tiny_gguf import write_gguf
from tests.train.tiny import completed

RECIPE = """
name: gguf
output: {folder}/runs
model: {{source: tiny.gguf, device: cpu{lora}}}
data:
  train: {{name: file, path: train.jsonl}}
rollout:
  prompts_per_block: 2
  completions_per_prompt: 2
  sampling: {{max_new_tokens: 4}}
rewards: [{{name: length, cap: 4, unit: characters}}]
train: {{blocks: 1, optimizer: {{learning_rate: 1e-3}}}}
writers: []
"""


def recipe_of(tmp_path, lora=""):
    """The recipe of a run from a GGUF file beside it."""
    write_gguf(tmp_path / "tiny.gguf", quantized=True)
    rows = ({"prompt": f"What is {n} + {n}?"} for n in range(4))
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "gguf.yaml").write_text(RECIPE.format(folder=tmp_path, lora=lora))
    return load_recipe(tmp_path / "gguf.yaml")


@pytest.mark.parametrize("lora", ["", ", lora: {rank: 2}"], ids=["full", "lora"])
def test_a_run_from_a_gguf_file_beside_its_recipe_is_exported_for_plain_transformers(tmp_path, lora):
    recipe = recipe_of(tmp_path, lora)
    assert recipe.model.source == str(tmp_path / "tiny.gguf")
    run = completed(recipe)
    target = tmp_path / "exported"
    assert main(["export", str(run.path), "--out", str(target), "--dtype", "float32"]) == 0
    model, tokenizer = AutoModelForCausalLM.from_pretrained(target), AutoTokenizer.from_pretrained(target)
    assert (model.dtype, tokenizer.eos_token, tokenizer.pad_token) == (torch.float32, "<|im_end|>", "<|im_end|>")
    assert model.generation_config.eos_token_id == 2
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], return_tensors="pt", return_dict=False)
    assert torch.isfinite(model(ids).logits).all()


def test_a_finished_run_with_whole_weights_does_not_need_its_file_and_an_unfinished_one_names_it(tmp_path, capsys):
    run, file, aside = completed(recipe_of(tmp_path)), tmp_path / "tiny.gguf", tmp_path / "aside"

    def used(name, *which):
        capsys.readouterr()
        assert main(["sample", str(run.path), *which, "--prompt", "What is 2 + 2?", "--samples", "2"]) == 0
        said, target = capsys.readouterr().out, tmp_path / name
        assert main(["export", str(run.path), *which, "--out", str(target)]) == 0
        of_origin = ("README.md", "tokenizer_config.json")  # they say which files were read
        return said, {path.name: path.read_bytes() for path in target.iterdir() if path.name not in of_origin}

    run.model.rename(aside)
    of_file = used("from the file")
    file.unlink()
    assert main(["sample", str(run.path), "--prompt", "a"]) == 2
    assert f"needed a GGUF file; given '{file}', which does not exist" in capsys.readouterr().err
    aside.rename(run.model)
    assert of_file == used("latest") == used("model", "--checkpoint", "model")


def test_checkpoints_are_read_beside_a_model_whose_weights_were_deleted(tmp_path):
    run = completed(recipe_of(tmp_path))
    for weights in run.model.glob("*.safetensors"):
        weights.unlink()
    assert main(["sample", str(run.path), "--prompt", "a"]) == 0

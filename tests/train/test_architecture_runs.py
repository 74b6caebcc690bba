"""Whole runs of a hybrid and of an image model's language model, exported and read by plain transformers."""

import signal
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from logitless.cli.main import main
from logitless.train.record.run_folder import RunFolder
from logitless.train.saved_policy import load_policy
from tests.models.families import DELTA_NET, FAMILY, IMAGE_MODELS, TRAINED, one_of_each_kind
from tests.train.interrupting import stopped_at
from tests.train.tiny import assert_same_run, finished_run, start, steps_of, tiny_raw, tiny_recipe

ENDS = {"vocab_size": 11, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def check_export(run: RunFolder, target: Path, kind: str) -> None:
    """What is exported computes in plain transformers what the run's policy does."""
    assert all(torch.isfinite(torch.tensor(step["loss/total"])) for step in steps_of(run))
    assert main(["export", str(run.path), "--out", str(target), "--dtype", "float32"]) == 0
    plain, report = AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager", output_loading_info=True)
    assert plain.config.model_type == kind
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    policy = load_policy(run, exact=True).policy.model.eval()
    ids = torch.tensor([[3, 4, 5, 6, 7, 8]])
    torch.testing.assert_close(plain(input_ids=ids).logits, policy(input_ids=ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow  # an image model's hybrid is trained and exported below
@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["full", "lora"])
def test_a_hybrid_is_trained_resumed_and_exported(tmp_path, lora):
    config = FAMILY["qwen3_5_text"].config | ENDS
    options = {"model__source": config, "model__lora": lora, "model__gradient_checkpointing": True}
    for name in ("whole", "resumed"):
        (tmp_path / name).mkdir()
    whole = finished_run(tmp_path / "whole", train__blocks=2, **options)
    check_export(whole, tmp_path / "exported", "qwen3_5_text")
    if lora is None:
        recipe = tiny_recipe(tmp_path / "resumed", train__blocks=2, **options)
        resumed = stopped_at(2, recipe, signal.SIGINT)
        assert start(recipe, resume=True) == (resumed, True)
        assert_same_run(whole, resumed)


def test_the_language_model_of_an_image_model_is_trained_and_exported(tmp_path):
    kind = next(each for each in IMAGE_MODELS if each.model_type == "qwen3_5")
    fields = kind.config | {"text_config": kind.config["text_config"] | DELTA_NET | ENDS}
    fields.pop("model_type")
    torch.manual_seed(0)
    image_model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind.model_type, **fields))
    image_model.save_pretrained(tmp_path / "image_model")
    tiny_raw(tmp_path)
    source = {"model__source": str(tmp_path / "image_model"), "model__random_weights": False}
    check_export(finished_run(tmp_path, train__blocks=1, **source), tmp_path / "exported", "qwen3_5_text")


# The others, with sparse attention, are sampled on servers.
SAMPLED_HERE = [family for family in TRAINED if family.attention == "packed"]


@pytest.mark.parametrize("family", one_of_each_kind(SAMPLED_HERE))
def test_a_dry_run_plans_every_architecture(family, tmp_path, capsys):
    config = (
        family.config
        | ENDS
        | ({"vocab_size_per_layer_input": 11} if family.model_type.startswith(("gemma3n", "gemma4")) else {})
    )
    raw = tiny_raw(tmp_path)
    raw["model"] |= {"source": config}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(raw))
    assert main(["train", str(tmp_path / "recipe.yaml"), "--dry-run"]) == 0
    assert "memory" in capsys.readouterr().out

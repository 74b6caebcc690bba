"""A recipe that asks for row-invariant layers trains through them, or is refused in words."""

import pytest
import torch

from logitless.distributed.arrangement import Arrangement
from logitless.errors import ConfigurationError, UnavailableError
from logitless.models.lm_head import backbone
from logitless.models.row_invariant import RowInvariantLayer
from logitless.train import setup
from logitless.train.checkpoint import load_checkpoint
from logitless.train.checks import arrangement_of
from logitless.train.config import Recipe
from logitless.train.plan import plan_of
from logitless.train.run import start
from logitless.train.setup import effects, own_layers_because, policy_model, section_for, tokenizer_of
from tests.head.interpreter import complete_interpreter, interpreted
from tests.train.tiny import tiny_recipe

if interpreted():
    complete_interpreter()


BFLOAT16 = {"model__trained_dtype": "bfloat16"}
FEW = {"rollout__prompts_per_block": 2, "rollout__completions_per_prompt": 2, "data__held_out": None, "kl": None}


def recipe(folder, layers, **changes) -> Recipe:
    changes = {"model__source__head_dim": 16, "train__blocks": 1, "train__epochs_per_block": 1, **changes}
    return tiny_recipe(folder, model__layers=layers, **changes)


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4.0}], ids=["full", "lora"])
def test_a_run_trains_through_row_invariant_layers_what_it_trains_through_transformers(tmp_path, monkeypatch, lora):
    calls, plain_forward = [], RowInvariantLayer.forward

    def counted(self, *arguments, **options):
        calls.append(1)
        return plain_forward(self, *arguments, **options)

    monkeypatch.setattr(RowInvariantLayer, "forward", counted)
    folders = [start(recipe(tmp_path / kind, kind, model__lora=lora))[0] for kind in ("transformers", "row_invariant")]
    plain, ours = (next(r for r in folder.read_metrics() if r["step"] == 1) for folder in folders)
    assert ours["ratio/max"] == ours["ratio/min"] == 1.0
    assert plain["sampler/exact"] == ours["sampler/exact"] == 0  # transformers' sampler has its own bits
    assert ours["optimizer/grad_norm"] == pytest.approx(plain["optimizer/grad_norm"], rel=1e-3)
    weights = [load_checkpoint(folder.checkpoints).tensors for folder in folders]
    assert weights[0].keys() == weights[1].keys()
    assert calls


def test_recomputed_activations_train_the_same_weights_to_the_last_bit(tmp_path):
    weights = []
    for recompute in (False, True):
        changes = {"model__gradient_checkpointing": recompute, "rollout__sampling": {"max_new_tokens": 3}} | FEW
        run = start(recipe(tmp_path / str(recompute), "row_invariant", **changes))[0]
        weights.append(load_checkpoint(run.checkpoints).tensors)
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_run_on_the_cpu_is_refused_where_kernels_cannot_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(UnavailableError, match="a model on the CPU"):
        start(recipe(tmp_path, "row_invariant"))


def test_a_plan_names_what_is_not_covered(tmp_path):
    with pytest.raises(UnavailableError, match="the architecture gpt_neox"):
        plan_of(recipe(tmp_path, "row_invariant", model__source__model_type="gpt_neox"))


def reason(tmp_path, device="meta", layers="auto", **changes):
    section = recipe(tmp_path, layers, **changes).model
    plain = section.model_copy(update={"compile": False})  # what compiles is not asked here
    model = policy_model(plain, tokenizer_of(section), seed=0, device=torch.device(device))
    return own_layers_because(section, model)


def test_auto_takes_row_invariant_layers_for_a_covered_model_in_16_bits(tmp_path):
    assert reason(tmp_path, **BFLOAT16) == ""
    assert reason(tmp_path, model__lora={"rank": 2, "alpha": 4.0}, model__dtype="bfloat16") == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "float32 weights"),
        (BFLOAT16 | {"model__source__model_type": "gpt_neox"}, "the architecture gpt_neox"),
        (BFLOAT16 | {"model__attention": "sdpa"}, "model.attention: sdpa"),
        (BFLOAT16 | {"model__compile": True}, "model.compile: true"),
        ({"model__autocast": "bfloat16"}, "model.autocast: bfloat16"),
        (BFLOAT16 | {"device": "cpu"}, "a model on the CPU"),
    ],
    ids=str,
)
def test_auto_says_what_keeps_the_model_at_its_own_layers(tmp_path, changes, words):
    assert words in reason(tmp_path, **changes)


def test_a_run_with_layers_auto_goes_on_with_its_own_where_others_cannot_serve_and_says_so(tmp_path):
    section = recipe(tmp_path, "auto").model
    model = policy_model(section, tokenizer_of(section), seed=0, device=torch.device("cpu"))
    assert not hasattr(backbone(model), "row_invariant")
    assert "layers transformers' own, for a model on the CPU" in effects(section, torch.device("cpu"), model)


@pytest.mark.parametrize("parallel", [{"shard": 2}, {"sequence": 2}], ids=str)
def test_auto_keeps_its_own_layers_where_weights_or_sequences_are_split_over_processes(tmp_path, parallel):
    automatic = recipe(tmp_path, "auto", parallel=parallel)
    split = arrangement_of(automatic, 2)
    assert split != Arrangement(replicate=2)
    assert section_for(automatic.model, split).layers == "transformers"
    assert section_for(automatic.model, Arrangement(replicate=2)).layers == "auto"
    assert section_for(recipe(tmp_path, "row_invariant").model, split).layers == "row_invariant"


def test_layers_that_do_not_keep_their_bits_here_are_taken_back_under_auto_and_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "own_layers_because", lambda *_: "")
    monkeypatch.setattr(setup, "_keeps_bits", lambda _: False)
    section = recipe(tmp_path, "auto").model
    model = policy_model(section, tokenizer_of(section), seed=0, device=torch.device("cpu"))
    assert not hasattr(backbone(model), "row_invariant")
    with pytest.raises(UnavailableError, match="attention does not keep its bits"):
        reason(tmp_path, "cpu", "row_invariant")


@pytest.mark.parametrize(
    "beside", [{"model__compile": True}, {"model__autocast": "bfloat16"}, {"model__attention": "sdpa"}], ids=str
)
def test_what_would_break_the_bits_is_refused_beside_them(tmp_path, beside):
    with pytest.raises(ConfigurationError, match=r"beside model\.layers: row_invariant"):
        recipe(tmp_path, "row_invariant", **beside)

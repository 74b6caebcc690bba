"""A recipe that asks for row-invariant layers trains through them, or is refused in words."""

import pytest

from logitless.errors import ConfigurationError, UnavailableError
from logitless.models.row_invariant import RowInvariantLayer
from logitless.train.checkpoint import load_checkpoint
from logitless.train.config import Recipe
from logitless.train.plan import plan_of
from logitless.train.run import start
from tests.head.interpreter import complete_interpreter, interpreted
from tests.train.tiny import tiny_recipe

if interpreted():
    complete_interpreter()


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
    assert ours["optimizer/grad_norm"] == pytest.approx(plain["optimizer/grad_norm"], rel=1e-3)
    weights = [load_checkpoint(folder.checkpoints).tensors for folder in folders]
    assert weights[0].keys() == weights[1].keys()
    assert calls


def test_a_run_on_the_cpu_is_refused_where_kernels_cannot_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(UnavailableError, match="a model on the CPU"):
        start(recipe(tmp_path, "row_invariant"))


def test_a_plan_names_what_is_not_covered(tmp_path):
    with pytest.raises(UnavailableError, match="the architecture gpt_neox"):
        plan_of(recipe(tmp_path, "row_invariant", model__source__model_type="gpt_neox"))


@pytest.mark.parametrize(
    "beside", [{"model__compile": True}, {"model__autocast": "bfloat16"}, {"model__attention": "sdpa"}], ids=str
)
def test_what_would_break_the_bits_is_refused_beside_them(tmp_path, beside):
    with pytest.raises(ConfigurationError, match=r"beside model\.layers: row_invariant"):
        recipe(tmp_path, "row_invariant", **beside)

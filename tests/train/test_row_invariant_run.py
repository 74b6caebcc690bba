"""A recipe that asks for row-invariant layers trains through them, or is refused in words."""

import pytest

from logitless.distributed.arrangement import Arrangement
from logitless.errors import UnavailableError
from logitless.models.lm_head import backbone
from logitless.models.row_invariant.layers import RowInvariantLayer
from logitless.train.assembly import layers, resolve, teacher
from logitless.train.assembly import model as assembly_model
from logitless.train.assembly.checks import arrangement_of
from logitless.train.assembly.layers import against_row_invariant, in_words
from logitless.train.assembly.resolve import before_loading, resolved
from logitless.train.assembly.teacher import layers_lines
from logitless.train.plan.run_plan import plan_of
from logitless.train.recipe.config import Recipe
from logitless.train.store.checkpoint import load_checkpoint
from tests.head.interpreter import complete_interpreter, interpreted
from tests.train.interrupting import before
from tests.train.test_distillation import ALONE, teacher_in
from tests.train.test_experts import MIXTURE
from tests.train.tiny import assert_equal, finished_run, start, steps_of, tiny_model, tiny_recipe

if interpreted():
    complete_interpreter()


BFLOAT16 = {"model__trained_dtype": "bfloat16"}
FEW = {"rollout__prompts_per_block": 2, "rollout__completions_per_prompt": 2, "data__held_out": None, "kl": None}
MOST_3 = {"max_new_tokens": 3}


def recipe(folder, layers, **changes) -> Recipe:
    changes = {"model__source__head_dim": 16, "train__blocks": 1, "train__epochs_per_block": 1, **changes}
    return tiny_recipe(folder, model__layers=layers, **changes)


@pytest.mark.parametrize("lora", [None, pytest.param({"rank": 2, "alpha": 4.0}, marks=pytest.mark.slow)])
def test_a_run_trains_through_row_invariant_layers_what_it_trains_through_transformers(tmp_path, monkeypatch, lora):
    calls = []
    before(monkeypatch, RowInvariantLayer, "forward", lambda *_, **__: calls.append(1))
    folders = [start(recipe(tmp_path / kind, kind, model__lora=lora))[0] for kind in ("transformers", "row_invariant")]
    plain, ours = (next(r for r in folder.read_metrics() if r["step"] == 1) for folder in folders)
    assert ours["ratio/max"] == ours["ratio/min"] == 1.0
    assert plain["sampler/exact"] == ours["sampler/exact"] == 0  # transformers' sampler has its own bits
    assert ours["optimizer/grad_norm"] == pytest.approx(plain["optimizer/grad_norm"], rel=1e-3)
    weights = [load_checkpoint(folder.checkpoints).tensors for folder in folders]
    assert weights[0].keys() == weights[1].keys()
    assert calls


def test_a_teacher_teaches_the_same_through_row_invariant_layers(tmp_path, monkeypatch):
    calls, found = [], []
    before(monkeypatch, RowInvariantLayer, "forward", lambda *_, **__: calls.append(1))
    source = teacher_in(tmp_path, hidden_size=16, head_dim=16)
    changes = {**ALONE, **FEW, "train__blocks": 1, "rollout__sampling": {"max_new_tokens": 3}}
    for kind in ("transformers", "row_invariant"):
        teacher = {"source": source, "divergence": "reverse_kl", "advantage": 1, "layers": kind}
        step = steps_of(finished_run(tmp_path, **changes, teacher=teacher, name=kind))[0]
        found.append([step["teacher/divergence"], step["teacher/log_ratio"], step["optimizer/grad_norm"]])
        assert bool(calls) == (kind == "row_invariant")
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_the_load_balancing_loss_trains_a_mixture_through_row_invariant_layers_also_those_of_an_engine(tmp_path):
    engine = {"rollout__engine": {"name": "gpu"}, "model__layers": "auto"}
    changes = {**MIXTURE, **FEW, "train__blocks": 1, "train__epochs_per_block": 1, "rollout__sampling": MOST_3}
    norms = {}
    for name, of in (("own", {}), ("named", {"model__layers": "row_invariant"}), ("engine", engine)):
        for loss in (0, 0.5):
            made = tiny_recipe(tmp_path / name / str(loss), **changes, **of, model__router__loss=loss)
            step = steps_of(start(made)[0])[0]
            norms[name, loss] = step["optimizer/grad_norm"]
    assert norms["named", 0.5] == pytest.approx(norms["own", 0.5], rel=1e-3)
    assert norms["named", 0] == pytest.approx(norms["own", 0], rel=1e-3)
    for name in ("own", "named", "engine"):
        assert norms[name, 0.5] != pytest.approx(norms[name, 0], rel=1e-2)


def test_recomputed_activations_train_the_same_weights_to_the_last_bit(tmp_path):
    weights = []
    for recompute in (False, True):
        changes = {"model__gradient_checkpointing": recompute, "rollout__sampling": {"max_new_tokens": 3}} | FEW
        run = start(recipe(tmp_path / str(recompute), "row_invariant", **changes))[0]
        weights.append(load_checkpoint(run.checkpoints).tensors)
    assert_equal(*weights)


def test_a_run_on_the_cpu_is_refused_where_kernels_cannot_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(UnavailableError, match="a model on the CPU"):
        start(recipe(tmp_path, "row_invariant"))


def test_a_plan_is_refused_where_kernels_cannot_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(UnavailableError, match="a model on the CPU"):
        plan_of(recipe(tmp_path, "row_invariant"))


def test_a_plan_names_what_is_not_covered(tmp_path):
    with pytest.raises(UnavailableError, match="the architecture gpt_neox"):
        plan_of(recipe(tmp_path, "row_invariant", model__source__model_type="gpt_neox"))


def reason(tmp_path, device="meta", layers="auto", **changes):
    made = recipe(tmp_path, layers, **changes)
    plain = made.model.model_copy(update={"compile": False})  # what compiles is not asked here
    return in_words(against_row_invariant(made.model, tiny_model(made.model_copy(update={"model": plain}), device)))


def test_auto_takes_row_invariant_layers_for_a_covered_model_in_16_bits(tmp_path):
    assert reason(tmp_path, **BFLOAT16) == ""
    assert reason(tmp_path, model__lora={"rank": 2, "alpha": 4.0}, model__dtype="bfloat16") == ""
    assert reason(tmp_path, **BFLOAT16, **MIXTURE, model__router__loss=0.5) == ""


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


def test_a_machine_on_which_triton_compiles_nothing_has_transformers_own_layers(tmp_path, monkeypatch):
    monkeypatch.setattr(layers, "without_triton", lambda: "Triton finds no C compiler")
    assert reason(tmp_path, **BFLOAT16) == "Triton finds no C compiler"


def test_a_run_with_layers_auto_goes_on_with_its_own_where_others_cannot_serve_and_says_so(tmp_path):
    automatic = recipe(tmp_path, "auto")
    model = tiny_model(automatic)
    assert not hasattr(backbone(model), "row_invariant")
    chosen = resolved(automatic, model, Arrangement())
    assert chosen.recipe.model.layers == "transformers"
    assert chosen.layers_line == "transformers' own, for a model on the CPU"


@pytest.mark.parametrize("parallel", [{"shard": 2}, {"sequence": 2}], ids=str)
def test_auto_keeps_its_own_layers_where_weights_or_sequences_are_split_over_processes(tmp_path, parallel):
    automatic = recipe(tmp_path, "auto", parallel=parallel)
    split = arrangement_of(automatic, 2)
    assert split != Arrangement(replicate=2)
    assert before_loading(automatic, split).model.layers == "transformers"
    assert before_loading(automatic, Arrangement(replicate=2)) is automatic
    named = recipe(tmp_path, "row_invariant")
    assert before_loading(named, split) is named


def test_layers_that_do_not_keep_their_bits_here_are_taken_back_under_auto_and_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(assembly_model, "against_row_invariant", lambda *_: [])
    monkeypatch.setattr(assembly_model, "_passes_self_check", lambda _: False)
    automatic = recipe(tmp_path, "auto")
    model = tiny_model(automatic)
    assert not hasattr(backbone(model), "row_invariant")
    monkeypatch.setattr(resolve, "against_row_invariant", lambda *_: [])
    chosen = resolved(automatic, model, Arrangement())
    assert chosen.recipe.model.layers == "transformers"
    assert chosen.layers_line.startswith("transformers' own, for the self-check on this GPU")
    monkeypatch.setattr(teacher, "_against_layers", lambda *_: "")
    [line] = layers_lines(automatic, {"t": model}, Arrangement())
    assert line.startswith("teacher t: layers transformers' own, for the self-check on this GPU")
    with pytest.raises(UnavailableError, match="the self-check on this GPU"):
        reason(tmp_path, "cpu", "row_invariant")

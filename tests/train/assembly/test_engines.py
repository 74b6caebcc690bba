"""An engine that keeps weights of its own samples what one in this process samples, for it gets them when it must."""

import pytest
import torch

from logitless.distributed.arrangement import Arrangement
from logitless.errors import UnavailableError
from logitless.models.char_tokenizer import character_tokenizer
from logitless.models.loading import load_model
from logitless.rollout.transformers import TransformersEngine
from logitless.train.assembly import resolve
from logitless.train.assembly.engines import Engines, open_engines
from logitless.train.assembly.resolve import GPU_RULES, Placed, resolved
from logitless.train.recipe.engine import GpuEngineSection
from logitless.train.recipe.rule import unmet
from tests.train.engines import FakeEngine, copying
from tests.train.interrupting import stopped_at
from tests.train.tiny import finished_run, repeated, start, tiny_recipe, warm_start

# Evaluation at temperature 1, so that a difference in the weights shows.
SAMPLED = {"every_blocks": 1, "samples_per_prompt": 8, "sampling": {"max_new_tokens": 6}, "success_at": 5.0}
LORA = {"rank": 4, "alpha": 64.0, "targets": "all-linear"}


CHANGES = {
    "kl": None, "train__epochs_per_block": 1, "train__tokens_per_step": 1000,
    "train__optimizer": {"learning_rate": 0.2}, "train__blocks": 3, "evaluation": SAMPLED,
}  # fmt: skip


def _lines(folder, **changes):
    run = finished_run(folder, **CHANGES, **changes)
    return repeated(run), [rows for _, rows in run.read_rollouts()]


@pytest.mark.parametrize("lora", [None, LORA])
def test_training_and_evaluation_with_copies_equal_those_in_this_process(tmp_path, lora):
    changes = {"model__lora": lora, "warm_start": warm_start(tmp_path, steps=2, learning_rate=0.05)}
    here = _lines(tmp_path, name="here", **changes)
    there = _lines(tmp_path, name="there", **changes, open_engines=copying)
    if lora is None:
        assert here == there
    else:  # W + BA is rounded once where it is merged: the same tokens, logp_sampler a last digit apart
        assert [[row["completion"] for row in rows] for rows in here[1]] == [
            [row["completion"] for row in rows] for rows in there[1]
        ]
    assert len({line["evaluation/reward_mean"] for line in here[0]}) > 1  # the weights are seen to move


def test_engines_get_the_weights_at_the_start_and_after_each_block_and_are_closed(tmp_path):
    opened: list[Engines] = []

    def opening(*arguments):
        opened.append(copying(*arguments))
        return opened[0]

    lines, _ = _lines(tmp_path, open_engines=opening)
    for engine in opened[0].distinct:
        assert engine.loaded == [0, *(line["step"] for line in lines if "loss/total" in line)]
        assert engine.closed


def test_every_engine_is_closed_although_one_fails():
    class Failing(FakeEngine):
        closed = 0

        def close(self):
            Failing.closed += 1
            raise OSError("no device")

    with pytest.raises(OSError, match="no device"):
        Engines(Failing(), Failing()).close()
    assert Failing.closed == 2


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_resumed_run_hands_the_restored_weights_over(tmp_path, lora):
    changes = CHANGES | {"model__lora": lora, "warm_start": warm_start(tmp_path, steps=2, learning_rate=0.05)}
    whole = finished_run(tmp_path, **changes, name="whole", open_engines=copying)
    stopped = tiny_recipe(tmp_path, **changes, name="stopped")
    folder = stopped_at(1, stopped, open_engines=copying)
    start(stopped, resume=True, open_engines=copying)
    assert repeated(whole) == repeated(folder)


def test_auto_samples_with_transformers_where_nothing_has_the_bits_of_training_and_says_why(tmp_path, monkeypatch):
    recipe = tiny_recipe(tmp_path)
    assert recipe.rollout.engine.name == "auto"
    model = load_model(recipe.model.source, random_weights=True)
    chosen = resolved(recipe, model, Arrangement())
    engines = open_engines(chosen.recipe, model, character_tokenizer("abcdefgh"))
    assert isinstance(engines.training, TransformersEngine)
    assert chosen.engine_line == "transformers, for a model on the CPU"
    of_a_gpu = recipe.model_copy(update={"model": recipe.model.model_copy(update={"device": "cuda"})})
    monkeypatch.setattr(resolve, "device_of", lambda section: torch.device(section.device))
    assert unmet(GPU_RULES, Placed(of_a_gpu, model))[0].given == "its weights are to be sharded"


def test_a_copy_to_sample_with_is_refused_where_the_engine_gpu_cannot_run(tmp_path):
    recipe = tiny_recipe(tmp_path, parallel__sampling_shards=1)
    with pytest.raises(UnavailableError, match=r"rollout\.engine gpu: a GPU and Triton.*given a model on the CPU"):
        resolved(recipe, load_model(recipe.model.source, random_weights=True), Arrangement())


def _on_a_gpu(monkeypatch):
    """Models are taken for ones on a GPU."""
    monkeypatch.setattr(resolve, "_device_type", lambda model: "cuda")
    monkeypatch.setattr(resolve, "device_of", lambda section: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))


def test_auto_takes_the_engine_with_the_bits_of_training_where_the_layers_have_them(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    from logitless.models.row_invariant.layers import install_row_invariant
    from logitless.rollout.gpu.engine import GpuEngine

    recipe = tiny_recipe(tmp_path, rollout__engine={"name": "auto", "memory": 1000, "rescore_every": 3})
    model = load_model(recipe.model.source, random_weights=True)
    install_row_invariant(model)
    _on_a_gpu(monkeypatch)
    chosen = resolved(recipe, model, Arrangement())
    assert chosen.recipe.rollout.engine == GpuEngineSection(memory=1000, rescore_every=3)
    assert chosen.engine_line == "gpu, bitwise identical to training"
    engines = open_engines(chosen.recipe, model, character_tokenizer("abcdefgh"))
    assert isinstance(engines.training, GpuEngine)
    assert engines.evaluation is engines.training
    named = tiny_recipe(tmp_path, train__scoring_backend="chunked")
    assert "train.scoring_backend: chunked" in unmet(GPU_RULES, Placed(named, model))[0].given


def test_each_rule_of_sampling_with_the_bits_of_training_keeps_auto_from_it(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    from logitless.models.row_invariant.layers import install_row_invariant

    recipe, named = tiny_recipe(tmp_path), tiny_recipe(tmp_path, train__training_backend="chunked")
    model, plain = (load_model(recipe.model.source, random_weights=True) for _ in range(2))
    install_row_invariant(model)
    found = []
    for changed, of, name, patch in (
        (recipe, model, "device_of", lambda _: torch.device("cpu")),
        (recipe, model, "is_sharded", lambda _: True),
        (recipe, plain, "_device_type", lambda _: "cuda"),
        (named, model, "_device_type", lambda _: "cuda"),
    ):
        with monkeypatch.context() as patched:
            _on_a_gpu(patched)
            patched.setattr(resolve, name, patch)
            found += unmet(GPU_RULES, Placed(changed, of))[:1]
    assert [each.needed for each in found] == [f"for rollout.engine gpu: {rule.needed}" for rule in GPU_RULES]


@pytest.mark.parametrize(
    ("key", "value", "given"),
    [
        ("autocast", "bfloat16", "model.autocast: bfloat16"),
        ("compile", True, "model.compile: true"),
        ("attention", "sdpa", "model.attention: sdpa"),
    ],
)
def test_an_engine_gpu_that_is_named_is_refused_beside_what_its_layers_would_leave_out(tmp_path, key, value, given):
    pytest.importorskip("triton")
    recipe = tiny_recipe(tmp_path, rollout__engine={"name": "gpu"}, **{f"model__{key}": value})
    model = load_model(recipe.model.source, random_weights=True)
    with pytest.raises(UnavailableError, match=f"{given}.*Set rollout.engine: {{name: transformers}}, or leave it out"):
        resolved(recipe, model, Arrangement())
    sampling = {"parallel__sampling_shards": 1, f"model__{key}": value}
    copied = Placed(tiny_recipe(tmp_path, rollout__engine={"name": "gpu"}, **sampling), model)
    assert given in unmet(GPU_RULES, copied)[-1].given  # a copy is made with them

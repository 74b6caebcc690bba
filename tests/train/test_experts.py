"""Mixtures of experts in whole runs: the load-balancing loss, frozen routers, and numbers over ranks."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from logitless.errors import ConfigurationError
from logitless.train.recipe.loading import load_recipe
from tests.train.test_data_parallel import _assert_alike, _on
from tests.train.tiny import assert_equal, assert_same_run, finished_run, start, tiny_model, tiny_recipe

MIXTURE = {
    "model__source__model_type": "qwen3_moe", "model__source__num_hidden_layers": 2, "model__source__head_dim": 16,
    "model__source__num_experts": 4, "model__source__num_experts_per_tok": 2,
    "model__source__moe_intermediate_size": 16, "model__source__initializer_range": 0.3,
}  # fmt: skip
ONE_EPOCH = {"train__blocks": 2, "train__epochs_per_block": 1}


def _steps(run):
    return [record for record in run.read_metrics() if "optimizer/tokens" in record]


def test_a_mixture_trains_without_a_word_about_its_routers_and_says_how_they_are_loaded(tmp_path):
    (first, *_) = _steps(finished_run(tmp_path, **ONE_EPOCH, **MIXTURE))
    assert first["router/load_min"] < 1 < first["router/load_max"]
    assert 0 < first["router/entropy"] < torch.tensor(4.0).log()
    assert first["router/dropped_fraction"] == 0
    assert "loss/router" not in first


@pytest.mark.parametrize("micro_batch", [13, pytest.param(1000, marks=pytest.mark.slow)])
def test_the_load_balancing_loss_is_part_of_what_is_differentiated(tmp_path, micro_batch):
    """The first step's loss is a sum of means of which the KL, and the policy's with its ratio of 1, are known."""
    changes = {**ONE_EPOCH, **MIXTURE, "kl": None, "train__tokens_per_micro_batch": micro_batch}
    (plain, *_), (balanced, *_) = (
        _steps(finished_run(tmp_path / str(loss), **changes, model__router__loss=loss)) for loss in (0, 0.5)
    )
    assert balanced["loss/total"] - plain["loss/total"] == pytest.approx(0.5 * balanced["loss/router"], rel=1e-4)
    assert balanced["optimizer/grad_norm"] != plain["optimizer/grad_norm"]


def test_a_config_that_switches_the_loss_on_trains_and_samples_with_it(tmp_path):
    source = {"model__source__output_router_logits": True, "model__source__router_aux_loss_coef": 0.5}
    by_config, by_recipe = (
        finished_run(tmp_path / str(number), **ONE_EPOCH, **MIXTURE, **changes)
        for number, changes in enumerate((source, {"model__router__loss": 0.5}))
    )
    assert_same_run(by_config, by_recipe)
    with pytest.raises(ConfigurationError, match=r"a load-balancing loss: no model.lora.dropout"):
        tiny_model(tiny_recipe(tmp_path, **MIXTURE, **source, model__lora={"dropout": 0.1, "targets": ["q_proj"]}))


def test_a_load_balancing_loss_evens_the_load(tmp_path):
    options = {
        **ONE_EPOCH,
        **MIXTURE,
        "train__blocks": 10,
        "train__tokens_per_step": 1000,
        "train__tokens_per_micro_batch": 1000,
        "train__skip_zero_advantage": False,
        "data__held_out": None,
        "kl": None,
    }
    apart, even = (_steps(finished_run(tmp_path / str(c), **options, model__router__loss=c)) for c in (0, 1.0))
    assert apart[0]["router/load_max"] == even[0]["router/load_max"]
    assert even[-1]["loss/router"] < even[0]["loss/router"]
    assert even[-1]["router/load_max"] < apart[-1]["router/load_max"]


@pytest.mark.parametrize("lora", [None, pytest.param({"rank": 2}, marks=pytest.mark.slow)])
def test_a_frozen_router_ends_as_it_began(tmp_path, lora):
    changes = {**ONE_EPOCH, **MIXTURE, "model__lora": lora}
    begun = dict(tiny_model(tiny_recipe(tmp_path, **changes)).named_parameters())
    trained = {}
    for frozen in (False, True):
        run = finished_run(tmp_path / str(frozen), **changes, model__router__frozen=frozen)
        trained[frozen] = load_file(next(run.model.glob("*.safetensors")))
    names = [name for name in begun if name.endswith("mlp.gate.weight")]
    assert len(names) == 2
    for name in names if lora is None else ():
        assert torch.equal(trained[True][name], begun[name])
        assert not torch.equal(trained[False][name], begun[name])


def test_a_frozen_router_has_the_dtype_of_what_is_trained(tmp_path):
    changes = {**ONE_EPOCH, **MIXTURE, "model__router__frozen": True, "model__trained_dtype": "bfloat16"}
    model = tiny_model(tiny_recipe(tmp_path, **changes))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    finished_run(tmp_path, **changes)


def test_ranks_that_add_in_order_have_the_bits_of_one(tmp_path):
    options = {**ONE_EPOCH, **MIXTURE, "model__router__loss": 0.5, "parallel__deterministic": True}
    one, two = (_on(number, tmp_path / str(number), options) for number in (1, 2))
    assert_equal(*(load_file(run.model / "model.safetensors") for run in (one, two)))
    _assert_alike(one, two, 2)


@pytest.mark.parametrize(
    "changes",
    [{}, pytest.param({"model__lora": {"rank": 2}}, marks=pytest.mark.slow), {"parallel__sequence": 2}],
    ids=str,
)
def test_ranks_have_one_load_balancing_loss(tmp_path, changes):
    options = {**ONE_EPOCH, **MIXTURE, "model__router__loss": 0.5, "model__source__num_attention_heads": 2}
    one = _on(1, tmp_path / "1", options | {key: value for key, value in changes.items() if "model" in key})
    several = _on(2, tmp_path / "2", options | changes)
    _assert_alike(one, several, 2 if "parallel__sequence" not in changes else None)


RECIPE = Path(__file__).parents[2] / "recipes/quickstart.yaml"


def of_three_letters(output):
    """What a recipe sets: the quickstart with a small mixture of experts and words of three letters."""
    dense = load_recipe(RECIPE).model.source
    experts = {"moe_intermediate_size": 96, "num_experts": 4, "num_experts_per_tok": 2}
    source = {**dense, "model_type": "qwen3_moe", "num_hidden_layers": 2, **experts}
    words = json.dumps({"min_length": 3, "max_length": 3})
    return [
        *(f"{data}.options={words}" for data in ("data.train", "data.held_out", "warm_start.data")),
        *(f"{data}.size={size}" for data, size in (("data.train", 1500), ("data.held_out", 400))),
        *(f"{name}.sampling.max_new_tokens=6" for name in ("rollout", "evaluation")),
        *("warm_start.data.size=1500", "warm_start.steps=45", "train.blocks=30", "seed=3"),
        *("train.optimizer.learning_rate=0.0015", "evaluation.every_blocks=30", "checkpoint.every_blocks=30"),
        *(f"model.source={json.dumps(source)}", "model.router.loss=0.01", f"output={output}", "writers=[]"),
    ]


def assert_learnt(records):
    """Held-out accuracy, sampled at temperature 1, rises from 0.50 to 0.74; with seeds 4 and 5 by as much."""
    begun, *_, ended = (each["evaluation/accuracy"] for each in records if "evaluation/accuracy" in each)
    assert begun < 0.65 < ended
    assert ended > begun + 0.07  # of 400 prompts: 0.025 is one standard deviation
    assert 2 <= records[-1]["loss/router"] < 2.2  # 2 where all experts are loaded alike
    assert records[-1]["router/load_min"] > 0.3


def test_a_mixture_learns_the_quickstarts_task_in_words_of_three_letters(tmp_path):
    run, complete = start(load_recipe(RECIPE, of_three_letters(tmp_path)))
    assert complete
    assert_learnt(list(run.read_metrics()))

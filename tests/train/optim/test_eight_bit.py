"""8-bit optimizer state: torchao over master weights, packed in checkpoints, and what is refused without it."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

from logitless.errors import ConfigurationError, UnavailableError
from logitless.train.optim.master_weights import lower_to, master_weight
from logitless.train.optim.optimizer import adamw, implementation, take_step
from logitless.train.plan.run_plan import plan_of
from logitless.train.recipe.training import OptimizerSection
from logitless.train.store.checkpoint import load_checkpoint
from tests.train import fake_torchao
from tests.train.tiny import assert_same_end, finished_run, start, tiny_recipe

REAL = importlib.util.find_spec("torchao") is not None


def test_without_torchao_they_are_refused_before_a_run_starts(tmp_path):
    if REAL:
        pytest.skip("torchao is installed")
    recipe = tiny_recipe(tmp_path, train__optimizer={"moments": "8bit"})
    for refused in (plan_of, start):
        with pytest.raises(UnavailableError, match=r"8bit: torchao; given none installed.*logitless\[torchao\]"):
            refused(recipe)
    assert not list(Path(recipe.output).glob("*/config.yaml"))


def test_each_step_writes_the_master_weights_rounded_and_takes_the_rate_that_it_is_given(monkeypatch):
    fake_torchao.installed(monkeypatch)
    layer = nn.Linear(4, 3, bias=False)
    lower_to(torch.bfloat16, layer.parameters())
    optimizer = adamw(layer.parameters(), OptimizerSection(moments="8bit"), torch.device("cpu"))
    assert implementation(optimizer) == "8-bit state by torchao"
    before = master_weight(layer.weight).detach().clone()
    layer.weight.grad = torch.ones(3, 4)
    norm, taken = take_step(optimizer, rate=0.5, max_grad_norm=None)
    assert taken
    assert float(norm) == pytest.approx(12**0.5)
    moved = before - master_weight(layer.weight)
    assert torch.allclose(moved, torch.full((3, 4), 0.5 * (1 - 0.9)), atol=1e-6)
    assert torch.equal(layer.weight.detach(), master_weight(layer.weight).bfloat16())
    assert layer.weight.grad is None


def test_a_run_resumes_bitwise_from_packed_state(tmp_path, monkeypatch):
    fake_torchao.installed(monkeypatch)
    changes = {"train__optimizer": {"moments": "8bit", "learning_rate": 1e-3}, "model__trained_dtype": "bfloat16"}
    whole = finished_run(tmp_path / "whole", train__blocks=2, **changes)
    finished_run(tmp_path / "begun", train__blocks=1, **changes)
    assert_same_end(whole, finished_run(tmp_path / "begun", train__blocks=2, **changes, resume=True))
    tensors = load_checkpoint(whole.checkpoints).tensors
    packed = [name for name in tensors if name.endswith("/exp_avg.codes")]
    assert packed
    assert all(tensors[name].dtype == torch.uint8 for name in packed)


@pytest.mark.skipif(not REAL, reason="needs torchao")
def test_steps_with_8_bit_state_stay_near_those_with_float32_ones():
    torch.manual_seed(0)
    ours, plain = nn.Parameter(torch.zeros(64, 128)), nn.Parameter(torch.zeros(64, 128))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ours.data, plain.data = ours.data.to(device), plain.data.to(device)
    packed = adamw([ours], OptimizerSection(moments="8bit"), device)
    wide = adamw([plain], OptimizerSection(), device)
    with torch.compiler.set_stance("force_eager"):
        for step in range(20):
            gradient = torch.randn(64, 128, generator=torch.Generator().manual_seed(step)).to(device)
            for parameter, optimizer in ((ours, packed), (plain, wide)):
                parameter.grad = gradient.clone()
                take_step(optimizer, rate=1e-2, max_grad_norm=1.0)
    # a code is within a few per cent of its number, and the errors of 20 steps are independent
    assert float((ours - plain).detach().norm() / plain.detach().norm()) < 0.1
    assert packed.state[ours]["exp_avg"].codes.dtype == torch.uint8


def test_they_take_a_quarter_of_the_memory_in_the_plan(tmp_path, monkeypatch):
    fake_torchao.installed(monkeypatch)
    wide, packed = (
        plan_of(tiny_recipe(tmp_path, train__optimizer={"moments": moments})).memory_bytes["AdamW moments"]
        for moments in ("float32", "8bit")
    )
    assert packed / wide == pytest.approx(0.25 * 65 / 64, rel=1e-3)


def test_state_on_the_host_needs_a_gpu_and_master_weights(tmp_path):
    words = r"float32 master weight of every trained weight.*given cpu and float32"
    with pytest.raises(ConfigurationError, match=words):
        adamw(nn.Linear(2, 2).parameters(), OptimizerSection(moments="host"), torch.device("cpu"))
    changes = {"train__optimizer": {"moments": "host"}, "model__trained_dtype": "bfloat16", "model__device": "cpu"}
    with pytest.raises(ConfigurationError, match=r"train\.optimizer\.moments host: a GPU and Triton; given no GPU"):
        plan_of(tiny_recipe(tmp_path, **changes))

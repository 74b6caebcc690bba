"""8-bit moments: torchao over masters, its packed moments in checkpoints, and what is refused without it."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

from logitless.errors import ConfigurationError, UnavailableError
from logitless.train.checkpoint import load_checkpoint
from logitless.train.checks import arrangement_of
from logitless.train.config import OptimizerSection
from logitless.train.masters import lower_to, master_of
from logitless.train.optimizer import adamw, implementation, take_step
from logitless.train.plan import plan_of
from logitless.train.run import start
from tests.train import fake_torchao
from tests.train.tiny import tiny_recipe

REAL = importlib.util.find_spec("torchao") is not None


def test_without_torchao_they_are_refused_before_a_run_starts(tmp_path):
    if REAL:
        pytest.skip("torchao is installed")
    recipe = tiny_recipe(tmp_path, train__optimizer={"moments": "8bit"})
    for refused in (plan_of, start):
        with pytest.raises(UnavailableError, match=r"needed torchao .* given none installed.*logitless\[torchao\]"):
            refused(recipe)
    assert not list(Path(recipe.output).glob("*/config.yaml"))


def test_each_step_writes_the_masters_rounded_and_takes_the_rate_that_it_is_given(monkeypatch):
    fake_torchao.installed(monkeypatch)
    layer = nn.Linear(4, 3, bias=False)
    lower_to(torch.bfloat16, layer.parameters())
    optimizer = adamw(layer.parameters(), OptimizerSection(moments="8bit"), torch.device("cpu"))
    assert implementation(optimizer) == "8-bit moments by torchao"
    before = master_of(layer.weight).detach().clone()
    layer.weight.grad = torch.ones(3, 4)
    norm, taken = take_step(optimizer, rate=0.5, max_grad_norm=None)
    assert taken
    assert float(norm) == pytest.approx(12**0.5)
    moved = before - master_of(layer.weight)
    assert torch.allclose(moved, torch.full((3, 4), 0.5 * (1 - 0.9)), atol=1e-6)
    assert torch.equal(layer.weight.detach(), master_of(layer.weight).bfloat16())
    assert layer.weight.grad is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_resumes_bitwise_from_packed_moments(tmp_path, monkeypatch, dtype):
    fake_torchao.installed(monkeypatch)
    changes = {"train__optimizer": {"moments": "8bit", "learning_rate": 1e-3}, "model__trained_dtype": dtype}
    whole, _ = start(tiny_recipe(tmp_path / "whole", **changes))
    start(tiny_recipe(tmp_path / "begun", train__blocks=1, **changes))
    resumed, _ = start(tiny_recipe(tmp_path / "begun", **changes), resume=True)
    ends = [load_checkpoint(folder.checkpoints).tensors for folder in (whole, resumed)]
    assert ends[0].keys() == ends[1].keys()
    packed = [name for name in ends[0] if name.endswith("/exp_avg.codes")]
    assert packed
    assert all(ends[0][name].dtype == torch.uint8 for name in packed)
    for name, tensor in ends[0].items():
        assert torch.equal(tensor, ends[1][name]), name


@pytest.mark.skipif(not REAL, reason="needs torchao")
def test_steps_with_8_bit_moments_stay_near_those_with_float32_ones():
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


def test_an_implementation_of_torchs_beside_other_moments_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="Leave implementation out"):
        tiny_recipe(tmp_path, train__optimizer={"moments": "8bit", "implementation": "fused"})


@pytest.mark.parametrize(("moments", "replicate", "fits"), [("8bit", 1, False), ("8bit", 2, True), ("host", 2, False)])
def test_shards_have_float32_moments_and_copies_none_on_the_host(tmp_path, moments, replicate, fits):
    recipe = tiny_recipe(
        tmp_path,
        train__optimizer={"moments": moments},
        model__trained_dtype="bfloat16",
        parallel={"replicate": replicate},
    )
    if fits:
        assert arrangement_of(recipe, 2).replicate == 2
    else:
        with pytest.raises(ConfigurationError, match=f"given {moments} on 2"):
            arrangement_of(recipe, 2)


def test_moments_on_the_host_need_a_gpu_and_masters(tmp_path):
    layer = nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match=r"float32 master of every trained weight.*given cpu and float32"):
        adamw(layer.parameters(), OptimizerSection(moments="host"), torch.device("cpu"))
    with pytest.raises(ConfigurationError, match="whose masters go to the host"):
        tiny_recipe(tmp_path, train__optimizer={"moments": "host"})
    recipe = tiny_recipe(
        tmp_path, train__optimizer={"moments": "host"}, model__trained_dtype="bfloat16", model__device="cpu"
    )
    with pytest.raises(
        ConfigurationError, match=r"a GPU beside train\.optimizer\.moments: host; given model\.device cpu"
    ):
        plan_of(recipe)

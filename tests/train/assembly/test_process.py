"""Settings of the process are made, and read back."""

import pytest
import torch

from logitless.errors import ConfigurationError
from logitless.train.assembly.process import allocator_of_environment, device_of, effects, set_process
from tests.train.tiny import tiny_model, tiny_recipe

CPU = torch.device("cpu")


def test_auto_is_a_device_that_exists_and_an_absent_one_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(tiny_recipe(tmp_path, model__device="auto").model) == CPU
    with pytest.raises(ConfigurationError, match=r"CUDA.*cpu or auto"):
        device_of(tiny_recipe(tmp_path, model__device="cuda:1").model)


def test_effects_are_read_back(tmp_path):
    settings = {"model__matmul_precision": "high", "model__sdpa_backends": ["math", "efficient"]}
    recipe = tiny_recipe(tmp_path, model__gradient_checkpointing=True, **settings)
    try:
        set_process(recipe.model, seed=5)
        drawn = torch.rand(1)
        text = "\n".join(effects(recipe.model, CPU, tiny_model(recipe), layers=""))
    finally:
        torch.set_float32_matmul_precision("highest")
        everything = ["flash", "efficient", "cudnn", "math"]
        set_process(tiny_recipe(tmp_path, model__sdpa_backends=everything).model, seed=5)
    assert "attention logitless_packed; SDPA may use efficient, math" in text
    assert "gradient checkpointing on, compile off" in text
    assert "'high'" in text
    set_process(tiny_recipe(tmp_path).model, seed=5)
    assert torch.equal(drawn, torch.rand(1))


@pytest.mark.parametrize(
    ("named", "count", "with_others", "said"),
    [
        ("auto", 8, False, True),
        ("cuda", 2, False, True),
        ("cuda:0", 8, False, False),
        ("auto", 1, False, False),
        ("auto", 8, True, False),
    ],
)
def test_gpus_that_one_process_leaves_idle_are_named_with_the_command_that_uses_them(
    tmp_path, monkeypatch, named, count, with_others, said
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: with_others)
    recipe = tiny_recipe(tmp_path)
    section = recipe.model.model_copy(update={"device": named, "dtype": "float32", "trained_dtype": "float32"})
    first, *_ = effects(section, torch.device("cuda"), tiny_model(recipe), layers="")
    assert first.startswith("device cuda (H200)")
    assert (f"one of {count}: torchrun --nproc-per-node {count} -m logitless train RECIPE uses all" in first) == said


@pytest.mark.parametrize("is_initialized", [False, True])
def test_the_allocator_is_set_also_where_cuda_was_asked_for_its_devices_before(tmp_path, monkeypatch, is_initialized):
    given = list[str]()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", given.append)
    with monkeypatch.context() as without:
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            without.setenv(name, "")  # restored, also after what is set below
        set_process(tiny_recipe(tmp_path).model, seed=5)
        assert allocator_of_environment() == "expandable_segments:True"
        assert given == (["expandable_segments:True"] if is_initialized else [])
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    given.clear()
    set_process(tiny_recipe(tmp_path).model, seed=5)
    assert (allocator_of_environment(), given) == ("max_split_size_mb:64", [])

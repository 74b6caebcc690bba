"""Bytes of a training step that are counted from what other modules decide."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from head_bytes import step_bytes
from logitless.models.lm_head import backbone_hidden
from logitless.models.loading import load_model
from logitless.train.plan import training_memory
from logitless.types import PackedInputs
from tests.train.tiny import TINY_LLAMA


def test_the_block_that_is_counted_is_the_one_that_the_head_makes():
    pytest.importorskip("triton")
    from logitless.head import passes

    assert training_memory.BLOCK == passes.BLOCK_BYTES


@pytest.mark.parametrize("cut", [1, 2, 8])
@pytest.mark.parametrize("budget", [0, 2**30, 2**40])
@pytest.mark.parametrize("tokens", [2048, 16384, 65536])
@pytest.mark.parametrize(("width", "vocabulary"), [(896, 151936), (2048, 151936), (4096, 128256)])
def test_the_heads_bytes_are_those_that_the_fused_head_counts_itself(width, vocabulary, tokens, budget, cut):
    """But for blocks that fill the last round of a grid, and for sums that few rows are split into."""
    pytest.importorskip("triton")
    head = torch.empty(vocabulary, width, device="meta", requires_grad=True)
    found = training_memory._head_bytes(tokens, width, vocabulary, 2, budget, head, cut)
    counted = step_bytes(tokens, width, vocabulary, memory_budget=budget, shards=cut)
    assert abs(found - counted) < 0.02 * counted + training_memory.BLOCK


def _kept(layers, recomputes, dtype, tokens=64):
    """Bytes of the storages that a forward pass keeps for the backward, parameters left out; and the model."""
    config = TINY_LLAMA | {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": layers}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = load_model(config, random_weights=True, dtype=dtype).train()
    if recomputes:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    held, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = tensor  # held, so that no other gets its place
        return tensor

    inputs = PackedInputs(torch.ones(tokens, dtype=torch.long), torch.arange(tokens), (tokens,), torch.arange(1), (1,))
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = backbone_hidden(model, inputs)
    assert hidden.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()), model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("recomputes", [True, False])
def test_what_layers_are_said_to_keep_is_in_the_storages_that_autograd_holds(recomputes, dtype):
    (of_two, _), (of_four, model) = (_kept(layers, recomputes, dtype) for layers in (2, 4))
    number = dtype.itemsize
    said, made = training_memory.layers_bytes(model, number, tokens=64, recomputes=recomputes)
    assert said == pytest.approx(2 * (of_four - of_two), rel=0.03)  # sums of norms and attention: a few numbers a token
    assert made > 0

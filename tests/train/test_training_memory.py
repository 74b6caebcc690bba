"""Bytes of a training step that are counted from what other modules decide."""

import pytest
import torch

from logitless.train import training_memory


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
    from logitless.head import fused

    head = torch.empty(vocabulary, width, device="meta", requires_grad=True)
    found = training_memory._head_bytes(tokens, width, vocabulary, 2, budget, head, cut)
    counted = fused.peak_bytes(tokens, width, vocabulary, memory_budget=budget, shards=cut)
    assert abs(found - counted) < 0.02 * counted + training_memory.BLOCK

"""Bytes of a training step that are counted from what other modules decide."""

import pytest

from logitless.train import training_memory


def test_the_block_that_is_counted_is_the_one_that_the_head_makes():
    pytest.importorskip("triton")
    from logitless.head import passes

    assert training_memory.BLOCK == passes.BLOCK_BYTES

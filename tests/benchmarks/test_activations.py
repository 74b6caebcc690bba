"""The estimate of activation memory: the benchmark's plans and row, and what was measured with it."""

from pathlib import Path

import activations as benchmark
from logitless.data.packing import share_prompts
from shapes import TINY

ROOT = Path(__file__).parents[2]


def test_the_row_is_packed_with_shared_prompts_and_not_longer_than_asked():
    batch = benchmark.row_of(TINY, 200, 16)
    inputs = share_prompts(batch.inputs)
    assert len(inputs.input_ids) <= 200
    assert len(inputs.input_ids) < len(batch.inputs.input_ids)

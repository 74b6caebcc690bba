"""Parts of a decoding step: which kernel is what, and rows that share their prompts' pages."""

import pytest

from benchmarks import decode_step
from logitless.models.row_invariant.layers import install_row_invariant
from logitless.rollout.gpu.steps import TokenSampling
from logitless.rollout.sampling import SamplingOptions
from tests.head.interpreter import complete_interpreter, interpreted
from tests.rollout.gpu.test_engine import model_of

if interpreted():
    complete_interpreter()


@pytest.mark.slow
def test_rows_that_share_pages_are_decoded_at_the_position_asked_for():
    model = model_of(end_bias=-1e4)
    install_row_invariant(model)
    steps, place = decode_step.rows_of(model, 8, 500)
    log = steps.run(place, steps.place(place), TokenSampling(SamplingOptions(max_new_tokens=72), (2,)))()
    assert log.token.shape == (decode_step.STEPS, 8)
    assert steps.slot_position[:8].tolist() == [500 + decode_step.STEPS] * 8

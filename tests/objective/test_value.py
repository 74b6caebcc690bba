"""The value loss, by hand in value and gradient."""

import math
from dataclasses import replace

import pytest
import torch

from logitless.errors import InputError
from logitless.objective.value import (
    ValueLoss,
    clipped_value_loss,
    explained_variance,
    value_diagnostics,
    value_is_clipped,
    value_loss,
    value_weight,
)
from logitless.types import TokenBatch
from tests.objective.batches import batch_of, double

# V_old 0, clip 0.5, R 2:   V = 1 (past the clip, nearing R), 0.25 (inside), -1 (past it, going away), 5 (over R)
VALUE = double(1, 0.25, -1, 5)
OLD, TARGET = double(0, 0, 0, 0), double(2, 2, 2, 2)


def test_clipped_value_loss_by_hand():
    # max of (V - 2)^2 and (clip(V) - 2)^2, halved: 1, 2.25 | both 3.0625 | 9, 6.25 | 9, 2.25
    value = VALUE.clone().requires_grad_()
    loss = clipped_value_loss(value, OLD, TARGET, clip=0.5)
    assert loss.tolist() == [1.125, 1.53125, 4.5, 4.5]
    loss.sum().backward()
    # a prediction that moved far enough towards its target has no gradient
    assert value.grad.tolist() == [0, -1.75, -3, 3]
    assert value_is_clipped(value, OLD, TARGET, clip=0.5).tolist() == [True, False, False, False]


def test_the_clip_is_around_the_old_prediction_on_both_sides():
    # clip 0.25 -> held 3.75, 4.25, 3.9; R = 0, 9, 4
    loss = clipped_value_loss(double(3, 5, 3.9), double(4, 4, 4), double(0, 9, 4), clip=0.25)
    assert loss.tolist() == pytest.approx([3.75**2 / 2, 4.75**2 / 2, 0.005])


def test_neither_targets_nor_old_predictions_are_trained():
    value, old, target = (torch.tensor([x], requires_grad=True) for x in (1.0, 0.0, 2.0))
    clipped_value_loss(value, old, target, clip=0.5).sum().backward()
    value_loss(value, target).sum().backward()
    assert old.grad is None
    assert target.grad is None


# --- the term of a loss ---------------------------------------------------------------------------------------------


def _batch(weights, **tensors) -> TokenBatch:
    """The four tokens of above, one a sequence."""
    return batch_of([0, 1, 2, 3], **{"value_old": OLD, "value_target": TARGET, "value_weight": weights} | tensors)


def test_the_term_is_the_coefficient_times_the_weighted_sum():
    value = VALUE.clone().requires_grad_()
    # losses 1.125, 1.53125, 4.5, 4.5 and gradients 0, -1.75, -3, 3 at clip 0.5
    output = ValueLoss(coefficient=2.0, clip=0.5)(value, _batch([0.5, 0.25, 0.125, 0.0]))
    assert output.mean.item() == 0.5625 + 0.3828125 + 0.5625
    assert output.loss.item() == 2 * output.mean.item()
    assert not output.mean.requires_grad
    output.loss.backward()
    assert value.grad.tolist() == [0, -0.875, -0.75, 0]
    assert output.fitted.tolist() == [True, True, True, False]
    assert output.clipped.tolist() == [True, False, False, False]


def test_without_a_clip_the_term_is_the_squared_error_and_reads_no_old_value():
    value = VALUE.clone().requires_grad_()
    output = ValueLoss(coefficient=1.0, clip=None)(value, _batch([0.25] * 4, value_old=None))
    assert output.loss.item() == (1 + 1.75**2 + 9 + 9) / 8
    output.loss.backward()
    assert value.grad.tolist() == [-0.25, -1.75 / 4, -0.75, 0.75]
    assert output.clipped.tolist() == [False] * 4


@pytest.mark.parametrize("clip", [0.5, None])
def test_rows_of_weight_0_may_hold_anything_and_get_no_gradient(clip):
    spoilt = [math.nan, math.inf]
    value = double(1, 0.25, *spoilt).requires_grad_()
    garbage = {"value_old": [0, 0, *spoilt], "value_target": [2, 2, *spoilt]}
    output = ValueLoss(clip=clip)(value, _batch([0.5, 0.5, 0.0, 0.0], **garbage))
    assert output.loss.item() == ValueLoss(clip=clip)(VALUE, _batch([0.5, 0.5, 0.0, 0.0])).loss.item() > 0
    output.loss.backward()
    assert value.grad.tolist()[1:] == [-0.4375, 0.0, 0.0]
    assert output.clipped.tolist() == [clip is not None, False, False, False]


def test_the_term_is_float32_for_values_of_a_half_precision():
    batch = _batch([0.25] * 4)
    output = ValueLoss(clip=None)(VALUE.bfloat16(), batch)
    assert output.loss.dtype == torch.float32


@pytest.mark.parametrize("name", ["value_old", "value_target", "value_weight"])
def test_what_a_value_loss_needs_is_named(name):
    with pytest.raises(InputError, match=name):
        ValueLoss()(OLD, _batch([0.25] * 4, **{name: None}))
    with pytest.raises(InputError, match="value_target"):
        value_weight(_batch([0.25] * 4, value_target=None))


def test_the_weights_are_1_over_the_trained_tokens_with_a_return_on_every_rank():
    target = torch.tensor([2.0, math.nan, 2.0, 2.0])
    batch = replace(_batch([0.0] * 4, value_target=target), token_weight=torch.tensor([0.1, 0.1, 0.0, -3.0]))
    assert value_weight(batch).tolist() == [0.5, 0.0, 0.0, 0.5]
    assert value_weight(batch, lambda own: own + 6).tolist() == [0.125, 0.0, 0.0, 0.125]
    assert value_weight(batch).dtype == torch.float32
    one = replace(batch, token_weight=torch.tensor([0.1, 0.1, 0.0, 0.0]))
    assert value_weight(one).tolist() == [1.0, 0.0, 0.0, 0.0]
    nothing = replace(batch, value_target=torch.full((4,), math.nan))
    assert value_weight(nothing).tolist() == [0.0] * 4


def test_explained_variance_by_hand():
    target = torch.tensor([1.0, 2.0, 3.0, 6.0, math.nan])  # mean 3, variance 14 / 4
    assert explained_variance(target, target) == 1
    assert explained_variance(torch.full((5,), 9.0), target) == 0  # a constant, however far off
    # errors 0, 0, 0, 4: mean 1, variance 12 / 4; the token without a return does not count
    value = torch.tensor([1.0, 2.0, 3.0, 2.0, 1e9])
    assert float(explained_variance(value, target)) == pytest.approx(1 - 12 / 14)
    assert float(explained_variance(-target, target)) == -3  # errors 2 R
    assert not math.isfinite(explained_variance(target[:1], target[:1]))
    assert explained_variance(target[:0], target[:0]).isnan()


def test_diagnostics_are_of_the_whole_step_and_of_every_rank():
    parts = [
        ValueLoss(coefficient=3.0, clip=0.5)(VALUE, _batch(weights))
        for weights in ([0.5, 0.25, 0.0, 0.0], [0.25, 0.0, 0.0, 0.0])
    ]
    numbers = value_diagnostics(parts)
    assert numbers["loss/value"].item() == 0.75 * 1.125 + 0.25 * 1.53125
    assert numbers["value/clipped_fraction"].item() == pytest.approx(2 / 3)
    twice = value_diagnostics(parts, gather=lambda own: torch.cat([own, own]))
    assert twice["loss/value"].item() == 2 * numbers["loss/value"].item()
    assert twice["value/clipped_fraction"].item() == pytest.approx(2 / 3)
    one = value_diagnostics([ValueLoss(clip=0.5)(VALUE, _batch([0.5, 0.0, 0.0, 0.0]))])
    assert one["value/clipped_fraction"].item() == 1
    none = value_diagnostics([ValueLoss()(OLD, _batch([0.0] * 4))])
    assert (none["loss/value"].item(), none["value/clipped_fraction"].item()) == (0, 0)

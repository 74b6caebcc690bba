"""The way between padded and packed tensors."""

import inspect

import pytest
import torch

from logitless.errors import InputError
from logitless.integrations.padded import from_padded
from logitless.objective.weighting import SequenceMean, Totals

NAN = float("nan")
MASK = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
TOOL = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 1, 1]])
# Rows with both masks: (0, 1) (0, 2) (2, 0) (2, 2) (2, 3).


def padded(*values):
    """[3, 4] with the values at the five trained positions and NaN elsewhere."""
    tensor = torch.full((3, 4), NAN)
    tensor[(MASK * TOOL).bool()] = torch.tensor(values)
    return tensor


def test_padded_tensors_become_rows_in_order_without_masked_or_tool_written_positions():
    batch, places = from_padded(
        MASK,
        torch.tensor([1.0, NAN, -2.0]),
        padded(0.1, 0.2, 0.3, 0.4, 0.5),
        tool_mask=TOOL,
        logp_old=padded(-1.0, -2.0, -3.0, -4.0, -5.0),
        logp_sampler=padded(-1.5, -2.5, -3.5, -4.5, -5.5),
        logp_ref=padded(-6.0, -7.0, -8.0, -9.0, -10.0),
        entropy_old=padded(0.6, 0.7, 0.8, 0.9, 1.0),
        turn=torch.tensor([[9, 0, 0, 9], [9, 9, 9, 9], [0, 9, 1, 1]]),
        value_old=padded(10.0, 20.0, 30.0, 40.0, 50.0),
        value_target=padded(11.0, 21.0, 31.0, 41.0, 51.0),
    )
    assert batch.num_sequences == 3
    assert places.column.tolist() == [1, 2, 0, 2, 3]
    expected = {
        "sequence": [0, 0, 2, 2, 2],
        "advantage": [1.0, 1.0, -2.0, -2.0, -2.0],
        "token_weight": [0.1, 0.2, 0.3, 0.4, 0.5],
        "logp_old": [-1.0, -2.0, -3.0, -4.0, -5.0],
        "logp_sampler": [-1.5, -2.5, -3.5, -4.5, -5.5],
        "logp_ref": [-6.0, -7.0, -8.0, -9.0, -10.0],
        "entropy_old": [0.6, 0.7, 0.8, 0.9, 1.0],
        "turn": [0, 0, 0, 1, 1],
        "value_old": [10.0, 20.0, 30.0, 40.0, 50.0],
        "value_target": [11.0, 21.0, 31.0, 41.0, 51.0],
    }
    for name, values in expected.items():
        assert torch.equal(getattr(batch, name), torch.tensor(values)), name


def test_advantages_may_differ_inside_a_sequence():
    batch, _ = from_padded(MASK, padded(1.0, 2.0, 3.0, 4.0, 5.0), padded(1.0, 1.0, 1.0, 1.0, 1.0), tool_mask=TOOL)
    assert batch.advantage.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_weights_can_be_made_from_the_counts_of_trained_tokens():
    batch, _ = from_padded(
        MASK.bool(), torch.zeros(3), lambda counts: SequenceMean()(counts, Totals.of(counts)), tool_mask=TOOL.bool()
    )
    # Counts 2, 0, 3; a third of the weight to each sequence, the empty one's share to nobody.
    assert torch.equal(batch.token_weight, torch.tensor([1 / 6, 1 / 6, 1 / 9, 1 / 9, 1 / 9]))


def test_garbage_where_nothing_is_trained_reaches_neither_loss_nor_gradient():
    old = padded(-1.0, -2.0, -3.0, -4.0, -5.0).requires_grad_()
    batch, _ = from_padded(MASK, torch.ones(3), padded(1.0, 1.0, 1.0, 1.0, 1.0), tool_mask=TOOL, logp_old=old)
    loss = (batch.token_weight * batch.logp_old.exp()).sum()
    loss.backward()
    assert loss.isfinite()
    assert torch.equal(old.grad, padded(-1.0, -2.0, -3.0, -4.0, -5.0).exp().nan_to_num())


def test_results_go_back_to_where_they_came_from_with_their_gradient():
    _, places = from_padded(MASK, torch.ones(3), torch.ones(3, 4), tool_mask=TOOL)
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], requires_grad=True)
    back = places.scatter_back(values)
    assert back.tolist() == [[0, 1, 2, 0], [0, 0, 0, 0], [3, 0, 4, 5]]
    (back * torch.arange(12.0).view(3, 4)).sum().backward()
    assert values.grad.tolist() == [1, 2, 8, 10, 11]


def test_a_batch_without_a_trained_token_is_allowed():
    batch, places = from_padded(torch.zeros(2, 3, dtype=torch.bool), torch.ones(2), torch.ones(2, 3))
    assert batch.num_tokens == 0
    assert places.scatter_back(torch.zeros(0)).tolist() == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("name", "shape"), [("advantages", (2,)), ("advantages", (3, 5)), ("token_weight", (3, 1)), ("logp_old", (1, 4))]
)
def test_a_tensor_of_another_shape_is_named(name, shape):
    tensors = {"advantages": torch.ones(3), "token_weight": torch.ones(3, 4)} | {name: torch.ones(shape)}
    unchecked = inspect.unwrap(from_padded)  # without this test run's shape annotations
    with pytest.raises(InputError, match=rf"given {name} of \({shape[0]}"):
        unchecked(MASK, **tensors)


@pytest.mark.parametrize("shape", [(4,), (5, 1)])
def test_results_that_are_not_one_a_token_are_refused(shape):
    _, places = from_padded(MASK, torch.ones(3), torch.ones(3, 4), tool_mask=TOOL)
    unchecked = inspect.unwrap(type(places).scatter_back)
    with pytest.raises(InputError, match="one value for each of 5 tokens"):
        unchecked(places, torch.zeros(shape))

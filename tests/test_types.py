"""The nouns: what they refuse, and the way between padded and packed tensors."""

import inspect
import pickle

import pytest
import torch

from logitless.errors import InputError
from logitless.objective.weighting import SequenceMean, Totals
from logitless.types import Completion, Group, LMHead, PackedInputs, Prompt, TokenBatch, Verdict

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
    batch = TokenBatch.from_padded(
        MASK,
        torch.tensor([1.0, NAN, -2.0]),
        padded(0.1, 0.2, 0.3, 0.4, 0.5),
        tool_mask=TOOL,
        target=torch.arange(12).view(3, 4),
        logp_old=padded(-1.0, -2.0, -3.0, -4.0, -5.0),
        logp_sampler=padded(-1.5, -2.5, -3.5, -4.5, -5.5),
        logp_ref=padded(-6.0, -7.0, -8.0, -9.0, -10.0),
        entropy_old=padded(0.6, 0.7, 0.8, 0.9, 1.0),
        turn=torch.tensor([[9, 0, 0, 9], [9, 9, 9, 9], [0, 9, 1, 1]]),
        value_old=padded(10.0, 20.0, 30.0, 40.0, 50.0),
        value_target=padded(11.0, 21.0, 31.0, 41.0, 51.0),
    )
    assert batch.num_sequences == 3
    expected = {
        "sequence": [0, 0, 2, 2, 2],
        "column": [1, 2, 0, 2, 3],
        "advantage": [1.0, 1.0, -2.0, -2.0, -2.0],
        "token_weight": [0.1, 0.2, 0.3, 0.4, 0.5],
        "target": [1, 2, 8, 10, 11],
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
    batch = TokenBatch.from_padded(
        MASK, padded(1.0, 2.0, 3.0, 4.0, 5.0), padded(1.0, 1.0, 1.0, 1.0, 1.0), tool_mask=TOOL
    )
    assert batch.advantage.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_weights_can_be_made_from_the_counts_of_trained_tokens():
    batch = TokenBatch.from_padded(
        MASK.bool(), torch.zeros(3), lambda counts: SequenceMean()(counts, Totals.of(counts)), tool_mask=TOOL.bool()
    )
    # Counts 2, 0, 3; a third of the weight to each sequence, the empty one's share to nobody.
    assert torch.equal(batch.token_weight, torch.tensor([1 / 6, 1 / 6, 1 / 9, 1 / 9, 1 / 9]))


def test_garbage_where_nothing_is_trained_reaches_neither_loss_nor_gradient():
    old = padded(-1.0, -2.0, -3.0, -4.0, -5.0).requires_grad_()
    batch = TokenBatch.from_padded(MASK, torch.ones(3), padded(1.0, 1.0, 1.0, 1.0, 1.0), tool_mask=TOOL, logp_old=old)
    loss = (batch.token_weight * batch.logp_old.exp()).sum()
    loss.backward()
    assert loss.isfinite()
    assert torch.equal(old.grad, padded(-1.0, -2.0, -3.0, -4.0, -5.0).exp().nan_to_num())


def test_results_go_back_to_where_they_came_from_with_their_gradient():
    batch = TokenBatch.from_padded(MASK, torch.ones(3), torch.ones(3, 4), tool_mask=TOOL)
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], requires_grad=True)
    back = batch.scatter_back(values)
    assert back.tolist() == [[0, 1, 2, 0], [0, 0, 0, 0], [3, 0, 4, 5]]
    (back * torch.arange(12.0).view(3, 4)).sum().backward()
    assert values.grad.tolist() == [1, 2, 8, 10, 11]


def test_chosen_sequences_of_a_padded_batch_go_back_to_their_own_rows():
    batch = TokenBatch.from_padded(MASK, torch.ones(3), torch.ones(3, 4), tool_mask=TOOL).take([2, 1])
    assert batch.scatter_back(torch.tensor([3.0, 4.0, 5.0])).tolist() == [[3, 0, 4, 5], [0, 0, 0, 0]]


def test_a_batch_without_a_trained_token_is_allowed():
    batch = TokenBatch.from_padded(torch.zeros(2, 3, dtype=torch.bool), torch.ones(2), torch.ones(2, 3))
    assert batch.num_tokens == 0
    assert batch.scatter_back(torch.zeros(0)).tolist() == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("name", "shape"), [("advantages", (2,)), ("advantages", (3, 5)), ("token_weight", (3, 1)), ("logp_old", (1, 4))]
)
def test_a_tensor_of_another_shape_is_named(name, shape):
    tensors = {"advantages": torch.ones(3), "token_weight": torch.ones(3, 4)} | {name: torch.ones(shape)}
    unchecked = inspect.unwrap(TokenBatch.from_padded.__func__)  # without this test run's shape annotations
    with pytest.raises(InputError, match=rf"given {name} of \({shape[0]}"):
        unchecked(TokenBatch, MASK, **tensors)


def test_a_batch_that_was_never_padded_has_nowhere_to_go_back_to():
    batch = TokenBatch(torch.tensor([0]), 1, advantage=torch.zeros(1), token_weight=torch.ones(1))
    with pytest.raises(InputError, match="from_padded"):
        batch.scatter_back(torch.zeros(1))


@pytest.mark.parametrize("sequence", [[1, 0], [0, 2], [-1, 0]])
def test_sequence_ids_that_decrease_or_leave_their_range_are_refused(sequence):
    with pytest.raises(InputError, match="sequence ids"):
        TokenBatch(torch.tensor(sequence), 2, advantage=torch.zeros(2), token_weight=torch.ones(2))


def test_taking_sequences_keeps_each_of_them_whole():
    # Prompts of 2, 1 and 1 tokens, completions of 2, 1 and 0 trained ones.
    inputs = PackedInputs(
        input_ids=torch.arange(10, 18),
        position_ids=torch.tensor([0, 1, 2, 3, 0, 1, 0, 1]),
        lengths=(4, 2, 2),
        source=torch.tensor([1, 2, 4]),
        source_counts=(2, 1, 0),
    )
    batch = TokenBatch(
        sequence=torch.tensor([0, 0, 1]),
        num_sequences=3,
        advantage=torch.tensor([1.0, 2.0, 3.0]),
        token_weight=torch.tensor([0.1, 0.2, 0.3]),
        inputs=inputs,
    )
    taken = batch.take([2, 1, 0])
    assert taken.sequence.tolist() == [1, 2, 2]
    assert taken.advantage.tolist() == [3.0, 1.0, 2.0]
    assert taken.inputs.input_ids.tolist() == [16, 17, 14, 15, 10, 11, 12, 13]
    assert taken.inputs.source.tolist() == [2, 5, 6]
    assert taken.inputs.lengths == (2, 2, 4)
    assert taken.inputs.source_counts == (0, 1, 2)


@pytest.mark.parametrize(("score", "status"), [(None, "graded"), (1.0, "error"), (NAN, "graded")])
def test_a_verdict_has_a_score_exactly_when_it_is_graded(score, status):
    with pytest.raises(InputError, match="score"):
        Verdict(score=score, status=status)


def test_per_token_fields_of_a_completion_have_its_length():
    with pytest.raises(InputError, match="turn"):
        Completion("7", token_ids=(1, 2), text="", finish_reason="stop", turn=(0,))


def test_a_group_holds_the_completions_of_its_prompt_only():
    prompt = Prompt(id="7", text="", token_ids=())
    stray = Completion("8", token_ids=(1,), text="", finish_reason="stop")
    with pytest.raises(InputError, match="'8'"):
        Group(prompt, (stray,), ({},), (None,))


def test_half_a_lora_head_is_refused():
    with pytest.raises(InputError, match="lora_a only"):
        LMHead(weight=torch.zeros(5, 4), lora_a=torch.zeros(2, 4))


def test_errors_survive_the_trip_between_processes():
    error = InputError(needed="a", given="b", remedy="c")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)

"""The one shift, and the cut of a block into steps and micro-batches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logitless.data.packing import pack, plan_epoch
from logitless.errors import InputError
from logitless.types import Completion, PackedInputs, Prompt


def _prompt(*ids: int) -> Prompt:
    return Prompt(id=str(ids), text="", token_ids=ids)


def _completion(prompt: Prompt, *ids: int, **fields) -> Completion:
    return Completion(prompt.id, token_ids=ids, text="", finish_reason="stop", **fields)


def test_a_target_is_predicted_from_the_token_before_it():
    first, second = _prompt(1, 2), _prompt(3)
    batch = pack([(first, _completion(first, 4, 5)), (second, _completion(second, 6, 7, 8))])
    # read: 1 2 4 | 3 6 7; the rows that predict 4 5 6 7 8 stand at 2 4 3 6 7
    assert batch.inputs.input_ids.tolist() == [1, 2, 4, 3, 6, 7]
    assert batch.inputs.position_ids.tolist() == [0, 1, 2, 0, 1, 2]
    assert batch.inputs.input_ids[batch.inputs.source].tolist() == [2, 4, 3, 6, 7]
    assert batch.target.tolist() == [4, 5, 6, 7, 8]
    assert batch.sequence.tolist() == [0, 0, 1, 1, 1]


def test_a_token_that_a_tool_wrote_is_read_but_has_no_row():
    prompt = _prompt(1)
    batch = pack([(prompt, _completion(prompt, 4, 5, 6, trained=(True, False, True), turn=(0, 0, 1)))])
    assert batch.inputs.input_ids.tolist() == [1, 4, 5]
    assert batch.target.tolist() == [4, 6]
    assert batch.inputs.input_ids[batch.inputs.source].tolist() == [1, 5]
    assert batch.turn.tolist() == [0, 1]


def test_an_empty_completion_counts_as_a_sequence_and_is_not_read():
    prompt = _prompt(1, 2)
    batch = pack([(prompt, _completion(prompt)), (prompt, _completion(prompt, 3))])
    assert batch.num_sequences == 2
    assert batch.inputs.lengths == (0, 2)
    assert batch.sequence.tolist() == [1]


def test_sampler_log_probabilities_stay_with_their_tokens_and_missing_ones_are_nan():
    prompt = _prompt(1)
    given_ones = _completion(prompt, 4, 5, logp_sampler=(-0.5, -1.5))
    batch = pack([(prompt, given_ones), (prompt, _completion(prompt, 6))])
    assert batch.logp_sampler[:2].tolist() == [-0.5, -1.5]
    assert batch.logp_sampler[2].isnan()


def test_a_prompt_without_tokens_is_refused():
    prompt = _prompt()
    with pytest.raises(InputError, match="at least one token"):
        pack([(prompt, _completion(prompt, 1))])


def _inputs(lengths: list[int]) -> PackedInputs:
    """Sequences whose every token but the first two is scored; length 0 stands for an empty completion."""
    counts = [max(0, n - 1) for n in lengths]
    zeros = torch.zeros(sum(lengths), dtype=torch.long)
    return PackedInputs(zeros, zeros, tuple(lengths), torch.zeros(sum(counts), dtype=torch.long), tuple(counts))


@settings(max_examples=50, deadline=None)
@given(
    groups=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=8),
    tokens_per_step=st.integers(1, 60),
    tokens_per_micro_batch=st.integers(9, 40),
    seed=st.integers(0, 3),
)
def test_every_sequence_is_in_one_step_and_groups_stay_whole(groups, tokens_per_step, tokens_per_micro_batch, seed):
    inputs = _inputs([n for group in groups for n in group])
    members, first = [], 0
    for group in groups:
        members.append(list(range(first, first + len(group))))
        first += len(group)
    steps = plan_epoch(
        members, inputs, tokens_per_step=tokens_per_step, tokens_per_micro_batch=tokens_per_micro_batch, seed=seed
    )
    assert sorted(s for step in steps for s in step.sequences) == list(range(first))
    for group in members:
        assert sum(set(group) <= set(step.sequences) for step in steps) == 1
    for step in steps:
        rows = [s for row in step.micro_batches for s in row]
        assert rows == [s for s in step.sequences if inputs.source_counts[s]]
        assert all(sum(inputs.lengths[s] for s in row) <= tokens_per_micro_batch for row in step.micro_batches)
        assert step.micro_batches or not sum(inputs.source_counts)


def test_steps_have_about_the_tokens_that_were_asked_for():
    inputs = _inputs([11] * 32)  # 320 scored tokens in 16 groups of 20
    members = [[2 * i, 2 * i + 1] for i in range(16)]
    steps = plan_epoch(members, inputs, tokens_per_step=80, tokens_per_micro_batch=64, seed=0)
    assert [sum(inputs.source_counts[s] for s in step.sequences) for step in steps] == [80, 80, 80, 80]


def test_a_group_of_empty_completions_joins_a_step_with_tokens():
    inputs = _inputs([1, 1, 11, 11])  # 0, 0, 10 and 10 scored tokens: the empty group would fill a step of two alone
    for seed in range(4):
        steps = plan_epoch([[0, 1], [2, 3]], inputs, tokens_per_step=10, tokens_per_micro_batch=32, seed=seed)
        assert all(step.micro_batches for step in steps)
        assert sorted(s for step in steps for s in step.sequences) == [0, 1, 2, 3]


def test_the_order_follows_the_seed():
    inputs, members = _inputs([3] * 16), [[i] for i in range(16)]

    def order(seed: int) -> list[int]:
        steps = plan_epoch(members, inputs, tokens_per_step=1000, tokens_per_micro_batch=1000, seed=seed)
        return list(steps[0].sequences)

    assert order(1) == order(1) != order(2)


def test_a_sequence_over_the_micro_batch_limit_is_refused_with_a_remedy():
    with pytest.raises(InputError, match=r"tokens_per_micro_batch = 8 .*given one of 9.*Raise"):
        plan_epoch([[0]], _inputs([9]), tokens_per_step=8, tokens_per_micro_batch=8, seed=0)

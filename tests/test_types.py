"""The nouns: what they refuse, and how they are cut."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from logitless.errors import InputError
from logitless.types import (
    Completion,
    Episode,
    Group,
    LMHead,
    PackedBatch,
    PackedInputs,
    Prompt,
    PromptGroup,
    SharedInputs,
    TokenBatch,
    Verdict,
)

NAN = float("nan")


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
    packed = PackedBatch(
        inputs, torch.tensor([7, 8, 9]), turn=torch.tensor([0, 1, 0]), logp_sampler=torch.tensor([-0.1, -0.2, -0.3])
    )
    taken = packed.take([2, 1, 0])
    assert taken.sequence.tolist() == [1, 2, 2]
    assert taken.target.tolist() == [9, 7, 8]
    assert taken.turn.tolist() == [0, 0, 1]
    assert taken.logp_sampler.tolist() == pytest.approx([-0.3, -0.1, -0.2])
    assert taken.inputs.input_ids.tolist() == [16, 17, 14, 15, 10, 11, 12, 13]
    assert taken.inputs.position_ids.tolist() == [0, 1, 0, 1, 0, 1, 2, 3]
    assert taken.inputs.source.tolist() == [2, 5, 6]
    assert taken.inputs.lengths == (2, 2, 4)
    assert taken.inputs.source_counts == (0, 1, 2)
    assert packed.tokens_of([1, 0]).tolist() == [2, 0, 1]
    tokens = TokenBatch(packed.sequence, 3, advantage=torch.tensor([1.0, 2.0, 3.0]), token_weight=torch.ones(3))
    assert tokens.take([2, 1, 0]).sequence.tolist() == [1, 2, 2]
    assert tokens.take([2, 1, 0]).advantage.tolist() == [3.0, 1.0, 2.0]


def test_everything_goes_to_a_device_without_the_host_waiting_for_it(monkeypatch):
    tokens = TokenBatch(torch.tensor([0]), 1, advantage=torch.ones(1), token_weight=torch.ones(1))
    inputs = PackedInputs(torch.ones(2).long(), torch.arange(2), (2,), torch.tensor([0]), (1,))
    packed = PackedBatch(inputs, torch.tensor([7]), turn=torch.tensor([0]), logp_sampler=torch.tensor([-0.1]))
    shared = SharedInputs(inputs.input_ids, inputs.position_ids, (PromptGroup(2),), inputs.source)
    moved: list[torch.Tensor] = []
    monkeypatch.setattr("logitless.types.sent", lambda tensor, _: (moved.append(tensor), tensor)[1])
    for item, expected in ((tokens, 3), (packed, 6), (shared, 3)):
        moved.clear()
        item.to("cuda")
        assert len(moved) == expected


def test_an_episode_is_paid_once_a_turn_or_not_at_all():
    completion = Completion("7", (1, 2, 3), "", "stop", trained=(True, False, True), turn=(0, 0, 1))
    assert Episode(completion, (), turn_rewards=(0.5, 0.0)).num_turns == 2
    with pytest.raises(InputError, match="each of 2 turns"):
        Episode(completion, (), turn_rewards=(0.5,))


@pytest.mark.parametrize(("score", "status"), [(None, "graded"), (1.0, "error"), (NAN, "graded")])
def test_a_verdict_has_a_score_exactly_when_it_is_graded(score, status):
    with pytest.raises(InputError, match="score"):
        Verdict(score=score, status=status)


def test_per_token_fields_of_a_completion_have_its_length():
    with pytest.raises(InputError, match="turn"):
        Completion("7", token_ids=(1, 2), text="", finish_reason="stop", turn=(0,))


def test_the_tokens_of_a_completion_are_its_own_and_cannot_be_changed():
    given = np.array([4, 2])
    completion = Completion("7", given, "4", "stop", logp_sampler=[-0.5, -0.25])
    given[0] = 5
    assert completion.token_ids.tolist() == [4, 2]
    assert (completion.token_ids.dtype, completion.logp_sampler.dtype) == (np.int64, np.float32)
    with pytest.raises(ValueError, match="read-only"):
        completion.token_ids[0] = 5
    assert replace(completion, text="four").token_ids is completion.token_ids  # and is not copied again


@pytest.mark.parametrize("change", [{"token_ids": (4, 3)}, {"logp_sampler": None}, {"turn": (0, 0)}, {"text": "5"}])
def test_completions_are_equal_where_every_number_is(change):
    completion = Completion("7", (4, 2), "4", "stop", (-0.1, NAN))
    assert completion == Completion("7", [4, 2], "4", "stop", np.array([-0.1, NAN]))
    assert completion != replace(completion, **change)


@pytest.mark.parametrize("ids", [("a",), (2**70,), ((1,), (2, 3)), (None,)])
def test_tokens_that_are_no_numbers_are_refused(ids):
    with pytest.raises(InputError, match="token_ids as numbers"):
        Completion("7", token_ids=ids, text="", finish_reason="stop")


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

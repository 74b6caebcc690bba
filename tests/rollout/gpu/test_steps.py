"""Kernels of a step against plain torch, and the numbers of rows and positions of graphs."""

from types import SimpleNamespace

import pytest
import torch

from logitless.rollout.gpu.steps import BUCKETS, SPLIT, Steps, _splits, bucket
from logitless.rollout.sampling import SamplingOptions

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def ints(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def test_a_step_begins_with_the_token_the_position_and_the_cache_row_of_each_slot():
    from logitless.rollout.gpu.kernels.step import begin

    slot, tokens, positions = ints([2, 0, 3]), ints([7, 8, 9, 0], torch.long), ints([65, 1, 3, -1])
    table = ints([[4, 5], [6, 7], [1, 1]])
    token, position, place, row = ints([0] * 3, torch.long), ints([0] * 3), ints([0] * 3), ints([0] * 3, torch.long)
    step = ints([1], torch.long)
    begin(slot, tokens, positions, table, token, position, place, row, step, num_steps=2, page=64)
    assert token.tolist()[:2] == [9, 7]
    assert position.tolist() == [3, 65, -1]
    assert place.tolist() == [3, 65, 0]
    assert row.tolist() == [4 * 64 + 3, 7 * 64 + 1, -1]
    assert step.tolist() == [0]


def test_a_row_ends_by_a_stop_token_by_its_limit_or_for_want_of_a_distribution_and_empty_rows_write_nothing():
    from logitless.rollout.gpu.kernels.step import end

    slot, tokens, positions = ints([0, 1, 2, 3, 4]), ints([0] * 5, torch.long), ints([5, 5, 5, 5, -1])
    last, sampled = ints([9, 9, 5, 9, 9]), ints([11, 2, 12, 13, 2], torch.long)
    finite = torch.tensor([True, True, True, False, True], device=DEVICE)
    log, hidden = ints([[[0] * 5] * 2] * 2), torch.arange(15.0, device=DEVICE).view(5, 3)
    kept = torch.zeros(2, 5, 3, device=DEVICE)
    end(slot, tokens, positions, last, positions.clone(), sampled, finite, ints([2], torch.long), ints([1], torch.long),
        log, hidden, kept)  # fmt: skip
    assert positions.tolist() == [6, -1, -1, -1, -1]
    assert tokens.tolist() == [11, 2, 12, 13, 0]
    assert log[1, 0].tolist() == sampled.tolist()
    assert log[1, 1].tolist() == [3, 7, 7, 5, 0]
    assert not log[0].any()
    assert torch.equal(kept[1], hidden)


def test_pages_are_copied_in_every_layer_and_nowhere_else():
    from logitless.rollout.gpu.kernels.step import copy_pages

    cache = torch.randn(2, 2, 4 * 4, 1, 6, device=DEVICE)
    expected = cache.clone().view(2, 2, 4, 4, 1, 6)
    expected[:, :, [1, 3]] = expected[:, :, [0, 0]]
    copy_pages(cache, ints([0, 0]), ints([1, 3]), page=4)
    assert torch.equal(cache.view_as(expected), expected)


@pytest.mark.parametrize("count", [1, 3, 17, 500, 2048])
def test_a_graph_has_room_for_the_rows_and_few_that_are_empty(count):
    assert bucket(count) in BUCKETS
    assert count <= bucket(count) <= max(2 * count - 1, count + 63)


def test_a_graph_reaches_at_most_half_as_far_again_as_needed():
    for positions in range(1, 40 * SPLIT, 100):
        splits = -(-positions // SPLIT)
        assert splits <= _splits(positions) <= max(1, 1.5 * splits)


@pytest.mark.parametrize("penalty", [{"repetition_penalty": 1.3}, {"presence_penalty": 0.5}, {"min_new_tokens": 2}])
def test_what_a_graph_reads_of_a_penalty_or_of_stop_tokens_is_not_made_while_it_is_captured(monkeypatch, penalty):
    head, options = SimpleNamespace(weight=torch.zeros(11, 4)), SamplingOptions(max_new_tokens=3, **penalty)
    steps = SimpleNamespace(head=head, max_rows=2, device=torch.device("cpu"), _histories={}, _ends_of={})
    made = Steps._histories_of(steps, options), Steps._stop_tokens(steps, (2,))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    steps.device = torch.device("cuda")
    assert (Steps._histories_of(steps, options), Steps._stop_tokens(steps, (2,))) == made
    steps._histories = {}
    with pytest.raises(RuntimeError, match="history of sampled tokens must be made before"):
        Steps._histories_of(steps, options)
    with pytest.raises(RuntimeError, match="list of stop tokens must be made before"):
        Steps._stop_tokens(steps, (2, 5))

"""Ranks that sample wait as long as they must, are told so, and say whether training has the same bits."""

from datetime import timedelta
from queue import Queue

import pytest
import torch
from torch import nn

from logitless.distributed.ranks import Ranks
from logitless.errors import LostRankError
from logitless.rollout.engine import Weights
from logitless.rollout.sampling import SamplingOptions
from logitless.rollout.sampling_ranks import SamplingRanks, sample_for


class Told(Ranks):
    """Ranks whose messages can be read."""

    said = Queue()

    def broadcast_object(self, value):
        self.said.put(value)
        return value


def test_sampling_ranks_are_told_to_wait_until_the_engine_is_closed():
    ranks = Told(timeout=timedelta(milliseconds=8))
    engine = SamplingRanks(ranks)
    assert [ranks.said.get(timeout=300) for _ in range(3)] == [["wait"]] * 3
    engine.close()
    assert list(ranks.said.queue)[-1] == ["end"]


class Replied(Told):
    """Ranks of which the other one has sampled nothing, with training's bits if it has training's layers."""

    world = 2

    def all_gather_bytes(self, mine):
        return [mine, b'{"completions": [], "exact": true}\n']


@pytest.mark.parametrize("like_training", [True, False])
def test_what_ranks_with_other_layers_than_training_sample_is_never_taken_for_training_s_bits(like_training):
    engine = SamplingRanks(Replied(), like_training=like_training)
    assert engine.sample([], 1, SamplingOptions(max_new_tokens=1), seed=0) == []
    assert engine.exact == like_training
    engine.close()


def test_a_rank_that_is_told_to_wait_waits_for_the_next_request(monkeypatch):
    said = [["wait"], ["wait"], ["end"]]
    monkeypatch.setattr(Ranks, "broadcast_object", lambda *_: said.pop(0))
    sample_for(Ranks.alone(), None, nn.Linear(1, 1))
    assert not said


def lost(ranks, device):
    """What ``Ranks.wait_for`` does where another rank does not come."""
    raise LostRankError(needed="all 2 ranks", given=f"one, on {device}", remedy="Look for the other one.")


def test_a_rank_that_was_lost_in_a_transfer_is_not_waited_for_once_more_at_the_end(monkeypatch):
    monkeypatch.setattr(Told, "said", Queue())
    monkeypatch.setattr(Told, "wait_for", lost)
    engine = SamplingRanks(Told(timeout=timedelta(hours=1)))
    with pytest.raises(LostRankError):
        engine.load(Weights.of(nn.Linear(1, 1)), 0)
    engine.close()
    assert list(Told.said.queue) == [["load", 0, ["weight", "bias"]]]


class Shared:
    """A ``SharedEngine`` that takes weights and does nothing else."""

    def receive(self, tensors, version):
        self.taken = dict(tensors)

    load = sample = share = together = close = receive


def test_ranks_that_share_weights_wait_for_them_no_longer_than_a_rank_that_has_all(monkeypatch):
    said = [["load", 0, ["weight", "bias"]], ["end"]]
    monkeypatch.setattr(Ranks, "broadcast_object", lambda *_: said.pop(0))
    waited = []
    monkeypatch.setattr(Ranks, "wait_for", lambda _, device: waited.append(device))
    engine = Shared()
    sample_for(Ranks.alone(), engine, nn.Linear(1, 1))
    assert list(engine.taken) == ["weight", "bias"]
    assert waited == [torch.device("cpu")] * 2

"""Ranks that sample wait as long as they must, are told so, and say whether training has the same bits."""

from datetime import timedelta
from queue import Queue

import pytest
from torch import nn

from logitless.distributed.ranks import Ranks
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

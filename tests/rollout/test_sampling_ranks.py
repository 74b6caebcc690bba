"""Ranks that sample wait as long as they must, and are told so before a collective's timeout ends them."""

from datetime import timedelta
from queue import Queue

from torch import nn

from logitless.distributed.ranks import Ranks
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


def test_a_rank_that_is_told_to_wait_waits_for_the_next_request(monkeypatch):
    said = [["wait"], ["wait"], ["end"]]
    monkeypatch.setattr(Ranks, "broadcast_object", lambda *_: said.pop(0))
    sample_for(Ranks.alone(), None, nn.Linear(1, 1))
    assert not said

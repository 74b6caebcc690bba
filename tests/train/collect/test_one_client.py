"""One rank asks servers for all: what it meets there, whatever it is, ends all of them with the same words."""

import gc
import os
import time

import pytest
import torch
import torch.distributed as dist

from logitless.distributed import Ranks
from logitless.distributed.exit_reasons import ExitReasons
from logitless.distributed.ranks import _naming_lost_ranks
from logitless.errors import EngineError
from logitless.rollout.engine import Weights
from logitless.train.collect.one_client import OneClientANode
from logitless.types import Completion, Prompt
from tests.ranks import run_on_ranks
from tests.train.collect.test_collector import sampled_by
from tests.train.engines import FakeEngine

FULL = OSError(28, "No space left on device")
PROMPTLY = 100  # seconds, of the 300 after which a collective gives up


class Failing(FakeEngine):
    """An engine that reads some of the weights, probes, and fails where it is told to."""

    def __init__(self, at, error=FULL):
        self.at, self.error, self.transfer_numbers, self.num_servers, self.read = at, error, {}, 2, []

    def take_share(self, place, of):
        """Every server."""

    def load(self, weights, version):
        self._fail("first")
        for name, tensor in weights.tensors() if weights.adapter is None else weights.adapter():
            self.read.append((name, tensor.tolist()))
            self._fail("reading")
        if weights.score is not None:
            weights.score((1, 2), (3,), 1.0)
        self._fail("probed")

    def sample(self, prompts, num_samples, options, *, seed):
        self._fail("sampling")
        return [[Completion(p.id, (1,), "a", "stop")] * num_samples for p in prompts]

    def _fail(self, where):
        if where == self.at:
            raise self.error


def _collective(ranks, number):
    """A tensor that all ranks make together."""
    return ranks.sum(torch.full((3,), float(number)))


def _weights(ranks, *, together, adapter, breaks=None):
    """Of all ranks, each of whose tensors is a collective where they hold the weights together.

    ``breaks``: (rank, what) that fails inside, before the others are answered.
    """

    def fail(what):
        if breaks == (ranks.rank, what):
            raise RuntimeError(f"out of memory in {what}")

    def tensors():
        for number in range(3):
            fail(f"tensor {number}")
            yield str(number), _collective(ranks, number) if together else torch.full((3,), float(number))

    def score(prompt, completion, temperature):
        fail("score")
        return _collective(ranks, 1).tolist()

    return Weights(None, tensors, tensors if adapter else None, score if together else None)


def _words(error):
    return type(error).__name__, str(error)


def _pushes(rank):
    """What each push ends with, one after the other over the same connections, and what was read in the last.

    The last client fails: the one there is, or the second of two nodes.
    """
    ranks, found = Ranks(data=dist.group.WORLD), {}
    for nodes in (1, 2):
        os.environ["GROUP_RANK"] = str(0 if nodes == 1 else rank)
        for together in (False, True):
            for adapter in (False, True):
                for at in ("first", "reading", "probed"):
                    node = OneClientANode(Failing(at if rank == nodes - 1 else "nowhere"), ranks)
                    try:
                        node.load(_weights(ranks, together=together, adapter=adapter), 1)
                    except Exception as error:
                        found[nodes, together, adapter, at] = _words(error)
    del os.environ["GROUP_RANK"]
    engine = Failing("nowhere")
    OneClientANode(engine, ranks).load(_weights(ranks, together=True, adapter=False), 1)
    return found, engine.read


def test_whatever_a_client_meets_during_a_push_ends_all_ranks_and_the_next_push_can_follow():
    ends, read = zip(*run_on_ranks(2, _pushes), strict=True)
    for client in (0, 1):
        of_client, of_other = (
            [words for (nodes, *_), words in ends[rank].items() if nodes == client + 1] for rank in (client, 1 - client)
        )
        assert of_client == [("OSError", "[Errno 28] No space left on device")] * 12
        [(kind, words)] = set(of_other)
        assert len(of_other) == 12
        assert kind == "TrainingError"
        assert words.startswith("needed weights pushed to the servers, and probed there on every rank; given OSError: ")
        assert f"No space left on device (on rank {client})" in words
    assert read == ([(str(n), [2.0 * n] * 3) for n in range(3)], [])


def _rounds(rank):
    """What rounds of sampling end with, in which one rank's engine fails; over the same connections."""
    found, prompts = [], [Prompt(str(i), "p", (i + 1,)) for i in range(2)]
    for error in (MemoryError("of the host"), KeyboardInterrupt(), EngineError(needed="a", given="b", remedy="C.")):
        try:
            sampled_by(Failing("sampling" if rank == 1 else "nowhere", error), prompts, num_samples=1, seed=0)
        except BaseException as raised:
            found.append(_words(raised))
    return found


def test_whatever_a_rank_meets_while_it_samples_ends_all_ranks():
    of_other, of_failing = run_on_ranks(2, _rounds)
    needed = "needed completions, sampled and scored on every rank; given "
    end = "Look for that rank's traceback; --resume goes on from the last checkpoint."
    assert of_other == [
        ("TrainingError", f"{needed}MemoryError: of the host (on rank 1). {end}"),
        ("TrainingError", f"{needed}KeyboardInterrupt (on rank 1). {end}"),
        ("EngineError", "needed a; given b (on rank 1). C."),
    ]
    assert [kind for kind, _ in of_failing] == ["MemoryError", "KeyboardInterrupt", "EngineError"]


def _inside(rank, breaks):
    """What a push ends with that one rank fails in while the other waits for its part of a tensor."""
    ranks = Ranks(data=dist.group.WORLD)
    exit_reasons = ExitReasons(dist.PrefixStore("exit_reasons", dist.distributed_c10d._get_default_store()), rank, 2)
    node, began = OneClientANode(Failing("nowhere"), ranks), time.monotonic()
    try:
        with _naming_lost_ranks(exit_reasons):
            node.load(_weights(ranks, together=True, adapter=False, breaks=breaks), 1)
    except Exception as error:
        found = *_words(error), time.monotonic() - began
        each = error
        while each is not None:  # frames keep the group and its connections, which a process that ends does not
            each.__traceback__, each = None, each.__cause__ or each.__context__
    del ranks, exit_reasons, node
    gc.collect()
    return found


@pytest.mark.parametrize("what", ["tensor 0", "tensor 2", "score"])
@pytest.mark.parametrize("breaks", [0, 1], ids=["client", "other"])
def test_a_rank_that_fails_inside_a_collective_of_a_push_leaves_and_the_others_say_why(breaks, what):
    found = run_on_ranks(2, _inside, (breaks, what))
    assert found[breaks][:2] == ("RuntimeError", f"out of memory in {what}")
    kind, words, _ = found[1 - breaks]
    assert kind == "LostRankError"
    assert f"without rank {breaks}: RuntimeError: out of memory in {what} (" in words
    assert max(seconds for *_, seconds in found) < PROMPTLY

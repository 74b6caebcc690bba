"""Servers that sample for several ranks: on each node one rank, the client, syncs weights and sends the requests.

Clients divide servers and prompts among them; the other ranks wait, and every rank gets all groups. Sharded weights are
never whole on a rank: while a client sends them, all ranks gather one tensor after the other, and for the probe they
score a few tokens together. If a rank fails, all do (``distributed/failing.py``); on an ``EngineError`` they save a
checkpoint first.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from logitless.distributed.failing import SharedWork, failing_together
from logitless.distributed.ranks import Ranks
from logitless.errors import EngineError
from logitless.rollout.engine import Engine, PushingEngine, Weights
from logitless.rollout.sampling import SamplingOptions
from logitless.types import Completion, Prompt


@runtime_checkable
class ServerEngine(PushingEngine, Protocol):
    """An engine on servers that several clients may divide."""

    @property
    def num_servers(self) -> int:
        """Number of servers."""
        ...

    def take_share(self, place: int, of: int) -> None:
        """Use only every ``of``-th server, beginning with number ``place``, and no folder that other clients use."""
        ...


PUSHED = "weights pushed to the servers, and probed there"


class OneClientANode:
    """An ``Engine`` that only one rank of each node uses.

    Args:
        engine: of this rank; it has not contacted a server yet.

    Attributes:
        clients: the ranks that sample: at most one a node, and at most as many as there are servers.
    """

    def __init__(self, engine: ServerEngine, ranks: Ranks) -> None:
        self._engine, self._ranks = engine, ranks
        self.clients: Sequence[int] = [node.ranks[0] for node in ranks.nodes()][: engine.num_servers]
        if ranks.rank in self.clients:
            engine.take_share(self.clients.index(ranks.rank), len(self.clients))

    @property
    def transfer_numbers(self) -> Mapping[str, float | int]:
        """Metrics of this rank's last weight sync; none if it is no client."""
        return self._engine.transfer_numbers if self._ranks.rank in self.clients else {}

    def load(self, weights: Weights, version: int) -> None:
        """Sync weights to all servers and probe them. A collective; of sharded weights the clients take turns.

        Raises:
            LogitlessError: on every rank, the error of the one that failed.
        """
        if weights.score is None:
            with failing_together(self._ranks, PUSHED):
                if self._ranks.rank in self.clients:
                    self._engine.load(weights, version)
            return
        for client in self.clients:
            with failing_together(self._ranks, PUSHED) as work:
                sharded = ShardedWeights(self._ranks, client, weights, work)
                if self._ranks.rank == client:
                    with sharded.gathered() as gathered:
                        self._engine.load(gathered, version)
                else:
                    sharded.take_part()

    def sample(
        self, prompts: Sequence[Prompt], num_samples: int, options: SamplingOptions, *, seed: int
    ) -> list[list[Completion]]:
        """The completions of this client's prompts."""
        return self._engine.sample(prompts, num_samples, options, seed=seed)

    def close(self) -> None:
        """Close this rank's engine."""
        self._engine.close()


def ranks_that_sample(engine: Engine, ranks: Ranks) -> Sequence[int]:
    """The ranks that divide prompts among them: the engine's clients, or all."""
    return engine.clients if isinstance(engine, OneClientANode) else range(ranks.world)


class ShardedWeights:
    """Sharded weights that one rank reads: it tells the others what it reads next, and all gather it together."""

    def __init__(self, ranks: Ranks, reader: int, weights: Weights, work: SharedWork) -> None:
        self._ranks, self._reader, self._held, self._work, self._over = ranks, reader, weights, work, False

    @contextmanager
    def gathered(self) -> Iterator[Weights]:
        """For the reader: weights that may be read inside, while the other ranks are in ``take_part``."""
        adapter = None if self._held.adapter is None else partial(self._read, "adapter")
        try:
            yield Weights(self._held.module, partial(self._read, "tensors"), adapter, self._score)
        finally:
            self._over = True
            if self._work.can_report:
                with self._work.collective():
                    self._ranks.all_gather_object(None)

    def take_part(self) -> None:
        """For the other ranks: do what the reader asks for, until it is done.

        An iterator over tensors that the reader abandons is replaced by the next one.
        """
        tensors: Iterator[tuple[str, Tensor]] = iter(())
        asked: Any = ()
        while asked is not None:
            with self._work.collective():
                asked = self._ranks.all_gather_object(None)[self._reader]
                match asked:
                    case ["tensors" | "adapter" as which]:
                        tensors = iter(getattr(self._held, which)())
                    case ["next"]:
                        next(tensors, None)
                    case ["score", prompt, completion, temperature]:
                        assert self._held.score is not None
                        self._held.score(prompt, completion, temperature)

    def _read(self, which: Literal["tensors", "adapter"]) -> Iterator[tuple[str, Tensor]]:
        with self._asking(which):
            tensors = iter(getattr(self._held, which)())
        while True:
            with self._asking("next"):
                named = next(tensors, None)
            if named is None:
                return
            yield named

    def _score(self, prompt: Sequence[int], completion: Sequence[int], temperature: float) -> list[float]:
        assert self._held.score is not None
        with self._asking("score", list(prompt), list(completion), temperature):
            return self._held.score(prompt, completion, temperature)

    @contextmanager
    def _asking(self, *words: Any) -> Iterator[None]:
        """For the reader: send a request to the other ranks; inside, do the same as they do in ``take_part``."""
        if self._over:
            raise EngineError(
                needed="weights that the ranks hold together, after all of them went on",
                given="a server that was restarted and must get them again",
                remedy="Go on with --resume, or set rollout.engine.weights: {name: folder}, where they are kept.",
            )
        with self._work.collective():
            self._ranks.all_gather_object(words)
            yield

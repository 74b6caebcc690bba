"""Servers that sample for a run of several ranks: on each node one rank, the client, pushes weights and asks.

The clients share servers and prompts; the other ranks wait, and get all groups like everybody. Weights that are sharded
are never whole on a rank: while a client pushes, all ranks make one tensor whole after the other, and to probe they
score a few tokens together. What ends one of them ends all (``distributed/failing.py``); where it is an engine's error,
all of them save a checkpoint first.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from logitless.distributed.failing import SharedWork, failing_together
from logitless.distributed.ranks import Ranks
from logitless.errors import EngineError
from logitless.rollout.engine import PushingEngine, Weights
from logitless.rollout.sampling import SamplingOptions
from logitless.types import Completion, Prompt


@runtime_checkable
class ServerEngine(PushingEngine, Protocol):
    """An engine whose servers several clients may share."""

    @property
    def num_servers(self) -> int:
        """How many there are."""
        ...

    def take_share(self, place: int, of: int) -> None:
        """From now on use every ``of``-th server only, from ``place`` on, and share no folder with other clients."""
        ...


PUSHED = "weights pushed to the servers, and probed there"


class OneClientANode:
    """An ``Engine`` that one rank of each node asks.

    Args:
        engine: of this rank, which has asked no server anything yet.
        ranks: of the run.

    Attributes:
        clients: the ranks that sample, at most one a node and one a server.
    """

    def __init__(self, engine: ServerEngine, ranks: Ranks) -> None:
        self._engine, self._ranks = engine, ranks
        self.clients: Sequence[int] = ranks.first_on_nodes()[: engine.num_servers]
        if ranks.rank in self.clients:
            engine.take_share(self.clients.index(ranks.rank), len(self.clients))

    @property
    def transfer_numbers(self) -> Mapping[str, float | int]:
        """Numbers of this rank's last push; none where it is no client."""
        return self._engine.transfer_numbers if self._ranks.rank in self.clients else {}

    def load(self, weights: Weights, version: int) -> None:
        """Each client pushes to its servers and probes them; in turn where the ranks hold the weights together.

        Raises:
            LogitlessError: on every rank, what one of them met, an EngineError mostly.
        """
        if weights.score is None:
            with failing_together(self._ranks, PUSHED):
                if self._ranks.rank in self.clients:
                    self._engine.load(weights, version)
            return
        for client in self.clients:
            with failing_together(self._ranks, PUSHED) as work:
                reading = ReadTogether(self._ranks, client, weights, work)
                if self._ranks.rank == client:
                    with reading.lent() as lent:
                        self._engine.load(lent, version)
                else:
                    reading.take_part()

    def sample(
        self, prompts: Sequence[Prompt], num_samples: int, options: SamplingOptions, *, seed: int
    ) -> list[list[Completion]]:
        """The completions of this client's prompts."""
        return self._engine.sample(prompts, num_samples, options, seed=seed)

    def close(self) -> None:
        """Give back what this rank's engine holds."""
        self._engine.close()


class ReadTogether:
    """Sharded weights that one rank reads: it says what it reads next, and the others take part in making it whole.

    Args:
        ranks: that hold the weights.
        reader: one of them.
        weights: of all.
        work: that the reading is part of.
    """

    def __init__(self, ranks: Ranks, reader: int, weights: Weights, work: SharedWork) -> None:
        self._ranks, self._reader, self._held, self._work, self._over = ranks, reader, weights, work, False

    @contextmanager
    def lent(self) -> Iterator[Weights]:
        """The weights, for the reader, until the end of the block; from then on the others do something else."""
        adapter = None if self._held.adapter is None else partial(self._read, "adapter")
        try:
            yield Weights(self._held.module, partial(self._read, "tensors"), adapter, self._score)
        finally:
            self._over = True
            if self._work.can_report:
                with self._work.collective():
                    self._ranks.all_gather_object(None)

    def take_part(self) -> None:
        """The others, until the reader's end. A reading that is given up is forgotten with the next one."""
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
        """Inside, the reader does what the others do when they hear these words."""
        if self._over:
            raise EngineError(
                needed="weights that the ranks hold together, after all of them went on",
                given="a server that was restarted and must get them again",
                remedy="Go on with --resume, or set rollout.engine.weights: {name: folder}, where they are kept.",
            )
        with self._work.collective():
            self._ranks.all_gather_object(words)
            yield

"""Servers that sample for a run of several ranks: on each node one rank, the client, pushes weights and asks.

The clients share servers and prompts; the other ranks wait, and get all groups like everybody. While weights are pushed
and probed they are whole on every rank, as for an engine in the process. An error of one client is one of all ranks, so
that all of them save a checkpoint and end.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

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
    def hand_over(self) -> Mapping[str, float | int]:
        """Numbers of this rank's last push; none where it is no client."""
        return self._engine.hand_over if self._ranks.rank in self.clients else {}

    def load(self, weights: Weights, version: int) -> None:
        """Each client pushes to its servers and probes them.

        Raises:
            EngineError: on every rank, what one of them met.
        """
        failure = None
        if self._ranks.rank in self.clients:
            try:
                self._engine.load(weights, version)
            except EngineError as error:
                failure = error
        raise_on_all(self._ranks, failure)

    def sample(
        self, prompts: Sequence[Prompt], num_samples: int, options: SamplingOptions, *, seed: int
    ) -> list[list[Completion]]:
        """The completions of this client's prompts."""
        return self._engine.sample(prompts, num_samples, options, seed=seed)

    def close(self) -> None:
        """Give back what this rank's engine holds."""
        self._engine.close()


def raise_on_all(ranks: Ranks, failure: EngineError | None) -> None:
    """Let an engine's error of one rank be one of all; a collective.

    Raises:
        EngineError: the first rank's that has one.
    """
    said = ranks.everyones(None if failure is None else [failure.needed, failure.given, failure.remedy])
    if failure is not None:
        raise failure
    for rank, words in enumerate(said):
        if words is not None:
            raise EngineError(needed=words[0], given=f"{words[1]} (on rank {rank})", remedy=words[2])

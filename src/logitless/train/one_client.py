"""Servers that sample for a run of several ranks: on each node one rank, the client, pushes weights and asks.

The clients share servers and prompts; the other ranks wait, and get all groups like everybody. Weights that are sharded
are never whole on a rank: while a client pushes, all ranks make one tensor whole after the other, and to probe they
score a few tokens together. An error of one client is one of all ranks, so that all of them save a checkpoint and end.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

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
        """Each client pushes to its servers and probes them; in turn where the ranks hold the weights together.

        Raises:
            EngineError: on every rank, what one of them met.
        """
        failure = None
        together = weights.score is not None
        for client in self.clients if together else [self._ranks.rank]:
            reading = ReadTogether(self._ranks, client, weights)
            if self._ranks.rank != client:
                reading.take_part()
            elif client in self.clients:
                try:
                    self._engine.load(reading.weights() if together else weights, version)
                except EngineError as error:
                    failure = error
                finally:
                    if together:
                        reading.end()
        raise_on_all(self._ranks, failure)

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
    """

    def __init__(self, ranks: Ranks, reader: int, weights: Weights) -> None:
        self._ranks, self._reader, self._held, self._over = ranks, reader, weights, False

    def weights(self) -> Weights:
        """For the reader, until ``end``."""
        adapter = None if self._held.adapter is None else partial(self._read, "adapter")
        return Weights(self._held.module, partial(self._read, "tensors"), adapter, self._score)

    def take_part(self) -> None:
        """The others, until the reader's ``end``. A reading that is given up is forgotten with the next one."""
        tensors: Iterator[tuple[str, Tensor]] = iter(())
        while (asked := self._ranks.everyones(None)[self._reader]) is not None:
            match asked:
                case ["tensors" | "adapter" as which]:
                    tensors = iter(getattr(self._held, which)())
                case ["next"]:
                    next(tensors, None)
                case ["score", prompt, completion, temperature]:
                    assert self._held.score is not None
                    self._held.score(prompt, completion, temperature)

    def end(self) -> None:
        """The reader has what it wants; from now on the others do something else."""
        self._over = True
        self._ranks.everyones(None)

    def _read(self, which: Literal["tensors", "adapter"]) -> Iterator[tuple[str, Tensor]]:
        self._ask(which)
        tensors = iter(getattr(self._held, which)())
        while True:
            self._ask("next")
            named = next(tensors, None)
            if named is None:
                return
            yield named

    def _score(self, prompt: Sequence[int], completion: Sequence[int], temperature: float) -> list[float]:
        self._ask("score", list(prompt), list(completion), temperature)
        assert self._held.score is not None
        return self._held.score(prompt, completion, temperature)

    def _ask(self, *words: Any) -> None:
        if self._over:
            raise EngineError(
                needed="weights that the ranks hold together, after all of them went on",
                given="a server that was restarted and must get them again",
                remedy="Go on with --resume, or set rollout.engine.weights: {name: folder}, where they are kept.",
            )
        self._ranks.everyones(words)


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

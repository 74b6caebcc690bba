"""In-flight weight updates, repeated: a record of which weights sampled each token, and an engine that follows it.

The time at which weights arrive differs from run to run. A repetition with the recorded versions samples the same
tokens, however completions are divided among processes and decode batches.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from logitless.errors import TrainingError, UnavailableError
from logitless.rollout.engine import Engine, InFlightEngine, Weights, is_exact
from logitless.rollout.sampling import SamplingOptions
from logitless.types import Completion, Prompt


class DrawnVersions:
    """Which version of the weights sampled each token, for the calls of ``sample`` in a rollout batch.

    Args:
        calls: by prompt id, for each call with this prompt, for each of its samples: [version, number of tokens] pairs
            in the order of its tokens.

    Example:
        >>> drawn = DrawnVersions()
        >>> drawn.add([[Completion("7", (4, 5, 2), "45", "stop", weights_version=3, token_versions=(3, 3, 8))]])
        >>> drawn.calls
        {'7': [[[[3, 2], [8, 1]]]]}
        >>> drawn.next(["7"])
        {'7': [[[3, 2], [8, 1]]]}
    """

    def __init__(self, calls: Mapping[str, Iterable[list[list[list[int]]]]] | None = None) -> None:
        self.calls = {prompt: list(of) for prompt, of in (calls or {}).items()}
        self._taken = dict[str, int]()

    def add(self, groups: Sequence[Sequence[Completion]]) -> None:
        """Add a call's completions."""
        for group in groups:
            self.calls.setdefault(group[0].prompt_id, []).append([_runs(each) for each in group])

    def next(self, prompt_ids: Iterable[str]) -> dict[str, list[list[list[int]]]]:
        """The samples of each prompt in its next recorded call; empty if the repetition makes more calls than the
        record.

        ``train/collect/replay.py`` compares tokens, and reports where a repetition differs.
        """
        found = {}
        for prompt in prompt_ids:
            call, of_prompt = self._taken.get(prompt, 0), self.calls.get(prompt, [])
            found[prompt] = of_prompt[call] if call < len(of_prompt) else []
            self._taken[prompt] = call + 1
        return found


def _runs(completion: Completion) -> list[list[int]]:
    """[version, number of tokens] pairs of a completion."""
    if completion.token_versions is None:
        return [[completion.weights_version or 0, completion.length]]
    return [[version, len(list(of))] for version, of in groupby(completion.token_versions.tolist())]


def in_flight_engine(engine: Engine) -> InFlightEngine:
    """The engine, if it is an ``InFlightEngine``; raises UnavailableError otherwise."""
    if not isinstance(engine, InFlightEngine):
        raise UnavailableError(
            needed="an engine with `updates`, which takes weights between two decoding steps (rollout.in_flight)",
            given=type(engine).__name__,
            remedy="Leave rollout.in_flight out, or sample with rollout.engine gpu or transformers.",
        )
    return engine


class RepeatingEngine:
    """An ``Engine`` that samples a rollout batch with the recorded versions of the weights, of which it keeps copies.

    While it samples, the model has older weights; afterwards it has the newest again, bit for bit. Memory: ``copies``
    times the trained weights.

    Args:
        engine: samples with the model of the last ``load``; raises UnavailableError unless it is an ``InFlightEngine``.
        recompute: see ``Updates``.
        copies: versions to keep, the newest included.
    """

    def __init__(self, engine: Engine, *, recompute: bool, copies: int) -> None:
        self._engine, self._recompute, self._most = in_flight_engine(engine), recompute, copies
        self._copies: dict[int, dict[str, Tensor]] = {}
        self._drawn = DrawnVersions()

    @property
    def exact(self) -> bool:
        return is_exact(self._engine)

    def repeat(self, drawn: DrawnVersions) -> None:
        """Follow this record in the next calls of ``sample``."""
        self._drawn = drawn

    def load(self, weights: Weights, version: int) -> None:
        """Copy the trained weights, and forget the oldest copy if there are too many."""
        named = weights.module.named_parameters()
        self._copies[version] = {name: p.detach().clone() for name, p in named if p.requires_grad}
        for older in sorted(self._copies)[: -self._most]:
            del self._copies[older]
        self._module, self._newest = weights.module, version
        self._engine.load(weights, version)

    def sample(
        self, prompts: Sequence[Prompt], num_samples: int, options: SamplingOptions, *, seed: int
    ) -> list[list[Completion]]:
        """Exactly ``num_samples`` completions of each prompt, each token by the weights in the record.

        Raises:
            TrainingError: the record has weights that are gone.
        """
        engine = self._engine
        engine.updates = _Recorded(self._drawn.next(prompt.id for prompt in prompts), self._recompute, self._put)
        try:
            return engine.sample(prompts, num_samples, options, seed=seed)
        finally:
            engine.updates = None
            self._put(self._newest)

    def close(self) -> None:
        self._engine.close()

    def _put(self, version: int) -> None:
        """Write a copy into the model."""
        if version not in self._copies:
            raise TrainingError(
                needed=f"what was recorded: tokens by version {version} of the weights",
                given=f"the versions {', '.join(map(str, self._copies))}",
                remedy="Repeat the run with the rollout.staleness that it had.",
            )
        module: nn.Module = self._module
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(self._copies[version][name])
        self._engine.load(Weights.of(module), version)


class _Recorded:
    """``Updates`` according to a record; ``runs`` as in ``DrawnVersions.next``, ``put`` loads a version."""

    def __init__(
        self, runs: Mapping[str, Sequence[Sequence[Sequence[int]]]], recompute: bool, put: Callable[[int], None]
    ) -> None:
        self.recompute, self._runs, self._put = recompute, runs, put
        self._loaded: int | None = None
        self._next = 0

    def version(self, prompt_id: str, sample: int, token: int) -> int | None:
        """The recorded version; None after the last token, and for prompts or samples without a record."""
        of_prompt = self._runs[prompt_id]
        for version, count in of_prompt[sample] if sample < len(of_prompt) else ():
            token -= count
            if token < 0:
                return version
        return None

    def due(self, needed: Callable[[], Collection[int | None]]) -> bool:
        """Whether the loaded weights can sample none of the next tokens."""
        versions = [each for each in needed() if each is not None]
        if not versions or self._loaded in versions:
            return False
        self._next = min(versions)
        return True

    def load(self) -> None:
        """Load the oldest version that is needed."""
        self._put(self._next)
        self._loaded = self._next

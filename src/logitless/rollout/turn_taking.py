"""An engine in another process that alternates between sampling and weight transfers."""

import threading
from collections.abc import Sequence

from logitless.rollout.engine import Engine, Weights
from logitless.rollout.sampling import SamplingOptions
from logitless.types import Completion, Prompt


class TurnTaking:
    """An ``Engine`` in another process, to which weights are transferred only while nothing is sampled.

    Several threads may sample at once. ``load`` waits for them, and calls of ``sample`` that begin meanwhile wait for
    ``load``.

    Args:
        inner: has weights of its own, in another process.

    Example:
        >>> class Saying:
        ...     def load(self, weights, version): print("version", version)
        ...     def sample(self, prompts, num_samples, options, *, seed): return [[] for _ in prompts]
        ...     def close(self): ...
        >>> from torch import nn
        >>> engine = TurnTaking(Saying())
        >>> engine.load(Weights.of(nn.Linear(1, 1)), 3)
        version 3
        >>> engine.sample([], 1, SamplingOptions(max_new_tokens=1), seed=0), engine.transfer_numbers
        ([], {})
    """

    def __init__(self, inner: Engine) -> None:
        self._inner, self._changed = inner, threading.Condition()
        self._sampling, self._loading = 0, False

    @property
    def prompts_at_once(self) -> int:
        """The inner engine's; 1 if it has none."""
        return getattr(self._inner, "prompts_at_once", 1)

    @property
    def transfer_numbers(self) -> dict[str, float]:
        """The inner engine's metrics of its last transfer, if it has any."""
        return getattr(self._inner, "transfer_numbers", {})

    def load(self, weights: Weights, version: int) -> None:
        """Wait for calls that are sampling, then transfer."""
        try:
            with self._changed:
                self._loading = True
                while self._sampling:
                    self._changed.wait(1.0)  # with a timeout, so that Ctrl-C is handled
            self._inner.load(weights, version)
        finally:  # also after Ctrl-C: `sample` must not wait for ever
            with self._changed:
                self._loading = False
                self._changed.notify_all()

    def sample(
        self, prompts: Sequence[Prompt], num_samples: int, options: SamplingOptions, *, seed: int
    ) -> list[list[Completion]]:
        with self._changed:
            self._changed.wait_for(lambda: not self._loading)
            self._sampling += 1
        try:
            return self._inner.sample(prompts, num_samples, options, seed=seed)
        finally:
            with self._changed:
                self._sampling -= 1
                self._changed.notify_all()

    def close(self) -> None:
        self._inner.close()

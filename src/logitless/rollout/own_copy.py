"""Engines that sample while the policy is trained: with a copy of their own, or taking turns with those who load."""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from logitless.models.lora import frozen_copy
from logitless.rollout.engine import Engine, Weights
from logitless.rollout.sampling import SamplingOptions
from logitless.types import Completion, Prompt


class OwnCopy:
    """An ``Engine`` around another one in this process that samples with a copy of the weights it was last handed.

    ``load`` copies what is trained and returns at once; the next ``sample`` begins with it. No completion is drawn with
    two versions. It costs the memory of a second model and of what is trained once more. One thread loads and another
    samples; an engine whose settings reach the whole process (kernels of attention on a GPU) is better elsewhere.

    Args:
        inner: samples in this process.

    Example:
        >>> class Saying:
        ...     def load(self, weights, version): print(float(weights.module.weight.detach()), version)
        ...     def sample(self, prompts, num_samples, options, *, seed): return [[] for _ in prompts]
        ...     def close(self): ...
        >>> model = nn.Linear(1, 1, bias=False)
        >>> engine = OwnCopy(Saying())
        >>> _ = nn.init.constant_(model.weight, 2.0)
        >>> engine.load(Weights.of(model), 1)
        >>> _ = nn.init.constant_(model.weight, 3.0)  # training goes on
        >>> engine.sample([], 1, SamplingOptions(max_new_tokens=1), seed=0)
        2.0 1
        []
    """

    def __init__(self, inner: Engine) -> None:
        self._inner = inner
        self._copy: nn.Module | None = None
        self._handed_over: tuple[dict[str, Tensor], int] | None = None
        self._lock = threading.Lock()

    def load(self, weights: Weights, version: int) -> None:
        """Copy what is trained, for the next ``sample``."""
        if self._copy is None:
            self._copy = frozen_copy(weights.module)
        trained = {n: p.detach().clone() for n, p in weights.module.named_parameters() if p.requires_grad}
        with self._lock:
            self._handed_over = trained, version

    def sample(
        self, prompts: Sequence[Prompt], num_samples: int, options: SamplingOptions, *, seed: int
    ) -> list[list[Completion]]:
        """Completions with the weights, and the version, that were handed over last."""
        self._take_over()
        return self._inner.sample(prompts, num_samples, options, seed=seed)

    def _take_over(self) -> None:
        """Sample with what was handed over since, of which nothing is held any more afterwards."""
        with self._lock:
            synced, self._handed_over = self._handed_over, None
        if synced is None:
            return
        assert self._copy is not None
        trained, version = synced
        with torch.no_grad():
            for name, parameter in self._copy.named_parameters():
                if name in trained:
                    parameter.copy_(trained[name])
        self._inner.load(Weights.of(self._copy), version)

    def close(self) -> None:
        """The inner engine's."""
        self._inner.close()


class TurnTaking:
    """An ``Engine`` elsewhere, to which weights are pushed between calls of ``sample`` and never during one.

    Several threads may sample at once. One that loads waits for them, and calls that begin meanwhile wait for it.

    Args:
        inner: has weights of its own, in another process.

    Example:
        >>> class Saying:
        ...     def load(self, weights, version): print("version", version)
        ...     def sample(self, prompts, num_samples, options, *, seed): return [[] for _ in prompts]
        ...     def close(self): ...
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
        """The inner engine's; 1 where it says nothing."""
        return getattr(self._inner, "prompts_at_once", 1)

    @property
    def transfer_numbers(self) -> dict[str, float]:
        """What the inner engine says of its last push, where it does."""
        return getattr(self._inner, "transfer_numbers", {})

    def load(self, weights: Weights, version: int) -> None:
        """Wait for the calls that are sampling, then push."""
        try:
            with self._changed:
                self._loading = True
                while self._sampling:
                    self._changed.wait(1.0)  # a second at a time: a signal that came just before is heard after it
            self._inner.load(weights, version)
        finally:  # Ctrl-C while it waits, too: calls that wait for it go on
            with self._changed:
                self._loading = False
                self._changed.notify_all()

    def sample(
        self, prompts: Sequence[Prompt], num_samples: int, options: SamplingOptions, *, seed: int
    ) -> list[list[Completion]]:
        """The inner engine's completions."""
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
        """The inner engine's."""
        self._inner.close()

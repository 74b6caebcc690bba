"""Engines that sample while the policy is trained: on a copy of the weights, or alternating with weight transfers."""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from logitless.models.lora import frozen_copy
from logitless.rollout.engine import Engine, Weights
from logitless.rollout.sampling import SamplingOptions
from logitless.types import Completion, Prompt


class OwnCopy:
    """An ``Engine`` around another one in this process that samples with a copy of the weights.

    ``load`` copies the trained parameters and returns; the next ``sample`` uses them, so that no completion mixes two
    versions. One thread may load while another samples. Memory: a second model, and the trained parameters once more.
    Unsuitable for an engine that changes settings of the whole process, such as attention kernels on a GPU.

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
        self._loaded: tuple[dict[str, Tensor], int] | None = None  # trained parameters that `sample` has not taken yet
        self._lock = threading.Lock()

    def load(self, weights: Weights, version: int) -> None:
        """Copy the trained parameters, for the next ``sample``."""
        if self._copy is None:
            self._copy = frozen_copy(weights.module)
        trained = {n: p.detach().clone() for n, p in weights.module.named_parameters() if p.requires_grad}
        with self._lock:
            self._loaded = trained, version

    def sample(
        self, prompts: Sequence[Prompt], num_samples: int, options: SamplingOptions, *, seed: int
    ) -> list[list[Completion]]:
        """Completions with the weights and the version of the last ``load``."""
        self._use_loaded()
        return self._inner.sample(prompts, num_samples, options, seed=seed)

    def _use_loaded(self) -> None:
        """Move newly loaded parameters into the copy, and free them."""
        with self._lock:
            loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        assert self._copy is not None
        trained, version = loaded
        with torch.no_grad():
            for name, parameter in self._copy.named_parameters():
                if name in trained:
                    parameter.copy_(trained[name])
        self._inner.load(Weights.of(self._copy), version)

    def close(self) -> None:
        """Close the inner engine."""
        self._inner.close()


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
        """Close the inner engine."""
        self._inner.close()

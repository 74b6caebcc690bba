"""A client's LoRA adapter: its shape, weights and optimizer state."""

from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor, nn

from logitless.tinker.wire import LoraConfig

ALPHA = 32.0
"""LoRA's alpha in the service: the product of the factors is multiplied by 32 / rank."""


@dataclass(frozen=True)
class Shape:
    """The rank of an adapter, and what it adapts."""

    rank: int
    attention: bool
    mlp: bool
    unembed: bool

    @classmethod
    def of(cls, config: LoraConfig) -> "Shape":
        return cls(config.rank, config.train_attn, config.train_mlp, config.train_unembed)


_versions = count(1)


@dataclass(eq=False)
class Adapter:
    """A trainable adapter.

    Args:
        weights: float32 factors, in the order of ``Trainer.names``.
        version: identifies the weights: unique, and new after every change.
        optimizer: with Adam's state; None before the first step.
        broken: why the gradient so far is incomplete; empty if it is complete.
    """

    shape: Shape
    weights: list[nn.Parameter]
    version: int = field(default_factory=lambda: next(_versions))
    optimizer: torch.optim.AdamW | None = None
    broken: str = ""

    def renew(self) -> None:
        """Take a new version, because the weights change."""
        self.version = next(_versions)

    def drop_gradients(self) -> None:
        for weight in self.weights:
            weight.grad = None

    def snapshot(self) -> "Snapshot":
        return Snapshot(self.shape, [w.detach().to("cpu", copy=True) for w in self.weights], self.version)


@dataclass(frozen=True)
class Snapshot:
    """A copy of an adapter's weights: float32, in host memory, in the order of ``Trainer.names``.

    Its version is the adapter's, or negative if it was read from a file.
    """

    shape: Shape
    weights: list[Tensor]
    version: int


Weights = Adapter | Snapshot | None
"""What to compute with; None for the base model."""


def version_of(weights: Weights) -> int:
    """The version of the weights; 0 for the base model."""
    return 0 if weights is None else weights.version

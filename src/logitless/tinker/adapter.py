"""A client's adapter: its shape, its weights and the state of its optimizer."""

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
        """Of a request."""
        return cls(config.rank, config.train_attn, config.train_mlp, config.train_unembed)


_versions = count(1)


@dataclass(eq=False)
class Adapter:
    """A client's adapter.

    Args:
        shape: of it.
        weights: float32 factors, in the order of ``Trainer.names``.
        version: changes whenever the weights do; no two adapters share one.
        optimizer: Adam's state; None before the first step.
        broken: why the gradients so far are incomplete; empty if they are not.
    """

    shape: Shape
    weights: list[nn.Parameter]
    version: int = field(default_factory=lambda: next(_versions))
    optimizer: torch.optim.AdamW | None = None
    broken: str = ""

    def renew(self) -> None:
        """Take another version, for the weights change."""
        self.version = next(_versions)

    def drop_gradients(self) -> None:
        """Make them 0."""
        for weight in self.weights:
            weight.grad = None

    def snapshot(self) -> "Snapshot":
        """A copy of the weights in host memory."""
        return Snapshot(self.shape, [w.detach().to("cpu", copy=True) for w in self.weights], self.version)


@dataclass(frozen=True)
class Snapshot:
    """Weights of an adapter as they were.

    Args:
        shape: of it.
        weights: float32, in host memory, in the order of ``Trainer.names``.
        version: of the adapter; negative for one that was read from a file.
    """

    shape: Shape
    weights: list[Tensor]
    version: int


Weights = Adapter | Snapshot | None
"""What to compute with; None for the base model."""


def version_of(weights: Weights) -> int:
    """Of an adapter's weights; 0 of the base model."""
    return 0 if weights is None else weights.version

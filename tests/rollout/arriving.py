"""Weights that arrive while completions are under way, after so many looks for them."""

from collections.abc import Mapping

import torch
from torch import nn

from logitless.rollout.engine import InFlightEngine, Weights


class Versions:
    """Weights of a model: version 0 is what it has now, further ones are other random weights near it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._first = {name: p.detach().clone() for name, p in model.named_parameters()}

    def put(self, version: int) -> None:
        """Write a version into the model."""
        for number, (name, p) in enumerate(self.model.named_parameters()):
            p.requires_grad_(True)
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(1000 * version + number))
            with torch.no_grad():
                p.copy_(self._first[name] * (1 + 0.3 * bool(version) * noise.to(p)))


class Arriving:
    """``Updates``: versions by the number of the look at which they are there."""

    def __init__(self, engine: InFlightEngine, versions: Versions, at: Mapping[int, int], *, recompute: bool) -> None:
        self.recompute, self._engine, self._versions, self._at = recompute, engine, versions, dict(at)
        self._looks, self._due = 0, list[int]()

    def version(self, prompt_id, sample, token):
        return None

    def due(self, needed):
        if self._looks in self._at:
            self._due.append(self._at[self._looks])
        self._looks += 1
        return bool(self._due)

    def load(self):
        self._versions.put(self._due[-1])
        self._engine.load(Weights.of(self._versions.model), self._due.pop())


def in_flight(engine, versions, at, *arguments, recompute, **options):
    """Completions of an engine to which these versions come, from version 0 on."""
    versions.put(0)
    engine.load(Weights.of(versions.model), 0)
    engine.updates = Arriving(engine, versions, at, recompute=recompute)
    groups = engine.sample(*arguments, **options)
    engine.updates = None
    return groups

"""A ``forward_backward`` request as packed rows: its batch, and losses and log-probs collected per datum."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from logitless.data.packing import pack
from logitless.tinker.adapter import Adapter
from logitless.tinker.losses import token_losses
from logitless.tinker.wire import ForwardBackward
from logitless.transfer import sent
from logitless.types import Completion, PackedInputs, Prompt

Trained = tuple[list[dict[str, np.ndarray]], dict[str, float]]
"""Arrays of each datum, and metrics."""


class Work:
    """A request of ``forward_backward`` in progress."""

    def __init__(self, adapter: Adapter, request: ForwardBackward) -> None:
        self.adapter, self.request = adapter, request
        self.columns = [(d, k) for d, datum in enumerate(request.data) for k in range(datum.targets.shape[1])]
        pairs = [(request.data[d].tokens, request.data[d].targets[:, k]) for d, k in self.columns]
        self.batch = packed(pairs)
        self.to_pack = _with_distinct_counts(self.batch.inputs, [targets for _, targets in pairs])
        self._found = list[tuple[Sequence[int], Tensor, Tensor]]()
        self.logp = [np.zeros(datum.targets.shape, np.float32) for datum in request.data]
        self.losses = [np.zeros_like(each) for each in self.logp]

    def loss(self, row: Sequence[int], logp: Tensor) -> Tensor:
        """The loss [n] of each target of a packed row; keeps it and the log-probs for ``result``."""
        request, parts = self.request, [self.columns[s] for s in row]
        inputs = {
            name: sent(
                torch.from_numpy(np.concatenate([request.data[d].inputs[name][:, k] for d, k in parts])), logp.device
            )
            for name in request.data[0].inputs
        }
        loss = token_losses(request.loss, request.config, logp, inputs, self._lengths(row))
        self._found.append((row, logp.detach(), loss.detach()))  # on the device: the host goes on to the next row
        return loss

    def _lengths(self, row: Sequence[int]) -> list[int]:
        return [len(self.request.data[self.columns[s][0]].tokens) for s in row]

    def _collect(self) -> None:
        """Copy kept results to the host, which waits for the passes."""
        for row, *both in self._found:
            for values, into in zip(both, (self.logp, self.losses), strict=True):
                pieces = torch.split(values.float().cpu(), self._lengths(row))
                for (d, k), piece in zip([self.columns[s] for s in row], pieces, strict=True):
                    into[d][:, k] = piece.numpy()
        self._found.clear()

    @property
    def is_finite(self) -> bool:
        """Whether all losses and gradients are finite."""
        self._collect()
        grads = [weight.grad for weight in self.adapter.weights if weight.grad is not None]
        sums = torch.stack(torch._foreach_norm(grads)) if grads else torch.zeros(1)
        return all(np.isfinite(each).all() for each in self.losses) and bool(sums.isfinite().all())

    def result(self) -> Trained:
        """The arrays of each datum, and metrics."""
        self._collect()
        total = float(sum(each.astype(np.float64).sum() for each in self.losses))
        shaped = [(each, datum) for each, datum in zip(self.logp, self.request.data, strict=True)]
        outputs = [{"logprobs": each[:, 0] if datum.is_flat else each} for each, datum in shaped]
        if self.request.loss == "cross_entropy":
            for output, each, datum in zip(outputs, self.losses, self.request.data, strict=True):
                output["elementwise_loss"] = each[:, 0] if datum.is_flat else each
        return outputs, {"loss:sum": total, "num_tokens:sum": float(self.request.num_tokens)}


def packed(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> Any:
    """Pairs of tokens [L] and targets [L] (already shifted) as a batch that scores every position."""
    read = [(Prompt("", "", tokens[:1]), Completion("", np.append(tokens[1:], 0), "", "length")) for tokens, _ in pairs]
    return replace(pack(read), target=torch.from_numpy(np.concatenate([targets for _, targets in pairs])))


def _with_distinct_counts(inputs: PackedInputs, targets: Sequence[np.ndarray]) -> PackedInputs:
    """``inputs`` whose ``source_counts`` count a target once if sequences share its prefix and the target.

    That is how often the head reads it (``Trainer._logp``), and how it counts for the size of a packed row.
    Each sequence counts at least once.
    """
    first: dict[int, np.ndarray] = {}
    counts = []
    for own, prefixes in zip(targets, inputs.prefixes or [()] * len(targets), strict=True):
        known = start = 0
        for prefix, stop in prefixes:
            given = first.setdefault(prefix, own)
            if given is not own:
                known += int((given[start:stop] == own[start:stop]).sum())
            start = stop
        counts.append(max(1, len(own) - known))
    return replace(inputs, source_counts=tuple(counts))

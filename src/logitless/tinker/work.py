"""The data of a request of ``forward_backward`` as a packed batch, and what is known of its results."""

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
from logitless.types import Completion, Prompt

Trained = tuple[list[dict[str, np.ndarray]], dict[str, float]]
"""Arrays of each datum, and metrics."""


class Work:
    """A request of ``forward_backward`` and what is known of its results."""

    def __init__(self, adapter: Adapter, request: ForwardBackward) -> None:
        self.adapter, self.request = adapter, request
        self.columns = [(d, k) for d, datum in enumerate(request.data) for k in range(datum.targets.shape[1])]
        self.batch = packed([(request.data[d].tokens, request.data[d].targets[:, k]) for d, k in self.columns])
        self.logp = [np.zeros(datum.targets.shape, np.float32) for datum in request.data]
        self.losses = [np.zeros_like(each) for each in self.logp]

    def loss(self, row: Sequence[int], logp: Tensor) -> Tensor:
        """The loss of each target of a row; keeps it and the log-probs."""
        request, parts = self.request, [self.columns[s] for s in row]
        inputs = {
            name: torch.from_numpy(np.concatenate([request.data[d].inputs[name][:, k] for d, k in parts])).to(
                logp.device
            )
            for name in request.data[0].inputs
        }
        lengths = [len(request.data[d].tokens) for d, _ in parts]
        loss = token_losses(request.loss, request.config, logp, inputs, lengths)
        for values, into in ((logp, self.logp), (loss, self.losses)):
            pieces = torch.split(values.detach().float().cpu(), lengths)
            for (d, k), piece in zip(parts, pieces, strict=True):
                into[d][:, k] = piece.numpy()
        return loss

    @property
    def is_finite(self) -> bool:
        """Of losses and gradients."""
        grads = [weight.grad for weight in self.adapter.weights if weight.grad is not None]
        sums = torch.stack(torch._foreach_norm(grads)) if grads else torch.zeros(1)
        return all(np.isfinite(each).all() for each in self.losses) and bool(sums.isfinite().all())

    def result(self) -> Trained:
        """Of ``Trainer.forward_backward``."""
        total = float(sum(each.astype(np.float64).sum() for each in self.losses))
        shaped = [(each, datum) for each, datum in zip(self.logp, self.request.data, strict=True)]
        outputs = [{"logprobs": each[:, 0] if datum.is_flat else each} for each, datum in shaped]
        if self.request.loss == "cross_entropy":
            for output, each, datum in zip(outputs, self.losses, self.request.data, strict=True):
                output["elementwise_loss"] = each[:, 0] if datum.is_flat else each
        return outputs, {"loss:sum": total, "num_tokens:sum": float(self.request.num_tokens)}


def packed(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> Any:
    """Pairs of tokens and targets [L], already shifted, as a batch that scores every position."""
    read = [(Prompt("", "", tokens[:1]), Completion("", np.append(tokens[1:], 0), "", "length")) for tokens, _ in pairs]
    return replace(pack(read), target=torch.from_numpy(np.concatenate([targets for _, targets in pairs])))

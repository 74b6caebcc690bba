"""Compiles the kernels of a mixture for one compute capability: python -m tests.models.kernels.experts_ahead 80."""

import json
import sys
from unittest import mock

import torch

from logitless.models.kernels import experts
from logitless.models.kernels.experts import Act, LowRankTerm, Slots
from logitless.models.kernels.route import Routing, Score, route, route_backward
from tests.models.kernels.ahead import compiled


def launch(rows: int, act: Act, *, adapters: bool, biases: bool, transposed: bool = False) -> None:
    """The products of a few experts in tiles of so many rows, forward and backward."""
    dtype, width, inner = torch.bfloat16, 256, 128
    x, down = torch.zeros(8, width, dtype=dtype), torch.zeros(4, width, inner, dtype=dtype)
    gate_up = torch.zeros(4, 2 * inner, width, dtype=dtype)
    if transposed:  # as gpt-oss and Llama 4 keep them
        gate_up = gate_up.transpose(1, 2).contiguous().transpose(1, 2)
    slots = Slots.of(torch.zeros(8, 2, dtype=torch.int32), 4, rows=rows)
    weights, low = torch.zeros(slots.count), torch.zeros(slots.count, 16, dtype=dtype)
    factors = gate_up[..., :16].contiguous(), down[..., :16].contiguous(), torch.zeros(4, 16, inner, dtype=dtype)
    first, second, back = (LowRankTerm(low, each, 2.0) if adapters else experts.NO_TERM for each in factors)
    bias = gate_up[..., 0].contiguous() if biases else None
    hidden, both = experts.gated_products(x, gate_up, slots, act, bias=bias, low=first, keeps_both=True)
    assert both is not None
    experts.gated_products(x, gate_up, slots, act, bias=bias, low=first)
    parts = experts.grouped_product(hidden, down, slots, to_slots=True, low=second)
    experts.grouped_product(both, gate_up.transpose(1, 2), slots, to_slots=True)
    experts.gated_products_backward(x, weights, down, both, slots, act, low=back, keeps_hidden=True)
    experts.outer_products(x, hidden, slots, down, a_of_tokens=True, weights=weights)
    experts.outer_products(both, x, slots, torch.zeros(4, 2 * inner, width), b_of_tokens=True, adds=True)
    experts.combined(parts, 2, weights, x)
    experts.by_expert(gate_up[0, :, :32], 2)


def main() -> None:
    """Prints what became of each launch."""
    capability = int(sys.argv[1])
    large = capability in (80, 90, 100)
    tiles = mock.patch.object(experts, "_tile", lambda small, big, rows, _: (big if large else small)[rows])
    outer = mock.patch.object(experts, "_outer_tile", return_value=(experts._OUTER_ROWS, experts._OUTER))
    scores: tuple[Score, ...] = ("softmax", "sigmoid", "softmax of the chosen", "sigmoid of the chosen")
    with tiles, outer, compiled(capability) as found:
        for rows in experts.TILE_ROWS:
            launch(rows, Act(), adapters=rows == 16, biases=False)
        launch(128, Act(), adapters=False, biases=False, transposed=True)
        launch(128, Act(interleaved=True, limit=7.0), adapters=True, biases=True, transposed=True)
        logits = torch.zeros(8, 128, dtype=torch.bfloat16)
        for score in scores:
            routing = Routing(8, score, groups=4 if score == "sigmoid" else 1, chosen_groups=2)
            weights, chosen = route(logits, routing)
            route_backward(logits, routing, weights, chosen.zero_(), weights)
    print(json.dumps([list(kernel) for kernel in found]))


if __name__ == "__main__":
    main()

"""Compiles kernels of a gated delta net for one compute capability: python -m tests.models.kernels.delta_ahead 80."""

import json
import sys

import torch

from logitless.models.kernels import delta_launch as delta
from logitless.models.kernels.convolution import convolution, convolution_backward, convolution_step
from logitless.models.kernels.delta_gates import (
    decay_and_beta,
    decay_and_beta_backward,
    gated_norm,
    gated_norm_backward,
)
from logitless.models.kernels.delta_launch import Chunks, DeltaCache, DeltaTiles, Segment
from tests.models.kernels.ahead import compiled

KEY_HEADS, HEADS, WIDTH, SIZE, TAPS = 16, 32, 128, 64, 4
"""Of Qwen3.5-9B."""


def launch(dtype: torch.dtype, tiles: DeltaTiles) -> None:
    """A layer's rows in training with a shared prompt, and a decoding step."""
    rows = 8
    query, key = (torch.zeros(rows, KEY_HEADS, WIDTH, dtype=dtype) for _ in range(2))
    value, decay = torch.zeros(rows, HEADS, WIDTH, dtype=dtype), torch.zeros(rows, HEADS)
    beta = torch.zeros(rows, HEADS)
    shared = [Segment(0, 0, 4, after=0, num_following=1), Segment(4, 0, 8, before=0, gradient=0, level=1)]
    chunks = Chunks.laid(shared, SIZE, "cpu")
    _, made = delta.forward(query, key, value, decay, beta, chunks, tiles)
    delta.backward(query, key, value, beta, made, value, chunks, tiles)
    cache = DeltaCache.empty(2, KEY_HEADS, HEADS, WIDTH, WIDTH, size=SIZE, dtype=dtype)
    delta.forward(query, key, value, decay, beta, Chunks.of([rows], SIZE, slots=[0]), tiles, cache=cache)
    slot = torch.zeros(rows, dtype=torch.int32)
    delta.delta_step(query, key, value, decay, beta, cache, slot, slot, slot, tiles)


def launch_beside(dtype: torch.dtype) -> None:
    """What a layer does besides: convolution, gates and norm."""
    rows, channels = 8, 2 * KEY_HEADS * WIDTH + HEADS * WIDTH
    x, weight = torch.zeros(rows, channels, dtype=dtype), torch.zeros(channels, TAPS, dtype=dtype)
    age = torch.arange(rows, dtype=torch.int32)
    convolution(x, weight, age)
    convolution_backward(x, weight, age, x)
    convolution_step(x, weight, torch.zeros(2, TAPS - 1, channels, dtype=dtype), torch.zeros(rows, dtype=torch.int32))
    a, of_heads = torch.zeros(rows, HEADS, dtype=dtype), torch.zeros(HEADS, dtype=dtype)
    decay, beta = decay_and_beta(a, a, of_heads, of_heads)
    decay_and_beta_backward(a, a, of_heads, of_heads, decay, beta)
    heads, gain = torch.zeros(rows, HEADS, WIDTH, dtype=dtype), torch.zeros(WIDTH, dtype=dtype)
    gate = heads.view(rows, -1)
    gated_norm(heads, gate, gain, 1e-6)
    gated_norm_backward(heads, gate, gain, 1e-6, gate)


def main() -> None:
    """Prints what became of each launch."""
    capability = int(sys.argv[1])
    with compiled(capability) as found:
        launch(torch.bfloat16, DeltaTiles() if capability == 90 else delta.SMALL)
        launch_beside(torch.bfloat16)
    print(json.dumps([list(kernel) for kernel in found]))


if __name__ == "__main__":
    main()

"""Compiles the kernels of sampling for one compute capability: python -m tests.rollout.sample_ahead 80."""

import json
import sys

import torch

from logitless.rollout.gpu.kernels.sample import filter_rows, sample_rows
from logitless.rollout.gpu.kernels.step import begin, copy_pages, end
from tests.models.kernels.ahead import compiled


def main() -> None:
    """Print the result of each launch."""
    logits, rows = torch.zeros(2, 20000), torch.zeros(2)
    key, position = rows.long(), rows.int()
    with compiled(int(sys.argv[1]), resources=True) as found:
        for lowest in (None, rows):
            noise = lowest is None
            sample_rows(logits, key, position, temperature=0.7, noise=noise, lowest=lowest, log_normaliser=lowest)
        filter_rows(logits, temperature=0.7, top_k=20, top_p=0.9, log_min_p=-2.0)
        filter_rows(logits, temperature=0.7, top_k=None, top_p=1.0, log_min_p=None)
        slots, ints = position, torch.zeros(2, 3, 2, dtype=torch.int32)
        begin(slots, key, slots, ints[0], key, slots, slots, key, key, num_steps=8, page=64)
        hidden = torch.zeros(2, 2048, dtype=torch.bfloat16)
        end(slots, key, slots, slots, slots, key, rows > 0, key, key, ints[:, :2], hidden, hidden[None])
        copy_pages(torch.zeros(2, 2, 128, 2, 64, dtype=torch.bfloat16), slots, slots, page=64)
    print(json.dumps([list(kernel) for kernel in found]))


if __name__ == "__main__":
    main()

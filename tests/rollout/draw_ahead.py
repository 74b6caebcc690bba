"""Compiles the kernels of drawing for one compute capability: python -m tests.rollout.draw_ahead 80."""

import json
import sys

import torch

from logitless.rollout.kernels.draw import draw_rows, filter_rows
from tests.models.kernels.ahead import compiled


def main() -> None:
    """Prints what became of each launch."""
    logits, rows = torch.zeros(2, 20000), torch.zeros(2)
    key, position = rows.long(), rows.int()
    with compiled(int(sys.argv[1]), resources=True) as found:
        for lowest in (None, rows):
            draw_rows(logits, key, position, temperature=0.7, noise=lowest is None, lowest=lowest)
        filter_rows(logits, temperature=0.7, top_k=20, top_p=0.9, log_min_p=-2.0)
        filter_rows(logits, temperature=0.7, top_k=None, top_p=1.0, log_min_p=None)
    print(json.dumps([list(kernel) for kernel in found]))


if __name__ == "__main__":
    main()

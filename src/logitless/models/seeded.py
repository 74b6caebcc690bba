"""Seed torch for a block of code, without changing the random numbers of the rest of the process."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Inside, the generators of the CPU and the device have this seed; afterwards their state is restored.

    Other GPUs are neither seeded nor initialized.

    Example:
        >>> before = torch.random.get_rng_state()
        >>> with seeded(3):
        ...     drawn = torch.rand(2)
        >>> with seeded(3):
        ...     again = torch.rand(2)
        >>> torch.equal(drawn, again), torch.equal(torch.random.get_rng_state(), before)
        (True, True)
    """
    on_gpu = torch.device(device).type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield

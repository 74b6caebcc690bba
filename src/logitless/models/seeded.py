"""Random numbers of a seed of one's own, with every other draw of the process as if nothing had been drawn."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Numbers of this seed inside, on the CPU and on this device; their generators go on as they were afterwards.

    Other GPUs are neither seeded nor started.

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

"""Run a function on several gloo processes of this machine.

The processes are started once and kept, for importing torch is what takes the time. A process keeps its rank, on which
what torch remembers of DTensors depends. The environment variable ``LOGITLESS_ONE_PROCESS`` skips the tests that need
them.
"""

import functools
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist


def run_on_ranks(num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """``function(rank, *args)`` on each rank, inside a process group of all of them; the results by rank.

    The function must be importable (defined at the top of a module), and what goes in and out must pickle.
    """
    if os.environ.get("LOGITLESS_ONE_PROCESS"):
        pytest.skip("needs processes of its own, which LOGITLESS_ONE_PROCESS forbids")
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        futures = [_process(rank).submit(_on_rank, rank, num_ranks, store, function, args) for rank in range(num_ranks)]
        return [future.result(timeout=120) for future in futures]


@functools.cache
def _process(rank: int) -> ProcessPoolExecutor:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


def _on_rank(rank: int, num_ranks: int, store: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60)
    )
    try:
        return function(rank, *args)
    finally:
        dist.destroy_process_group()

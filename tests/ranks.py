"""Run a function on several processes of this machine: of the CPU, by gloo, or of a GPU each, by NCCL.

The processes are started once and kept. They are forks of one that has imported torch and the trainer, which is what
takes the time. A process keeps its rank, and forgets what torch remembers of DTensors, whose groups are gone with each
test. A test that fails takes its processes along, whatever state they are in (hung in a collective, aborted by a
watchdog), and the next test starts others. The environment variable ``LOGITLESS_ONE_PROCESS`` skips the tests that need
them.
"""

import faulthandler
import functools
import importlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed, wait
from concurrent.futures.process import BrokenProcessPool
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from logitless.distributed.ranks import _is_of_collectives
from tests.disk import written_at_once

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)]


def run_on_ranks(
    num_ranks: int, function: Callable[..., Any], *args: Any, device: str = "cpu", timeout_seconds: float = 600
) -> list[Any]:
    """``function(rank, *args)`` on each rank, inside a process group of all of them; the results by rank, on the CPU.

    The function must be importable (defined at the top of a module), and what goes in and out must pickle. With
    ``device="cuda"`` every rank has the GPU of its number as the current device. What a rank raised is raised here, the
    cause rather than another rank's lost connection, with a note of each rank whose process ended: by which signal or
    with which exit status; ``TimeoutError`` where one has not answered in time.
    """
    if device == "cuda" and torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} CUDA devices")
    if os.environ.get("LOGITLESS_ONE_PROCESS"):
        pytest.skip("needs processes of its own, which LOGITLESS_ONE_PROCESS forbids")
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        executors = [_process(rank, device) for rank in range(num_ranks)]
        futures = [
            executor.submit(_on_rank, rank, num_ranks, device, store, function, args)
            for rank, executor in enumerate(executors)
        ]
        processes = [next(iter(executor._processes.values())) for executor in executors]
        try:
            for future in as_completed(futures, timeout=timeout_seconds):
                if future.exception() is not None:
                    error = _cause(futures)
                    for rank, future in enumerate(futures):
                        if future.done() and isinstance(future.exception(), BrokenProcessPool):
                            executors[rank].shutdown()  # its process is gone, whose exit status it then has
                            error.add_note(f"rank {rank} {_end(processes[rank].exitcode)}")
                    raise error
        except BaseException:
            _end_processes()
            raise
        return [future.result() for future in futures]


def _cause(futures: list[Future[Any]]) -> BaseException:
    """Of what the ranks raised, once all of them have noticed or one of them hangs, what is not torch's word of it."""
    ended = wait(futures, timeout=60).done
    errors = [error for future in futures if future in ended and (error := future.exception()) is not None]
    return next((error for error in errors if not _is_of_collectives(error)), errors[0])


def _end(exit_status: int | None) -> str:
    """How a process ended that gave no result, for a person."""
    if exit_status is not None and exit_status < 0:
        return f"was ended by {signal.Signals(-exit_status).name}"
    return f"ended with exit status {exit_status}"


def _end_processes() -> None:
    """Kill every rank; the next test that needs one starts it anew."""
    for executor in _started:
        for process in list((executor._processes or {}).values()):
            process.kill()
        executor.shutdown(wait=True, cancel_futures=True)
    _started.clear()
    _process.cache_clear()


_started: list[ProcessPoolExecutor] = []


@functools.cache
def _process(rank: int, device: str) -> ProcessPoolExecutor:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.tensor", "logitless.train.run"])
    _started.append(ProcessPoolExecutor(1, mp_context=context))
    return _started[-1]


def _on_rank(
    rank: int, num_ranks: int, device: str, store: Path, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    faulthandler.enable()  # where it was, if a signal ends this process
    torch.set_num_threads(1)
    written_at_once()
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=300),
        device_id=torch.device("cuda", rank) if on_gpu else None,
    )
    try:
        dist.barrier()  # a rank that is done at once would hang up on those that are still being connected
        return tree_map_only(torch.Tensor, torch.Tensor.cpu, function(rank, *args))
    finally:
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """Forget the results of operations on DTensors that torch remembers.

    They refer to the mesh of the first such operation, which is the same to torch as any later one over the same ranks,
    and to its groups by names, which are numbers: under these there are other groups in the next test, or none.
    """
    if "torch.distributed.tensor" in sys.modules:
        for name, forget in vars(importlib.import_module("torch.distributed.tensor.debug")).items():
            if name.startswith("_clear_") and name.endswith("_cache"):
                forget()

"""What a command imports before it can begin: seconds of torch and transformers."""

import ctypes
import gc
import importlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def loading(command: str) -> Iterator[None]:
    """For a command's imports: says on a terminal that they go on, and keeps the garbage collector out."""
    shows = sys.stderr.isatty() and "transformers" not in sys.modules
    if shows:
        print(f"logitless {command}: loading ...", end="", file=sys.stderr, flush=True)
    was_enabled = gc.isenabled()
    gc.disable()  # it takes a quarter of the time of imports, and frees nothing
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        if shows:
            print("\r\033[K", end="", file=sys.stderr, flush=True)  # erases the line


def import_transformers() -> None:
    """Import transformers and ``transformers.models`` in two thirds of the time, with the same result.

    To find out what their modules offer, both read every file of every model. The second one uses what the first one
    read only if both name the folder alike.
    """
    import_utils: Any = importlib.import_module("transformers.utils.import_utils")
    read = getattr(import_utils, "create_import_structure_from_path", None)
    if read is None:  # another version of transformers is imported as it is
        return

    def read_once(path: str | Path) -> object:
        return read(Path(path).parent if Path(path).name == "__init__.py" else path)

    import_utils.create_import_structure_from_path = read_once
    try:
        importlib.import_module("transformers.models")
    finally:
        import_utils.create_import_structure_from_path = read


@contextmanager
def cuda_context(device: str, environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """For imports after torch: meanwhile a thread creates the CUDA context of a run's GPU.

    Nothing happens where torch was built without CUDA.

    Args:
        device: ``model.device`` of the recipe.
        environment: its LOCAL_RANK is the GPU's number under torchrun.
    """
    import torch

    number = gpu_of(device, environment)
    if torch.version.cuda is None or number is None:
        yield
        return
    # Drivers before CUDA 12.2 would load every kernel of torch at once; they read this at the first call.
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    library = f"libcudart.so.{torch.version.cuda.partition('.')[0]}"  # torch has loaded it
    thread = threading.Thread(target=_create_context, args=(library, number))
    thread.start()
    try:
        yield
    finally:
        thread.join()


def gpu_of(device: str, environment: Mapping[str, str]) -> int | None:
    """The number of this process's GPU; None for a run on a CPU, and for a name that ``device_of`` refuses.

    Args:
        device, environment: of ``cuda_context``.

    Example:
        >>> torchrun = {"WORLD_SIZE": "8", "LOCAL_RANK": "5"}
        >>> [gpu_of(device, torchrun) for device in ("auto", "cuda:1", "cpu")], gpu_of("cuda", {})
        ([5, 1, None], 0)
    """
    kind, colon, number = device.partition(":")
    if not colon:
        number = environment.get("LOCAL_RANK", "") if environment.get("WORLD_SIZE", "1") != "1" else "0"
    return int(number) if kind in ("auto", "cuda") and number.isdecimal() else None


def _create_context(library: str, number: int) -> None:
    """Create a GPU's context. Errors are left to torch, which makes the same calls later."""
    try:
        runtime = ctypes.CDLL(library)
    except OSError:
        return
    if runtime.cudaSetDevice(number) == 0:  # a call by ctypes lets other threads run Python
        runtime.cudaFree(None)

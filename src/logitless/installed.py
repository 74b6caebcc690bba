"""What this machine has: optional packages, versions of packages and of the GPU's driver, GPUs that are new enough,
what Triton needs to compile.
"""

import importlib
import os
import re
import shutil
import sysconfig
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from logitless.errors import UnavailableError

if TYPE_CHECKING:
    import torch

OLDEST = (8, 0)
"""Lowest compute capability with bfloat16 and tf32 products."""


def optional(module: str, *, extra: str, needed: str, otherwise: str = "") -> Any:
    """A module of a package that an extra installs.

    Args:
        needed: the package and what for, for the error.
        otherwise: what to do without it.

    Raises:
        UnavailableError: it cannot be imported.

    Example:
        >>> optional("json", extra="data", needed="JSON").dumps(1)
        '1'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        remedy = f"Run pip install 'logitless[{extra}]'{otherwise and f', or {otherwise}'}."
        raise UnavailableError(needed=needed, given=str(error), remedy=remedy) from error


def version_of(package: str) -> str | None:
    """The version of an installed package; None if it is not installed.

    Example:
        >>> version_of("no-such-package") is None
        True
    """
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
def gpu_driver() -> str | None:
    """The version of NVIDIA's driver; None without one."""
    try:
        found = re.search(r"\d+\.\d+(\.\d+)?", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return None
    return None if found is None else found[0]


def unused_gpu() -> str:
    """Why torch sees no GPU beside NVIDIA's driver, in words; empty where it does, or was told not to."""
    import torch  # commands that need no torch import this file

    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if is_hidden or torch.cuda.is_available() or (driver := gpu_driver()) is None:
        return ""
    if torch.version.cuda is None:
        return f"NVIDIA's driver {driver} is here, but torch {torch.__version__} is not built for it (pytorch.org)"
    return (
        f"NVIDIA's driver {driver} is here, but torch {torch.__version__} sees no GPU (a container started without "
        "them, or a driver too old for this torch)"
    )


@cache
def without_triton() -> str:
    """Why no Triton kernel can be compiled for a GPU here, in words; empty where they can.

    Besides the package it needs a C compiler and Python's headers, to build what launches a kernel, and a folder that
    it can write to; images that only run programs may lack all of them.
    """
    if find_spec("triton") is None:
        return "Triton is absent (pip install 'logitless[triton]')"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return ""
    given = os.environ.get("CC")
    if not any(map(shutil.which, ("gcc", "clang") if given is None else (given,))):
        return "Triton finds no C compiler (apt-get install gcc, or set CC)"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton
    searched = [sysconfig.get_path("include", scheme)]
    searched += ":".join(os.environ.get(name, "") for name in ("CPATH", "C_INCLUDE_PATH")).split(":")
    if not any((Path(place) / "Python.h").is_file() for place in searched):
        package = f"python{sysconfig.get_python_version()}-dev"
        return f"Triton finds no Python.h in {searched[0]} (apt-get install {package})"
    from triton import knobs

    try:
        Path(knobs.cache.dir).mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=knobs.cache.dir):
            return ""
    except OSError as error:
        return f"Triton cannot write to its cache {knobs.cache.dir}, {error.strerror} (set TRITON_CACHE_DIR)"


def too_old(device: "torch.device") -> str:
    """That a GPU has a lower compute capability than ``OLDEST``, in words; empty for others and other devices."""
    import torch  # commands that need no torch import this file

    if device.type != "cuda" or (found := torch.cuda.get_device_capability(device)) >= OLDEST:
        return ""
    return f"compute capability {found[0]}.{found[1]} is older than {OLDEST[0]}.{OLDEST[1]}"

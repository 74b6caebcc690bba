"""What this machine has: optional packages, versions of packages and of the GPU's driver, GPUs that are new enough."""

import importlib
import re
from functools import cache
from importlib import metadata
from pathlib import Path
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


def too_old(device: "torch.device") -> str:
    """That a GPU has a lower compute capability than ``OLDEST``, in words; empty for others and other devices."""
    import torch  # commands that need no torch import this file

    if device.type != "cuda" or (found := torch.cuda.get_device_capability(device)) >= OLDEST:
        return ""
    return f"compute capability {found[0]}.{found[1]} is older than {OLDEST[0]}.{OLDEST[1]}"

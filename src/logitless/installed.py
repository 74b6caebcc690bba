"""What is installed on this machine: optional packages, versions of packages and of the GPU's driver."""

import importlib
import re
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from logitless.errors import UnavailableError


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

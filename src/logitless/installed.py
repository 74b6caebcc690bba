"""What is installed on this machine: versions of packages and of the GPU's driver."""

import re
from functools import cache
from importlib import metadata
from pathlib import Path


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

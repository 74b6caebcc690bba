"""What a measurement depends on, and how memory is given back between two of them."""

import gc
import subprocess
from collections.abc import Sequence
from importlib import metadata

import torch


def environment(device: str, packages: Sequence[str]) -> dict[str, str]:
    """Machine and versions.

    Example:
        >>> environment("cpu", ("no-such-package",))["no-such-package"]
        'not installed'
    """
    gpu, driver = "none", "none"
    if device == "cuda":
        gpu = torch.cuda.get_device_name()
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0].strip()
    return {"gpu": gpu, "driver": driver, "torch": torch.__version__} | {name: _version(name) for name in packages}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def release(device: str) -> None:
    """Give back memory that nothing refers to any more."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()

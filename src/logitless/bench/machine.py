"""Machine and versions of a measurement, its JSON file, and freeing memory between two measurements."""

import gc
import json
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

SCHEMA_NUMBER = 1
"""Of the files under ``benchmarks/results``."""


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


def write_result(path: Path, document: Mapping[str, Any], *, indent: int = 1) -> None:
    """Write what was measured as JSON, with the number of its format.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "result.json"
        >>> write_result(path, {"rows": []}, indent=0)
        >>> json.loads(path.read_text())
        {'schema_number': 1, 'rows': []}
    """
    path.write_text(json.dumps({"schema_number": SCHEMA_NUMBER, **document}, indent=indent) + "\n")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def release(device: str) -> None:
    """Free memory that nothing refers to any more."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()

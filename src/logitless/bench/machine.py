"""Machine and versions of a measurement, its JSON file, and freeing memory between two measurements."""

import gc
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from logitless.installed import gpu_driver, version_of

SCHEMA_NUMBER = 1
"""Of the files under ``benchmarks/results``."""


def environment(device: str, packages: Sequence[str]) -> dict[str, str]:
    """Machine and versions.

    Example:
        >>> environment("cpu", ("no-such-package",))["no-such-package"]
        'not installed'
    """
    gpu, driver = (torch.cuda.get_device_name(), gpu_driver()) if device == "cuda" else (None, None)
    found = {"gpu": gpu or "none", "driver": driver or "none", "torch": torch.__version__}
    return found | {name: version_of(name) or "not installed" for name in packages}


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


def release(device: str) -> None:
    """Free memory that nothing refers to any more."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()

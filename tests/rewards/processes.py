"""Which processes were started under a mark, wherever they are in the process tree by now."""

import os
import time
from pathlib import Path


def marked_processes(mark: str) -> set[int]:
    """Every process whose environment, at its last exec, held the mark."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                alive = (folder / "stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
                if alive and mark.encode() in (folder / "environ").read_bytes():
                    found.add(int(folder.name))
            except OSError:
                continue
    return found


def none_left(mark: str, seconds: float = 5.0) -> bool:
    """Whether the last marked process is gone in time."""
    patience = time.monotonic() + seconds
    while marked_processes(mark):
        if time.monotonic() > patience:
            return False
        time.sleep(0.02)
    return True

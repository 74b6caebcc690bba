"""Finding the processes of a pool, wherever they are in the process tree."""

import time
from pathlib import Path


def processes_of(name: str) -> set[int]:
    """Every process of the pool of this name, which is in their command lines."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                alive = (folder / "stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
                if alive and name.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                    found.add(int(folder.name))
            except OSError:
                continue
    return found


def none_left(name: str, seconds: float = 60.0) -> bool:
    """Whether the pool's last process ends in time."""
    patience = time.monotonic() + seconds
    while processes_of(name):
        if time.monotonic() > patience:
            return False
        time.sleep(0.02)
    return True

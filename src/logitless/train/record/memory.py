"""Peak memory of a run, free memory of the host, and sizes and shortages in words."""

import os
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch


def peak_memory(device: torch.device) -> int:
    """Peak bytes allocated on a GPU; on a CPU the peak resident size of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def is_shortage(error: Exception) -> bool:
    """Whether an error says that a GPU's memory was too small: for a tensor, or for CUDA itself."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, torch.AcceleratorError) and "out of memory" in str(error)
    )


def shortage_in_words(error: Exception) -> str:
    """What was asked for, of torch's many sentences, and who holds the current GPU's memory."""
    asked = ". ".join(str(error).splitlines()[0].split(". ")[:2]).removesuffix(".")
    with suppress(RuntimeError):
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            own = torch.cuda.memory_reserved()
            asked += (
                f"; of {size_text(total)} this process holds {size_text(own)}, others {size_text(total - free - own)}"
            )
    return asked


def free_host_memory(root: Path = Path("/")) -> int:
    """Bytes of host memory that are available, within the limits of control groups (containers).

    Args:
        root: of the file system, for tests.
    """
    found = list(_left_by_control_groups(root))
    meminfo = root / "proc/meminfo"
    if meminfo.is_file():
        lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    if not found:  # no Linux
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return max(0, min(found))


def _left_by_control_groups(root: Path) -> Iterator[int]:
    """Bytes left in each control group around this process; cached files count as free.

    Inside a container the group's files may be at the top of the hierarchy, whatever path the process sees.
    """
    membership = root / "proc/self/cgroup"
    for line in membership.read_text().splitlines() if membership.is_file() else ():
        _, kinds, path = line.split(":", 2)
        if kinds == "":  # version 2
            top, limit, used, of_all = root / "sys/fs/cgroup", "memory.max", "memory.current", ""
        elif "memory" in kinds.split(","):
            top, of_all = root / "sys/fs/cgroup/memory", "total_"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        innermost = top / path.lstrip("/")
        for group in (innermost, *innermost.parents[: len(innermost.parts) - len(top.parts)]):
            if all((group / name).is_file() for name in (limit, used, "memory.stat")):
                most = (group / limit).read_text().strip()
                if most.isdigit():  # else: "max"
                    stat = dict(each.split() for each in (group / "memory.stat").read_text().splitlines())
                    files = sum(int(stat.get(f"{of_all}{age}_file", 0)) for age in ("active", "inactive"))
                    yield int(most) - int((group / used).read_text()) + files


def size_lines(parts: Mapping[str, int], width: int) -> list[str]:
    """A line for each name and its bytes, indented and aligned.

    Example:
        >>> size_lines({"head": 1536}, 6)
        ['    head        1.5 KiB']
    """
    return [f"    {name:{width}s} {size_text(size):>12s}" for name, size in parts.items()]


def size_text(size: int | float) -> str:
    """A number of bytes in a readable unit.

    Example:
        >>> size_text(1536), size_text(300 * 2**20), size_text(2.5 * 2**30)
        ('1.5 KiB', '300.0 MiB', '2.50 GiB')
    """
    if size < 2**20:
        return f"{size / 2**10:.1f} KiB"
    return f"{size / 2**20:.1f} MiB" if size < 2**30 else f"{size / 2**30:.2f} GiB"

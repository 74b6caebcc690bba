"""What the host has left: of its memory, and within the limits of its containers."""

from pathlib import Path

import pytest

from logitless.train.record.memory import free_host_memory

MIB = 2**20
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
VERSION_2 = ("memory.max", "memory.current", "")


def machine(root: Path, membership: str = "0::/\n") -> None:
    """100 MiB, of which 50 are available."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {100 * 1024} kB\nMemAvailable: {50 * 1024} kB\n")
    (root / "proc/self/cgroup").write_text(membership)


def group(folder: Path, names: tuple[str, str, str], *, limit: int | str, used: int, files: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    stat = {"anon": used - files, f"{names[2]}active_file": files // 4, f"{names[2]}inactive_file": files - files // 4}
    (folder / "memory.stat").write_text("".join(f"{name} {size}\n" for name, size in stat.items()))


def test_without_a_limit_it_is_what_the_machine_has_available(tmp_path):
    machine(tmp_path)
    group(tmp_path / "sys/fs/cgroup", VERSION_2, limit="max", used=MIB)
    assert free_host_memory(tmp_path) == 50 * MIB


@pytest.mark.parametrize("inside", [True, False], ids=["seen from inside", "by its path"])
@pytest.mark.parametrize(
    ("names", "membership", "top"),
    [
        (VERSION_2, "0::/pod/box\n", "sys/fs/cgroup"),
        (VERSION_1, "5:cpu,cpuacct:/\n4:memory:/pod/box\n0::/\n", "sys/fs/cgroup/memory"),
    ],
    ids=["version 2", "version 1"],
)
def test_a_container_may_take_what_its_limit_leaves_and_its_files_in_memory_are_no_use(
    names, membership, top, inside, tmp_path
):
    machine(tmp_path, membership)
    group(tmp_path / top / ("" if inside else "pod/box"), names, limit=20 * MIB, used=8 * MIB, files=4 * MIB)
    assert free_host_memory(tmp_path) == (20 - 8 + 4) * MIB


def test_the_narrowest_limit_around_a_process_counts(tmp_path):
    machine(tmp_path, "0::/pod/box\n")
    top = tmp_path / "sys/fs/cgroup"
    group(top / "pod", VERSION_2, limit=10 * MIB, used=7 * MIB)
    group(top / "pod/box", VERSION_2, limit=20 * MIB, used=7 * MIB)
    group(top / "other", VERSION_2, limit=MIB, used=MIB)
    assert free_host_memory(tmp_path) == 3 * MIB


def test_a_limit_that_is_used_up_leaves_nothing(tmp_path):
    machine(tmp_path)
    group(tmp_path / "sys/fs/cgroup", VERSION_2, limit=5 * MIB, used=6 * MIB)
    assert free_host_memory(tmp_path) == 0


def test_where_nothing_is_said_it_is_all_that_the_machine_has(tmp_path):
    assert free_host_memory(tmp_path) >= free_host_memory() > 0

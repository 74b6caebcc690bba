"""Run programs that a model wrote, in worker processes.

The expected output is not in the worker, where a program that breaks out could read it: the worker returns a hash of
what was printed.
"""

import hashlib
import json
import math
import os
import resource
import secrets
import select
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from logitless.rewards.workers import confinement
from logitless.rewards.workers.worker import BUSY_SHARE, LATE_SECONDS, MAX_DEADLINES, Sleep, end_children, usage

MAX_OUTPUT_BYTES = 1 << 20
MAX_OPEN_FILES = 64
_A_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def run_program(
    program: str, tests: Sequence[Mapping[str, str]], test_seconds: float, memory_bytes: int, sandboxed: bool
) -> dict[str, Any]:
    """Hashes of a program's output, one a test; None if the program fails. Each test runs in a fresh interpreter.

    A test has ``input`` (standard input) or ``call`` (an expression whose ``repr`` is printed). The result is ``idle``
    if the machine was too busy to run the program.
    """
    prints: list[str | None] = []
    for test in tests:
        source = program if "call" not in test else f"{program}\n\nprint(repr({test['call']}))\n"
        try:
            printed = output_of(source, test.get("input", ""), test_seconds, memory_bytes, sandboxed)
        except TimeoutError as error:
            return {"idle": str(error)}
        prints.append(None if printed is None else fingerprint(printed))
    return {"prints": prints}


def fingerprint(output: str) -> str:
    """The hash of a text, ignoring trailing white space in lines and blank lines at the end.

    Example:
        >>> fingerprint("a \\n\\n") == fingerprint("a"), fingerprint(" a") == fingerprint("a")
        (True, False)
    """
    lines = [line.rstrip() for line in output.rstrip().splitlines()]
    return hashlib.sha256("\n".join(lines).encode(errors="surrogatepass")).hexdigest()


def run_tool(program: str, test_seconds: float, memory_bytes: int, sandboxed: bool) -> dict[str, Any]:
    """A program's output, errors included, and how it ended: ``{"printed": ..., "ended": "well"|"badly"|"late"}``.

    The result is ``idle`` if the machine was too busy to run it.
    """
    try:
        printed, in_time, status = _ran(program, "", test_seconds, memory_bytes, sandboxed, with_errors=True)
    except TimeoutError as error:
        return {"idle": str(error)}
    return {"printed": printed, "ended": "late" if not in_time else "well" if status == 0 else "badly"}


def output_of(source: str, given: str, test_seconds: float, memory_bytes: int, sandboxed: bool) -> str | None:
    """A program's output; None if it fails, or goes over time, memory or output size.

    Raises:
        TimeoutError: the machine was too busy to run it.
    """
    printed, in_time, status = _ran(source, given, test_seconds, memory_bytes, sandboxed)
    return printed if in_time and status == 0 else None


def _ran(
    source: str, given: str, test_seconds: float, memory_bytes: int, sandboxed: bool, *, with_errors: bool = False
) -> tuple[str, bool, int]:
    """(output, with standard error if ``with_errors``; whether it ended in time; its exit status)."""
    with (
        _own_folder() as folder,
        tempfile.TemporaryFile() as standard_input,
        tempfile.TemporaryFile() as printed,
        open(os.devnull, "wb") as nowhere,  # noqa: PTH123
    ):
        (Path(folder) / "program.py").write_text(source, encoding="utf-8", errors="replace")
        standard_input.write(given.encode(errors="replace"))
        standard_input.seek(0)
        environment = {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "PYTHONHASHSEED": "0"}
        process = confinement.launch_program(
            [sys.executable, *confinement.INTERPRETER_OPTIONS, "program.py"],
            environment | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            folder,
            (standard_input.fileno(), printed.fileno(), (printed if with_errors else nowhere).fileno()),
            _limits(test_seconds, memory_bytes, sandboxed),
            sandboxed,
        )
        try:
            in_time = _ends_within(process, test_seconds)
        finally:
            os.kill(process, signal.SIGKILL)
            _, status = os.waitpid(process, 0)
            end_children()
        printed.seek(0)
        return printed.read(MAX_OUTPUT_BYTES).decode(errors="replace"), in_time, status


@contextmanager
def _own_folder() -> Iterator[str]:
    """A temporary folder, removed with whatever a program left in it."""
    folder = tempfile.mkdtemp()
    try:
        yield folder
    finally:
        with suppress(OSError):
            remove_tree(folder)


def remove_tree(folder: str) -> None:
    """Remove a folder with its contents, whatever their depth and the owner's permissions.

    Nested folders are moved to the top before they are removed. ``shutil.rmtree`` needs a stack frame, a descriptor and
    a longer path for each level, and fails for deep nesting.

    Raises:
        OSError: something in it belongs to another user.
    """
    Path(folder).chmod(0o700)
    top = os.open(folder, _A_FOLDER)
    try:
        moved = f"{secrets.token_hex(16)}-"  # the program cannot have used this name
        waiting, number = _emptied(top), 0
        while waiting:
            name = waiting.pop()
            os.chmod(name, 0o700, dir_fd=top)
            inner = os.open(name, _A_FOLDER, dir_fd=top)
            try:
                for each in _emptied(inner):
                    os.chmod(each, 0o700, dir_fd=inner)  # moving a folder needs write permission on it
                    os.rename(each, f"{moved}{number}", src_dir_fd=inner, dst_dir_fd=top)
                    waiting.append(f"{moved}{number}")
                    number += 1
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    Path(folder).rmdir()


def _emptied(descriptor: int) -> list[str]:
    """Remove all files in an open folder; the names of the folders that are left."""
    with os.scandir(descriptor) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in found:
        if not is_folder:
            os.unlink(name, dir_fd=descriptor)
    return [name for name, is_folder in found if is_folder]


def spy(*arguments: Any) -> list[str]:
    """Run ``spy.reached`` as a program, with this process and its parent among its targets."""
    pids, *others = arguments
    source = (Path(__file__).parent / "spy.py").read_text(encoding="utf-8")
    given = json.dumps([[*pids, os.getpid(), os.getppid()], *others])
    printed = output_of(source, given, 10.0, 1 << 30, sandboxed=True)
    if printed is None:
        raise RuntimeError("a program cannot run in the sandbox of this machine")
    return json.loads(printed)


def _ends_within(pid: int, seconds: float) -> bool:
    """Whether a process ends in time: processor time while it computes, wall-clock time while it waits.

    Raises:
        TimeoutError: the machine was too busy to run it.
    """
    descriptor, sleep = os.pidfd_open(pid), Sleep(seconds)
    try:
        for _ in range(MAX_DEADLINES):
            due = time.monotonic() + seconds
            while (left := due - time.monotonic()) > 0:
                if select.select([descriptor], [], [], min(left, sleep.seconds_to_look))[0]:
                    return True
                if not sleep.seconds_to_look:
                    sleep.look(lambda: usage(pid).asleep)
                    if sleep.is_over:
                        return False
            late, used = time.monotonic() - due > LATE_SECONDS, usage(pid)
            if select.select([descriptor], [], [], 0)[0]:  # it ended during `usage`
                return True
            if used.seconds >= BUSY_SHARE * seconds or not (used.running or late):
                return False
    finally:
        os.close(descriptor)
    raise TimeoutError(f"over {MAX_DEADLINES * seconds:g} s without {BUSY_SHARE * seconds:g} s of the processor")


def _limits(test_seconds: float, memory_bytes: int, sandboxed: bool) -> dict[int, int]:
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: math.ceil(test_seconds) + 1,
        resource.RLIMIT_FSIZE: MAX_OUTPUT_BYTES,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    return limits if sandboxed else limits | {resource.RLIMIT_NPROC: 1}

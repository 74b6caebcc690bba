"""Whether the sandbox holds on this machine, tested by a process inside that tries to get out.

Kernel versions are not asked: a container's profile may forbid what the kernel supports.
"""

import functools
import logging
import os
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from logitless.errors import LogitlessError, UnavailableError
from logitless.rewards.workers.pool import FIND_LAYERS, Way, program_pool, shared_pool

logger = logging.getLogger("logitless")

Contained: TypeAlias = Literal["program", "grader"]
SandboxOption: TypeAlias = Literal["required", "none"]

CLAIMS = {
    "memory": "read the memory or environment of other processes",
    "secrets": "read files outside its folder, Python and the system's libraries",
    "network": "reach the network",
    "files": "write outside its folder",
    "processes": "start processes",
    "signals": "signal other processes",
}
"""What must be impossible, and its wording in messages."""

OF_A_GRADER = ("network", "files", "processes", "signals")  # it may read files: it cannot pass on what it read
PROBE_SECONDS = 20.0


@dataclass(frozen=True)
class Sandbox:
    """The test result of a sandbox on this machine.

    Args:
        layers: of ``confinement.layers``.
        open: the keys of ``CLAIMS`` that are possible after all.
        failure: why the test could not run, or empty.

    Example:
        >>> str(Sandbox(("seccomp",), ("memory",)))
        'seccomp; it can read the memory or environment of other processes'
    """

    layers: tuple[str, ...]
    open: tuple[str, ...]
    failure: str = ""

    @property
    def holds(self) -> bool:
        """Whether the test ran and every attempt to get out failed."""
        return not self.open and not self.failure

    def __str__(self) -> str:
        names = ", ".join(self.layers) or "no layer"
        if self.failure:
            return f"{names}; not known: {self.failure}"
        return f"{names}; it can {' and '.join(CLAIMS[kind] for kind in self.open) or 'do none of what is forbidden'}"


def sandbox_of(contained: Contained) -> Sandbox:
    """Test the sandbox; once in each process."""
    return _sandbox_of(os.getpid(), contained)


@functools.cache
def _sandbox_of(_pid: int, contained: Contained) -> Sandbox:
    program = contained == "program"
    kinds = tuple(CLAIMS) if program else OF_A_GRADER
    task = "logitless.rewards.workers.programs:spy" if program else "logitless.rewards.workers.spy:reached"
    way: Way = "kept" if program else "confined"
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listening:
        secret = Path(folder) / "secret"
        secret.write_text("swordfish")
        places = [
            place for place in (folder, tempfile.gettempdir(), "/dev/shm", str(Path.home())) if Path(place).is_dir()
        ]
        arguments = ([os.getpid()], listening.getsockname()[1], str(secret), places, kinds)
        try:
            pool = program_pool() if program else shared_pool()
            layers = tuple(pool.run(FIND_LAYERS, [()])[0].value or ())
            [outcome] = pool.run(task, [arguments], deadline_seconds=PROBE_SECONDS, ways=way)
        except LogitlessError as error:
            return Sandbox((), (), str(error))
    if outcome.status != "done" or not isinstance(outcome.value, list):
        return Sandbox(layers, (), f"{outcome.status}: {outcome.message or outcome.value}")
    return Sandbox(layers, tuple(kind for kind in kinds if kind in outcome.value))


def require_sandbox(contained: Contained, option: SandboxOption = "required") -> None:
    """Check that the sandbox holds, and log it once; nothing with option ``none``.

    Raises:
        UnavailableError: it does not hold.
    """
    if option == "none":
        return
    found = sandbox_of(contained)
    if not found.holds:
        raise UnavailableError(
            needed=f"a sandbox that keeps a {contained} of a model's text from reaching anything outside",
            given=str(found),
            remedy="Use Linux with Landlock (5.13) or namespaces, allow them in the container's profile, or set "
            "`sandbox: none` on the reward where nothing here is worth protecting.",
        )
    _log_once(contained, ", ".join(found.layers))


@functools.cache
def _log_once(contained: Contained, layers: str) -> None:
    what = "a program that the model writes" if contained == "program" else "what grades the model's answers"
    forbidden = list(CLAIMS.values()) if contained == "program" else [CLAIMS[kind] for kind in OF_A_GRADER]
    logger.info("sandbox: %s cannot %s or %s (kept by %s)", what, ", ".join(forbidden[:-1]), forbidden[-1], layers)

"""Which walls stand around text that runs, as found out by a process inside them that tries to get out.

A version number promises nothing (a container's profile may forbid what the kernel has), so none is asked.
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
from logitless.rewards.pool import Outcome, Way, program_pool, shared_pool

logger = logging.getLogger("logitless")

Inmate: TypeAlias = Literal["program", "grader"]

CLAIMS = {
    "memory": "read the memory or environment of other processes",
    "secrets": "read files outside its folder, Python and the system's libraries",
    "network": "reach the network",
    "files": "write outside its folder",
    "processes": "start processes",
    "signals": "signal other processes",
}
"""What must fail, and how a sentence says so. A grader may read files: it has no way to hand on what it read."""

OF_A_GRADER = ("network", "files", "processes", "signals")
PROBE_SECONDS = 20.0


@dataclass(frozen=True)
class Walls:
    """What a confined process is kept from on this machine.

    Args:
        layers: of ``confinement.layers``.
        open: the ``CLAIMS`` that a spy could disprove; none where the walls suffice.
        failure: why the spy could not say, or nothing.

    Example:
        >>> str(Walls(("seccomp",), ("memory",)))
        'seccomp; it can read the memory or environment of other processes'
    """

    layers: tuple[str, ...]
    open: tuple[str, ...]
    failure: str = ""

    @property
    def suffice(self) -> bool:
        """Whether every attempt to get out failed."""
        return not self.open and not self.failure

    def __str__(self) -> str:
        names = ", ".join(self.layers) or "no layer"
        if self.failure:
            return f"{names}; not known: {self.failure}"
        return f"{names}; it can {' and '.join(CLAIMS[kind] for kind in self.open) or 'do none of what is forbidden'}"


def walls_of(inmate: Inmate) -> Walls:
    """Send a spy inside the walls, once a process, and say what it could do.

    Example:
        >>> walls_of("grader") is walls_of("grader")
        True
    """
    return _walls_of(os.getpid(), inmate)


@functools.cache
def _walls_of(_pid: int, inmate: Inmate) -> Walls:
    kinds = tuple(CLAIMS) if inmate == "program" else OF_A_GRADER
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listening:
        secret = Path(folder) / "secret"
        secret.write_text("swordfish")
        port = listening.getsockname()[1]
        places = [
            place for place in (folder, tempfile.gettempdir(), "/dev/shm", str(Path.home())) if Path(place).is_dir()
        ]
        arguments = ([os.getpid()], port, str(secret), places, kinds)
        try:
            [outcome], layers = _spied(inmate, arguments)
        except LogitlessError as error:
            return Walls((), (), str(error))
    if outcome.status != "done" or not isinstance(outcome.value, list):
        return Walls(layers, (), f"{outcome.status}: {outcome.message or outcome.value}")
    return Walls(layers, tuple(kind for kind in kinds if kind in outcome.value))


def _spied(inmate: Inmate, arguments: tuple[object, ...]) -> tuple[list[Outcome], tuple[str, ...]]:
    pool = program_pool() if inmate == "program" else shared_pool()
    layers = pool.run("logitless.rewards.confinement:layers", [()])[0].value or ()
    task = "logitless.rewards.programs:spy" if inmate == "program" else "logitless.rewards.spy:reached"
    way: Way = "kept" if inmate == "program" else "confined"
    return pool.run(task, [arguments], deadline_seconds=PROBE_SECONDS, ways=way), tuple(layers)


def require_walls(inmate: Inmate) -> None:
    """Say once which walls there are.

    Raises:
        UnavailableError: they do not suffice.
    """
    walls = walls_of(inmate)
    if not walls.suffice:
        raise UnavailableError(
            needed=f"walls that keep a {inmate} made of a model's text from everything outside",
            given=str(walls),
            remedy="Use Linux with Landlock (5.13) or namespaces, allow them in the container's profile, or set "
            "`sandbox: none` on the reward where nothing here is worth protecting.",
        )
    _say_once(inmate, str(walls))


@functools.cache
def _say_once(inmate: Inmate, walls: str) -> None:
    logger.info("A %s made of a model's text runs inside %s.", inmate, walls)

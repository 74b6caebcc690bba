"""The common part of rewards that run in worker processes: limits, and verdicts from what became of an item."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from logitless.errors import ConfigurationError, UnavailableError
from logitless.rewards.contract import TextReward
from logitless.rewards.pool import Outcome, shared_pool
from logitless.types import Verdict

MEBIBYTE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class PooledReward(TextReward):
    """A reward whose ``grade`` runs in the workers of ``shared_pool``.

    Args:
        deadline_seconds: wall clock for one completion; then its verdict is a timeout.
        memory_mib: what one completion may take beyond what the worker has loaded.

    Raises:
        ConfigurationError: a limit that is not positive.
    """

    deadline_seconds: float = 5.0
    memory_mib: int = 1024

    def __post_init__(self) -> None:
        if not (self.deadline_seconds > 0 and self.memory_mib > 0):
            raise ConfigurationError(
                needed="positive limits",
                given=f"deadline_seconds={self.deadline_seconds}, memory_mib={self.memory_mib}",
                remedy="Raise them; there is no unlimited reward.",
            )

    def run(self, task: str, items: Sequence[tuple[Any, ...]], needs: Sequence[str] = ()) -> list[Outcome]:
        """What became of each item in the workers, within this reward's limits."""
        return shared_pool().run(
            f"logitless.rewards.tasks:{task}",
            items,
            deadline_seconds=self.deadline_seconds,
            memory_bytes=self.memory_mib * MEBIBYTE,
            needs=needs,
        )


def verdict_of(outcome: Outcome) -> Verdict:
    """The verdict that a task of ``tasks`` gave, or the status of the item that ended without one.

    Example:
        >>> verdict_of(Outcome("done", {"score": 1.0})).score
        1.0
        >>> verdict_of(Outcome("crashed", message="signal SIGSEGV"))
        Verdict(score=None, status='error', detail=(), message='crashed: signal SIGSEGV')
    """
    if outcome.status == "timeout":
        return Verdict(score=None, status="timeout", message=outcome.message)
    if outcome.status != "done":
        return Verdict(score=None, status="error", message=f"{outcome.status}: {outcome.message}")
    answer = outcome.value
    if "score" in answer:
        return Verdict.graded(float(answer["score"]), [(name, passed) for name, passed in answer.get("detail", ())])
    if "missing" in answer:
        return Verdict(score=None, status="missing", message=answer["missing"])
    return Verdict(score=None, status="error", message=answer["error"])


def require(module: str, package: str) -> None:
    """An optional package is installed.

    Raises:
        UnavailableError: it is not.

    Example:
        >>> require("json", "the standard library")
    """
    if importlib.util.find_spec(module) is None:
        raise UnavailableError(
            needed=f"the package {package}",
            given="an environment without it",
            remedy="Run pip install 'logitless[rewards]'.",
        )

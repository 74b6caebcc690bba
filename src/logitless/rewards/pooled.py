"""The common part of rewards that run in worker processes: limits, and verdicts from what became of an item."""

import importlib.util
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from logitless.errors import ConfigurationError, UnavailableError
from logitless.rewards.contract import TextReward
from logitless.rewards.pool import Outcome, Way, shared_pool
from logitless.rewards.sandbox import require_walls
from logitless.rewards.size import runs_nothing
from logitless.types import Verdict

MEBIBYTE = 1 << 20

_OVER_DEADLINE = re.compile(r"\b(?:over|slept for) [\d.e+-]+ s\b")
"""In the messages of ``pool``, ``worker`` and ``judge``."""

Sandbox: TypeAlias = Literal["required", "none"]


@dataclass(frozen=True, kw_only=True)
class PooledReward(TextReward):
    """A reward whose ``grade`` runs in worker processes.

    A completion that makes its own grading go over a limit, or end, is ``spoiled``: it scores ``spoiled_score``.

    Args:
        deadline_seconds: for one completion: of the processor's time while it computes, else of the clock.
        memory_mib: what one completion may take beyond what the worker has loaded.
        spoiled_score: the score of a completion that spoils its grading; null leaves it out as unscored, and then
            stalling pays better than a wrong answer.

    Raises:
        ConfigurationError: a limit that is not positive, or a score that is not finite.
    """

    way: ClassVar[Way] = "kept"
    """Whether a process that has judged a completion may judge another one: see ``pool.Way``."""

    deadline_seconds: float = 5.0
    memory_mib: int = 1024
    spoiled_score: float | None = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.deadline_seconds < math.inf and self.memory_mib > 0):
            raise ConfigurationError(
                needed="positive limits",
                given=f"deadline_seconds={self.deadline_seconds}, memory_mib={self.memory_mib}",
                remedy="Raise them; there is no unlimited reward.",
            )
        if self.spoiled_score is not None and not math.isfinite(self.spoiled_score):
            raise ConfigurationError(
                needed="a finite `spoiled_score`, or null",
                given=str(self.spoiled_score),
                remedy="Leave it out: 0 is what a wrong answer scores.",
            )

    def run(self, task: str, items: Sequence[tuple[Any, ...]], needs: Sequence[str] = ()) -> list[Outcome]:
        """What became of each item in the workers, within this reward's limits."""
        return shared_pool().run(
            f"logitless.rewards.tasks:{task}",
            items,
            deadline_seconds=self.deadline_seconds,
            memory_bytes=self.memory_mib * MEBIBYTE,
            needs=needs,
            ways=self.way,
        )

    def verdict(self, outcome: Outcome) -> Verdict:
        """The verdict of what became of an item."""
        return verdict_of(outcome, self.spoiled_score)


@dataclass(frozen=True, kw_only=True)
class ConfinedReward(PooledReward):
    """A reward of a library that hands a text to ``eval`` or to a parser built on it.

    Each completion has a process of its own inside walls, a fork of a clean one. Words and numbers, which run nothing
    whoever evaluates them, share a process.

    Args:
        sandbox: ``required`` refuses to start where walls cannot be had that keep a completion from writing files,
            from the network, and from other processes; ``none`` does without them, and keeps a process for each.
    """

    way: ClassVar[Way] = "confined"
    warm: ClassVar[str]
    """What a process does before it is forked, so that no fork has to: ``package.module:function``."""

    sandbox: Sandbox = "required"

    def check_walls(self) -> None:
        """There are walls, or the recipe does without.

        Raises:
            UnavailableError: there are none.
        """
        if self.sandbox == "required":
            require_walls("grader")

    def run_confined(
        self, task: str, items: Sequence[tuple[Any, ...]], texts: Sequence[str], needs: Sequence[str] = ()
    ) -> list[Outcome]:
        """What became of each item; its text is all that it has the library read, of a model or of a data file."""
        self.check_walls()
        apart: Way = "confined" if self.sandbox == "required" else "fresh"
        pool = shared_pool(self.name)
        pool.load(*needs)
        pool.load(self.warm, call=True)
        return pool.run(
            f"logitless.rewards.tasks:{task}",
            items,
            deadline_seconds=self.deadline_seconds,
            memory_bytes=self.memory_mib * MEBIBYTE,
            ways=["kept" if runs_nothing(text) else apart for text in texts],
        )

    def verdict(self, outcome: Outcome) -> Verdict:
        """The verdict of what became of an item; no text that left its grader alone scores outside [0, 1]."""
        verdict = super().verdict(outcome)
        if verdict.status == "graded" and verdict.score is not None and not 0 <= verdict.score <= 1:
            return spoiled(f"a score of {verdict.score}", self.spoiled_score)
        return verdict


def verdict_of(outcome: Outcome, spoiled_score: float | None = 0.0, blameless: bool = False) -> Verdict:
    """The verdict that a task of ``tasks`` gave, or that of the item that ended without one.

    Args:
        outcome: what became of the item.
        spoiled_score: the score of a completion that spoiled its grading; None leaves it unscored.
        blameless: an item whose process ended or went over its memory is the grader's own failure.

    Example:
        >>> verdict_of(Outcome("done", {"score": 1.0})).score
        1.0
        >>> verdict_of(Outcome("crashed", message="signal SIGSEGV"))
        Verdict(score=0.0, status='spoiled', detail=(), message='crashed: signal SIGSEGV', traceback='')
    """
    if outcome.status == "done":
        return _told(outcome.value, spoiled_score)
    if outcome.status == "idle":
        return Verdict(score=None, status="timeout", message=outcome.message)
    if outcome.status == "raised" or (blameless and outcome.status != "timeout"):
        message = f"{outcome.status}: {outcome.message}"
        return Verdict(score=None, status="error", message=message, traceback=outcome.traceback)
    return spoiled(f"{outcome.status}: {outcome.message}", spoiled_score)


def hit_deadline(verdict: Verdict) -> bool:
    """Whether a completion was not graded because a deadline passed, as the messages of workers and judges say.

    Example:
        >>> hit_deadline(Verdict(score=0.0, status="spoiled", message="timeout: over 2 s (signal SIGKILL)"))
        True
        >>> hit_deadline(Verdict(score=0.0, status="spoiled", message="5000000 characters, over 1000000"))
        False
    """
    return verdict.status in ("timeout", "spoiled") and _OVER_DEADLINE.search(verdict.message) is not None


def spoiled(why: str, score: float | None = 0.0, detail: Sequence[tuple[str, bool]] = ()) -> Verdict:
    """The verdict of a completion that made its own grading fail.

    Example:
        >>> spoiled("timeout: over 5 s").status, spoiled("timeout: over 5 s", None).status
        ('spoiled', 'timeout')
    """
    if score is None:
        return Verdict(score=None, status="timeout", message=why)
    return Verdict(score=score, status="spoiled", detail=tuple(detail), message=why)


def _told(answer: Any, spoiled_score: float | None) -> Verdict:
    """The verdict of an answer, which may come from a process that a text has taken over."""
    readers: dict[str, Callable[[Any], Verdict]] = {
        "score": lambda score: Verdict.graded(
            float(score), [(str(name), bool(passed)) for name, passed in answer.get("detail", ())]
        ),
        "missing": lambda why: Verdict(score=None, status="missing", message=str(why)),
        "error": lambda why: Verdict(score=None, status="error", message=str(why)),
        "idle": lambda why: Verdict(score=None, status="timeout", message=str(why)),
        "spoiled": lambda why: spoiled(str(why), spoiled_score),
    }
    try:
        [kind] = readers.keys() & answer.keys()
        return readers[kind](answer[kind])
    except (ValueError, TypeError, AttributeError, OverflowError):
        return spoiled(f"an answer that no grader gives: {answer!r:.80}", spoiled_score)


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

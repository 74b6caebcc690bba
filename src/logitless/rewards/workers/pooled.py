"""The common part of rewards that run in worker processes: limits, and verdicts from what became of an item."""

import importlib.util
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from logitless.errors import ConfigurationError, UnavailableError
from logitless.rewards.reward import TextReward
from logitless.rewards.workers.pool import Outcome, Way, shared_pool
from logitless.rewards.workers.sandbox import SandboxOption, require_sandbox
from logitless.rewards.workers.size import runs_nothing
from logitless.types import Verdict

MEBIBYTE = 1 << 20

_OVER_DEADLINE = re.compile(r"\b(?:over|slept for) [\d.e+-]+ s\b")
"""In the messages of ``pool``, ``worker`` and ``judge``."""


@dataclass(frozen=True, kw_only=True)
class PooledReward(TextReward):
    """A reward whose ``grade`` runs in worker processes.

    A completion that makes its own grading go over a limit, or end, is ``ungradable``: it scores ``ungradable_score``.

    Args:
        deadline_seconds: for one completion: of the processor's time while it computes, else of the clock.
        memory_mib: what one completion may take beyond what the worker has loaded.
        ungradable_score: of a completion that breaks its own grading; null leaves it out, so that stalling pays better
            than a wrong answer.

    Raises:
        ConfigurationError: a limit that is not positive, or a score that is not finite.
    """

    purpose: ClassVar[str] = "texts"
    """Of the pool: see ``pool.shared_pool``."""

    deadline_seconds: float = 5.0
    memory_mib: int = 1024
    ungradable_score: float | None = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.deadline_seconds < math.inf and self.memory_mib > 0):
            raise ConfigurationError(
                needed="positive limits",
                given=f"deadline_seconds={self.deadline_seconds}, memory_mib={self.memory_mib}",
                remedy="Raise them; there is no unlimited reward.",
            )
        if self.ungradable_score is not None and not math.isfinite(self.ungradable_score):
            raise ConfigurationError(
                needed="a finite `ungradable_score`, or null",
                given=str(self.ungradable_score),
                remedy="Leave it out: 0 is what a wrong answer scores.",
            )

    def check_one_source(self, knob: str, column: str | None) -> None:
        """What a text is compared with is that knob's for all rows, or a column's for each.

        Raises:
            ConfigurationError: both or neither is given.
        """
        given = getattr(self, knob) is not None
        if given == (column is not None):
            raise ConfigurationError(
                needed=f"either `{knob}` or `column`",
                given="both" if given else "neither",
                remedy=f"Give one {knob} for all rows, or the column that holds each row's {knob}.",
            )

    def run(
        self,
        task: str,
        items: Sequence[tuple[Any, ...]],
        needs: Sequence[str] = (),
        ways: Way | Sequence[Way] = "kept",
        environment: Mapping[str, str] | None = None,
    ) -> list[Outcome]:
        """What became of each item in the workers, within this reward's limits: see ``pool.WorkerPool.run``."""
        return shared_pool(self.purpose).run(
            f"logitless.rewards.workers.tasks:{task}",
            items,
            deadline_seconds=self.deadline_seconds,
            memory_bytes=self.memory_mib * MEBIBYTE,
            needs=needs,
            ways=ways,
            environment=environment,
        )

    def verdict(self, outcome: Outcome) -> Verdict:
        """The verdict of what became of an item."""
        return verdict_of(outcome, self.ungradable_score)


@dataclass(frozen=True, kw_only=True)
class ConfinedReward(PooledReward):
    """A reward of a library that hands a text to ``eval`` or to a parser built on it.

    Each completion has a process of its own in a sandbox, a fork of a clean one. Words and numbers, which run nothing
    whoever evaluates them, share a process.

    Args:
        sandbox: ``required`` refuses to start without a sandbox; ``none`` gives each completion a process alone.
    """

    warm: ClassVar[str]
    """What a process does before it is forked, so that no fork has to: ``package.module:function``."""

    sandbox: SandboxOption = "required"

    def run_confined(
        self, task: str, items: Sequence[tuple[Any, ...]], texts: Sequence[str], needs: Sequence[str] = ()
    ) -> list[Outcome]:
        """What became of each item; its text is all that it has the library read, of a model or of a data file."""
        require_sandbox("grader", self.sandbox)
        apart: Way = "confined" if self.sandbox == "required" else "fresh"
        shared_pool(self.purpose).load(*needs)
        shared_pool(self.purpose).load(self.warm, call=True)
        return self.run(task, items, ways=["kept" if runs_nothing(text) else apart for text in texts])

    def verdict(self, outcome: Outcome) -> Verdict:
        """The verdict of what became of an item; no text that left its grader alone scores outside [0, 1]."""
        verdict = super().verdict(outcome)
        if verdict.status == "graded" and verdict.score is not None and not 0 <= verdict.score <= 1:
            return ungradable(f"a score of {verdict.score}", self.ungradable_score)
        return verdict


def verdict_of(outcome: Outcome, ungradable_score: float | None = 0.0, blameless: bool = False) -> Verdict:
    """The verdict that a task of ``tasks`` gave, or that of the item that ended without one.

    Args:
        outcome: what became of the item.
        ungradable_score: the score of a completion that made its own grading fail; None leaves it unscored.
        blameless: an item whose process ended or went over its memory is the grader's own failure.

    Example:
        >>> verdict_of(Outcome("done", {"score": 1.0})).score
        1.0
        >>> verdict_of(Outcome("crashed", message="signal SIGSEGV"))
        Verdict(score=0.0, status='ungradable', detail=(), message='crashed: signal SIGSEGV', traceback='')
    """
    if outcome.status == "done":
        return _told(outcome.value, ungradable_score)
    if outcome.status == "idle":
        return Verdict(score=None, status="timeout", message=outcome.message)
    if outcome.status == "raised" or (blameless and outcome.status != "timeout"):
        message = f"{outcome.status}: {outcome.message}"
        return Verdict(score=None, status="error", message=message, traceback=outcome.traceback)
    return ungradable(f"{outcome.status}: {outcome.message}", ungradable_score)


def hit_deadline(verdict: Verdict) -> bool:
    """Whether a completion was not graded because a deadline passed, as the messages of workers and judges say.

    Example:
        >>> hit_deadline(Verdict(score=0.0, status="ungradable", message="timeout: over 2 s (signal SIGKILL)"))
        True
        >>> hit_deadline(Verdict(score=0.0, status="ungradable", message="5000000 characters, over 1000000"))
        False
    """
    return verdict.status in ("timeout", "ungradable") and _OVER_DEADLINE.search(verdict.message) is not None


def ungradable(why: str, score: float | None = 0.0, detail: Sequence[tuple[str, bool]] = ()) -> Verdict:
    """The verdict of a completion that made its own grading fail.

    Example:
        >>> ungradable("timeout: over 5 s").status, ungradable("timeout: over 5 s", None).status
        ('ungradable', 'timeout')
    """
    if score is None:
        return Verdict(score=None, status="timeout", message=why)
    return Verdict(score=score, status="ungradable", detail=tuple(detail), message=why)


def _told(answer: Any, ungradable_score: float | None) -> Verdict:
    """The verdict of an answer, which may come from a process that a text has taken over."""
    readers: dict[str, Callable[[Any], Verdict]] = {
        "score": lambda score: Verdict.graded(
            float(score), [(str(name), bool(passed)) for name, passed in answer.get("detail", ())]
        ),
        "missing": lambda why: Verdict(score=None, status="missing", message=str(why)),
        "error": lambda why: Verdict(score=None, status="error", message=str(why)),
        "idle": lambda why: Verdict(score=None, status="timeout", message=str(why)),
        "ungradable": lambda why: ungradable(str(why), ungradable_score),
    }
    try:
        [kind] = readers.keys() & answer.keys()
        return readers[kind](answer[kind])
    except (ValueError, TypeError, AttributeError, OverflowError):
        return ungradable(f"an answer that no grader gives: {answer!r:.80}", ungradable_score)


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

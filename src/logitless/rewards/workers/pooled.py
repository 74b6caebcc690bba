"""Base of rewards that run in worker processes: limits, and verdicts made of outcomes."""

import importlib.util
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from logitless.errors import ConfigurationError, UnavailableError
from logitless.rewards.reward import TextReward
from logitless.rewards.workers.pool import Outcome, Way, shared_pool
from logitless.rewards.workers.sandbox import SandboxOption, require_sandbox
from logitless.rewards.workers.size import runs_nothing
from logitless.types import Verdict, VerdictStatus

MEBIBYTE = 1 << 20

_OVER_DEADLINE = re.compile(r"\b(?:over|slept for) [\d.e+-]+ s\b")
"""Matches the messages of ``pool``, ``worker`` and ``judge``."""


@dataclass(frozen=True, kw_only=True)
class PooledReward(TextReward):
    """A reward whose ``grade`` runs in worker processes.

    A completion that makes its grading go over a limit or crash is ``ungradable``, with score ``ungradable_score``.

    Args:
        deadline_seconds: for one completion: processor time while it computes, wall-clock time while it waits.
        memory_mib: for one completion, beyond what the worker has loaded.
        ungradable_score: of a completion that makes its own grading fail; null leaves it out, which rewards stalling
            more than a wrong answer.

    Raises:
        ConfigurationError: a limit that is not positive, or a score that is not finite.
    """

    purpose: ClassVar[str] = "texts"
    """Which pool runs it: see ``pool.shared_pool``."""

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

    def check_one_source(self, option: str, column: str | None) -> None:
        """Raises ConfigurationError unless exactly one is given: the option, for all rows, or a column."""
        given = getattr(self, option) is not None
        if given == (column is not None):
            raise ConfigurationError(
                needed=f"either `{option}` or `column`",
                given="both" if given else "neither",
                remedy=f"Give one {option} for all rows, or the column that holds each row's {option}.",
            )

    def run(
        self,
        task: str,
        items: Sequence[tuple[Any, ...]],
        needs: Sequence[str] = (),
        ways: Way | Sequence[Way] = "kept",
        environment: Mapping[str, str] | None = None,
    ) -> list[Outcome]:
        """Run a function of ``tasks`` on items, within this reward's limits: see ``pool.WorkerPool.run``."""
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
        """The verdict for an outcome."""
        return verdict_of(outcome, self.ungradable_score)


@dataclass(frozen=True, kw_only=True)
class ConfinedReward(PooledReward):
    """A reward by a library that passes the text to ``eval`` or to a parser built on it.

    Each completion gets a fork of a clean process, in a sandbox. Texts of words and numbers alone are harmless to
    evaluate, and share a process.

    Args:
        sandbox: ``required`` refuses to start without a sandbox; ``none`` gives each completion a process, but no
            sandbox.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    """Paths as ``package.module:name`` of the library, imported before the process is forked."""

    warm: ClassVar[str]
    """``package.module:function``, called before the process is forked, so that forks start with its caches filled."""

    sandbox: SandboxOption = "required"

    def run_confined(
        self, task: str, items: Sequence[tuple[Any, ...]], texts: Sequence[str], *, harmless: str | None = None
    ) -> list[Outcome]:
        """The outcome of each item.

        Args:
            task: of ``tasks``.
            items: its arguments.
            texts: all that the library parses of each item, of the model and of the data.
            harmless: a task that evaluates nothing of the texts, tried first in a shared process. An item for which it
                returns None is left to ``task``.
        """
        require_sandbox("grader", self.sandbox)
        apart: Way = "confined" if self.sandbox == "required" else "fresh"
        shared_pool(self.purpose).load(*self.needs)
        shared_pool(self.purpose).load(self.warm, call=True)
        without_value = Outcome("done")
        found = [without_value] * len(items) if harmless is None else self.run(harmless, items)
        rest = [n for n, outcome in enumerate(found) if outcome == without_value]
        ways: list[Way] = ["kept" if runs_nothing(texts[n]) else apart for n in rest]
        for n, outcome in zip(rest, self.run(task, [items[n] for n in rest], ways=ways), strict=True):
            found[n] = outcome
        return found

    def verdict(self, outcome: Outcome) -> Verdict:
        """The verdict for an outcome."""
        verdict = super().verdict(outcome)
        if verdict.status == "graded" and verdict.score is not None and not 0 <= verdict.score <= 1:
            # Only a text that has taken the grader over can cause this.
            return ungradable(f"a score of {verdict.score}", self.ungradable_score)
        return verdict


def verdict_of(outcome: Outcome, ungradable_score: float | None = 0.0, blameless: bool = False) -> Verdict:
    """The verdict for an outcome of a task of ``tasks``.

    Args:
        outcome: of the item.
        ungradable_score: score of a completion that made its own grading fail; None leaves it unscored.
        blameless: count a crash, or going over the memory limit, as an ``error`` of the grader.

    Example:
        >>> verdict_of(Outcome("done", {"score": 1.0})).score
        1.0
        >>> verdict_of(Outcome("crashed", message="signal SIGSEGV"))
        Verdict(score=0.0, status='ungradable', detail=(), message='crashed: signal SIGSEGV', traceback='')
    """
    if outcome.status == "done":
        return _verdict_in(outcome.value, ungradable_score)
    if outcome.status == "idle":
        return Verdict(score=None, status="timeout", message=outcome.message)
    if outcome.status == "raised" or (blameless and outcome.status != "timeout"):
        message = f"{outcome.status}: {outcome.message}"
        return Verdict(score=None, status="error", message=message, traceback=outcome.traceback)
    return ungradable(f"{outcome.status}: {outcome.message}", ungradable_score)


def hit_deadline(verdict: Verdict) -> bool:
    """Whether a deadline kept a completion from being graded, by the verdict's message.

    Example:
        >>> hit_deadline(Verdict(score=0.0, status="ungradable", message="timeout: over 2 s (signal SIGKILL)"))
        True
    """
    return verdict.status in ("timeout", "ungradable") and _OVER_DEADLINE.search(verdict.message) is not None


def ungradable(why: str, score: float | None = 0.0, detail: Sequence[tuple[str, bool]] = ()) -> Verdict:
    """The verdict on a completion that made its own grading fail.

    Example:
        >>> ungradable("timeout: over 5 s").status, ungradable("timeout: over 5 s", None).status
        ('ungradable', 'timeout')
    """
    if score is None:
        return Verdict(score=None, status="timeout", message=why)
    return Verdict(score=score, status="ungradable", detail=tuple(detail), message=why)


def _verdict_in(answer: Any, ungradable_score: float | None) -> Verdict:
    """The verdict in a task's result, which may come from a process that a text has taken over."""
    without_score: dict[str, VerdictStatus] = {"missing": "missing", "error": "error", "idle": "timeout"}
    try:
        [kind] = {"score", "ungradable", *without_score} & answer.keys()
        if kind == "score":
            detail = [(str(name), bool(passed)) for name, passed in answer.get("detail", ())]
            return Verdict.graded(float(answer["score"]), detail)
        if kind == "ungradable":
            return ungradable(str(answer[kind]), ungradable_score)
        return Verdict(score=None, status=without_score[kind], message=str(answer[kind]))
    except (ValueError, TypeError, AttributeError, OverflowError):
        return ungradable(f"an answer that no grader gives: {answer!r:.80}", ungradable_score)


def require(module: str, package: str) -> None:
    """Raises UnavailableError unless an optional package is installed."""
    if importlib.util.find_spec(module) is None:
        raise UnavailableError(
            needed=f"the package {package}",
            given="an environment without it",
            remedy="Run pip install 'logitless[rewards]'.",
        )

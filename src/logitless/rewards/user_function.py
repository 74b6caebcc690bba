"""Reward functions with TRL's signature: run in worker processes by import path, or in this process if trusted."""

import asyncio
import functools
import inspect
import logging
import os
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from logitless.errors import ConfigurationError
from logitless.own_code import FORMS, with_whole_path
from logitless.rewards.reward import (
    RESERVED_ARGUMENTS,
    TRAINER_ARGUMENTS,
    Batch,
    Columns,
    Text,
    TextReward,
    TokenIds,
    TrlFunction,
    check_reserved,
)
from logitless.rewards.workers.pool import Outcome, Way, shared_pool
from logitless.rewards.workers.pooled import PooledReward, verdict_of
from logitless.rewards.workers.sandbox import require_sandbox
from logitless.rewards.workers.tasks import accepted_columns, awaited, missing_arguments, scores_of
from logitless.types import Verdict

logger = logging.getLogger("logitless")

TRIED = "The answer is 4."
"""A completion that ``Function.check`` has scored: a mean over an empty one may well be NaN."""


@dataclass(frozen=True, kw_only=True)
class Function(PooledReward):
    """The score from the function at an import path, called in a worker process for one completion at a time.

    The function has TRL's signature, ``f(prompts, completions, completion_ids, **columns) -> list[float | None]``, sync
    or async; every list has one value. It gets the columns that it names, or all if it has ``**kwargs``. Statuses:

    - ``missing``: it returned None.
    - ``error``: it raised, returned no finite number or another number of values than one, ended its process, went over
      its memory, or left processes running.
    - ``timeout``: it waited for something beyond its deadline.
    - ``ungradable``: it computed beyond its deadline, which a completion can cause, or slept beyond it in a sandbox.

    The module is imported once, in a process with an empty environment, and each completion gets a fork of it: load
    large things at import, not on first use. Printed output is lost.

    Args:
        path: ``package.module:function``, or ``./file.py:function`` from the recipe's folder.
        messages: pass prompt and completion as lists of messages, as TRL does for conversations.
        process: ``fresh``: a process for each completion; ``confined``: the same in a sandbox, for a function that
            evaluates the completion; ``kept``: many completions share a process, for a function that runs none of them.
        environment: variables of this process that the function finds in ``os.environ``.
        deadline_seconds: for one completion: processor time while it computes, wall-clock time while it waits.

    Example:
        >>> Function(path="math:fsum").metric_name
        'fsum'
    """

    purpose: ClassVar[str] = "functions"

    name: Literal["function"] = "function"
    path: str
    messages: bool = False
    process: Way = "fresh"
    environment: tuple[str, ...] = ()
    deadline_seconds: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        place, _, function = self.path.rpartition(":")
        if not (place and function):
            raise ConfigurationError(
                needed=f"an import path like {FORMS}",
                given=repr(self.path),
                remedy="Put a colon between the module or the file and the function.",
            )
        if self.process == "kept" and self.environment:
            raise ConfigurationError(
                needed="a process for each completion if it is to have environment variables",
                given="`process: kept` and `environment`",
                remedy="Leave one of them out.",
            )

    @property
    def metric_name(self) -> str:
        """The label, or the function's own name."""
        return self.label or self.path.rpartition(":")[2]

    def check(self, columns: Columns) -> None:
        """Check that workers can import the function, that its arguments are columns, and what it returns.

        It is called for two completions of the first row, an empty one and ``TRIED``. If it fails there, or has no
        finite score for one of them, completions may yet do better; a function that fails for both is told of.

        Raises:
            ConfigurationError: it cannot be imported, an argument without a default is no column, a column has a
                name of ``RESERVED_ARGUMENTS``, or it returns something else than a list with one finite number or None.
        """
        check_reserved(columns)
        if self.process == "confined":
            require_sandbox("grader")
        self._variables()
        names = [*RESERVED_ARGUMENTS, *columns]
        task = "logitless.rewards.workers.tasks:missing_arguments_at"
        pool = shared_pool(self.purpose)
        [outcome] = pool.run(task, [(self._located, names)], needs=(self._located,), ways="fresh")
        if outcome.status != "done":
            raise ConfigurationError(
                needed=f"a function at {self.path} whose arguments Python can name",
                given=outcome.message,
                remedy="Write a plain function: def reward(completions, **columns).",
            )
        _check_arguments(self.path, outcome.value, columns)
        row = {name: values[0] for name, values in columns.items() if values}
        items = [self._item(row, "", text, []) for text in ("", TRIED)]
        outcomes = self.run("call_function", items, (self._located,), self.process, self._variables())
        if all(outcome.status != "done" for outcome in outcomes):
            _warn_of_failing(self.metric_name, outcomes[-1], self.deadline_seconds)
        returned = [outcome.value for outcome in outcomes if outcome.status == "done"]
        wrong = [value for value in returned if "error" in value]
        if wrong and (len(wrong) == len(returned) or any("malformed" in value for value in wrong)):
            raise ConfigurationError(
                needed="a reward function that returns a list with a score, a number or None, for each completion",
                given=f"{self.path}: {wrong[0]['error']}",
                remedy="Return for example [0.5]: every call has one completion.",
            )

    def grade(self, texts: Sequence[str], batch: Batch) -> list[Verdict]:
        check_reserved(batch.columns)
        ids = [None] * len(texts) if batch.completion_ids is None else batch.completion_ids
        items = []
        for row in range(len(texts)):
            columns = {name: values[row] for name, values in batch.columns.items()}
            items.append(self._item(columns, batch.prompts[row], batch.completions[row], ids[row]))
        if self.process == "confined":
            require_sandbox("grader")
        outcomes = self.run("call_function", items, (self._located,), self.process, self._variables())
        return [verdict_of(outcome, self.ungradable_score, blameless=True) for outcome in outcomes]

    @property
    def _located(self) -> str:
        """The path with an absolute file name: workers may have started in another folder."""
        return with_whole_path(self.path, Path.cwd())

    def _variables(self) -> dict[str, str]:
        absent = [name for name in self.environment if name not in os.environ]
        if absent:
            raise ConfigurationError(
                needed="every variable of `environment` in this process's environment",
                given=f"none called {' or '.join(absent)}",
                remedy="Set it, or leave the name out.",
            )
        return {name: os.environ[name] for name in self.environment}

    def _item(self, row: dict[str, Any], prompt: Text, completion: Text, ids: TokenIds | None) -> tuple[Any, ...]:
        """Arguments of ``call_function`` for one completion."""
        arguments = {
            **row,
            "prompts": self._converted(prompt, "user"),
            "completions": self._converted(completion, "assistant"),
        }
        if ids is not None:
            arguments["completion_ids"] = np.asarray(ids).tolist()
        return self._located, arguments

    def _converted(self, text: Text, role: str) -> Text:
        return [{"role": role, "content": text}] if self.messages and isinstance(text, str) else text


@functools.cache  # once, and not for each source of the data
def _warn_of_failing(name: str, outcome: Outcome, deadline_seconds: float) -> None:
    does, why = "raises" if outcome.status == "raised" else "fails", outcome.message
    if outcome.status in ("timeout", "idle"):
        does = f"hits its deadline of {deadline_seconds:g} s"
        why = "what it imports or loads, load at the top of its file; if it needs longer, raise its deadline_seconds"
    logger.warning("reward %r %s at an empty completion and at %r: %s", name, does, TRIED, why)


@dataclass(frozen=True, kw_only=True)
class TrustedFunction(TextReward):
    """A reward function with TRL's signature that runs in this process, on the whole batch at once.

    For functions that hold a connection or a model, or that score a batch as a whole. If it hangs or crashes, so does
    the run; if it raises or returns another number of values, the whole batch is an ``error``.

    Args:
        function: sync or async; an async one must not need the caller's event loop.

    Example:
        >>> def shortness(prompts, completions, **columns):
        ...     return [1 / len(completion) for completion in completions]
        >>> TrustedFunction(function=shortness).verdicts(["Go on."], ["four"], {})[0].score
        0.25
    """

    name: str = "trusted_function"
    function: TrlFunction

    @property
    def metric_name(self) -> str:
        """The label, or the function's own name."""
        return self.label or str(getattr(self.function, "__name__", type(self.function).__name__))

    def check(self, columns: Columns) -> None:
        """Check that its arguments are columns, and that no column has a name of ``RESERVED_ARGUMENTS``."""
        check_reserved(columns)
        missing = missing_arguments(self.function, [*RESERVED_ARGUMENTS, *columns])
        _check_arguments(self.metric_name, missing, columns)

    def grade(self, texts: Sequence[str], batch: Batch) -> list[Verdict]:
        check_reserved(batch.columns)
        arguments = {**batch.columns, "prompts": batch.prompts, "completions": batch.completions}
        if batch.completion_ids is not None:
            arguments["completion_ids"] = [np.asarray(ids).tolist() for ids in batch.completion_ids]
        taken = accepted_columns(self.function, list(arguments))
        try:
            scores = scores_of(_result(self.function, {name: arguments[name] for name in taken}), len(texts))
        except Exception as error:
            message = f"raised: {type(error).__name__}: {error}"
            failure = Verdict(score=None, status="error", message=message, traceback=traceback.format_exc())
            return [failure] * len(texts)
        return [verdict_of(Outcome("done", score)) for score in scores]


def _check_arguments(function: str, missing: Sequence[str], columns: Columns) -> None:
    if missing:
        of_trl, remedies = [name for name in missing if name in TRAINER_ARGUMENTS], []
        if of_trl:
            remedies.append(
                f"Only TRL's trainer passes {', '.join(of_trl)}: set the default None, and test for it before use."
            )
        if len(of_trl) < len(missing):
            others = "the others" if of_trl else "them"
            remedies.append(f"Rename {others}, give them a default, or map a column to them in the data section.")
        raise ConfigurationError(
            needed=f"arguments of the reward function {function} that are {', '.join(sorted(RESERVED_ARGUMENTS))} or a "
            f"column of the data ({', '.join(sorted(columns)) or 'there is none'})",
            given=", ".join(missing),
            remedy=" ".join(remedies),
        )


def _result(function: TrlFunction, arguments: dict[str, Any]) -> Any:
    """The return value of a function, awaited if it is async."""
    result = function(**arguments)
    if not inspect.isawaitable(result):
        return result
    with ThreadPoolExecutor(max_workers=1) as thread:  # this thread may have a running event loop
        return thread.submit(lambda: asyncio.run(awaited(result))).result()

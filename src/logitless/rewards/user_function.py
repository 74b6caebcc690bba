"""A user's own reward function, in TRL's shape: in workers by its import path, or in this process if it is trusted."""

import asyncio
import inspect
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from logitless.errors import ConfigurationError
from logitless.rewards.contract import Batch, Columns, Text, TextReward, TrlFunction, check_reserved
from logitless.rewards.pool import Outcome, shared_pool
from logitless.rewards.pooled import PooledReward, verdict_of
from logitless.rewards.tasks import accepted_columns, score_of
from logitless.types import Verdict


@dataclass(frozen=True, kw_only=True)
class Function(PooledReward):
    """What the function at an import path returns, called in a worker for one completion at a time.

    The function has TRL's shape, ``f(prompts, completions, completion_ids, **columns) -> list[float | None]``, sync or
    async; every list it is given holds one value. It is given the columns that it names, or all where it has
    ``**kwargs``. None means that the completion cannot be scored (status ``missing``). Raising, a value that is no
    finite number, another number of values than one, ending its process, going over its memory, or leaving processes
    behind is an ``error``; going over its deadline a ``timeout``. What it prints is lost.

    Args:
        path: ``package.module:function``.
        messages: hand over prompt and completion as lists of messages, as TRL does for conversations.
        deadline_seconds: wall clock for one completion.

    Example:
        >>> Function(path="math:fsum").metric_name
        'fsum'
    """

    name: Literal["function"] = "function"
    path: str
    messages: bool = False
    deadline_seconds: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        module, colon, function = self.path.partition(":")
        if not (module and colon and function):
            raise ConfigurationError(
                needed="an import path like 'package.module:function'",
                given=repr(self.path),
                remedy="Put a colon between the module and the function.",
            )

    @property
    def metric_name(self) -> str:
        """The label, or the function's own name."""
        return self.label or self.path.rpartition(":")[2]

    def check(self, columns: Columns) -> None:
        """Workers can import the function, and no column has the name of another argument."""
        check_reserved(columns)
        shared_pool().load(self.path)

    def grade(self, texts: Sequence[str], batch: Batch) -> list[Verdict]:
        """One verdict a text."""
        check_reserved(batch.columns)
        items = []
        for row in range(len(texts)):
            arguments: dict[str, Any] = {name: values[row] for name, values in batch.columns.items()}
            arguments["prompts"] = self._shaped(batch.prompts[row], "user")
            arguments["completions"] = self._shaped(batch.completions[row], "assistant")
            if batch.completion_ids is not None:
                arguments["completion_ids"] = list(batch.completion_ids[row])
            items.append((self.path, arguments))
        return [verdict_of(outcome) for outcome in self.run("call_function", items, (self.path,))]

    def _shaped(self, text: Text, role: str) -> Text:
        return [{"role": role, "content": text}] if self.messages and isinstance(text, str) else text


@dataclass(frozen=True, kw_only=True)
class TrustedFunction(TextReward):
    """A reward function of TRL's shape that runs in this process, on the whole batch at once.

    Nothing stops it when it hangs, and a crash is a crash of the run: for functions that hold a connection or a model,
    or judge a batch as a whole. Where it raises or returns another number of values, the whole batch is an error.

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
        """No column has the name of another argument."""
        check_reserved(columns)

    def grade(self, texts: Sequence[str], batch: Batch) -> list[Verdict]:
        """One verdict a text."""
        check_reserved(batch.columns)
        arguments = {**batch.columns, "prompts": batch.prompts, "completions": batch.completions}
        if batch.completion_ids is not None:
            arguments["completion_ids"] = batch.completion_ids
        taken = accepted_columns(self.function, list(arguments))
        try:
            values = list(_result(self.function, {name: arguments[name] for name in taken}))
        except Exception as error:
            failure = Verdict(score=None, status="error", message=f"raised: {type(error).__name__}: {error}")
            return [failure] * len(texts)
        if len(values) != len(texts):
            reason = f"{len(texts)} values expected, {len(values)} returned"
            return [Verdict(score=None, status="error", message=reason)] * len(texts)
        return [verdict_of(Outcome("done", score_of(value))) for value in values]


def _result(function: TrlFunction, arguments: dict[str, Any]) -> Any:
    """What a function returns; what it awaits runs on an event loop of its own, in a thread of its own."""
    result = function(**arguments)
    if not inspect.isawaitable(result):
        return result

    async def awaited() -> Any:
        return await result

    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(lambda: asyncio.run(awaited())).result()

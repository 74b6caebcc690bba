"""Rewards in both directions between logitless and `verifiers`, whose tasks judge a trace by decorated methods.

``task_reward`` makes a logitless reward a method of a task; ``task_function`` makes a task a reward function of TRL's
shape, which TRL takes as it is and logitless by its import path. Written for verifiers 0.4, where the rubric of older
versions is a task's ``@reward`` methods. Gives up what needs a sandbox or a judge model: no runtime is started here.
"""

import asyncio
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from logitless.errors import ConfigurationError, InputError, UnavailableError
from logitless.rewards.contract import RESERVED_ARGUMENTS, Text, TextReward, TrlFunction, completion_text


def task_reward(reward: TextReward, *, weight: float = 1.0) -> Callable[..., Any]:
    """A logitless reward as a ``@reward`` method of a verifiers task.

    The task's data are the reward's columns, one row of them. A completion without a score raises in the method, by
    which verifiers leaves the reward unscored and names the reason: it is not a wrong answer.

    Args:
        reward: judges the last message that the model wrote, as it stands.
        weight: factor in the task's reward.

    Returns:
        What to assign inside the class of a task; the trace names it as ``reward.metric_name``.

    Raises:
        UnavailableError: verifiers is not installed.

    Example:
        >>> import importlib.util
        >>> from logitless.rewards.exact import Exact
        >>> not importlib.util.find_spec("verifiers") or task_reward(Exact()).reward
        True
    """
    verifiers = _verifiers()

    async def judge(_self: object, task: Any, trace: Any) -> float:
        columns = {name: [value] for name, value in task.model_dump().items() if name not in RESERVED_ARGUMENTS}
        written = trace.assistant_messages
        text = (written[-1].content or "") if written else ""
        [verdict] = await asyncio.to_thread(reward.verdicts, [task.prompt_text], [text], columns)
        if verdict.score is None:
            raise InputError(
                needed=f"a completion that {reward.metric_name!r} can score",
                given=f"one with status {verdict.status!r} ({verdict.message})",
                remedy="Leave the trace out of training.",
            )
        return verdict.score

    judge.__name__ = reward.metric_name
    return verifiers.reward(judge, weight=weight)


def task_function(task_type: type[Any], config: Any = None) -> TrlFunction:
    """A verifiers task as an async reward function of TRL's shape.

    Each completion becomes a finished trace of one turn, of a task whose data are the prompt and the row's columns.

    ``score = sum_name weight[name] * rewards[name]``

    Args:
        task_type: subclass of ``verifiers.v1.Task``. Columns that its data do not declare are left out.
        config: of the task; None for its default.

    Returns:
        A function that gives None where the task records no reward, and raises what the task raises.

    Raises:
        UnavailableError: verifiers is not installed.
        ConfigurationError: not a task, or one whose rewards need a runtime or a judge model.

    Example:
        >>> import importlib.util
        >>> installed = importlib.util.find_spec("verifiers")
        >>> not installed or task_function(importlib.import_module("verifiers.v1").Task).__name__ == "Task"
        True
    """
    verifiers = _verifiers()
    if not (isinstance(task_type, type) and issubclass(task_type, verifiers.Task)):
        raise ConfigurationError(
            needed="a subclass of verifiers.v1.Task", given=repr(task_type), remedy="Give the task, not its taskset."
        )
    _check_offline(task_type, config)

    async def judge(prompts: Sequence[Text], completions: Sequence[Text], **columns: Any) -> list[float | None]:
        scores = []
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            declared = task_type.data_type().model_fields
            given = {name: values[row] for name, values in columns.items() if name in declared}
            task = task_type(task_type.data_type()(**(given | {"prompt": prompt})), config)
            trace = _trace(verifiers, task, completion_text(completion))
            await task.score(trace)
            recorded = list(trace.rewards.values())
            scores.append(trace.reward if recorded and None not in recorded else None)
        return scores

    judge.__name__ = task_type.__name__
    return judge


def _verifiers() -> Any:
    try:
        return importlib.import_module("verifiers.v1")
    except ImportError as error:
        raise UnavailableError(
            needed="the package verifiers, 0.4 or later",
            given=str(error),
            remedy="Run pip install 'logitless[verifiers]'.",
        ) from error


def _check_offline(task_type: Any, config: Any) -> None:
    """Scoring without a runtime leaves out, in silence, what needs one: refuse it beforehand."""
    methods = [getattr(task_type, name) for name in dir(task_type)]
    in_sandbox = [
        method.__name__
        for method in methods
        if callable(method) and hasattr(method, "reward") and "runtime" in inspect.signature(method).parameters
    ]
    judges = list(getattr(config, "judges", ()))
    if in_sandbox or judges:
        raise ConfigurationError(
            needed="a task whose rewards read the trace alone",
            given=f"rewards with a runtime {in_sandbox}" if in_sandbox else f"{len(judges)} judge models",
            remedy="Run that task in verifiers itself.",
        )


def _trace(verifiers: Any, task: Any, text: str) -> Any:
    """The trace of a task that one message answered."""
    prompt = verifiers.MessageNode(message={"role": "user", "content": task.data.prompt_text})
    answer = verifiers.MessageNode(parent=0, message={"role": "assistant", "content": text}, sampled=True)
    return verifiers.Trace(
        task=verifiers.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        agent=verifiers.AgentInfo(config=verifiers.AgentConfig()),
        nodes=[prompt, answer],
        is_completed=True,
        ok=True,
    )

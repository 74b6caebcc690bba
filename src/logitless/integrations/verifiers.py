"""Tasks of `verifiers` as environments, and rewards converted in both directions; for verifiers 0.4 and later.

- ``play_task`` runs an episode (``rollout.environment: {name: harness}``): verifiers runs a task with its own harness
  program, tools and rewards against the policy's endpoint.
- ``task_rows`` are the rows to train on; ``python -m logitless.integrations.verifiers TASKSET`` prints them as JSON.
- ``task_reward`` makes a logitless reward a ``@reward`` method of a task.
- ``task_function`` makes a task a reward function with TRL's signature.

Not supported: environments of several agents; in ``task_function`` rewards that need a sandbox or a judge model.
"""

import asyncio
import functools
import importlib
import inspect
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from logitless.errors import ConfigurationError, InputError, UnavailableError
from logitless.rewards.reward import RESERVED_ARGUMENTS, Text, TextReward, TrlFunction, completion_text


def play_task(
    base_url: str,
    row: Mapping[str, Any],
    seed: int,  # noqa: ARG001 - the endpoint samples by it; a task has its own randomness
    *,
    taskset: str,
    config: Mapping[str, Any] | None = None,
    harness: str = "null",
    max_turns: int | None = None,
) -> float | None:
    """Run one task against an endpoint; for ``rollout.environment.function`` of a recipe.

    The harness's program runs in a process on this machine, with your rights.

    Args:
        base_url: of the episode.
        row: of ``task_rows``; its ``idx`` is the task's number.
        seed: not used.
        taskset: name of an installed package that exports one, or of a module.
        config: of the taskset, besides its name.
        harness: the program that talks to the policy; ``null`` is a chat with the task's tools.
        max_turns: of the policy; None: those of ``rollout.limits``.

    Returns:
        The task's reward, the weighted sum of its ``@reward`` methods.

    Raises:
        UnavailableError: verifiers is not installed.
        ConfigurationError: no such taskset.
        InputError: a row without the task's number.
        RuntimeError: verifiers could not run or score it; that episode has no reward.
    """
    verifiers = _verifiers()
    if not isinstance(row.get("idx"), int):
        raise InputError(
            needed="rows with the number of a task",
            given=f"idx={row.get('idx')!r}",
            remedy="Write the data by python -m logitless.integrations.verifiers TASKSET > tasks.jsonl.",
        )
    task = _task(taskset, json.dumps(dict(config or {}), sort_keys=True), row["idx"])
    agent = verifiers.make_agent(
        verifiers.AgentConfig.model_validate(
            {
                "harness": {"id": harness},
                "runtime": verifiers.SubprocessConfig(),
                "client": verifiers.EvalClientConfig(base_url=base_url, api_key_var="LOGITLESS_HAS_NO_KEY"),
                "model": "policy",
                "max_turns": max_turns,
            }
        )
    )
    trace = asyncio.run_coroutine_threadsafe(agent.run(task), _loop()).result()
    if not trace.ok:
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in trace.errors) or "no trace")
    return float(trace.reward)


def task_rows(taskset: str, config: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """A taskset as rows of a data file: ``id``, ``prompt`` and ``idx``, the task's number.

    Args:
        taskset, config: as of ``play_task``.

    Raises:
        UnavailableError: verifiers is not installed.
        ConfigurationError: no such taskset, or one that never ends.
    """
    for task in _tasks(taskset, json.dumps(dict(config or {}), sort_keys=True)):
        yield {"id": task.data.id or str(task.data.idx), "prompt": task.data.prompt_text, "idx": task.data.idx}


_ONE_AT_A_TIME = threading.Lock()


def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all episodes: objects that verifiers shares between episodes belong to one loop."""
    with _ONE_AT_A_TIME:
        return _started_loop()


@functools.cache
def _started_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="logitless-verifiers", daemon=True).start()
    return loop


@functools.cache
def _tasks(taskset: str, config: str) -> tuple[Any, ...]:
    _verifiers()
    loaders: Any = importlib.import_module("verifiers.v1.utils.loaders")
    try:
        made = loaders.load_taskset(loaders.taskset_config_type(taskset)(id=taskset, **json.loads(config)))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigurationError(
            needed=f"a taskset of verifiers called {taskset!r}",
            given=f"{type(error).__name__}: {error}",
            remedy="Install the package that exports it, or put its module on PYTHONPATH.",
        ) from error
    if not made.bounded:
        raise ConfigurationError(
            needed="a taskset that ends", given=f"{taskset!r}, which does not", remedy="Bound it in its config."
        )
    return tuple(made)


def _task(taskset: str, config: str, number: int) -> Any:
    tasks = _tasks(taskset, config)
    if not 0 <= number < len(tasks):
        raise InputError(
            needed=f"a task of {taskset!r}, from 0 to {len(tasks) - 1}",
            given=str(number),
            remedy="Write the data anew, with the config of the recipe.",
        )
    return tasks[number]


def task_reward(reward: TextReward, *, weight: float = 1.0) -> Callable[..., Any]:
    """A logitless reward as a ``@reward`` method of a verifiers task.

    The fields of the task's data are the reward's columns. For a completion without a score the method raises, so that
    verifiers leaves the reward unscored and records the reason.

    Args:
        reward: scores the last message that the model wrote.
        weight: factor in the task's reward.

    Returns:
        A method to assign in the class of a task; its name is ``reward.metric_name``.

    Raises:
        UnavailableError: verifiers is not installed.

    Example:
        >>> import importlib.util
        >>> from logitless.rewards.text.exact import Exact
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
    """A verifiers task as an async reward function with TRL's signature.

    Each completion becomes a finished trace of one turn; the task's data are the prompt and the row's columns.

    ``score = sum_name weight[name] * rewards[name]``

    Args:
        task_type: subclass of ``verifiers.v1.Task``. Columns that its data do not declare are left out.
        config: of the task; None for its default.

    Returns:
        A function that returns None if the task records no reward, and raises what the task raises.

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
    """Refuse rewards that need a runtime: without one verifiers would skip them silently."""
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
    """The trace of a task with one answer."""
    prompt = verifiers.MessageNode(message={"role": "user", "content": task.data.prompt_text})
    answer = verifiers.MessageNode(parent=0, message={"role": "assistant", "content": text}, sampled=True)
    return verifiers.Trace(
        task=verifiers.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        agent=verifiers.AgentInfo(config=verifiers.AgentConfig()),
        nodes=[prompt, answer],
        is_completed=True,
        ok=True,
    )


if __name__ == "__main__":
    for each in task_rows(sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else None):
        print(json.dumps(each, ensure_ascii=False))

"""Tasks of `verifiers` as environments; for verifiers 0.4 and later.

- ``play_task`` runs an episode (``rollout.environment: {name: harness}``): verifiers runs a task with its own harness
  program, tools and rewards against the policy's endpoint.
- ``task_rows`` are the rows to train on; ``python -m logitless.integrations.verifiers TASKSET`` prints them as JSON.

Not supported: environments of several agents.
"""

import asyncio
import functools
import importlib
import json
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from logitless.errors import ConfigurationError, InputError
from logitless.installed import optional


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
        row: of ``task_rows``; its ``idx`` is the task's number.
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


def _verifiers() -> Any:
    return optional("verifiers.v1", extra="verifiers", needed="the package verifiers, 0.4 or later")


if __name__ == "__main__":
    for each in task_rows(sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else None):
        print(json.dumps(each, ensure_ascii=False))

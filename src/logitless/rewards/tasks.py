"""What rewards run inside worker processes: plain functions of plain data, and no import that costs time or memory.

Each returns what ``pooled.verdict_of`` reads: ``{"score": ..., "detail": [[id, satisfied], ...]}`` for a graded answer,
``{"missing": why}`` or ``{"error": why}`` otherwise. An exception is the grader's own failure, never a wrong answer.
"""

import asyncio
import functools
import inspect
import json
import logging
import math
import os
import re
import resource
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from logitless.rewards.worker import end_children, resolve

Answer: TypeAlias = dict[str, Any]

MAX_SCORE = 1e9
MAX_OUTPUT_BYTES = 1 << 20
MAX_OPEN_FILES = 64


def score_of(value: Any) -> Answer:
    """One value that a reward function returned, as an answer: None is missing, a number that is no score an error."""
    if value is None:
        return {"missing": "the function returned None"}
    try:
        score = math.nan if isinstance(value, str | bytes) else float(value)
    except Exception:
        score = math.nan
    if math.isnan(score):
        return {"error": f"a number or None expected, {_shown(value)} returned"}
    if abs(score) > MAX_SCORE:
        return {"error": f"a number within ±{MAX_SCORE:g} expected, {score} returned"}
    return {"score": score}


def _shown(value: Any) -> str:
    return "nan" if isinstance(value, float) else type(value).__name__


def accepted_columns(function: Any, names: Sequence[str]) -> list[str]:
    """The columns that a reward function takes: all where it has ``**kwargs``, else those it names."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return list(names)
    return [name for name in names if name in parameters]


def call_function(path: str, arguments: Mapping[str, Any]) -> Answer:
    """Call a user's function for one completion."""
    function = resolve(path)
    taken = accepted_columns(function, list(arguments))
    result = function(**{name: [arguments[name]] for name in taken})
    if inspect.isawaitable(result):
        result = asyncio.run(_awaited(result))
    values = list(result)
    if len(values) != 1:
        return {"error": f"1 value for 1 completion expected, {len(values)} returned"}
    return score_of(values[0])


async def _awaited(result: Any) -> Any:
    return await result


def match_pattern(pattern: str, flags: int, whole: bool, text: str) -> Answer:
    """Whether a pattern matches a text, all of it or somewhere."""
    compiled = re.compile(pattern, flags)
    return {"score": float(bool(compiled.fullmatch(text) if whole else compiled.search(text)))}


def grade_reasoning_gym(task: str, options: str, entry: Mapping[str, Any], text: str | None) -> Answer:
    """The score of a reasoning-gym task. Its verifiers raise on answers that they cannot read: those are wrong."""
    verifier = _reasoning_gym_task(task, options)
    try:
        return {"score": float(verifier.score_answer(text, dict(entry)))}
    except MemoryError:
        raise
    except Exception:
        return {"score": 0.0}


@functools.lru_cache(maxsize=8)
def _reasoning_gym_task(task: str, options: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, size=1, seed=0, **json.loads(options))


def grade_math(gold: str, text: str) -> Answer:
    """Whether the last expression of a text equals the gold answer."""
    expected = _parsed_gold(gold)
    if not expected:
        return {"missing": f"no mathematical expression in the gold answer {gold!r:.80}"}
    try:
        from math_verify import parse, verify

        given = parse(text, parsing_timeout=None)
        return {"score": float(verify(expected, given, timeout_seconds=None))}
    except RecursionError:
        return {"score": 0.0}


@functools.lru_cache(maxsize=4096)
def _parsed_gold(gold: str) -> list[Any]:
    """The gold answer as math-verify reads it, as it stands or as LaTeX; empty where only its text is left."""
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    found = parse(gold, parsing_timeout=None) or parse(f"${gold}$", parsing_timeout=None)
    return found if any(not isinstance(each, str) for each in found) else []


def grade_json(schema: str, text: str) -> Answer:
    """Whether a text is JSON that a schema allows; a Markdown fence around it is left out of account."""
    import jsonschema
    import referencing

    rules = json.loads(schema)
    parses = valid = False
    try:
        instance = json.loads(unfenced(text, "json"), parse_constant=_refused_constant)
        parses = True
        validator = jsonschema.validators.validator_for(rules, default=jsonschema.Draft202012Validator)
        valid = validator(rules, registry=referencing.Registry()).is_valid(instance)
    except (ValueError, RecursionError):
        pass
    return {"score": float(valid), "detail": [["json:parses", parses], ["json:valid", valid]]}


def _refused_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def unfenced(text: str, language: str) -> str:
    """The content of the last closed Markdown fence (of that language, or of none named), or the text as it stands.

    Example:
        >>> unfenced("So:\\n```python\\nprint(1)\\n```\\nDone.", "python")
        'print(1)\\n'
    """
    block: list[str] | None = None
    found = None
    for line in text.splitlines(keepends=True):
        fence = line.strip()
        if block is not None and fence == "```":
            found, block = "".join(block), None
        elif block is not None:
            block.append(line)
        elif fence in ("```", f"```{language}"):
            block = []
    return text if found is None else found


def run_program(program: str, tests: Sequence[Mapping[str, str]], test_seconds: float, memory_bytes: int) -> Answer:
    """Run a program once a test in a fresh interpreter, and compare its output here, where it cannot see it.

    A test has ``output`` and either ``input`` (standard input) or ``call`` (an expression whose ``repr`` is printed).
    """
    outputs = [_output(program, test, test_seconds, memory_bytes) for test in tests]
    passed = [
        output is not None and _lines(output) == _lines(test["output"])
        for output, test in zip(outputs, tests, strict=True)
    ]
    return {"score": sum(passed) / len(passed), "detail": [["code:test", each] for each in passed]}


def _output(program: str, test: Mapping[str, str], test_seconds: float, memory_bytes: int) -> str | None:
    """What a program prints, or None where it fails, or goes over time, memory or output size."""
    source = program if "call" not in test else f"{program}\n\nprint(repr({test['call']}))\n"
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as printed,
    ):
        (Path(folder) / "program.py").write_text(source, encoding="utf-8", errors="replace")
        given.write(test.get("input", "").encode(errors="replace"))
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "program.py"],
            cwd=folder,
            stdin=given,
            stdout=printed,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.defpath, "HOME": folder, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            preexec_fn=functools.partial(_limit_program, test_seconds, memory_bytes),
        )
        succeeded = _ends_within(process.pid, test_seconds) and process.wait() == 0
        end_children()
        process.wait()
        printed.seek(0)
        return printed.read(MAX_OUTPUT_BYTES).decode(errors="replace") if succeeded else None


def _ends_within(pid: int, seconds: float) -> bool:
    """Whether a process ends in time; unlike ``Popen.wait`` without polling, which would cost 50 ms a program."""
    descriptor = os.pidfd_open(pid)
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


def _limit_program(test_seconds: float, memory_bytes: int) -> None:
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: math.ceil(test_seconds) + 1,
        resource.RLIMIT_FSIZE: MAX_OUTPUT_BYTES,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_NPROC: 1,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))


def _lines(output: str) -> list[str]:
    """Lines without trailing white space, and without blank ones at the end."""
    return [line.rstrip() for line in output.rstrip().splitlines()]

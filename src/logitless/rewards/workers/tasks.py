"""What rewards run in worker processes: functions of plain data, without slow or large imports.

Each returns what ``pooled.verdict_of`` reads: ``{"score": ..., "detail": [[id, satisfied], ...]}`` if graded,
``{"ungradable": why}`` if the text makes its grading fail, else ``{"missing": why}`` or ``{"error": why}``. Raising is
a failure of the grader, never a wrong answer.
"""

import asyncio
import functools
import inspect
import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from logitless.rewards.workers.plain_eval import guard_verifiers
from logitless.rewards.workers.size import runs_nothing, too_large
from logitless.rewards.workers.worker import resolve

Answer: TypeAlias = dict[str, Any]

MAX_SCORE = 1e9


def score_of(value: Any) -> Answer:
    """The answer for one value of a reward function: None is missing, anything but a finite number an error.

    What no completion can excuse, a value of another type, is ``malformed`` too.
    """
    if value is None:
        return {"missing": "the function returned None"}
    malformed = isinstance(value, str | bytes)
    try:
        score = math.nan if malformed else float(value)
    except OverflowError:
        score = math.inf
    except Exception:
        score, malformed = math.nan, True
    if math.isnan(score):
        returned = type(value).__name__ if malformed else "nan"
        answer: Answer = {"error": f"a score (a number or None) expected, {returned} returned"}
        return {**answer, "malformed": True} if malformed else answer
    if abs(score) > MAX_SCORE:
        return {"error": f"a number within ±{MAX_SCORE:g} expected, {score} returned"}
    return {"score": score}


def accepted_columns(function: Any, names: Sequence[str]) -> list[str]:
    """The columns that a reward function accepts: all if it has ``**kwargs``, else those it names."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return list(names)
    return [name for name in names if name in parameters]


def missing_arguments(function: Any, names: Sequence[str]) -> list[str]:
    """The required arguments of a reward function that are not among these names.

    Example:
        >>> missing_arguments(lambda completions, answer, *, strict=True, **columns: None, ["completions", "question"])
        ['answer']
    """
    return [
        f"{name} (by position)" if parameter.kind is parameter.POSITIONAL_ONLY else name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and (name not in names or parameter.kind is parameter.POSITIONAL_ONLY)
    ]


def missing_arguments_at(path: str, names: Sequence[str]) -> list[str]:
    """``missing_arguments`` of the function at an import path; raises TypeError for a class."""
    function = resolve(path)
    if inspect.isclass(function):
        raise TypeError("a class is there")
    return missing_arguments(function, names)


def call_function(path: str, arguments: Mapping[str, Any]) -> Answer:
    """Call a user's function for one completion."""
    function = resolve(path)
    taken = accepted_columns(function, list(arguments))
    result = function(**{name: [arguments[name]] for name in taken})
    if inspect.isawaitable(result):
        result = asyncio.run(awaited(result))
    return scores_of(result, 1)[0]


def scores_of(result: Any, num_completions: int) -> list[Answer]:
    """An answer for each completion, from the return value of a reward function."""
    listed: Any = None if isinstance(result, str | bytes) else result  # a text is no list of its characters
    try:
        values = iter(listed)
    except TypeError:
        given = type(result).__name__
    else:
        scores = [score_of(value) for value in values]
        if len(scores) == num_completions:
            return scores
        given = f"one of {len(scores)}"
    error = f"a list of {num_completions} scores (numbers or None) expected, {given} returned"
    return [{"error": error, "malformed": True}] * num_completions


async def awaited(result: Any) -> Any:
    """The result of an awaitable, as a coroutine that ``asyncio.run`` takes."""
    return await result


def match_pattern(pattern: str, flags: int, whole: bool, text: str) -> Answer:
    """Whether a pattern matches the whole text, or is found in it."""
    compiled = re.compile(pattern, flags)
    return {"score": float(bool(compiled.fullmatch(text) if whole else compiled.search(text)))}


def grade_reasoning_gym(task: str, options: str, entry: Mapping[str, Any], text: str | None) -> Answer:
    """The score of a reasoning-gym task; 0 for an answer at which the verifier raises."""
    if text is not None and (why := too_large(text)) and not too_large(str(entry["answer"])):
        return {"ungradable": why}
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

    guard_verifiers()
    return reasoning_gym.create_dataset(task, size=1, seed=0, **json.loads(options))


def grade_math(gold: str, text: str) -> Answer:
    """Whether the last expression of a text equals the gold answer."""
    if (why := too_large(text)) and not too_large(gold):
        return {"ungradable": why}
    expected = _parsed_gold(gold)
    if not expected:
        return {"missing": f"no mathematical expression in the gold answer {gold!r:.80}"}
    from math_verify import parse, verify

    try:
        given = parse(text, parsing_timeout=None)
        return {"score": float(verify(expected, given, timeout_seconds=None))}
    except MemoryError:
        raise
    except RecursionError:
        return {"score": 0.0}
    except Exception as error:
        return {"ungradable": f"it makes math-verify raise {type(error).__name__}"}


def grade_math_of_numbers(gold: str, text: str) -> Answer | None:
    """``grade_math``; None where it would parse anything but words and numbers as Python or LaTeX."""
    from math_verify import parser

    parsers: dict[str, Any] = {name: vars(parser).get(name) for name in ("parse_expr", "latex2sympy")}
    if None in parsers.values():  # another version: it may parse by other functions
        return None
    try:
        vars(parser).update({name: functools.partial(_of_numbers, parse) for name, parse in parsers.items()})
        return grade_math(gold, text)
    except _ParserNeededError:
        return None
    finally:
        vars(parser).update(parsers)


class _ParserNeededError(BaseException):
    """Not an ``Exception``: math-verify would catch that and go on."""


def _of_numbers(parse: Callable[..., Any], text: str, *options: Any, **more: Any) -> Any:
    if not runs_nothing(text.removeprefix("-")):
        raise _ParserNeededError
    return parse(text, *options, **more)


@functools.lru_cache(maxsize=4096)
def _parsed_gold(gold: str) -> list[Any]:
    """The gold answer as parsed by math-verify, as it is or as LaTeX; empty if it has no expression."""
    from math_verify import parse

    guard_verifiers()
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    found = parse(gold, parsing_timeout=None) or parse(f"${gold}$", parsing_timeout=None)
    return found if any(not isinstance(each, str) for each in found) else []


def warm_math() -> None:
    """Parse formulas of every kind, so that forks start with the parser's caches filled."""
    for formula in (
        "\\frac{1}{2}", "x^2-1", "(x-1)(x+1)", "\\sqrt{3}", "\\pi r^2", "\\{1, 2\\}", "(0, 1]", "x = 3", "a_1 + b",
        "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", "\\sin(x)", "\\log_2 8", "\\text{no}", "50\\%", "3!", "|x|",
        "\\infty", "x \\le 2", "1{,}000", "2\\cdot 10^{3}", "-1.5", "\\binom{5}{2}", "\\angle A", "90^\\circ",
    ):  # fmt: skip
        for text in (formula, f"${formula}$", f"So \\boxed{{{formula}}}."):
            grade_math("$x^2+1$", text)
            grade_math("3", text)


def warm_reasoning_gym() -> None:
    """Import reasoning-gym, and guard its verifiers."""
    import reasoning_gym  # noqa: F401

    guard_verifiers()


def grade_json(schema: str, text: str) -> Answer:
    """Whether a text is JSON that satisfies a schema, ignoring a Markdown fence around it."""
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
    """The content of the last closed Markdown fence, of this language or of none; the whole text if there is none.

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

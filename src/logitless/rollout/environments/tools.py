"""Tools that a policy can call; they run in the rewards' worker processes, with their deadlines and sandbox.

An error that the call causes (also too long a run) is a result that the policy reads; a failure of the machine ends the
episode without a reward.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from logitless.errors import ConfigurationError
from logitless.rewards.workers.pool import Outcome, program_pool, shared_pool
from logitless.rewards.workers.pooled import MEBIBYTE
from logitless.rewards.workers.sandbox import SandboxOption, require_sandbox
from logitless.rewards.workers.worker import MAX_DEADLINES

_START_SECONDS = 10.0


@dataclass(frozen=True)
class Result:
    """The result of a call.

    Args:
        text: for the policy to read.
        failure: why there is no text, if the machine failed.
    """

    text: str = ""
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class Tool(ABC):
    """A tool with one argument, a text.

    Args:
        deadline_seconds: for one call: processor time while it computes, wall-clock time while it waits.
        max_characters: of its text; the rest is cut, with a note.

    Raises:
        ConfigurationError: a limit that is not positive.

    Attributes:
        name: that the policy calls it by.
        description: for the chat template.
        argument: name of its argument.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}
    description: ClassVar[str]
    argument: ClassVar[str]

    name: str
    deadline_seconds: float = 5.0
    max_characters: int = 2_000

    def __post_init__(self) -> None:
        if not (0 < self.deadline_seconds < math.inf and self.max_characters > 0):
            raise ConfigurationError(
                needed="positive limits of a tool",
                given=f"deadline_seconds={self.deadline_seconds}, max_characters={self.max_characters}",
                remedy="Raise them.",
            )

    def check(self) -> None:  # noqa: B027 - most need nothing
        """Check that this machine has what the tool needs."""

    @property
    def schema(self) -> dict[str, Any]:
        """Its schema for chat templates and OpenAI's API."""
        parameters = {"type": "object", "properties": {self.argument: {"type": "string"}}, "required": [self.argument]}
        about = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": about}

    def run(self, arguments: Sequence[Mapping[str, Any]]) -> list[Result]:
        """The result of each call, in order."""
        given = [each.get(self.argument, each.get("")) for each in arguments]
        results = iter(self.run_texts([text for text in given if isinstance(text, str)]))
        missing = Result(f"error: {self.argument} must be a text")
        return [self._cut(next(results)) if isinstance(text, str) else missing for text in given]

    @abstractmethod
    def run_texts(self, texts: Sequence[str]) -> list[Result]:
        """The result of each argument."""

    def _cut(self, result: Result) -> Result:
        if len(result.text) <= self.max_characters:
            return result
        return Result(f"{result.text[: self.max_characters]}\n[{len(result.text) - self.max_characters} more]")


@dataclass(frozen=True, kw_only=True)
class Calculator(Tool):
    """The value of an expression of numbers, ``+ - * / // % **`` and brackets; exact if it is whole.

    Example:
        >>> Calculator().run([{"expression": "37*48"}, {"expression": "1/0"}, {"expression": 3}])
        [Result(text='1776', failure=''), Result(text='error: division by zero', failure=''), \
Result(text='error: expression must be a text', failure='')]
    """

    description = "The value of an arithmetic expression."
    argument = "expression"

    name: Literal["calculator"] = "calculator"

    def run_texts(self, texts: Sequence[str]) -> list[Result]:
        """Evaluate each in a worker process, which computes with numbers and nothing else."""
        outcomes = shared_pool("calculator").run(
            "logitless.rewards.workers.arithmetic:evaluated",
            [(text,) for text in texts],
            deadline_seconds=self.deadline_seconds,
            memory_bytes=256 * MEBIBYTE,
        )
        return [self._result(outcome) for outcome in outcomes]

    def _result(self, outcome: Outcome) -> Result:
        if outcome.status == "done":
            value = outcome.value
            return Result(value["value"] if "value" in value else f"error: {value['error']}")
        return _without_value(outcome)


@dataclass(frozen=True, kw_only=True)
class Python(Tool):
    """The output of a program, run by a fresh interpreter in the sandbox of the ``code`` reward.

    Args:
        memory_mib: memory for one call.
        sandbox: ``required`` refuses to start without a sandbox; ``none`` runs programs with your rights.

    Example:
        >>> Python(sandbox="none").run([{"code": "print(2 + 2)"}])
        [Result(text='4', failure='')]
    """

    description = "Runs a Python program and gives back what it prints."
    argument = "code"

    name: Literal["python"] = "python"
    memory_mib: int = 512
    sandbox: SandboxOption = "required"

    def check(self) -> None:
        """Check that there is a sandbox, unless the recipe does without."""
        require_sandbox("program", self.sandbox)

    def run_texts(self, texts: Sequence[str]) -> list[Result]:
        """Run each program in a process of its own."""
        self.check()
        limits = (self.deadline_seconds, self.memory_mib * MEBIBYTE, self.sandbox == "required")
        outcomes = program_pool().run(
            "logitless.rewards.workers.programs:run_tool",
            [(text, *limits) for text in texts],
            deadline_seconds=MAX_DEADLINES * self.deadline_seconds + _START_SECONDS,
        )
        return [self._result(outcome) for outcome in outcomes]

    def _result(self, outcome: Outcome) -> Result:
        if outcome.status != "done":
            return _without_value(outcome)
        value = outcome.value
        if "idle" in value:
            return Result(failure=value["idle"])
        printed = str(value["printed"]).rstrip()
        if value["ended"] == "late":
            return Result(f"{printed}\nerror: over {self.deadline_seconds:g} s".lstrip())
        silent = "(nothing printed)" if value["ended"] == "well" else "error: it ended without a word"
        return Result(printed or silent)


ToolOptions: TypeAlias = Annotated[Calculator | Python, Field(discriminator="name")]
"""``{name: calculator}`` and the like; each variant is itself the tool."""


def _without_value(outcome: Outcome) -> Result:
    """The result of a call that ended badly: an error for the policy, or a failure that it did not cause."""
    if outcome.status in ("idle", "raised"):
        return Result(failure=f"{outcome.status}: {outcome.message}")
    return Result(f"error: {outcome.status}")

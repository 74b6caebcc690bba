"""The environment that runs tools: it answers a turn with a call in it, and ends the episode at one without."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from logitless.errors import ConfigurationError
from logitless.rollout.environment import Reply
from logitless.rollout.environments.tools import Result, ToolOptions
from logitless.rollout.tool_calls import Call, Format, tool_calls
from logitless.types import Completion, Prompt


@dataclass(frozen=True, kw_only=True)
class ToolEnvironment:
    """Runs the tools that a turn calls, and says what came of each in a message of its own.

    Args:
        tools: that there are, each once.
        format: how the policy writes a call. tags: `<calculator>2+2</calculator>`; tool_call: JSON in `<tool_call>`
            (Qwen, Hermes); json: the whole turn (Llama 3, Mistral).
        role: who speaks the results, where the chat template has no tools.
        template: plain text around `{reply}`, used instead of the tokenizer's chat template.
        max_calls: of one turn; further ones are not run, and the policy is told.
        call_reward: paid for a turn whose calls could all be read and run, even with errors of the tool.

    Raises:
        ConfigurationError: no tool, or one twice.

    Example:
        >>> from logitless.rollout.environments.tools import Calculator
        >>> environment = ToolEnvironment(tools=(Calculator(),))
        >>> state = environment.start(Prompt("7", "2+2=", (4,)), seed=0)
        >>> turn = Completion("7", (4,), "<calculator>2+2</calculator>", "stop")
        >>> environment.reply(state, turn).messages[0]["content"]
        '4'
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    name: Literal["tools"] = "tools"
    tools: tuple[ToolOptions, ...]
    format: Format = "tags"
    role: Literal["tool", "user"] = "tool"
    template: str | None = None
    max_calls: int = 4
    call_reward: float = 0.0

    def __post_init__(self) -> None:
        names = [tool.name for tool in self.tools]
        if not names or len(set(names)) < len(names) or self.max_calls < 1:
            raise ConfigurationError(
                needed="tools, each once, and max_calls of at least 1",
                given=f"{names}, max_calls={self.max_calls}",
                remedy="Write for example tools: [{name: calculator}].",
            )

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Of the tools, for chat templates."""
        return [tool.schema for tool in self.tools]

    def check(self) -> None:
        """What the tools need is there."""
        for tool in self.tools:
            tool.check()

    def start(self, prompt: Prompt, *, seed: int) -> None:
        """Nothing to remember: a call has a process of its own."""

    def reply(self, state: None, turn: Completion) -> Reply:
        """The results of a turn's calls; the end where it makes none."""
        return self.replies([state], [turn])[0]

    def replies(self, states: Sequence[None], turns: Sequence[Completion]) -> list[Reply]:  # noqa: ARG002
        """``reply`` of each; all calls of a tool run side by side."""
        names = [tool.name for tool in self.tools]
        calls = [tool_calls(turn.text, names, self.format) for turn in turns]
        results: dict[tuple[int, int], Result] = {}
        for tool in self.tools:
            places = [
                (i, j)
                for i, of_turn in enumerate(calls)
                for j, call in enumerate(of_turn[: self.max_calls])
                if call.name == tool.name and not call.error
            ]
            if places:
                found = tool.run([calls[i][j].arguments for i, j in places])
                results |= dict(zip(places, found, strict=True))
        return [self._answer(i, of_turn, results) for i, of_turn in enumerate(calls)]

    def _answer(self, turn: int, calls: Sequence[Call], results: dict[tuple[int, int], Result]) -> Reply:
        if not calls:
            return Reply()
        said = [results.get((turn, j)) or Result(self._refusal(j, call)) for j, call in enumerate(calls)]
        if failures := [result.failure for result in said if result.failure]:
            return Reply(failure=failures[0])
        if self.role == "user":
            messages: list[dict[str, Any]] = [{"role": "user", "content": "\n".join(result.text for result in said)}]
        else:
            messages = [
                {"role": "tool", "content": result.text, "name": call.name or "tool", "tool_call_id": f"{j:09d}"}
                for j, (call, result) in enumerate(zip(calls, said, strict=True))
            ]
        ran = all((turn, j) in results for j in range(len(calls)))
        return Reply(self.call_reward if ran else 0.0, tuple(messages))

    def _refusal(self, number: int, call: Call) -> str:
        if number >= self.max_calls:
            return f"error: at most {self.max_calls} calls a turn"
        return f"error: {call.error or f'no tool called {call.name[:40]!r}'}"


def tools_of(environment: Any) -> list[dict[str, Any]] | None:
    """The schemas of the tools that the policy is told of: the environment's ``schemas``, where it has any.

    Example:
        >>> from logitless.rollout.environment import SingleTurn
        >>> tools_of(SingleTurn()) is None
        True
    """
    return getattr(environment, "schemas", None)

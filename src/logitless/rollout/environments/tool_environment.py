"""An environment that runs the tool calls in a turn, and ends the episode at a turn without calls."""

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
    """Runs the tools that a turn calls, and replies with the result of each call in a message of its own.

    Args:
        tools: each once.
        format: how the policy writes a call. tags: `<calculator>2+2</calculator>`; tool_call: JSON in `<tool_call>`
            (Qwen, Hermes); json: the whole turn (Llama 3, Mistral).
        role: of the results; `user` for chat templates without tools.
        template: plain text around `{reply}`, used instead of the tokenizer's chat template.
        max_calls: of one turn; further calls are refused with an error message.
        call_reward: for a turn whose calls could all be parsed and run, even if a tool reported an error.

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
        """Check that this machine has what the tools need."""
        for tool in self.tools:
            tool.check()

    def start(self, prompt: Prompt, *, seed: int) -> None:
        """No state: each call has a process of its own."""

    def reply(self, state: None, turn: Completion) -> Reply:
        """The results of a turn's calls; the end if it has none."""
        return self.replies([state], [turn])[0]

    def replies(self, states: Sequence[None], turns: Sequence[Completion]) -> list[Reply]:  # noqa: ARG002
        """``reply`` of each; all calls of a tool run in parallel."""
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
        return [self._reply(i, of_turn, results) for i, of_turn in enumerate(calls)]

    def _reply(self, turn: int, calls: Sequence[Call], results: dict[tuple[int, int], Result]) -> Reply:
        if not calls:
            return Reply()
        of_calls = [results.get((turn, j)) or Result(self._refusal(j, call)) for j, call in enumerate(calls)]
        if failures := [result.failure for result in of_calls if result.failure]:
            return Reply(failure=failures[0])
        messages: list[dict[str, Any]]
        if self.role == "user":
            messages = [{"role": "user", "content": "\n".join(result.text for result in of_calls)}]
        else:
            messages = [
                {"role": "tool", "content": result.text, "name": call.name or "tool", "tool_call_id": f"{j:09d}"}
                for j, (call, result) in enumerate(zip(calls, of_calls, strict=True))
            ]
        all_ran = all((turn, j) in results for j in range(len(calls)))
        return Reply(self.call_reward if all_ran else 0.0, tuple(messages))

    def _refusal(self, number: int, call: Call) -> str:
        if number >= self.max_calls:
            return f"error: at most {self.max_calls} calls a turn"
        return f"error: {call.error or f'no tool called {call.name[:40]!r}'}"


def tools_of(environment: Any) -> list[dict[str, Any]] | None:
    """The tool schemas for the policy's chat template: the environment's ``schemas``, if it has any."""
    return getattr(environment, "schemas", None)

"""The tokens between two turns of the policy: an environment's messages under the chat template.

    ... <sampled tokens of a turn> <end of turn> <messages> <header of an assistant's message> <next turn> ...
                                   `----------------- made here -------------------------'

Sampled tokens stay as they are; their text is never tokenized again. The tokens between are cut out of the chat
template's rendering of a placeholder conversation, so that no model's format is written down a second time. Templates
that rewrite earlier turns (Qwen 3 removes their thoughts) are not followed in that: earlier turns stay.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from logitless.errors import ConfigurationError
from logitless.rollout.environment import Environment, Reply, replies_of
from logitless.types import Completion, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PLACEHOLDER = "(what the policy says)"


def check_chat_template_kwargs(tokenizer: "PreTrainedTokenizerBase", given: Mapping[str, Any]) -> None:
    """Check that the tokenizer's chat template reads these variables: Jinja ignores unknown ones silently.

    Raises:
        ConfigurationError: there is no chat template, it does not mention a name, or a name is ``messages`` or an
            argument of ``apply_chat_template``.
    """
    taken = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
    template = str(tokenizer.chat_template or "")
    unread = [name for name in given if name in taken or not re.search(rf"\b{re.escape(name)}\b", template)]
    if unread:
        raise ConfigurationError(
            needed="chat_template_kwargs that the tokenizer's chat template reads, such as enable_thinking of Qwen3's",
            given=", ".join(unread) + ("" if template else " with a tokenizer without a chat template"),
            remedy="Look for the variable in tokenizer.chat_template, or leave it out.",
        )


class ChatTurns:
    """Renders the tokens between two turns of the policy.

    Args:
        tokenizer: of the policy.
        template: plain text around ``{reply}``, used instead of the tokenizer's chat template.
        chat_template_kwargs: further variables of the chat template.

    Raises:
        ConfigurationError: no ``template`` and no chat template, or a ``template`` without ``{reply}`` or with a
            character that the tokenizer lacks.

    Example:
        >>> from logitless.models.char_tokenizer import character_tokenizer
        >>> turns = ChatTurns(character_tokenizer("ab=\\n"), template="={reply}\\n")
        >>> turns.between(Completion("7", (3, 2), "a", "stop"), [{"role": "tool", "content": "b"}])
        (5, 4, 6)
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.tokenizer, self.template, self.chat_template_kwargs = tokenizer, template, chat_template_kwargs
        if template is None and not tokenizer.chat_template:
            raise ConfigurationError(
                needed="a chat template for the environment's messages",
                given="a tokenizer without one",
                remedy="Set rollout.environment.template to plain text with {reply}.",
            )
        if template is not None and "{reply}" not in template:
            raise ConfigurationError(
                needed="a template with {reply}", given=repr(template), remedy="Write for example '\\n{reply}\\n'."
            )
        if template is not None:
            self._check_characters(template.replace("{reply}", ""))
        self._special = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special and t.content]

    def _check_characters(self, text: str) -> None:
        if not (why := self._unreadable(text)):
            return
        raise ConfigurationError(
            needed="a rollout.environment.template in characters of the tokenizer",
            given=f"{self.template!r} with {[each for each in dict.fromkeys(text) if self._unreadable(each)]} ({why})",
            remedy="Leave them out. For line breaks from a shell, quote for it and for YAML: '\"\\n{reply}\\n\"'.",
        )

    def _unreadable(self, text: str) -> str:
        """Why the tokenizer cannot read a text; empty if it can."""
        try:
            self.tokenizer(text, add_special_tokens=False)
        except Exception as error:  # the tokenizers library raises no class of its own
            return str(error)
        return ""

    def check(self, role: str) -> None:
        """Check that the chat template accepts a message of this role after an assistant's.

        Raises:
            ConfigurationError: it does not.
        """
        self._text([{"role": role, "content": "4", "name": "tool", "tool_call_id": "000000000"}])

    def between(self, turn: Completion, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """The tokens from the end of a turn to the start of the next.

        They begin with the end-of-turn token, unless the policy sampled it.

        Args:
            turn: the policy's.
            messages: the environment's. Special tokens in their texts are removed, so that they cannot imitate a role.

        Raises:
            ConfigurationError: the chat template refuses the messages.
        """
        ids: list[int] = self.tokenizer(self._text(messages), add_special_tokens=False)["input_ids"]
        if ids and turn.token_ids[-1:].tolist() == ids[:1] and ids[0] in self.tokenizer.added_tokens_decoder:
            del ids[0]
        return tuple(ids)

    def _text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        from jinja2 import TemplateError

        plain = [{**message, "content": self._without_special(message.get("content", ""))} for message in messages]
        if self.template is not None:
            return self.template.replace("{reply}", "\n".join(message["content"] for message in plain))
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PLACEHOLDER}]
        try:
            text: str = self.tokenizer.apply_chat_template(
                [*before, *plain], tokenize=False, add_generation_prompt=True, **self.chat_template_kwargs
            )
        except TemplateError as error:
            raise ConfigurationError(
                needed="a chat template that accepts the environment's messages",
                given=f"roles {[message['role'] for message in messages]} ({error})",
                remedy="Let tools reply as the user (rollout.environment.role: user), or set its template.",
            ) from error
        _, found, after = text.partition(_PLACEHOLDER)
        if not found:
            raise ConfigurationError(
                needed="a chat template that renders an assistant's content",
                given="one that leaves it out",
                remedy="Set rollout.environment.template to plain text with {reply}.",
            )
        return after

    def _without_special(self, text: str) -> str:
        while found := [token for token in self._special if token in text]:
            for token in found:
                text = text.replace(token, "")
        return text


class ChatEnvironment:
    """Adds the tokens to the messages of another environment.

    Args:
        inner: replies in messages.
        turns: renders them.
    """

    def __init__(self, inner: Environment, turns: ChatTurns) -> None:
        self.inner, self.turns = inner, turns

    @property
    def schemas(self) -> list[dict[str, Any]] | None:
        """Schemas of the inner environment's tools; None if it has none."""
        return getattr(self.inner, "schemas", None)

    def start(self, prompt: Prompt, *, seed: int) -> Any:
        """The inner environment's state."""
        return self.inner.start(prompt, seed=seed)

    def reply(self, state: Any, turn: Completion) -> Reply:
        """The inner environment's reply, with tokens."""
        return self.replies([state], [turn])[0]

    def replies(self, states: Sequence[Any], turns: Sequence[Completion]) -> list[Reply]:
        """The inner environment's replies, with tokens; text that cannot be tokenized is the environment's failure."""
        replies = replies_of(self.inner, states, turns)
        return [self._rendered(reply, turn) for reply, turn in zip(replies, turns, strict=True)]

    def _rendered(self, reply: Reply, turn: Completion) -> Reply:
        if reply.ends or len(reply.token_ids):
            return reply
        try:
            return replace(reply, token_ids=self.turns.between(turn, reply.messages))
        except ConfigurationError:
            raise
        except Exception as error:  # the tokenizers library raises no class of its own
            return Reply(reply.reward, failure=f"{error} in {[message.get('content') for message in reply.messages]}")

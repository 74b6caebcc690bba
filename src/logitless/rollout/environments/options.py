"""The environments that a recipe can name, and how one is made for a policy."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from logitless.errors import ConfigurationError
from logitless.own_code import check_takes, made
from logitless.rollout.chat import ChatEnvironment, ChatTurns
from logitless.rollout.environment import BatchedEnvironment, Driver, Environment, SingleTurn
from logitless.rollout.environments.harness import Harness, HarnessEpisodes
from logitless.rollout.environments.text_game import GuessingGame
from logitless.rollout.environments.tool_environment import ToolEnvironment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class OwnEnvironment:
    """An environment of yours, by import path; it runs in this process, with your rights.

    Args:
        factory: `package.module:name`, or `./file.py:name` from the recipe's folder; returns an object with `start` and
            `reply`.
        options: keyword arguments of the factory.
        template: plain text around `{reply}`, used instead of the tokenizer's chat template.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    name: Literal["own"] = "own"
    factory: str
    options: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None

    def made(self) -> Environment:
        """The environment.

        Raises:
            ConfigurationError: the path cannot be imported, or returns something else, or its methods take other
                arguments.
        """
        environment = made(self.factory, self.options, what="an environment", key="rollout.environment.factory")
        if not isinstance(environment, Environment):
            raise ConfigurationError(
                needed="an environment, with start and reply",
                given=f"{type(environment).__name__} of {self.factory}",
                remedy="See logitless.rollout.environment.Environment.",
            )
        check_takes("start(prompt, *, seed)", environment.start, None, seed=0)
        check_takes("reply(state, turn)", environment.reply, None, None)
        if isinstance(environment, BatchedEnvironment):
            check_takes("replies(states, turns)", environment.replies, [], [])
        return environment


EnvironmentOptions: TypeAlias = ToolEnvironment | GuessingGame | OwnEnvironment | Harness
"""The section ``rollout.environment``."""


def pays(options: EnvironmentOptions | None) -> bool:
    """Whether the environment may give rewards, so that a recipe needs none beside it.

    Example:
        >>> pays(GuessingGame()), pays(None)
        (True, False)
    """
    return options is not None and (not isinstance(options, ToolEnvironment) or options.call_reward != 0)


def environment_of(
    options: EnvironmentOptions | None,
    tokenizer: "PreTrainedTokenizerBase",
    chat_template_kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> Environment | Driver:
    """The environment of a recipe, checked, with its messages rendered to tokens.

    Args:
        options: of the recipe; None for single turns.
        tokenizer: of the policy.
        chat_template_kwargs: further variables of its chat template.

    Raises:
        ConfigurationError: it cannot be made, or the chat template refuses its messages.
        UnavailableError: this machine lacks what its tools or its server need.
    """
    if options is None:
        return SingleTurn()
    if isinstance(options, Harness):
        # these raise here, not at the first block
        importlib.import_module("logitless.http_server")
        if not tokenizer.chat_template:
            raise ConfigurationError(
                needed="a tokenizer with a chat template, which a harness's first messages are written in",
                given="one without",
                remedy="Set chat_template in the tokenizer's tokenizer_config.json, or train its instruct variant.",
            )
        ChatTurns(tokenizer, template=options.template)
        return HarnessEpisodes(options, options.drive(), tokenizer, chat_template_kwargs)
    inner = options.made() if isinstance(options, OwnEnvironment) else options
    turns = ChatTurns(tokenizer, template=options.template, chat_template_kwargs=chat_template_kwargs)
    if isinstance(inner, ToolEnvironment):
        inner.check()
        turns.check(inner.role)
    elif isinstance(inner, GuessingGame):
        turns.check("user")
    return ChatEnvironment(inner, turns)

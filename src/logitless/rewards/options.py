"""The rewards a recipe can name: one entry of its list is one of these, told apart by ``name``."""

from typing import Annotated, TypeAlias

from pydantic import Field

from logitless.rewards.code import Code
from logitless.rewards.exact import Exact
from logitless.rewards.format import Format
from logitless.rewards.gate import MinimumLength, Relevance
from logitless.rewards.instruction_reward import InstructionReward
from logitless.rewards.json_schema import JsonSchema
from logitless.rewards.judge import Judge
from logitless.rewards.length import Length
from logitless.rewards.math import Math
from logitless.rewards.overlong import Overlong
from logitless.rewards.reasoning_gym import ReasoningGym
from logitless.rewards.regex import Regex
from logitless.rewards.repetition import Repetition
from logitless.rewards.user_function import Function

RewardOptions: TypeAlias = Annotated[
    Code
    | Exact
    | Format
    | Function
    | InstructionReward
    | Judge
    | JsonSchema
    | Length
    | Math
    | MinimumLength
    | Overlong
    | ReasoningGym
    | Regex
    | Relevance
    | Repetition,
    Field(discriminator="name"),
]
"""``{name: exact, column: answer}`` and the like; each variant is itself the reward."""

"""The rewards that a recipe can name: each entry of its list is one of these, by ``name``."""

from typing import Annotated, TypeAlias

from pydantic import Field

from logitless.rewards.code import Code
from logitless.rewards.instructions.instruction_reward import InstructionReward
from logitless.rewards.judge import Judge
from logitless.rewards.math import Math
from logitless.rewards.reasoning_gym import ReasoningGym
from logitless.rewards.text.exact import Exact
from logitless.rewards.text.format import Format
from logitless.rewards.text.gate import MinimumLength, Relevance
from logitless.rewards.text.json_schema import JsonSchema
from logitless.rewards.text.length import Length
from logitless.rewards.text.overlong import Overlong
from logitless.rewards.text.regex import Regex
from logitless.rewards.text.repetition import Repetition
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
"""An entry such as ``{name: exact, column: answer}``, which is itself the reward."""

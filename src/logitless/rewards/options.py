"""The rewards a recipe can name: one entry of its list is one of these, told apart by ``name``."""

from typing import Annotated, TypeAlias

from pydantic import Field

from logitless.rewards.exact import Exact
from logitless.rewards.format import Format
from logitless.rewards.gate import MinimumLength, Relevance
from logitless.rewards.length import Length

RewardOptions: TypeAlias = Annotated[Exact | Format | Length | MinimumLength | Relevance, Field(discriminator="name")]
"""``{name: exact, column: answer}`` and the like; each variant is itself the reward."""

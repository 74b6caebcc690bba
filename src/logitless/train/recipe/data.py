"""The sections ``data``, ``warm_start`` and ``rewards``."""

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Field, PositiveFloat, PositiveInt

from logitless.data.sources import RESERVED_SOURCES, DataOptions, TrainingData
from logitless.models.reward_model import RewardModel
from logitless.rewards.options import RewardOptions
from logitless.train.recipe.rule import Rule, Setting, given
from logitless.train.recipe.section import Section

if TYPE_CHECKING:
    from logitless.train.recipe.config import Recipe


class DataSection(Section):
    """Where prompts come from."""

    train: TrainingData = Field(description="prompts to train on, of one source or of a mixture")
    held_out: DataOptions | None = Field(None, description="prompts to evaluate on, removed from training; or None")
    max_prompt_tokens: PositiveInt = Field(512, description="tokens; longer prompts are handled as `too_long` says")
    too_long: Literal["drop", "error"] = Field("drop", description="drop longer prompts and count them, or refuse")


class WarmStartSection(Section):
    """A supervised stage before the first rollout: `nll` of a column's text through the same head."""

    data: DataOptions = Field(description="prompts with their answers")
    answer_column: str = Field("answer", description="column with the text to imitate")
    steps: PositiveInt = Field(100, description="optimizer steps")
    sequences_per_step: PositiveInt = Field(64, description="prompt-answer pairs a step")
    learning_rate: PositiveFloat = Field(1e-3, description="of AdamW, at its peak")
    schedule: Literal["constant", "linear"] = Field("linear", description="constant, or linear decay to 0")


AnyReward: TypeAlias = Annotated[RewardOptions | RewardModel, Field(discriminator="name")]
"""A reward by rules on the text, or by a reward model."""


# --- rules ----------------------------------------------------------------------------------------------------------


def _sources(recipe: "Recipe") -> tuple[str, ...]:
    """Names of all data that completions are sampled for: training sources and held-out sets."""
    held_out = ("held_out",) if recipe.data.held_out is not None else ()
    return (*recipe.training_sources, *held_out, *recipe.evaluation.sets)


def _taken_set_names(recipe: "Recipe") -> str:
    return ", ".join(sorted({*recipe.evaluation.sets} & {*RESERVED_SOURCES, *recipe.training_sources}))


def _unknown_reward_sources(recipe: "Recipe") -> str:
    known = _sources(recipe)
    unknown = sorted({name for reward in recipe.rewards for name in reward.sources or ()} - {*known})
    return f"{', '.join(unknown)}, and there are {', '.join(known)}" if unknown else ""


def _sources_without_reward(recipe: "Recipe") -> str:
    def is_scored(source: str) -> bool:
        rewards = [reward for reward in recipe.rewards if not reward.gate]
        return any(reward.sources is None or source in reward.sources for reward in rewards)

    missing = [source for source in _sources(recipe) if not is_scored(source)]
    return f"none for {', '.join(missing)}" if missing else ""


def _unfit_labels(recipe: "Recipe") -> str:
    names = [reward.metric_name for reward in recipe.rewards]
    return ", ".join(repr(name) for name in names if "/" in name or not name.isprintable())


RULES: tuple[Rule["Recipe"], ...] = (
    Setting["Recipe"]("evaluation.sets").needs(
        "names that are neither train, held_out nor those of data.train.sources",
        given=_taken_set_names,
        remedy="Give the set another name, for example with -test at its end.",
    ),
    Setting["Recipe"]("sources of a reward").needs(
        "names of data: train or those of data.train.sources, held_out, those of evaluation.sets",
        given=_unknown_reward_sources,
        remedy="Correct the name, or leave `sources` out for a reward that scores everything.",
    ),
    given("rewards").needs(
        "for each source of data a reward that is not a gate",
        given=_sources_without_reward,
        remedy="Add the name to `sources` of a reward, or leave `sources` out.",
    ),
    Setting["Recipe"]("rewards []", lambda recipe: not recipe.rewards).needs(
        "a teacher, algorithm.preset nll, or a rollout.environment that pays by itself: own, guessing, harness, or "
        "tools with a call_reward",
        holds=lambda recipe: recipe.teacher is not None or recipe.imitates or recipe.scores,
        given=lambda recipe: recipe.rollout.environment.name if recipe.rollout.environment else "no environment",
        remedy="Name a reward; docs/own_reward.md has a template.",
    ),
    Setting["Recipe"]("label of a reward").needs(
        "printable characters and no slash, which separates the parts of a metric's name",
        given=_unfit_labels,
        remedy="Write for example a dash.",
    ),
)

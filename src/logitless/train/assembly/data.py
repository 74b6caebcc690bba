"""Prompts, their order, and rewards of a recipe, checked before the first rollout."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from logitless.data.mixing import MixedOrder
from logitless.data.prompts import PromptOrder, load_prompts, without_overlap
from logitless.data.sources import DataOptions, sources_of
from logitless.errors import ConfigurationError, DataError
from logitless.objective.advantage import Estimator
from logitless.rewards.instructions.instruction_reward import InstructionReward
from logitless.rewards.instructions.suites import warn_of_overlap
from logitless.rewards.reward import WeightedReward, told_if_slow, weighted
from logitless.seeds import derived_seed
from logitless.train.recipe.config import Recipe
from logitless.types import Prompt

logger = logging.getLogger("logitless")


@dataclass(frozen=True)
class Data:
    """The prompts of a recipe.

    Args:
        train: prompts to train on, without held-out ones.
        held_out: prompts to evaluate on.
        warm_start: prompts with answers, without held-out ones.
        counts: numbers of rows read and dropped, by source.
        held_out_sets: further prompts to evaluate on, by name of their set.
    """

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    warm_start: tuple[Prompt, ...]
    counts: dict[str, dict[str, int]]
    held_out_sets: Mapping[str, tuple[Prompt, ...]] = field(default_factory=dict)

    @property
    def judged(self) -> tuple[Prompt, ...]:
        """All prompts whose completions get rewards: to train and to evaluate on."""
        return (*self.train, *self.all_held_out)

    @property
    def all_held_out(self) -> tuple[Prompt, ...]:
        """The prompts of every held-out set."""
        return (*self.held_out, *(prompt for prompts in self.held_out_sets.values() for prompt in prompts))


def data_of(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]] | None = None
) -> Data:
    """Load all prompts of a recipe; held-out texts are removed from training.

    Args:
        tools: of the environment, which the chat template puts into prompts.

    Raises:
        DataError: too few prompts are left to train on, or a source cannot be read.

    Warns:
        OverlapWarning: instruction ids are both trained on and held out.
    """
    section = recipe.data
    counts: dict[str, dict[str, int]] = {}

    def load(name: str, options: DataOptions) -> tuple[Prompt, ...]:
        found = load_prompts(
            options,
            tokenizer,
            max_prompt_tokens=section.max_prompt_tokens,
            too_long=section.too_long,
            tools=tools,
            chat_template_kwargs=recipe.model.chat_template_kwargs,
        )
        counts[name] = dict(found.counts)
        return tuple(replace(prompt, source=name) for prompt in found.prompts)

    if section.held_out is None and (unused := recipe.evaluation.changed):
        logger.warning(
            "evaluation: %s without effect, for there is no data.held_out; evaluation.sets have their own",
            ", ".join(unused),
        )
    held_out = load("held_out", section.held_out) if section.held_out is not None else ()
    sets = {name: load(name, each.data) for name, each in recipe.evaluation.sets.items()}
    evaluated = [*held_out, *(prompt for prompts in sets.values() for prompt in prompts)]

    def to_train_on(name: str, options: DataOptions) -> tuple[Prompt, ...]:
        loaded = load(name, options)
        kept = without_overlap(loaded, evaluated)
        counts[name]["held_out"] = len(loaded) - len(kept)
        return kept

    sources = sources_of(section.train)
    train = tuple(
        replace(prompt, id=f"{name}/{prompt.id}") if len(sources) > 1 else prompt
        for name, each in sources.items()
        for prompt in to_train_on(name, each.data)
    )
    warm: tuple[Prompt, ...] = ()
    if recipe.warm_start is not None:
        warm = without_overlap(load("warm_start", recipe.warm_start.data), evaluated)
    if len(train) < recipe.rollout.prompts_per_block:
        raise DataError(
            needed=f"at least rollout.prompts_per_block = {recipe.rollout.prompts_per_block} prompts to train on",
            given="; ".join(f"{name}: {prompts_in_words(counts[name])}" for name in recipe.training_sources),
            remedy="Give more data, raise data.max_prompt_tokens, or lower rollout.prompts_per_block.",
        )
    order_of(recipe, train)  # raises for a mixture with too few prompts, before anything else is loaded
    warn_of_overlap(instruction_ids(recipe, train), instruction_ids(recipe, evaluated))
    return Data(train, held_out, warm, counts, sets)


def prompts_in_words(counts: Mapping[str, int]) -> str:
    """Numbers of prompts and rows in words, and why rows were left out."""
    left_out, kept = _left_out(counts), counts["prompts"] - counts.get("held_out", 0)
    return f"{kept:,} prompts of {counts['rows']:,} rows" + (f"; left out: {', '.join(left_out)}" if left_out else "")


def _left_out(counts: Mapping[str, int]) -> list[str]:
    words = {"empty": "empty", "too_long": "too long", "held_out": "that repeat held-out prompts"}
    return [f"{counts[name]:,} {word}" for name, word in words.items() if counts.get(name)]


def left_out_in_words(counts: Mapping[str, Mapping[str, int]]) -> list[str]:
    """A line for each source of which rows were left out.

    Example:
        >>> left_out_in_words({"train": {"rows": 9, "prompts": 6, "too_long": 3}, "hard": {"rows": 2, "prompts": 2}})
        ['train: 6 prompts of 9 rows; left out: 3 too long']
    """
    return [f"{name}: {prompts_in_words(numbers)}" for name, numbers in counts.items() if _left_out(numbers)]


def order_of(recipe: Recipe, prompts: Sequence[Prompt]) -> PromptOrder | MixedOrder:
    """The order of training prompts: random permutations of one source, or a mixture's sources by weight.

    Args:
        prompts: to train on.

    Raises:
        DataError: a source of a mixture has too few prompts for its share of a block.
    """
    sources = sources_of(recipe.data.train)
    if len(sources) == 1:
        return PromptOrder(len(prompts), derived_seed(recipe.seed, "order"))
    members: dict[str, list[int]] = {name: [] for name in sources}
    for index, prompt in enumerate(prompts):
        members[prompt.source].append(index)
    weights = {name: each.weight for name, each in sources.items()}
    most = recipe.rollout.prompts_per_block
    return MixedOrder(members, weights, seed=derived_seed(recipe.seed, "order"), most=most)


def instruction_ids(recipe: Recipe, prompts: Sequence[Prompt]) -> set[str]:
    """Instruction ids in the columns that the recipe's instruction rewards read; checked later, by the rewards."""
    columns = [reward.ids_column for reward in recipe.rewards if isinstance(reward, InstructionReward)]
    given = [prompt.columns.get(name) for prompt in prompts for name in columns]
    return {name for ids in given if isinstance(ids, list) for name in ids if isinstance(name, str)}


def check_columns(advantage: Estimator | None, prompts: Sequence[Prompt]) -> None:
    """Refuse data without a column that the advantage reads.

    Raises:
        DataError: a prompt to train on has no such column.
    """
    if advantage is None:
        return
    for name in advantage.reads_columns:
        lacking = next((prompt for prompt in prompts if name not in prompt.columns), None)
        if lacking is not None:
            raise DataError(
                needed=f"column {name!r} in each row of data.train, which algorithm.advantage {advantage.name} reads",
                given=f"prompt {lacking.id!r} with {', '.join(lacking.columns) or 'none'}",
                remedy="Add it to the data, or name another column.",
            )


def rewards_of(recipe: Recipe, prompts: Sequence[Prompt]) -> tuple[WeightedReward, ...]:
    """The recipe's rewards, each checked against all rows that it applies to."""
    rewards = weighted(recipe.rewards)
    for entry in rewards:
        sources: dict[str, list[Mapping[str, Any]]] = {}
        for prompt in prompts:
            if entry.applies_to(prompt.source):
                sources.setdefault(prompt.source, []).append(prompt.columns)
        for source, rows in sources.items():  # each by itself: a column of one source may be missing from another
            columns = {name: [row.get(name) for row in rows] for name in {n for row in rows for n in row}}
            try:
                with told_if_slow(entry.name, "pass its check"):
                    entry.reward.check(columns)
            except (ConfigurationError, DataError) as error:
                needed = f"for reward {entry.name!r} and the data {source!r}: {error.needed}"
                raise type(error)(needed=needed, given=error.given, remedy=error.remedy) from error
    return rewards

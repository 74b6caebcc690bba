"""Checks that need recipe, data and model together; made before a run samples its first token, and by ``--dry-run``."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from logitless.distributed.arrangement import Arrangement
from logitless.errors import DataError
from logitless.models.lm_head import causal_lm
from logitless.models.loading import positions
from logitless.rollout.recorded import ColumnEngine, read_completions
from logitless.rollout.sampling import SamplingOptions
from logitless.train.assembly.data import Data
from logitless.train.learn.teacher_prompts import TeacherPrompts
from logitless.train.recipe.config import PROCESS_RULES, Recipe
from logitless.train.recipe.rule import Machine, Processes, Rule, Setting, check
from logitless.train.recipe.training import MOMENT_RULES
from logitless.types import Completion, Prompt


@dataclass(frozen=True)
class Built:
    """A recipe with its data and model, as the subject of rules.

    Args:
        recipe: checked.
        data: of the recipe.
        model: of the recipe, on any device, ``meta`` included.
    """

    recipe: Recipe
    data: Data
    model: nn.Module

    @property
    def too_long(self) -> str:
        """The first prompts whose completions may need more positions than the model has, in words; empty if none."""
        config: Any = causal_lm(self.model).config.get_text_config()  # type: ignore[union-attr]
        limit = positions(config) or sys.maxsize
        for prompts, (most, key) in self._prompts():
            longest = max((len(prompt.token_ids) for prompt in prompts), default=0)
            if prompts and longest + most - 1 > limit:  # the last token is sampled and never read
                fits = max(0, limit - longest + 1)
                return f"prompts of up to {longest} tokens and {key}={most}, of which {fits} fit into {limit} positions"
        return ""

    def _prompts(self) -> Iterator[tuple[tuple[Prompt, ...], tuple[int, str]]]:
        """The prompts of each set, most tokens of their completions, and the key that sets this number."""
        rollout, judged = self.recipe.rollout, self.recipe.evaluation
        several = (rollout.longest_completion, "rollout.limits.max_tokens")

        def most_of(sampling: SamplingOptions | None, section: str) -> tuple[int, str]:
            of_one = ((sampling or rollout.sampling).max_new_tokens, f"{section}.sampling.max_new_tokens")
            return several if rollout.environment else of_one

        yield self.data.train, most_of(rollout.sampling, "rollout")
        yield self.data.held_out, most_of(judged.sampling, "evaluation")
        for name, each in judged.sets.items():
            yield self.data.held_out_sets[name], most_of(each.sampling, f"evaluation.sets.{name}")

    @cached_property
    def recorded(self) -> list[Completion]:
        """The completions that the engine replays."""
        path = self.recipe.rollout.engine.recorded_file
        return [] if path is None else read_completions(path)

    @cached_property
    def unknown_token(self) -> str:
        """The first recorded token that is not in the model's vocabulary, in words; empty if none."""
        vocabulary = causal_lm(self.model).get_input_embeddings().weight.shape[0]
        for completion in self.recorded:
            for token in completion.token_ids.tolist():
                if not 0 <= token < vocabulary:
                    return (
                        f"{token} in a completion of prompt {completion.prompt_id!r}, where ids are below {vocabulary}"
                    )
        return ""

    @cached_property
    def too_few(self) -> str:
        """The first prompt with too few recorded completions, in words; empty if none."""
        count = Counter(completion.prompt_id for completion in self.recorded)
        wanted = self.recipe.rollout.completions_per_prompt
        few = next((prompt.id for prompt in self.data.train if count[prompt.id] < wanted), None)
        return "" if few is None else f"{count[few]} of prompt {few!r}, not {wanted}"


_recorded = Setting[Built](
    "rollout.engine recorded", lambda built: built.recipe.rollout.engine.recorded_file is not None
)

BUILT_RULES: tuple[Rule[Built], ...] = (
    Setting[Built]("data.max_prompt_tokens and sampling.max_new_tokens").needs(
        "as many positions as the model knows for a prompt and its completion",
        given=lambda built: built.too_long,
        remedy="Lower one of them.",
    ),
    _recorded.needs(
        "token ids that the model has",
        given=lambda built: built.unknown_token,
        remedy="Record with the model's own tokenizer.",
        kind=DataError,
    ),
    _recorded.needs(
        "rollout.completions_per_prompt of every prompt",
        given=lambda built: built.too_few,
        remedy="Record more, ask for fewer completions a prompt, or leave the prompt out.",
        kind=DataError,
    ),
)


def check_before_start(recipe: Recipe, data: Data, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a recipe that breaks one of the rules above, or a rule about ``train.optimizer.moments``, or whose data
    lack a text to imitate or what ``teacher.template`` reads.

    A model on the meta device is checked for the recipe's device, which need not be on this machine.

    Args:
        model: of the recipe, on any device, ``meta`` included.

    Raises:
        ConfigurationError, DataError, UnavailableError: what the rule says.
    """
    check(BUILT_RULES, Built(recipe, data, model))
    column = recipe.rollout.engine.recorded_column
    if column is not None:
        ColumnEngine(column, tokenizer).check(data.train, recipe.rollout.sampling.max_new_tokens)
    if recipe.teacher is not None and recipe.teacher.template is not None:
        _check_template(recipe.teacher.template, data.train, tokenizer)
    device = next(model.parameters()).device.type
    if device == "meta":
        device = "cuda" if recipe.model.device == "auto" else recipe.model.device.split(":")[0]
    check(MOMENT_RULES, Machine(recipe, device))


def _check_template(template: str, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse what is no template, and a name that no row has; a row that alone lacks one may be tested for it."""
    from jinja2 import Environment, meta

    TeacherPrompts(template, tokenizer, {})
    known = {"prompt", "others", "reward", "verdicts"}.union(*(prompt.columns for prompt in prompts))
    unknown = meta.find_undeclared_variables(Environment().parse(template)) - known  # parsed, never rendered
    if unknown:
        raise DataError(
            needed=f"teacher.template to read of {', '.join(sorted(known))}",
            given=", ".join(sorted(unknown)),
            remedy="Correct the name, or give the rows such a column.",
        )


def arrangement_of(recipe: Recipe, world: int) -> Arrangement:
    """The arrangement of those of ``world`` processes that train, by the recipe's ``parallel``, checked.

    Raises:
        LogitlessError: a number of processes that does not fit, or a setting that does not run on several.
    """
    parallel, training = recipe.parallel, world - recipe.parallel.num_sampling
    if training < 1:
        check(PROCESS_RULES, Processes(recipe, training, Arrangement()))
    arrangement = Arrangement.of(
        training,
        replicate=parallel.replicate,
        shard=parallel.shard,
        sequence=parallel.sequence,
        whole=parallel.deterministic or parallel.num_sampling > 0,
    )
    check(PROCESS_RULES, Processes(recipe, training, arrangement))
    return arrangement

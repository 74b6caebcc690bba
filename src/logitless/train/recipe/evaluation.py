"""The sections ``evaluation`` and ``checkpoint``, and the held-out metrics that decide on stopping and keeping."""

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from logitless.data.sources import DataOptions, SourceName, nearest
from logitless.rewards.reward import ENVIRONMENT
from logitless.rollout.sampling import SamplingOptions
from logitless.train.recipe.rule import Rule, Setting
from logitless.train.recipe.section import Section

if TYPE_CHECKING:
    from logitless.train.recipe.config import Recipe


class _HeldOut(Section):
    every_blocks: PositiveInt = Field(10, description="also before the first and after the last block")
    samples_per_prompt: PositiveInt = Field(1, description="completions a prompt; of several, pass@k is told too")
    sampling: SamplingOptions | None = Field(None, description="default: the rollout's at temperature 0")
    success_at: float = Field(1.0, description="reward from which a completion counts as correct")


class HeldOutSection(_HeldOut):
    """A further set of held-out prompts, with settings and metrics (`held_out/<name>/...`) of its own."""

    data: DataOptions = Field(description="prompts, removed from training")


class WatchSection(Section):
    """A metric of held-out prompts, and which way is better."""

    metric: str = Field(
        "evaluation/accuracy",
        description="of `data.held_out` (`evaluation/...`) or of a set (`held_out/<set>/...`), see docs/metrics.md",
    )
    mode: Literal["max", "min"] = Field("max", description="max: a larger value is better; min: a smaller one")

    @property
    def least_gain(self) -> float:
        """How much better than the best a value must be to count."""
        return 0.0

    @property
    def longest_wait(self) -> float:
        """Evaluations in a row without a better value that end the run."""
        return math.inf

    @property
    def prefix(self) -> str:
        """Prefix of the metrics of the same held-out set: ``evaluation/`` or ``held_out/<set>/``."""
        parts = self.metric.split("/")
        return "/".join(parts[: 1 if parts[0] == "evaluation" else 2]) + "/"


class StopSection(WatchSection):
    """Early stopping: the run is complete once a metric has not become better for some evaluations."""

    patience: PositiveInt = Field(description="evaluations in a row without a better value that end the run")
    min_delta: NonNegativeFloat = Field(0.0, description="by which a value must be better than the best to count")

    @property
    def least_gain(self) -> float:
        return self.min_delta

    @property
    def longest_wait(self) -> float:
        return self.patience


class EvaluationSection(_HeldOut):
    """Held-out prompts, with their own sampling settings."""

    stop: StopSection | None = Field(None, description="early stopping; None: the run has `train.blocks` blocks")
    sets: dict[SourceName, HeldOutSection] = Field(
        default_factory=dict, description="further held-out sets, by a name that a reward may name in sources"
    )

    @property
    def changed(self) -> list[str]:
        """The keys about ``data.held_out`` whose values are not the defaults."""
        return [name for name, key in _HeldOut.model_fields.items() if getattr(self, name) != key.default]


class CheckpointSection(Section):
    """Saves that `--resume` continues from."""

    every_blocks: PositiveInt = Field(10, description="also at the end and on Ctrl-C")
    keep: PositiveInt = Field(2, description="latest checkpoints kept")
    keep_best: WatchSection | None = Field(
        None,
        description="keep the best evaluation's checkpoint too, and export it at the end; None: the last weights are "
        "exported",
    )


# --- rules ----------------------------------------------------------------------------------------------------------


def pass_at_ks(num_samples: int) -> list[int]:
    """The k of pass@k that are measured with so many samples a prompt: 1 (accuracy), 2, 4, ... and all.

    Example:
        >>> pass_at_ks(6)
        [1, 2, 4, 6]
    """
    return sorted({2**power for power in range(num_samples.bit_length())} | {num_samples})


def held_out_metrics(recipe: "Recipe") -> Iterator[str]:
    """The names of all metrics that the recipe's evaluations may have."""
    sets: dict[str, EvaluationSection | HeldOutSection] = {**recipe.evaluation.sets}
    if recipe.data.held_out is not None:
        sets["held_out"] = recipe.evaluation
    for source, section in sets.items():
        start = "evaluation" if source == "held_out" else f"held_out/{source}"
        ks = pass_at_ks(section.samples_per_prompt)
        for name in ("accuracy" if k == 1 else f"pass_at/{k}" for k in ks):
            yield from (f"{start}/{name}", f"{start}/{name}/low", f"{start}/{name}/high")
        yield from (f"{start}/{name}" for name in ("reward_mean", "length_mean", "truncated_fraction", "prompts"))
        if recipe.scores:
            yield f"{start}/unscored_fraction"
        scored = [each.metric_name for each in recipe.rewards if each.sources is None or source in each.sources]
        scored += [ENVIRONMENT] * (recipe.scores and not recipe.rewards)
        yield from (f"{start}/{name}/mean" for name in scored)


def _watched(key: str, section: Callable[["Recipe"], WatchSection | None]) -> Rule["Recipe"]:
    """The rule that a watched metric is one of the recipe's evaluations."""

    def given(recipe: "Recipe") -> str:
        watch, known = section(recipe), [*held_out_metrics(recipe)]
        if watch is None or watch.metric in known:
            return ""
        return f"{watch.metric}, where " + (f"{nearest(watch.metric, known)} is nearest" if known else "none are there")

    return Setting["Recipe"](f"{key}.metric", lambda recipe: section(recipe) is not None).needs(
        "a metric of the recipe's held-out prompts",
        given=given,
        remedy="Name one, or give the prompts that it is measured on (data.held_out, evaluation.sets).",
    )


RULES: tuple[Rule["Recipe"], ...] = (
    _watched("evaluation.stop", lambda recipe: recipe.evaluation.stop),
    _watched("checkpoint.keep_best", lambda recipe: recipe.checkpoint.keep_best),
)

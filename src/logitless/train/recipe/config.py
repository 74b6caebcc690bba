"""The recipe of a run: one YAML file, typed, checked as a whole before anything is loaded.

Each section is a frozen pydantic model; parts with variants (surrogates, advantages, rewards, data sources) are unions
told apart by ``name``, so a variant has only its own knobs. ``docs/configuration.md`` is generated from these types.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, field_validator, model_validator

from logitless.data.sources import sources_of
from logitless.rollout.environments.options import pays
from logitless.rollout.sampling import SamplingOptions
from logitless.train.recipe import (
    algorithm,
    data,
    engine,
    evaluation,
    model,
    parallel,
    rollout,
    teacher,
    training,
    writers,
)
from logitless.train.recipe.algorithm import AlgorithmSection, KLInLoss, KLInReward, ValueHeadSection
from logitless.train.recipe.data import AnyReward, DataSection, WarmStartSection
from logitless.train.recipe.evaluation import CheckpointSection, EvaluationSection
from logitless.train.recipe.model import ModelSection
from logitless.train.recipe.parallel import ParallelSection
from logitless.train.recipe.rollout import RolloutSection
from logitless.train.recipe.rule import Machine, Processes, Rule, check
from logitless.train.recipe.section import Section
from logitless.train.recipe.teacher import TeacherSection
from logitless.train.recipe.training import TrainSection
from logitless.train.recipe.writers import WriterSection


class Recipe(Section):
    """A complete run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="of the run folder")
    schema_number: Literal[1] = Field(1, description="of the recipe's format; a later one needs a later logitless")
    seed: NonNegativeInt = Field(0, lt=2**63, description="of everything random, below 2^63")
    output: str = Field("runs", description="folder of run folders")
    model: ModelSection
    data: DataSection
    warm_start: WarmStartSection | None = None
    rollout: RolloutSection
    rewards: tuple[AnyReward, ...] = Field(
        description="several are summed with their weights; `[]` beside an environment that pays by itself"
    )
    algorithm: AlgorithmSection = Field(default_factory=AlgorithmSection)
    value_head: ValueHeadSection | None = Field(
        None, description="None: its defaults where the algorithm has a value loss, else no value head"
    )
    kl: KLInLoss | KLInReward | None = Field(
        None, discriminator="placement", description="distance to the reference; None: no reference is loaded"
    )
    teacher: TeacherSection | None = None
    train: TrainSection = Field(default_factory=TrainSection)
    parallel: ParallelSection = Field(default_factory=ParallelSection)
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    writers: tuple[Annotated[WriterSection, Field(discriminator="name")], ...] = Field(
        ("tensorboard",),
        validate_default=True,
        description="where metrics go besides the run folder; a name alone has its defaults",
    )

    @property
    def samplings(self) -> tuple[SamplingOptions, ...]:
        """All sampling settings that the recipe gives explicitly, the rollout's first."""
        held_out = (self.evaluation, *self.evaluation.sets.values())
        return (self.rollout.sampling, *(each.sampling for each in held_out if each.sampling is not None))

    @property
    def scores(self) -> bool:
        """Whether a reward or the environment scores completions; under a teacher alone nothing does."""
        return bool(self.rewards) or pays(self.rollout.environment)

    @property
    def imitates(self) -> bool:
        """Whether the loss is the likelihood of the completions, whatever their rewards are."""
        surrogate = self.algorithm.surrogate
        return (self.algorithm.preset if surrogate is None else surrogate.name) == "nll"

    @property
    def reads_reference(self) -> bool:
        """Whether there is a reference: for a KL, or for the loss itself."""
        return self.kl is not None or self.algorithm.reads_reference

    @property
    def training_sources(self) -> tuple[str, ...]:
        """Names of the training sources; ``train`` where there is one."""
        return tuple(sources_of(self.data.train))

    @field_validator("writers", mode="before")
    @classmethod
    def _sections_of_names(cls, given: Any) -> Any:
        if not isinstance(given, list | tuple):
            return given
        return [{"name": each} if isinstance(each, str) else each for each in given]

    @model_validator(mode="after")
    def _parts_fit(self) -> "Recipe":
        check(RULES, self)
        return self


RULES: tuple[Rule[Recipe], ...] = (
    *(*data.RULES, *writers.RULES, *evaluation.RULES, *rollout.RULES, *training.RULES),
    *(*model.RULES, *engine.RULES, *parallel.RULES, *algorithm.RULES, *teacher.RULES),
)
"""Checked when a recipe is read."""

PROCESS_RULES: tuple[Rule[Processes], ...] = (
    *(*parallel.PROCESS_RULES, *training.PROCESS_RULES, *rollout.PROCESS_RULES),
    *(*engine.PROCESS_RULES, *model.PROCESS_RULES, *teacher.PROCESS_RULES, *algorithm.PROCESS_RULES),
)
"""Checked when the number of processes is known."""

MACHINE_RULES: tuple[Rule[Machine], ...] = (
    *(*model.MACHINE_RULES, *engine.MACHINE_RULES, *training.MACHINE_RULES, *writers.MACHINE_RULES),
    *rollout.MACHINE_RULES,
)
"""Checked by doctor against the machine."""

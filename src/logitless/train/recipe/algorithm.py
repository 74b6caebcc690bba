"""The sections ``algorithm``, ``value_head`` and ``kl``."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveFloat

from logitless.objective.advantage import Advantage
from logitless.objective.correction import SamplerCorrection
from logitless.objective.divergence import KLPenalty
from logitless.objective.entropy import EntropyBonus
from logitless.objective.filters import Filter
from logitless.objective.kl_control import KLControl
from logitless.objective.own import OwnAdvantage, OwnSurrogate
from logitless.objective.presets import PRESETS
from logitless.objective.ratio import Ratio
from logitless.objective.surrogate import Surrogate
from logitless.objective.value import ValueLoss
from logitless.objective.weighting import Weighting
from logitless.train.recipe.rule import Composed, Processes, Rule, Setting, given, needs_whole_weights, refusal
from logitless.train.recipe.section import Section

if TYPE_CHECKING:
    from logitless.train.recipe.config import Recipe


class AlgorithmSection(Section):
    """A paper's composition, with parts replaced by name."""

    preset: str = Field("grpo", description="a paper's name, see docs/objectives.md")
    parameters: dict[str, Any] = Field(default_factory=dict, description="of the preset, in its paper's terms")
    ratio: Annotated[Ratio, Field(discriminator="name")] | None = Field(None, description="replaces the preset's")
    surrogate: Annotated[Surrogate | OwnSurrogate, Field(discriminator="name")] | None = Field(
        None, description="replaces the preset's"
    )
    filters: tuple[Annotated[Filter, Field(discriminator="name")], ...] | None = Field(
        None, description="replaces the preset's"
    )
    correction: SamplerCorrection | None = Field(None, description="sampler correction (importance sampling)")
    score_centering: Literal["device", "host"] | None = Field(
        None, description="centre the score (docs/objectives.md); where the sampler's weights wait"
    )
    entropy_bonus: EntropyBonus | None = Field(None, description="replaces the preset's")
    advantage: Annotated[Advantage | OwnAdvantage, Field(discriminator="name")] | None = Field(
        None, description="replaces the preset's"
    )
    weighting: Annotated[Weighting, Field(discriminator="name")] | None = Field(
        None, description="replaces the preset's"
    )
    value_loss: ValueLoss | None = Field(
        None, description="replaces the preset's; goes with an advantage that reads values (`gae`), and only with one"
    )

    @property
    def reads_reference(self) -> bool:
        """Whether a surrogate of the library reads the reference; a misspelled preset is refused later."""
        if self.surrogate is not None:
            return not isinstance(self.surrogate, OwnSurrogate) and self.surrogate.reads_reference
        return self.preset in PRESETS and PRESETS[self.preset]().objective.surrogate.reads_reference


class ValueHeadSection(Section):
    """The linear layer that predicts returns, on the policy's backbone, for algorithms with a value loss (PPO)."""

    learning_rate_factor: PositiveFloat = Field(
        10.0, description="the head's learning rate, as a multiple of the optimizer's; it is never decayed"
    )
    source: str | None = Field(
        None, description="`value_head.safetensors` of a finished run to start from; None: every weight 0"
    )


class _KL(Section):
    control: Annotated[KLControl, Field(discriminator="name")] = Field(description="fixed or adaptive coefficient")
    update: Literal["step", "epoch"] = Field("step", description="when the coefficient moves")


class KLInLoss(_KL):
    """A term of the loss that keeps the policy near the reference."""

    placement: Literal["loss"]
    penalty: KLPenalty = Field(default_factory=KLPenalty, description="estimator, ratio correction, clamp")


class KLInReward(_KL):
    """k1 subtracted from the reward: per token for token returns, else its sum over the sequence."""

    placement: Literal["reward"]


def value_head_section(recipe: "Recipe") -> ValueHeadSection:
    """The recipe's section, or its defaults."""
    return recipe.value_head or ValueHeadSection()


# --- rules ----------------------------------------------------------------------------------------------------------


def _refused_by_correction(recipe: "Recipe") -> str:
    """The sampling setting that the sampler correction does not allow; empty where it allows all of them."""
    correction, sampling = recipe.algorithm.correction, recipe.rollout.sampling
    if correction is None:
        return ""
    top_p, top_k, min_p = sampling.top_p, sampling.top_k or 0, sampling.min_p
    return refusal(lambda: correction.check_sampling(top_p=top_p, top_k=top_k, min_p=min_p, others=sampling.penalties))


centering = given("algorithm.score_centering")

RULES: tuple[Rule["Recipe"], ...] = (
    given("algorithm.correction").needs(
        "sampling from the whole softmax",
        given=_refused_by_correction,
        remedy="Leave that setting out of rollout.sampling, or set filtered_sampling: accept on the correction.",
    ),
    centering.needs(
        "sampling from the whole softmax",
        holds=lambda recipe: not recipe.rollout.sampling.filters_distribution,
        given=lambda _: "top-p, top-k, min-p or penalties in rollout.sampling",
        remedy="Leave those settings out.",
    ),
    centering.needs(
        "rollout.engine gpu, transformers or auto, which sample as training computes",
        holds=lambda recipe: recipe.rollout.engine.samples_policy,
        given=lambda recipe: f"rollout.engine: {recipe.rollout.engine.name}",
        remedy="Set algorithm.correction in its place.",
    ),
    centering.about(
        "rollout.in_flight",
        "no rollout.in_flight keep, whose keys and values are of no single model",
        lambda in_flight: in_flight != "keep",
        "Set it to recompute.",
    ),
    centering.excludes("model.lora.dropout"),
)

PROCESS_RULES: tuple[Rule[Processes], ...] = (
    needs_whole_weights(centering, ", which it copies", "Set parallel.replicate."),
)

COMPOSED_RULES: tuple[Rule[Composed], ...] = (
    Setting[Composed]("value_head", lambda composed: composed.recipe.value_head is not None).needs(
        "an algorithm with a value loss",
        holds=lambda composed: composed.algorithm.value_loss is not None,
        given=lambda composed: f"preset {composed.recipe.algorithm.preset!r} without one",
        remedy="Remove value_head, or set algorithm.preset: ppo.",
    ),
    Setting[Composed]("rewards []", lambda composed: not composed.recipe.rewards).needs(
        "an advantage that does not take rewards apart",
        holds=lambda composed: composed.algorithm.advantage is None or not composed.algorithm.advantage.reads_functions,
        given=lambda composed: composed.algorithm.advantage.name if composed.algorithm.advantage else "none",
        remedy="Choose another algorithm.advantage, or name a reward.",
    ),
    Setting[Composed]("algorithm.preset echo", lambda composed: composed.algorithm.observations is not None).needs(
        "rollout.environment, whose words are learnt",
        holds=lambda composed: composed.recipe.rollout.environment is not None,
        given=lambda _: "none",
        remedy="Set one, or choose the preset grpo.",
    ),
    Setting[Composed](
        "algorithm.advantage of columns",
        lambda composed: composed.algorithm.advantage is not None and bool(composed.algorithm.advantage.reads_columns),
    ).needs(
        "groups whose rewards are equal, which it compares with other prompts or blocks",
        holds=lambda composed: composed.recipe.rollout.zero_signal == "keep",
        given=lambda composed: f"rollout.zero_signal={composed.recipe.rollout.zero_signal}",
        remedy="Set rollout.zero_signal: keep.",
    ),
    Setting[Composed](
        "algorithm.surrogate of the reference", lambda composed: composed.algorithm.objective.surrogate.reads_reference
    ).needs(
        "a reference",
        holds=lambda composed: composed.recipe.reads_reference,
        given=lambda _: "no kl",
        remedy="Set kl: {placement: loss, control: {name: fixed, beta: 0.0}}.",
    ),
    Setting[Composed](
        "algorithm.advantage remax",
        lambda composed: composed.algorithm.advantage is not None and composed.algorithm.advantage.reads_baseline,
    ).needs(
        "an engine that samples",
        holds=lambda composed: not composed.recipe.rollout.engine.samples_nothing,
        given=lambda _: "recorded completions",
        remedy="Choose another algorithm.advantage.",
    ),
)

"""The section ``rollout``: one round of generation."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from logitless.rewards.reward import Unscored
from logitless.rewards.text.overlong import Overlong
from logitless.rollout.environment import Limits
from logitless.rollout.environments.options import EnvironmentOptions
from logitless.rollout.sampling import SamplingOptions
from logitless.train.recipe.engine import AnyEngine, AutoEngineSection
from logitless.train.recipe.rule import (
    Rule,
    Setting,
    chosen,
    given,
    needs_one_process,
    needs_package,
    needs_whole_weights,
)
from logitless.train.recipe.section import Section

if TYPE_CHECKING:
    from logitless.train.recipe.config import Recipe


class ParityThresholds(Section):
    """Bounds of |logp_old - logp_sampler| over a block."""

    mean: PositiveFloat | None = Field(None, description="nats, over tokens")
    p95: PositiveFloat | None = Field(None, description="nats, over tokens")
    max: PositiveFloat | None = Field(None, description="nats, over tokens")
    sequence: PositiveFloat | None = Field(
        None, description="nats, of the largest |sum over a completion| of logp_old - logp_sampler"
    )


class ParitySection(Section):
    """Bounds between sampler and trainer, at every scored block sampled from the policy's own softmax."""

    warn: ParityThresholds = Field(default_factory=ParityThresholds, description="above one of them, a message")
    stop: ParityThresholds = Field(default_factory=ParityThresholds, description="above one of them, the run ends")

    @property
    def has_threshold(self) -> bool:
        """Whether there is any bound."""
        return self != ParitySection()


class RolloutSection(Section):
    """How a block is sampled."""

    engine: AnyEngine = Field(default_factory=AutoEngineSection, discriminator="name", description="what samples")
    parity: ParitySection = Field(default_factory=ParitySection)
    environment: Annotated[EnvironmentOptions, Field(discriminator="name")] | None = Field(
        None, description="what answers the policy between its turns; None: a completion is a single turn"
    )
    limits: Limits = Field(default_factory=Limits, description="of an episode, where there is an environment")
    staleness: NonNegativeInt = Field(
        0, description="blocks that are sampled ahead of training, each by weights so many blocks old; 0: on policy"
    )
    in_flight: Literal["keep", "recompute"] | None = Field(
        None,
        description="completions under way on processes of parallel.sampling go on with newer weights; keys and values "
        "so far are kept or recomputed",
    )
    prompts_per_block: PositiveInt = Field(32, description="P, prompts a block")
    completions_per_prompt: PositiveInt = Field(8, description="G, completions a prompt")
    max_rows: PositiveInt = Field(512, description="completions decoded at once, here and in evaluation")
    prefill_tokens: PositiveInt = Field(16384, description="tokens of prompts that the engine prefills at once")
    sampling: SamplingOptions = Field(description="temperature, filters, limits, stops")
    zero_signal: Literal["keep", "drop", "refill"] = Field(
        "keep", description="groups whose rewards are all equal: train on them, leave them out, or sample others"
    )
    max_refills: NonNegativeInt = Field(3, description="times that `refill` samples further prompts")
    unscored: Unscored = Field(
        "leave_out", description="a completion that a function could not score: sum the others, or drop the completion"
    )

    @property
    def longest_completion(self) -> int:
        """Most tokens of a completion, those of its environment included."""
        most = self.sampling.max_new_tokens
        return most if self.environment is None else self.limits.max_tokens or most


# --- rules ----------------------------------------------------------------------------------------------------------


def _longest_turn(recipe: "Recipe") -> int:
    return max(each.max_new_tokens for each in recipe.samplings)


def _overlong(recipe: "Recipe") -> int | None:
    """The greatest ``max_length`` of an ``overlong`` reward that training reads; None without one."""
    trained = set(recipe.training_sources)
    read = (reward for reward in recipe.rewards if reward.sources is None or trained.intersection(reward.sources))
    return max((reward.max_length for reward in read if isinstance(reward, Overlong)), default=None)


parity = given("rollout.parity.has_threshold", "rollout.parity")
staleness = Setting["Recipe"](
    "rollout.staleness", lambda recipe: recipe.rollout.staleness > 0 and recipe.rollout.engine.recorded_run is None
)

staleness_on_servers = Setting["Recipe"](
    "rollout.staleness with vllm_server", lambda recipe: staleness.when(recipe) and recipe.rollout.engine.is_vllm
)

in_flight = given("rollout.in_flight")

RULES: tuple[Rule["Recipe"], ...] = (
    in_flight.requires(
        "rollout.staleness", ", for without it no weights come while a block is sampled", remedy="Set it to 1."
    ),
    in_flight.needs(
        "rollout.engine gpu, transformers or auto",
        holds=lambda recipe: recipe.rollout.engine.samples_policy,
        given=lambda recipe: f"rollout.engine: {recipe.rollout.engine.name}",
        remedy="Leave rollout.in_flight out; vllm_server has a rollout.engine.in_flight of its own.",
    ),
    given("rollout.environment").needs(
        "rollout.limits.max_tokens of at least one turn, the largest max_new_tokens",
        holds=lambda recipe: (recipe.rollout.limits.max_tokens or 0) >= _longest_turn(recipe),
        given=lambda recipe: f"{recipe.rollout.limits.max_tokens}, and a turn of {_longest_turn(recipe)} tokens",
        remedy="Set it to the tokens of a whole episode, what the environment says included.",
    ),
    Setting["Recipe"]("rollout.limits", lambda recipe: recipe.rollout.limits != Limits()).requires(
        "rollout.environment", ", for sampling.max_new_tokens bounds single turns", remedy="Leave rollout.limits out."
    ),
    Setting["Recipe"]("rollout.sampling").needs(
        "a positive temperature, which also divides the logits in the loss",
        holds=lambda recipe: recipe.rollout.sampling.temperature > 0,
        given=lambda recipe: str(recipe.rollout.sampling.temperature),
        remedy="Sample at temperature 1, or set evaluation.sampling for greedy evaluation.",
    ),
    Setting["Recipe"]("rewards overlong", lambda recipe: _overlong(recipe) is not None).needs(
        "a max_length that completions of the rollout can have",
        holds=lambda recipe: (_overlong(recipe) or 0) <= recipe.rollout.longest_completion,
        given=lambda recipe: f"{_overlong(recipe)}, and completions end after {recipe.rollout.longest_completion}",
        remedy="Set max_length to rollout.sampling.max_new_tokens (limits.max_tokens with an environment).",
    ),
    chosen("rollout.zero_signal", "drop", "refill").needs(
        "at least two completions a prompt, for their rewards to differ",
        holds=lambda recipe: recipe.rollout.completions_per_prompt > 1,
        given=lambda recipe: f"rollout.completions_per_prompt={recipe.rollout.completions_per_prompt}",
        remedy="Raise it, or set rollout.zero_signal: keep.",
    ),
    parity.needs(
        "sampling from the policy's own softmax, for it compares log-probs of the same distribution",
        holds=lambda recipe: not recipe.rollout.sampling.filters_distribution,
        given=lambda _: "top-p, top-k, min-p or penalties in rollout.sampling",
        remedy="Leave rollout.parity out, or those settings.",
    ),
    parity.excludes(
        "rollout.staleness",
        ", for it compares completions of the weights that are trained",
        remedy="Leave rollout.parity out; rollout.engine.probe compares after every sync.",
    ),
)

PROCESS_RULES = (
    needs_whole_weights(in_flight, ", which are swapped while a run is repeated", "Set parallel.replicate."),
    needs_one_process(
        staleness_on_servers,
        ", whose thread sends the requests",
        "Leave rollout.staleness out, start one process, or sample on some of them (parallel.sampling).",
    ),
)

harness = chosen("rollout.environment.name", "harness")

MACHINE_RULES = (needs_package(harness, "starlette", "serve", None),)

"""The collector: the next block of judged episodes, from whatever engine and environment it was given."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from logitless.data.mixing import MixedOrder
from logitless.data.prompts import PromptOrder
from logitless.distributed.ranks import Ranks
from logitless.rewards.reward import WeightedReward
from logitless.rollout.engine import Engine
from logitless.rollout.environment import Driver, Environment
from logitless.rollout.sampling import SamplingOptions
from logitless.seeds import derived_seed
from logitless.train.block import JudgedBlock
from logitless.train.collect.episode_rewards import signal
from logitless.train.collect.shared_rollout import sampled_and_judged
from logitless.train.recipe.rollout import RolloutSection
from logitless.types import Group, Prompt


class Collector:
    """Draws prompts in order, has them played and judged, and refills where groups have no signal.

    Args:
        prompts: to train on.
        engine: samples.
        environment: answers.
        rewards: judge.
        options: of the recipe.
        seed: of the run.
        ranks: that share the prompts of a round; every rank gets the same block.
        order: in which prompts are drawn; None for one source's, from the seed.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        engine: Engine,
        environment: Environment | Driver,
        rewards: Sequence[WeightedReward],
        options: RolloutSection,
        *,
        seed: int,
        ranks: Ranks = Ranks.alone(),
        order: PromptOrder | MixedOrder | None = None,
    ) -> None:
        self.ranks = ranks
        self.prompts, self.engine, self.environment = prompts, engine, environment
        self.rewards, self.options, self.seed = rewards, options, seed
        self.order = order or PromptOrder(len(prompts), derived_seed(seed, "order"))

    def under(self, options: RolloutSection) -> "Collector":
        """A collector of the same prompts, with the same place in them, that reads other settings.

        Args:
            options: for the engine that there is.
        """
        other = copy(self)
        other.options = options
        return other

    def next(self, block: int, *, length_factor: float = 1.0) -> JudgedBlock:
        """Sample and judge until there are enough groups to train on or the refills are used up.

        Args:
            block: number, from 0; with the run's seed it settles everything that is random.
            length_factor: multiplies ``max_new_tokens``.
        """
        options, sampling = self.options, self.sampling(length_factor)
        drawn, kept, rounds = list[Group](), list[bool](), 0
        limit = 1 + (options.max_refills if options.zero_signal == "refill" else 0)
        while rounds < limit and sum(kept) < options.prompts_per_block:
            prompts = [self.prompts[i] for i in self.order.next(options.prompts_per_block - sum(kept))]
            groups = sampled_and_judged(
                self.ranks,
                self.engine,
                self.environment,
                prompts,
                self.rewards,
                num_samples=options.completions_per_prompt,
                options=sampling,
                unscored=options.unscored,
                seed=derived_seed(self.seed, "rollout", block, rounds),
                limits=options.limits,
            )
            drawn += groups
            kept += [True] * len(groups) if options.zero_signal == "keep" else signal(groups)
            rounds += 1
        return JudgedBlock(tuple(drawn), tuple(kept), rounds)

    def sampling(self, length_factor: float) -> SamplingOptions:
        """How a block is sampled whose limit is multiplied."""
        options = self.options.sampling
        if length_factor == 1:
            return options
        return replace(options, max_new_tokens=max(1, int(options.max_new_tokens * length_factor)))

    def close(self) -> None:
        """Nothing is under way between two blocks."""

    def state_dict(self) -> dict[str, Any]:
        """Where in the prompts it is, as JSON."""
        return self.order.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``."""
        self.order.load_state_dict(state)

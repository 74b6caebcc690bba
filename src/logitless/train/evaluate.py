"""Held-out prompts under their own sampling settings: how good the policy is, apart from how it is trained."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from logitless.distributed.ranks import Ranks
from logitless.rewards.combine import Unscored, reward_statistics
from logitless.rewards.contract import WeightedReward
from logitless.rollout.engine import Engine
from logitless.rollout.environment import Driver, Environment, Limits
from logitless.rollout.sampling import SamplingOptions
from logitless.seeds import derived_seed
from logitless.train.config import Recipe
from logitless.train.metrics import Numbers
from logitless.train.pass_at import success_metrics
from logitless.train.shared_rollout import sampled_and_judged
from logitless.types import Prompt


@dataclass(frozen=True)
class Evaluation:
    """What is sampled and judged, the same every time.

    Args:
        engine: samples with the weights that it was last given.
        environment: answers.
        prompts: held out.
        rewards: judge.
        num_samples: of each prompt.
        sampling: settings.
        unscored: what a completion is worth that some of the functions could not judge.
        success_at: reward from which a completion counts as correct.
        seed: the same every time, too.
        ranks: that share the prompts; every rank gets the same numbers.
        limits: of an episode.
    """

    engine: Engine
    environment: Environment | Driver
    prompts: Sequence[Prompt]
    rewards: Sequence[WeightedReward]
    num_samples: int
    sampling: SamplingOptions
    unscored: Unscored
    success_at: float
    seed: int
    ranks: Ranks = field(default_factory=Ranks.alone)
    limits: Limits = field(default_factory=Limits)

    def __call__(self) -> Numbers:
        """Sample and judge every held-out prompt.

        Returns:
            The metrics ``evaluation/...``; accuracy is the fraction of all completions whose reward reaches
            ``success_at``, so an unscorable completion is not a success. With several samples a prompt pass@k, too.
        """
        groups = sampled_and_judged(
            self.ranks,
            self.engine,
            self.environment,
            self.prompts,
            self.rewards,
            num_samples=self.num_samples,
            options=self.sampling,
            unscored=self.unscored,
            seed=self.seed,
            limits=self.limits,
        )
        completions = [c for g in groups for c in g.completions]
        rewards = [r for g in groups for r in g.rewards if r is not None]
        correct = [sum(r is not None and r >= self.success_at for r in g.rewards) for g in groups]
        found: Numbers = {
            **success_metrics(correct, self.num_samples),
            "evaluation/reward_mean": math.fsum(rewards) / len(rewards) if rewards else math.nan,
            "evaluation/length_mean": sum(c.length for c in completions) / len(completions),
            "evaluation/truncated_fraction": sum(c.finish_reason == "length" for c in completions) / len(completions),
            "evaluation/prompts": len(self.prompts),
        }
        for name, numbers in reward_statistics([v for g in groups for v in g.verdicts]).items():
            if numbers["mean"] is not None:
                found[f"evaluation/{name}/mean"] = numbers["mean"]
        return found


def evaluation_of(
    recipe: Recipe,
    engine: Engine,
    environment: Environment | Driver,
    prompts: Sequence[Prompt],
    rewards: Sequence[WeightedReward],
    ranks: Ranks = Ranks.alone(),
) -> Evaluation:
    """The evaluation that a recipe describes; greedy unless it says otherwise."""
    options, rollout = recipe.evaluation, recipe.rollout
    return Evaluation(
        engine,
        environment,
        prompts,
        rewards,
        num_samples=options.samples_per_prompt,
        sampling=options.sampling or rollout.sampling.greedy(),
        unscored=rollout.unscored,
        success_at=options.success_at,
        seed=derived_seed(recipe.seed, "evaluation"),
        ranks=ranks,
        limits=rollout.limits,
    )

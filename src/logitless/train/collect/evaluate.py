"""Evaluation on held-out prompts: one set or several, each with sampling settings and metrics of its own."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from logitless.distributed.ranks import Ranks
from logitless.rewards.reward import WeightedReward
from logitless.rewards.statistics import reward_statistics
from logitless.rewards.wilson import wilson_interval
from logitless.rollout.engine import Engine
from logitless.rollout.environment import Driver, Environment
from logitless.rollout.sampling import SamplingOptions
from logitless.seeds import derived_seed
from logitless.train.block import sampling_numbers
from logitless.train.collect.collector import GroupSampler
from logitless.train.recipe.config import Recipe
from logitless.train.recipe.evaluation import EvaluationSection, HeldOutSection, pass_at_ks
from logitless.train.record.metrics import Numbers
from logitless.types import Group, Prompt


@dataclass(frozen=True)
class HeldOut:
    """At least one held-out prompt, and how they are evaluated.

    Args:
        metrics: prefix of its metrics: ``evaluation``, or ``held_out/<set>``.
        success_at: reward from which a completion counts as correct.
        every_blocks: blocks from one evaluation to the next.
        seed: the same in every evaluation.
    """

    metrics: str
    prompts: Sequence[Prompt]
    num_samples: int
    sampling: SamplingOptions
    success_at: float
    every_blocks: int
    seed: int


@dataclass(frozen=True)
class Evaluation:
    """Evaluates held-out sets.

    Args:
        scored: whether rewards or an environment score; else, under a teacher alone, accuracy and reward are NaN.
    """

    sampler: GroupSampler
    sets: Sequence[HeldOut]
    scored: bool = True

    def due(self, done: int, blocks: int) -> Sequence[HeldOut]:
        """The sets that are due after ``done`` of ``blocks`` blocks: all before the first and after the last block."""
        return [each for each in self.sets if done % each.every_blocks == 0 or done == blocks]

    def __call__(self, sets: Sequence[HeldOut], see: Callable[[Sequence[Group]], None] | None = None) -> Numbers:
        """Evaluate some sets; returns their metrics. ``see`` is called with the groups of each."""
        found: Numbers = {}
        for each in sets:
            groups = self.sampler(each.prompts, each.num_samples, each.sampling, seed=each.seed)
            if see is not None:
                see(groups)
            found |= self._metrics(each, groups)
        return found

    def _metrics(self, held_out: HeldOut, groups: Sequence[Group]) -> Numbers:
        """The metrics of a set; with several samples a prompt there is pass@k, too.

        Accuracy is the fraction of all completions whose reward reaches ``success_at``: one that could not be scored is
        no success. It is NaN if none could be scored.
        """
        correct = [sum(r is not None and r >= held_out.success_at for r in g.rewards) for g in groups]
        any_scored = self.scored and any(reward is not None for group in groups for reward in group.rewards)
        success = success_metrics(correct, held_out.num_samples)
        found: Numbers = {
            **(success if any_scored else dict.fromkeys(success, math.nan)),
            **sampling_numbers(groups),
            "prompts": len(held_out.prompts),
        }
        if not self.scored:
            found["reward_mean"] = math.nan
        else:
            unscored = [reward is None for group in groups for reward in group.rewards]
            found["unscored_fraction"] = sum(unscored) / len(unscored)
            for name, numbers in reward_statistics([v for g in groups for v in g.verdicts]).items():
                if numbers["mean"] is not None:
                    found[f"{name}/mean"] = numbers["mean"]
        return {f"{held_out.metrics}/{name}": value for name, value in found.items()}


def evaluation_of(
    recipe: Recipe,
    engine: Engine,
    environment: Environment | Driver,
    prompts: Mapping[str, Sequence[Prompt]],
    rewards: Sequence[WeightedReward],
    ranks: Ranks = Ranks.alone(),
) -> Evaluation:
    """The evaluation of a recipe; greedy by default.

    Args:
        prompts: by name of the set: ``held_out`` of the data section, and each of ``evaluation.sets``. Empty sets are
            left out.
    """
    rollout = recipe.rollout
    sections: Mapping[str, EvaluationSection | HeldOutSection] = {
        "held_out": recipe.evaluation,
        **recipe.evaluation.sets,
    }
    sets = [
        HeldOut(
            "evaluation" if name == "held_out" else f"held_out/{name}",
            prompts[name],
            num_samples=options.samples_per_prompt,
            sampling=options.sampling or rollout.sampling.greedy(),
            success_at=options.success_at,
            every_blocks=options.every_blocks,
            seed=derived_seed(recipe.seed, "evaluation"),
        )
        for name, options in sections.items()
        if prompts[name]
    ]
    sampler = GroupSampler(engine, environment, rewards, rollout.unscored, rollout.limits, ranks)
    return Evaluation(sampler, sets, scored=recipe.scores)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the probability that one of k samples of a prompt is correct, from n samples.

    ``pass@k = 1 - C(n - c, k) / C(n, k)``, with n samples of which c are correct and n at least k

    Source: Chen et al. 2021, Evaluating Large Language Models Trained on Code, arXiv:2107.03374, eq. 1.

    Example:
        >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
        (0.25, 0.5, 1.0)
    """
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def success_metrics(num_correct: Sequence[int], num_samples: int) -> Mapping[str, float]:
    """Accuracy and pass@k for k = 2, 4, 8, ... and all samples, each with its interval over prompts.

    Example:
        >>> found = success_metrics([1, 0], 2)
        >>> found["accuracy"], found["pass_at/2"]
        (0.25, 0.5)
    """
    found: dict[str, float] = {}
    for k in pass_at_ks(num_samples):
        name = "accuracy" if k == 1 else f"pass_at/{k}"
        mean = math.fsum(pass_at_k(num_samples, c, k) for c in num_correct) / len(num_correct)
        low, high = wilson_interval(mean, len(num_correct))
        found |= {name: mean, f"{name}/low": low, f"{name}/high": high}
    return found

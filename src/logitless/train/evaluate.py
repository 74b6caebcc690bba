"""Held-out prompts under their own sampling settings: how good the policy is, apart from how it is trained."""

import math
from collections.abc import Sequence

from logitless.rewards.combine import Unscored, reward_statistics
from logitless.rewards.contract import WeightedReward
from logitless.rollout.engine import Engine
from logitless.rollout.sampling import SamplingOptions
from logitless.train.block import roll_out
from logitless.train.metrics import Numbers
from logitless.types import Prompt


def evaluate(
    engine: Engine,
    prompts: Sequence[Prompt],
    rewards: Sequence[WeightedReward],
    *,
    num_samples: int,
    sampling: SamplingOptions,
    unscored: Unscored,
    success_at: float,
    seed: int,
) -> Numbers:
    """Sample and judge every held-out prompt.

    Returns:
        The metrics ``evaluation/...``; accuracy is the fraction of all completions whose reward reaches
        ``success_at``, so an unscorable completion is not a success.
    """
    groups = roll_out(
        engine, prompts, rewards, num_samples=num_samples, sampling=sampling, unscored=unscored, seed=seed
    )
    completions = [c for g in groups for c in g.completions]
    scored = [r for g in groups for r in g.rewards if r is not None]
    found: Numbers = {
        "evaluation/accuracy": sum(r >= success_at for r in scored) / len(completions),
        "evaluation/reward_mean": math.fsum(scored) / len(scored) if scored else math.nan,
        "evaluation/length_mean": sum(c.length for c in completions) / len(completions),
        "evaluation/truncated_fraction": sum(c.finish_reason == "length" for c in completions) / len(completions),
        "evaluation/prompts": len(prompts),
    }
    for name, numbers in reward_statistics([v for g in groups for v in g.verdicts]).items():
        if numbers["mean"] is not None:
            found[f"evaluation/{name}/mean"] = numbers["mean"]
    return found

"""From the rewards of groups to a number a token: advantages and the returns that values are fitted to."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from logitless.errors import ConfigurationError
from logitless.objective.advantage import AdvantageInputs, AdvantageOutput, Estimator, turn_index
from logitless.objective.divergence import kl_in_reward
from logitless.objective.inputs import required
from logitless.train.block import PackedBlock, number, rewards_of_groups
from logitless.types import Group, TokenScores


def advantages(
    block: PackedBlock,
    groups: Sequence[Group],
    estimator: Estimator | None,
    *,
    weights: Mapping[str, float],
    kl_beta: float = 0.0,
    old: TokenScores | None = None,
    logp_ref: Float[Tensor, "N"] | None = None,
) -> AdvantageOutput:
    """What each token is worth, and what a value head is fitted to, from the groups' rewards.

    A KL in the reward, and what an environment paid at the turns, is paid token by token by estimators of token
    returns, and summed over the completion before group statistics by the others. A completion without a reward has
    advantage 0 and no value target (NaN).

    Args:
        block: packed.
        groups: of every rank, in the order they were packed.
        estimator: of the algorithm; None (a loss that reads no advantage) gives 0.
        weights: of the reward functions, for estimators that take them apart.
        kl_beta: coefficient of the KL in the reward; 0 for none.
        old: scores under the policy, for the KL and for estimators that need values; None where nothing reads them.
        logp_ref: [N] for the KL.

    Raises:
        ConfigurationError: rewards of turns beside an estimator that reads the functions and not their sum.
    """
    if estimator is None:
        return AdvantageOutput(torch.zeros(block.packed.num_tokens))
    kl = None
    if kl_beta:
        logp_old = required(None if old is None else old.logp, "logp_old")
        kl = kl_beta * kl_in_reward(logp_old, required(logp_ref, "logp_ref"))
    turn_rewards = rewards_of_turns(block, groups)
    if turn_rewards is not None and estimator.reads_functions:
        raise ConfigurationError(
            needed=f"rewards of functions, which {estimator.name!r} takes apart",
            given="rewards that an environment paid at the turns",
            remedy="Choose another advantage.",
        )
    rewards, group = rewards_of_groups(groups)
    if turn_rewards is not None:  # what is left for the end
        rewards = rewards - torch.tensor([sum(paid) for g in groups for paid in _paid(g)], dtype=rewards.dtype)
    scores = [
        [number(v[name].score if name in v else None) for name in weights] for g in groups for v in g.verdicts
    ]  # a reward that does not judge the prompt's source has said nothing
    inputs = AdvantageInputs(
        rewards=rewards,
        group=group,
        sequence=block.packed.sequence,
        kl=kl,
        turn_rewards=turn_rewards,
        turn=block.packed.turn,
        scores=torch.tensor(scores),
        weights=torch.tensor(list(weights.values())),
        values=None if old is None else old.value,
    )
    return estimator.checked(inputs)


def rewards_of_turns(block: PackedBlock, groups: Sequence[Group]) -> Float[Tensor, "K"] | None:
    """What the environment paid for each turn that has a scored token, in the order of the tokens; None if nothing.

    Args:
        block: packed.
        groups: in the order they were packed.
    """
    paid = [turns for g in groups for turns in _paid(g)]
    if not any(paid):
        return None
    sequence, turn = block.packed.sequence, block.packed.turn
    owner = turn_index(sequence, turn)
    first = torch.cat([torch.ones(1, dtype=torch.bool), owner.diff() > 0])
    turns = zip(sequence[first].tolist(), turn[first].tolist(), strict=True)
    return torch.tensor([paid[s][t] if paid[s] else 0.0 for s, t in turns])


def _paid(group: Group) -> tuple[tuple[float, ...], ...]:
    return group.turn_rewards or ((),) * len(group.completions)

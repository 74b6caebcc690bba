"""From the rewards of groups to a number a token: advantages and the returns that values are fitted to."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from logitless.errors import ConfigurationError
from logitless.objective.advantage import (
    Advantage,
    Gae,
    Gdpo,
    ReinforcePP,
    pay_at_last_token,
    turn_index,
)
from logitless.objective.divergence import kl_in_reward
from logitless.objective.inputs import required
from logitless.objective.ranges import Ranges
from logitless.train.block import AdvantagedBlock, PackedBlock, ScoredBlock
from logitless.train.judge import number, rewards_of_groups
from logitless.types import Group


def with_advantages(
    block: ScoredBlock,
    groups: Sequence[Group],
    estimator: Advantage | None,
    *,
    weights: Mapping[str, float],
    kl_beta: float = 0.0,
) -> AdvantagedBlock:
    """The block with ``advantage`` (and ``value_target``) from the groups' rewards.

    A KL in the reward is paid per token by estimators of token returns, and subtracted as its sum over the sequence
    before group statistics by the others. A completion without a reward has advantage 0 and no value target (NaN).

    Args:
        block: scored; with ``kl_beta`` under a reference too, for GAE with values.
        groups: in the order they were packed.
        estimator: of the algorithm; None (a loss that reads no advantage) gives 0.
        weights: of the reward functions, for estimators that take them apart.
        kl_beta: coefficient of the KL in the reward; 0 for none.

    Raises:
        ConfigurationError: a KL or rewards of turns beside GDPO, which reads the functions and not their sum.
    """
    if isinstance(estimator, Gdpo) and kl_beta:
        raise ConfigurationError(
            needed="one reward a completion for a KL in the reward",
            given=f"kl_beta={kl_beta} beside gdpo, which takes the reward functions apart",
            remedy="Put the KL in the loss (kl.placement: loss), or choose another advantage.",
        )
    if isinstance(estimator, Gdpo) and any(g.turn_rewards for g in groups):
        raise ConfigurationError(
            needed="rewards of functions, which gdpo takes apart",
            given="rewards that an environment paid at the turns",
            remedy="Choose another advantage.",
        )
    packed, sequence = block.packed, block.packed.sequence
    if estimator is None:
        return _with(block, torch.zeros(packed.num_tokens))
    rewards, group = rewards_of_groups(groups)
    kl = torch.zeros(packed.num_tokens)
    if kl_beta:
        kl = kl_beta * kl_in_reward(block.logp_old, required(block.logp_ref, "logp_ref"))
    if isinstance(estimator, ReinforcePP | Gae):
        paid = paid_at_tokens(block, groups) - kl
        if isinstance(estimator, Gae):
            advantage, value_target = estimator(paid, sequence, block.value_old, packed.turn)
            unscored = rewards.isnan()[sequence]
            return _with(block, advantage, value_target.masked_fill(unscored, torch.nan))
        return _with(block, estimator(paid, sequence)[0])
    trained = torch.ones(packed.num_tokens, dtype=torch.bool)
    penalty = Ranges(sequence, packed.num_sequences, trained).sum(kl)
    if isinstance(estimator, Gdpo):
        names = list(weights)
        per_function = torch.tensor([[number(v[n].score) for n in names] for g in groups for v in g.verdicts])
        per_sequence = estimator(per_function, group, torch.tensor([weights[n] for n in names]))
    else:
        per_sequence = estimator(rewards - penalty, group)
    return _with(block, per_sequence[sequence])


def paid_at_tokens(block: PackedBlock, groups: Sequence[Group]) -> Float[Tensor, "N"]:
    """[N] rewards as they are paid: a turn's at its last token, what the rewards said at the completion's last token.

    Summed over a completion this is its reward, NaN where it has none.

    Args:
        block: packed.
        groups: in the order they were packed.
    """
    rewards, _ = rewards_of_groups(groups)
    sequence = block.packed.sequence
    turns = [paid for g in groups for paid in (g.turn_rewards or ((),) * len(g.completions))]
    if not any(turns):
        return pay_at_last_token(rewards, sequence)
    said = rewards - torch.tensor([sum(paid) for paid in turns], dtype=rewards.dtype)
    owner = turn_index(sequence, block.packed.turn)
    first = torch.cat([torch.ones(1, dtype=torch.bool), owner.diff() > 0])
    of_turn = zip(sequence[first].tolist(), block.packed.turn[first].tolist(), strict=True)
    at_turns = torch.tensor([turns[s][t] if turns[s] else 0.0 for s, t in of_turn], dtype=rewards.dtype)
    return pay_at_last_token(said, sequence) + pay_at_last_token(at_turns, owner)


def _with(
    block: ScoredBlock, advantage: Float[Tensor, "N"], value_target: Float[Tensor, "N"] | None = None
) -> AdvantagedBlock:
    return AdvantagedBlock(**vars(block), advantage=advantage, value_target=value_target)

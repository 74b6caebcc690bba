"""A block (rollout batch) on its way from sampling to training: one type for each stage.

    sampled     Episode                           rollout/environment.py              play
    judged      Group, JudgedBlock                train/collect/collector.py          Collector.next
    packed      PackedBlock                       here                                pack_groups
    scored      ScoredBlock, with advantages      train/learn/learner.py              Learner.score
    trained     MicroBatch, one after another     train/learn/step.py                 OptimizerStep, backward

Stages are frozen. A ``ScoredBlock`` is a ``PackedBlock``: what takes the one takes the other.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from logitless.data.packing import StepPlan, pack
from logitless.distributed.ranks import Ranks
from logitless.objective.advantage import has_signal
from logitless.types import Group, PackedBatch, TokenBatch


@dataclass(frozen=True)
class JudgedBlock:
    """All groups that were sampled for a block, with their rewards.

    Args:
        sampled: the groups, those of refills included.
        kept: one flag a group: whether it is trained on.
        rounds: rounds of sampling; more than 1 where zero-signal groups were refilled.
        exact: whether the sampler's log-probs are bitwise identical to training's (``ExactEngine``); equal blocks may
            differ in it.
    """

    sampled: tuple[Group, ...]
    kept: tuple[bool, ...]
    rounds: int
    exact: bool = field(default=False, compare=False)

    @property
    def trained(self) -> list[Group]:
        """The groups that are trained on."""
        return [group for group, kept in zip(self.sampled, self.kept, strict=True) if kept]


@dataclass(frozen=True)
class PackedBlock:
    """The completions that are trained on, packed end to end, on the CPU.

    Args:
        packed: their tokens.
        groups: indices of each group's sequences.
        truncated: whether each completion was cut at its limit.
        version: of the policy's weights, from which the lag of each token is counted.
    """

    packed: PackedBatch
    groups: tuple[tuple[int, ...], ...]
    truncated: tuple[bool, ...]
    version: int = field(default=0, kw_only=True)


@dataclass(frozen=True)
class ScoredBlock(PackedBlock):
    """A packed block with log-probs and advantages of its tokens: ready to be trained on.

    Args:
        logp_old: [N] nats, float32, under the policy before it is trained on the block; NaN where it is not needed yet.
        entropy_old: [N] of the same pass.
        logp_ref: [N] under the reference; None where the recipe has none.
        value_old: [N] of the value head; None where there is none.
        nonzero_advantage: one flag a sequence: whether it can change a gradient; the others are left out of training
            passes. None: all can.
        scores_itself: whether ``logp_old`` of the sequences in the first step's rows comes from its training pass.
        logp_teacher: [N] under the teacher; None where it adds nothing to the advantages.
        advantage: [N].
        value_target: [N] return that the value head is fitted to, NaN where a completion has no reward; None without a
            value head.
        advantage_state: of the advantage after this block; None for one that reads a single block.
    """

    logp_old: Float[Tensor, "N"]
    entropy_old: Float[Tensor, "N"]
    logp_ref: Float[Tensor, "N"] | None
    value_old: Float[Tensor, "N"] | None
    nonzero_advantage: tuple[bool, ...] | None = field(default=None, kw_only=True)
    scores_itself: bool = field(default=False, kw_only=True)
    logp_teacher: Float[Tensor, "N"] | None = field(default=None, kw_only=True)
    advantage: Float[Tensor, "N"]
    value_target: Float[Tensor, "N"] | None
    advantage_state: Mapping[str, float] | None = field(default=None, kw_only=True)

    def tokens(self, trained: Bool[Tensor, "B"]) -> TokenBatch:
        """The block as an objective reads it.

        Args:
            trained: [B] sequences whose tokens have weight 1; the others' have weight 0.
        """
        sequence = self.packed.sequence
        return TokenBatch(
            sequence=sequence,
            num_sequences=self.packed.num_sequences,
            advantage=self.advantage,
            token_weight=trained.to(self.advantage.dtype)[sequence],
            logp_old=self.logp_old,
            logp_sampler=self.packed.logp_sampler,
            logp_ref=self.logp_ref,
            entropy_old=self.entropy_old,
            turn=self.packed.turn,
            lag=self.packed.lag,
            value_old=self.value_old,
            value_target=self.value_target,
        )


def pack_groups(groups: Sequence[Group], *, version: int | None = None, observed: bool = False) -> PackedBlock:
    """Pack the completions of groups end to end, in order; for ``version`` see ``pack``.

    Args:
        observed: whether tokens of tools and environments are packed as targets too.
    """
    ends = list(accumulate((len(group.completions) for group in groups), initial=0))
    return PackedBlock(
        packed=pack(
            [(group.prompt, c) for group in groups for c in group.completions], version=version, observed=observed
        ),
        groups=tuple(tuple(range(first, end)) for first, end in pairwise(ends)),
        truncated=tuple(c.finish_reason == "length" for group in groups for c in group.completions),
        version=version or 0,
    )


def have_signal(groups: Sequence[Group]) -> list[bool]:
    """One flag a group: whether its rewards differ."""
    if not groups:
        return []
    rewards, group = rewards_of_groups(groups)
    return has_signal(rewards, group).tolist()


def rewards_of_groups(groups: Sequence[Group]) -> tuple[Float[Tensor, "B"], Int[Tensor, "B"]]:
    """The reward of each completion, NaN where it has none, and the index of its group."""
    rewards = torch.tensor([reward_or_nan(r) for g in groups for r in g.rewards], dtype=torch.float32)
    return rewards, torch.tensor([i for i, g in enumerate(groups) for _ in g.completions], dtype=torch.long)


def sampling_numbers(groups: Sequence[Group]) -> dict[str, float]:
    """Mean reward (NaN where nothing was scored) and length of all completions, and the share cut at their limit."""
    completions = [completion for group in groups for completion in group.completions]
    rewards = [reward for group in groups for reward in group.rewards if reward is not None]
    return {
        "reward_mean": math.fsum(rewards) / len(rewards) if rewards else math.nan,
        "length_mean": sum(each.length for each in completions) / len(completions),
        "truncated_fraction": sum(each.finish_reason == "length" for each in completions) / len(completions),
    }


def reward_or_nan(reward: float | None) -> float:
    """The reward, or NaN where there is none."""
    return math.nan if reward is None else reward


def micro_batches_of(plan: Sequence[StepPlan], ranks: Ranks = Ranks.alone()) -> list[tuple[int, ...]]:
    """The packed rows that this rank reads in an epoch, of all its steps.

    Example:
        >>> micro_batches_of([StepPlan((0, 1), ((0,), (1,)))])
        [(0,), (1,)]
    """
    return [row for step in plan for row in ranks.rows_of(step.micro_batches)]

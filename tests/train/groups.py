"""Groups and scored blocks made by hand."""

import torch

from logitless.train.block import AdvantagedBlock, JudgedBlock, PackedBlock, ScoredBlock, pack_groups
from logitless.train.learn.advantages import with_advantages
from logitless.types import Completion, Group, Prompt


def group_of(prompt_id: str, rewards, lengths=None, **verdicts) -> Group:
    """A group whose completions have these rewards and lengths (default 2 each)."""
    prompt = Prompt(prompt_id, "p", (1, 2))
    lengths = lengths or [2] * len(rewards)
    completions = tuple(Completion(prompt_id, (3,) * n, "c" * n, "stop") for n in lengths)
    said = tuple({name: values[i] for name, values in verdicts.items()} for i in range(len(rewards)))
    return Group(prompt, completions, said, tuple(rewards))


def scored(block: PackedBlock, *, logp_old=None, logp_ref=None, value_old=None) -> ScoredBlock:
    """The block with these scores; 0 where the policy's are left out."""
    zeros = torch.zeros(block.packed.num_tokens)
    return ScoredBlock(
        **vars(block),
        logp_old=zeros if logp_old is None else logp_old,
        entropy_old=zeros,
        logp_ref=logp_ref,
        value_old=value_old,
    )


def advantaged(groups, estimator, *, weights=None, kl_beta=0.0, **scores) -> AdvantagedBlock:
    """The groups packed, with these scores and the estimator's advantages."""
    block = scored(pack_groups(groups), **scores)
    return with_advantages(block, groups, estimator, weights=weights or {}, kl_beta=kl_beta)


def judged(groups, kept=None, rounds=1) -> JudgedBlock:
    """Everything that was drawn; all of it kept unless it is said otherwise."""
    return JudgedBlock(tuple(groups), tuple([True] * len(groups) if kept is None else kept), rounds)

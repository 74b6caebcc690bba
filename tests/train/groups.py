"""Groups and scored blocks made by hand."""

import torch

from logitless.train.block import JudgedBlock, ScoredBlock, pack_groups
from logitless.train.learn.score import advantages
from logitless.types import Completion, Group, Prompt, TokenScores, Verdict


def group_of(prompt_id: str, rewards, lengths=None, **verdicts) -> Group:
    """A group whose completions have these rewards and lengths (default 2 each)."""
    prompt = Prompt(prompt_id, "p", (1, 2))
    lengths = lengths or [2] * len(rewards)
    completions = tuple(Completion(prompt_id, (3,) * n, "c" * n, "stop") for n in lengths)
    said = tuple({name: values[i] for name, values in verdicts.items()} for i in range(len(rewards)))
    return Group(prompt, completions, said, tuple(rewards))


def advantaged(
    groups, estimator, *, weights=None, kl_beta=0.0, logp_old=None, logp_ref=None, value_old=None
) -> ScoredBlock:
    """The groups packed, with these scores (0 where the policy's are left out) and the estimator's advantages."""
    block = pack_groups(groups)
    zeros = torch.zeros(block.packed.num_tokens)
    old = TokenScores(zeros if logp_old is None else logp_old, zeros, value_old)
    options = {"weights": weights or {}, "kl_beta": kl_beta, "old": old, "logp_ref": logp_ref}
    found = advantages(block, groups, estimator, **options)
    return ScoredBlock(
        **vars(block),
        logp_old=old.logp,
        entropy_old=zeros,
        logp_ref=logp_ref,
        value_old=value_old,
        advantage=found.advantage,
        value_target=found.value_target,
    )


def judged(groups, kept=None, rounds=1) -> JudgedBlock:
    """Everything that was drawn; all of it kept unless it is said otherwise."""
    return JudgedBlock(tuple(groups), tuple([True] * len(groups) if kept is None else kept), rounds)


FINE = Verdict.graded(1.0)


def verdicts_of(*verdicts: Verdict) -> list[Group]:
    """One group whose completions got these verdicts of one function, called ``mine``."""
    return [group_of("7", [verdict.score for verdict in verdicts], mine=list(verdicts))]

"""Log-probs of completions by a plain forward pass over each, and by training's."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from logitless.data.packing import pack
from logitless.rollout.sampling import History, SamplingOptions, sampling_logp
from logitless.train.learn.policy import Policy
from logitless.types import Completion, Prompt, TokenScores


def logp_alone(
    model: nn.Module, prompt: Prompt, completion: Completion, options: SamplingOptions, ends: Sequence[int] = ()
) -> torch.Tensor:
    """Log-probs of one completion's tokens; ``ends`` are stop tokens, for ``min_new_tokens``."""
    ids, first = torch.tensor([*prompt.token_ids, *completion.token_ids]), len(prompt.token_ids)
    with torch.no_grad():
        logits = model(input_ids=ids[None].to(model.device), use_cache=False).logits[0, first - 1 : -1].float().cpu()
    steps = range(completion.length)
    seen = torch.stack([torch.bincount(ids[: first + t], minlength=logits.shape[-1]) > 0 for t in steps])
    counts = torch.stack([torch.bincount(ids[first : first + t], minlength=logits.shape[-1]) for t in steps])
    history = History(seen, counts, torch.arange(completion.length), torch.tensor(ends, dtype=torch.long))
    return sampling_logp(logits, options, history).gather(1, ids[first:, None])[:, 0]


def check_logp(
    model: nn.Module,
    prompts: Sequence[Prompt],
    groups: Sequence[Sequence[Completion]],
    options: SamplingOptions,
    *,
    ends: Sequence[int] = (),
    rtol: float = 1e-3,
    atol: float = 1e-3,
) -> None:
    """Check ``logp_sampler`` of every completion against ``logp_alone``."""
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            expected = logp_alone(model, prompt, completion, options, ends)
            assert expected.isfinite().all()
            torch.testing.assert_close(torch.tensor(completion.logp_sampler), expected, rtol=rtol, atol=atol)


def trainers_scores(
    policy: Policy, prompts: Sequence[Prompt], groups: Sequence[Sequence[Completion]], *, temperature: float
) -> TokenScores:
    """Log-probs and entropies of the sampled tokens by training's forward pass."""
    pairs = [(prompt, completion) for prompt, group in zip(prompts, groups, strict=True) for completion in group]
    with torch.no_grad():
        return policy.scores(pack(pairs), temperature=temperature, backend="fused")


def policy_logp(groups: Iterable[Sequence[Completion]]) -> list[float]:
    """Log-probs of all sampled tokens under the policy, without filters."""
    every = (completion for group in groups for completion in group)
    return [x for c in every for x in (c.logp_sampler if c.logp_policy is None else c.logp_policy)]

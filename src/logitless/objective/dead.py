"""Sequences that can change no gradient: a trainer may leave them out of its passes.

The weights of the others belong to the whole step and know nothing of it: what is left out still counts in them.
"""

import torch
from torch import Tensor

from logitless.objective.objective import Objective
from logitless.types import TokenBatch

_TOKENS = 256
_FARTHEST = 3.0  # nats that the probe's policies are apart


def silent_without_advantage(objective: Objective) -> bool:
    """Whether a sequence of advantage 0 adds nothing to the gradient, and its presence changes nothing for others.

    A KL or an entropy bonus speaks of every token. Whether the policy loss does is not taken from its name: it is asked
    for the gradient of tokens with advantage 0, and whether it looks at other sequences on the way.

    Example:
        >>> from logitless.objective.surrogate import Nll
        >>> silent_without_advantage(Objective()), silent_without_advantage(Objective(surrogate=Nll()))
        (True, False)
    """
    if objective.kl is not None or objective.entropy_bonus is not None:
        return False
    generator = torch.Generator().manual_seed(0)

    def spread(scale: float) -> Tensor:
        return scale * (2 * torch.rand(_TOKENS, generator=generator, dtype=torch.float64) - 1)

    logp_old = spread(_FARTHEST) - 2 * _FARTHEST
    selected = torch.arange(_TOKENS) % 2 == 0
    batch = TokenBatch(
        sequence=torch.arange(_TOKENS) // 64,
        num_sequences=_TOKENS // 64,
        advantage=torch.zeros(_TOKENS, dtype=torch.float64),
        token_weight=torch.ones(_TOKENS, dtype=torch.float64),
        logp_old=logp_old,
        logp_sampler=logp_old + spread(0.5),
        entropy_old=spread(1.0) + 1.0,
        turn=torch.arange(_TOKENS) // 16 % 4,
        lag=torch.arange(_TOKENS) // 8 % 4,
        selected=selected,
    )
    looked: list[Tensor] = []

    def gather(rows: Tensor) -> Tensor:
        looked.append(rows)
        return rows

    output = objective(
        (logp_old + spread(_FARTHEST)).requires_grad_(),
        spread(1.0) + 1.0,
        batch,
        block=objective.block_statistics(batch, generator=generator),
        gather=gather,
        generator=generator,
    )
    assert output.grad_logp is not None
    return not looked and not bool(output.grad_logp.count_nonzero())

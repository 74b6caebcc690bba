"""Sequences without a gradient, which a trainer may skip. They still count in the weights of the others."""

import torch
from torch import Tensor

from logitless.objective.objective import Objective
from logitless.types import TokenBatch

_TOKENS = 256
_FARTHEST = 3.0  # nats that the probe's policies are apart


def silent_without_advantage(objective: Objective) -> bool:
    """Whether a zero-advantage sequence adds nothing to the gradient, and changes nothing for the others.

    The loss is called to find out: its gradient at advantage 0, and whether it gathers other sequences. A KL or an
    entropy bonus always has a gradient.

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

"""Random packed batches for the objective's tests."""

import torch
from torch import Tensor

from logitless.types import TokenBatch


def random_batch(
    lengths: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64, drift: float = 0.5
) -> tuple[Tensor, Tensor, TokenBatch]:
    """logp, entropy and a batch with every optional vector; one advantage a sequence, sequence-mean weights."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    counts = torch.tensor(lengths, dtype=torch.long)
    num_tokens, num_sequences = int(counts.sum()), len(lengths)
    sequence = torch.repeat_interleave(torch.arange(num_sequences), counts)
    logp = -normal(num_tokens).abs() - 0.05
    sampler = logp + drift * normal(num_tokens)
    sampler[torch.rand(num_tokens, generator=generator) < 0.1] = torch.nan
    entropy = normal(num_tokens).abs()
    values = {
        "advantage": normal(num_sequences)[sequence],
        "token_weight": 1.0 / (num_sequences * counts.clamp(min=1)[sequence].double()),
        "logp_old": logp + drift * normal(num_tokens),
        "logp_sampler": sampler,
        "logp_ref": logp + drift * normal(num_tokens),
        "entropy_old": entropy + 0.1 * normal(num_tokens).abs(),
        "entropy_weight": torch.full((num_tokens,), 1.0 / max(num_tokens, 1), dtype=torch.float64),
    }
    turn = torch.cat([torch.arange(n) // 2 for n in lengths]) if lengths else torch.zeros(0, dtype=torch.long)
    batch = TokenBatch(
        sequence=sequence,
        num_sequences=num_sequences,
        turn=turn,
        selected=torch.rand(num_tokens, generator=generator) < 0.3,
        lag=torch.randint(0, 4, (num_tokens,), generator=generator),
        **{name: value.to(dtype) for name, value in values.items()},
    )
    return logp.to(dtype).requires_grad_(), entropy.to(dtype).requires_grad_(), batch

"""Packed batches for the objective's tests: of given numbers, and random ones."""

import torch
from torch import Tensor

from logitless.objective.ranges import Ranges
from logitless.types import TokenBatch


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def one_sequence(num_tokens: int) -> Ranges:
    return Ranges(torch.zeros(num_tokens, dtype=torch.long), 1, torch.ones(num_tokens, dtype=torch.bool))


def batch_of(sequence: int | list[int], **vectors) -> TokenBatch:
    """A batch of lists, in float64: the sequence of each token, or how many tokens the only sequence has.

    Advantages and weights are 1 and ``logp_old`` is -1 unless given.
    """
    ids = torch.tensor([0] * sequence if isinstance(sequence, int) else sequence, dtype=torch.long)
    ones = torch.ones(len(ids), dtype=torch.float64)
    given = {"advantage": ones, "token_weight": ones, "logp_old": -ones} | vectors
    for name, value in given.items():
        if isinstance(value, list):
            given[name] = torch.tensor(value) if name in ("turn", "lag", "selected") else double(*value)
    return TokenBatch(ids, int(ids.max()) + 1 if len(ids) else 1, **given)


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

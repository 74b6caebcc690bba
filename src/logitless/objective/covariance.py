"""Selection of tokens by the covariance of advantage and log-probability (Clip-Cov, KL-Cov).

``cov_t = (A_t - mean A)(logp_t - mean logp)`` over the trained tokens of a scope. A few tokens carry most of it.
"""

import math
import uuid
from fractions import Fraction

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from logitless.objective.inputs import shaped
from logitless.objective.over_ranks import GatherOverRanks, one_rank


@shaped
def token_covariance(
    advantage: Float[Tensor, "N"],
    logp: Float[Tensor, "N"],
    counted: Bool[Tensor, "N"],
    gather: GatherOverRanks = one_rank,
) -> Float[Tensor, "N"]:
    """``(A - mean A)(logp - mean logp)``, means over the counted tokens of all ranks; no gradient.

    Source: arXiv:2505.22617 (Clip-Cov and KL-Cov).

    Example:
        >>> token_covariance(torch.tensor([1.0, -1.0]), torch.tensor([-1.0, -3.0]), torch.tensor([True, True]))
        tensor([1., 1.])
    """
    rows = torch.stack([torch.ones_like(logp), advantage, logp], dim=1).detach()
    rows = torch.where(counted[:, None], rows, 0.0)
    everyone = gather(rows).double()
    means = everyone[:, 1:].sum(0) / everyone[:, 0].sum()
    return (rows[:, 1:] - means.to(rows.dtype)).prod(1)


@shaped
def num_chosen(fraction: float, num_tokens: Int[Tensor, ""]) -> Int[Tensor, ""]:
    """``max(1, floor(fraction N))``."""
    # as a fraction: 0.29 * 100 is a little below 29 in floating point
    exact = Fraction(str(fraction)).limit_denominator(10**9)
    return (num_tokens * exact.numerator // exact.denominator).clamp(min=1)


@shaped
def largest(
    key: Float[Tensor, "N"], eligible: Bool[Tensor, "N"], number: Int[Tensor, ""], gather: GatherOverRanks = one_rank
) -> Bool[Tensor, "N"]:
    """The ``number`` eligible tokens with the largest key over all ranks. Ties go to the lowest index on the lowest
    rank.

    Source: KL-Cov, arXiv:2505.22617.

    Example:
        >>> largest(torch.tensor([1.0, 3.0, 2.0]), torch.tensor([True, False, True]), torch.tensor(1))
        tensor([False, False,  True])
    """
    everyone = gather(torch.where(eligible, key, -math.inf))
    place = torch.empty(len(everyone), dtype=torch.long, device=everyone.device)
    place[everyone.sort(descending=True, stable=True).indices] = torch.arange(len(everyone), device=everyone.device)
    return eligible & (_own_rows(place, len(key), gather) < number)


def _own_rows(gathered: Tensor, number: int, gather: GatherOverRanks) -> Tensor:
    """This rank's rows of a gathered tensor."""
    if gather is one_rank:
        return gathered
    # The gather does not tell which rows are this rank's. A number that no other rank has marks them.
    mark = uuid.uuid4().int % 2**52 + 1
    return gathered[gather(torch.full((number,), mark, dtype=torch.float64, device=gathered.device)) == mark]


@shaped
def random_in_band(
    covariance: Float[Tensor, "N"],
    eligible: Bool[Tensor, "N"],
    number: Int[Tensor, ""],
    *,
    low: float,
    high: float,
    generator: torch.Generator,
    gather: GatherOverRanks = one_rank,
) -> Bool[Tensor, "N"]:
    """``number`` tokens sampled uniformly from the eligible ones with ``low < covariance < high``; all of them, if
    fewer.

    Args:
        covariance: [N].
        eligible: [N].
        number: over all ranks.
        low, high: the band.
        generator: seeded differently on every rank.
        gather: see ``GatherOverRanks``.

    Source: Clip-Cov, arXiv:2505.22617.

    Example:
        >>> random_in_band(torch.tensor([0.0, 2.0, 9.0]), torch.tensor([True, True, True]), torch.tensor(1),
        ...                low=1.0, high=5.0, generator=torch.Generator().manual_seed(0))
        tensor([False,  True, False])
    """
    order = torch.rand(len(covariance), generator=generator, device=generator.device, dtype=torch.float64)
    in_band = eligible & (covariance > low) & (covariance < high)
    return largest(order.to(covariance.device), in_band, number, gather)

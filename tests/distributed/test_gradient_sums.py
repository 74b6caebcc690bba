"""Gradients summed over ranks, whatever the buckets."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from logitless.distributed import Ranks, gradient_sums
from tests.ranks import run_on_ranks


def parts_of_gradients(rank, dtype):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in (7, 3, 1)]


def sum_of_gradients(rank, dtype, bucket_bytes):
    weights = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in (7, 3, 1)]
    unused, frozen = nn.Parameter(torch.zeros(2, dtype=dtype)), nn.Parameter(torch.zeros(2), requires_grad=False)
    for weight, part in zip(weights, parts_of_gradients(rank, dtype), strict=True):
        weight.grad = part
    given = weights[0].grad
    if rank == 1:
        weights[1].grad = None  # a rank whose tokens do not reach it
    with mock.patch.object(gradient_sums, "BUCKET_BYTES", bucket_bytes):  # this process runs other tests after this one
        Ranks(data=dist.group.WORLD).sum_gradients([weights[0], frozen, unused, *weights[1:]])
    assert unused.grad is None
    assert frozen.grad is None
    assert weights[0].grad is given
    return [weight.grad for weight in weights]


@pytest.mark.parametrize("bucket_bytes", [1, 40, 2**20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_gradients_are_summed_and_never_averaged_whatever_the_buckets(dtype, bucket_bytes):
    first, second = (parts_of_gradients(rank, dtype) for rank in range(2))
    high = torch.float64 if dtype == torch.float64 else torch.float32
    want = [(a.to(high) + b.to(high)).to(dtype) for a, b in zip(first, second, strict=True)]
    want[1] = first[1]
    for found in run_on_ranks(2, sum_of_gradients, dtype, bucket_bytes):
        for gradient, total in zip(found, want, strict=True):
            assert torch.equal(gradient, total)

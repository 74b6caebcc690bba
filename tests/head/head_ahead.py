"""Compiles the head's kernels for one compute capability: python -m tests.head.head_ahead 80 bfloat16 --everything."""

import json
import sys
from unittest import mock

import torch

from logitless.head import fused, passes
from logitless.head.kernels import launch, variants
from logitless.types import LMHead
from tests.models.kernels.ahead import Kernel, compiled


def variant_of(capability: int, hidden: torch.Tensor) -> variants.Variant:
    """What a GPU of this capability with 132 multiprocessors would be given."""
    with (
        mock.patch("torch.cuda.get_device_capability", return_value=divmod(capability, 10)),
        mock.patch("torch.cuda.get_device_properties", return_value=mock.Mock(multi_processor_count=132)),
    ):
        there = mock.Mock(
            dtype=hidden.dtype, shape=hidden.shape, element_size=hidden.element_size, data_ptr=lambda: 0,
            device=torch.device("cuda"),
        )  # fmt: skip
        return variants.variant(there)


def compile_fused(capability: int, dtype: torch.dtype, everything: bool) -> list[Kernel]:
    """Every launch of scoring and of both ways backward, plain or with all that a head may have."""
    rows, width, vocabulary = 640, 896, 2000
    hidden = torch.zeros(rows, width, dtype=dtype, requires_grad=True)
    weight = torch.zeros(vocabulary, width, dtype=dtype, requires_grad=True)
    factors = [torch.zeros(16, width, requires_grad=True), torch.zeros(vocabulary, 16, requires_grad=True)]
    bias = torch.zeros(vocabulary, requires_grad=True)
    target = torch.zeros(rows, dtype=torch.int64)
    heads = (
        LMHead(weight),
        LMHead(weight, lora_a=factors[0], lora_b=factors[1]),
        LMHead(weight, bias, lora_a=factors[0], lora_b=factors[1]),
        LMHead(weight, bias, softcap=30.0),
    )
    chosen = variant_of(capability, hidden)
    with mock.patch.object(passes, "variant", return_value=chosen), compiled(capability) as found:
        for head in heads if everything else heads[:1]:
            for budget in (2**40, 0):
                scores = fused.token_scores(hidden, head, target, memory_budget=budget)
                (scores.logp + scores.entropy).sum().backward()
    return found


def compile_tiles(capability: int) -> list[Kernel]:
    """What the chunked head runs beside a library's products."""
    product, row = torch.zeros(8, 5000), torch.zeros(8)
    target = torch.zeros(8, dtype=torch.int64)
    with compiled(capability) as found:
        for outside, inside in ((None, None), (row, 0.1)):
            launch.tile_sums(product, outside, target, inside)
            for logp, entropy in ((row, None), (None, row), (row, row)):
                slopes = (row, row, row, row, logp, entropy)
                for dtype in (torch.float16, torch.float32):
                    launch.tile_gradient(product, outside, target, inside, slopes, dtype, wide=entropy is None)
    return found


def compile_pairs(capability: int) -> list[Kernel]:
    """What the fused backend of two streams runs beside a library's products."""
    product, row = torch.zeros(8, 5000), torch.zeros(8)
    target, source = torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)
    with compiled(capability, resources=True) as found:
        for outside, inside, masked in ((None, None, False), (row, 0.1, True)):
            pair = launch.Pair(product, product, outside, outside, target, inside, inside, masked)
            for kind in ("forward_kl", "reverse_kl", "jensen_shannon", "total_variation", "centering"):
                launch.pair_sums(pair, kind)
                launch.pair_gradient(
                    pair, kind, 0.5, torch.zeros(10, 8), source if masked else None, torch.bfloat16, wide=masked
                )
            for kind in ("jensen_shannon", "total_variation"):
                launch.pair_terms(pair, kind, 0.5, torch.zeros(4, 8))
            student_alone = pair._replace(y=None)
            launch.pair_gradient(student_alone, "forward_kl", 0.5, torch.zeros(10, 8), None, torch.float32, wide=True)
    return found


def main() -> None:
    """Prints what became of each launch: of the chunked head, of two streams, or of the fused head in a dtype."""
    capability, *dtype = sys.argv[1:3]
    if dtype == ["pairs"]:
        found = compile_pairs(int(capability))
    elif dtype:
        found = compile_fused(int(capability), getattr(torch, dtype[0]), "--everything" in sys.argv)
    else:
        found = compile_tiles(int(capability))
    print(json.dumps([tuple(kernel) for kernel in found]))


if __name__ == "__main__":
    main()

"""Ways to break bitwise identical decoding, each on the decoding side alone: a law must notice every one of them."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

import bits_laws
from logitless.models.kernels import attention_launch
from logitless.models.row_invariant import functions, linear, paged_attention


@contextmanager
def _while_decoding(owner: object, name: str, mutant: object) -> Iterator[None]:
    """``owner.name`` is the mutant inside ``decode_step``."""
    step = bits_laws.decode_step

    def mutated(*arguments):
        with mock.patch.object(owner, name, mutant):
            return step(*arguments)

    with mock.patch("bits_laws.decode_step", mutated):
        yield


@contextmanager
def split_k() -> Iterator[None]:
    """Products in two halves of K, added in float32."""
    product = linear.product

    def halves(rows, weight, bias=None, *, out_dtype=None):
        k = rows.shape[1] // 2
        parts = [
            product(r.contiguous(), w.contiguous(), out_dtype=torch.float32)
            for r, w in ((rows[:, :k], weight[:, :k]), (rows[:, k:], weight[:, k:]))
        ]
        total = parts[0] + parts[1]
        return (total if bias is None else total + bias.float()).to(out_dtype or rows.dtype)

    with _while_decoding(linear, "product", halves):
        yield


@contextmanager
def torch_norm() -> Iterator[None]:
    """torch's reduction in the RMSNorm."""

    def norm(x, weight, eps, *, delta=None, gemma=False, once=False, after=False):
        total = x if delta is None else x + delta
        wide = total.float()
        unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return total, unit.to(x.dtype) * weight

    with _while_decoding(functions, "norm", norm):
        yield


@contextmanager
def other_blocks() -> Iterator[None]:
    """Splits of another length in attention; a split is where running sums are merged."""
    with _while_decoding(attention_launch.attention_tiles, "SPLIT", 64):
        yield


@contextmanager
def two_warps() -> Iterator[None]:
    """A tile of 16 rows on two warps, which sum a row in another order."""
    tiles = paged_attention.attention_tiles

    def narrow(*arguments):
        choice = tiles(*arguments)
        two = dataclasses.replace(choice.decode, rows=16, warps=2)
        return dataclasses.replace(choice, decode=two, decode_few=two)

    with _while_decoding(paged_attention, "attention_tiles", narrow):
        yield


MUTATIONS = {
    "K is split": split_k,
    "torch sums a norm": torch_norm,
    "splits have another length": other_blocks,
    "a row's softmax is summed by two warps": two_warps,
}
ON_CPU = ("K is split", "torch sums a norm")
"""Those that show under the interpreter, which knows no warps, on a few tokens in float32."""

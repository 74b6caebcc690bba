"""Compiles the kernels of a layer for one compute capability: python -m tests.models.kernels.layers_ahead 80."""

import json
import sys

import torch

from logitless.models.kernels.gate import gated, gated_backward
from logitless.models.kernels.linear import REFERENCE, Tile, add_low_rank, fixed_order_product, gated_product
from logitless.models.kernels.norm import norm, norm_backward
from logitless.models.kernels.rotary import HeadNorms, Heads, rotate, rotate_backward
from logitless.models.kernels.row_adapters import TILES, add_rows_own
from logitless.models.kernels.sinks import with_sinks, with_sinks_backward
from logitless.models.row_invariant.linear import _HOPPER, _LOW_RANK, _PLAIN, _narrow_tile
from logitless.models.row_invariant.self_check import _GATED
from tests.models.kernels.ahead import compiled


def tiles(capability: int) -> list[Tile]:
    """Those that this capability would be given."""
    narrow = [_narrow_tile(columns, capability == 90) for columns in (16, 32, 64)]
    return [*_PLAIN.values(), REFERENCE, _LOW_RANK, *narrow, *(_HOPPER.values() if capability == 90 else ())]


def main() -> None:
    """Prints what became of each launch."""
    capability = int(sys.argv[1])
    dtype = torch.bfloat16
    x, weight = torch.zeros(64, 256, dtype=dtype), torch.zeros(128, 256, dtype=dtype)
    with compiled(capability) as found:
        for tile in tiles(capability):
            fixed_order_product(x, weight, tile)
        for bias in (None, weight[:, 0].contiguous()):
            fixed_order_product(x, weight, REFERENCE, bias=bias, dtype=torch.float32)
        fixed_order_product(x[:, :24], weight[:, :24].contiguous(), _LOW_RANK, out=x[:, :128], add_to_out=2.0)
        add_low_rank(x[:, :48].contiguous(), weight[:, :16].contiguous(), x[:, :128], (64, 64, 128), 2.0)
        for own in (*TILES.values(), Tile(16, 16, 128, 4, 4)):
            stack, scale, rows = weight[None, :48].contiguous(), torch.zeros(1), torch.zeros(64, dtype=torch.int32)
            b = torch.zeros(1, 128, 16, dtype=dtype)
            for out in (x[:, :128], torch.zeros(64, 128)):
                add_rows_own(x, stack, b, scale, rows, [out], (128,), tile=own)
        if capability == 90:
            for tile in _GATED.values():
                for gelu in (False, True):
                    gated_product(x, weight, tile, gelu=gelu)
        for gemma in (False, True):
            for delta in (None, x):
                norm(x, weight[0], 1e-6, delta=delta, gemma=gemma)
                norm_backward(
                    x, weight[0], 1e-6, x, delta, gemma=gemma, weight_dtype=torch.float32 if delta is None else None
                )
        norm(x, weight[0], 1e-6, delta=x, gemma=True, after=True)
        norm(x, weight[0], 1e-6, once=True)
        scores = torch.zeros(8, 64)
        for width in (64, 80):
            attended = torch.zeros(8, 64, width, dtype=dtype)
            with_sinks(attended, scores, x[0, :64])
            for sinks_dtype in (None, dtype):
                grad = attended.flatten(1)
                with_sinks_backward(attended, scores, x[0, :64], grad, sinks_dtype=sinks_dtype)
        for gelu in (False, True):
            gated(x[:, :128], x[:, 128:], gelu=gelu)
            gated_backward(x[:, :128], x[:, 128:], x[:, :128].contiguous(), gelu=gelu)
        for width, rotary, factor in ((96, 72, None), (128, 128, None), (128, 0, torch.zeros(8))):
            heads = Heads(4, 2, width, rotary, interleaved=width == 128)
            query, key = torch.zeros(8, 4 * width, dtype=dtype), torch.zeros(8, 2 * width, dtype=dtype)
            table, position = torch.zeros(8, rotary, dtype=dtype), torch.zeros(8, dtype=torch.int32)
            table = table.float() if heads.interleaved else table
            table = table if rotary else None
            grads = [torch.zeros(8, n, width, dtype=dtype) for n in (4, 2, 2)]
            for norms in (None, HeadNorms(query[0, :width], key[0, :width], 1e-6)):
                rotate(query, key, key, heads, position, table, table, norms, slot=position.long(), factor=factor)
                options = {"norm_dtypes": (dtype, dtype), "factor": factor}
                rotate_backward(query, key, heads, position, table, table, norms, *grads, **options)
    print(json.dumps([list(kernel) for kernel in found]))


if __name__ == "__main__":
    main()

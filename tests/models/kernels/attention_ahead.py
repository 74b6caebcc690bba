"""Compiles attention's kernels for one compute capability: python -m tests.models.kernels.attention_ahead 90 128 8."""

import json
import sys

import torch

from logitless.models.attention import AttentionLayout
from logitless.models.kernels import attention_launch
from logitless.models.kernels.attention_tiles import AttentionTiles, hopper_tiles, plain_tiles
from logitless.models.kernels.window import Chunks
from logitless.types import PromptGroup
from tests.models.kernels.ahead import Kernel, compiled


def compile_all(
    capability: int, width: int, choice: AttentionTiles, *, dtype=torch.bfloat16, group=2, window=None, softcap=None,
    only=("forward", "backward", "branches", "decode"), resources=False,
) -> list[Kernel]:  # fmt: skip
    """Every launch of a forward pass, a backward pass, prefilling and decoding."""
    layout = AttentionLayout([PromptGroup(1100, (600,) * 8), PromptGroup(70, (40, 50))])
    tokens = layout.num_tokens
    query, grad = (torch.zeros(tokens, 2 * group, width, dtype=dtype) for _ in range(2))
    key, value = (torch.zeros(tokens, 2, width, dtype=dtype) for _ in range(2))
    form = attention_launch.Form(width**-0.5, window, softcap)
    table = torch.zeros(3, 40, dtype=torch.int32)
    with compiled(capability, resources) as found:
        tiles = layout.query_tiles(choice.forward.rows // group, 2, window)
        if "forward" in only:
            output, lse = attention_launch.attention_forward_rows(
                query, key, value, tiles, form, choice, every_row=True
            )
        else:
            output, lse = query, torch.zeros(tokens, 2 * group)
        if "paged" in only:
            attention_launch.attention_forward_rows(
                query, key, value, tiles, form, choice, every_row=True, page_table=table
            )
        if "backward" in only:
            _, terms = attention_launch.query_gradient(
                query, key, value, output, lse, grad, None, tiles, form, choice, every_row=True
            )
            tables = attention_launch.KeyTables(*layout.key_tiles(choice.key_gradient.keys, 2, window), tiles)
            attention_launch.key_gradient(query, key, value, grad, terms, tables, form, choice, every_row=True)
        if "branches" in only:
            rows = torch.zeros(1, dtype=torch.int32)
            attention_launch.attention_forward_rows(
                query, key, value, tiles, form, choice, every_row=True, branch_rows=rows
            )
            attention_launch.query_gradient(
                query, key, value, output, lse, grad, None, tiles, form, choice, every_row=True, branch_rows=rows
            )
        if "decode" in only:
            rows = torch.zeros(3, dtype=torch.int32)
            shared = (torch.zeros(1, 40, dtype=torch.int32), rows[:1], rows)
            for pages, sharing in ((table, shared), (table[:, :8].contiguous(), None)):
                for launch in attention_launch.decoding(
                    query[:3], key, value, pages, rows, sharing, form, choice
                ).launches:
                    launch()
    return found


def main() -> None:
    """Widths after the capability; prints what became of each. With --resources registers and spills, with --chunks
    chunks, too."""
    resources = "--resources" in sys.argv
    capability, *widths = (int(x) for x in sys.argv[1:] if not x.startswith("--"))
    report = []
    for width in widths:
        padded = max(16, 1 << (width - 1).bit_length())
        choice = hopper_tiles(padded) if capability == 90 else plain_tiles(padded)
        passes = ("forward", "paged", "backward", "branches", "decode")
        for window in (None, Chunks(8192)) if "--chunks" in sys.argv else (None,):
            found = compile_all(capability, width, choice, only=passes, window=window, resources=resources)
            report += [[width, *kernel] for kernel in found]
    print(json.dumps(report))


if __name__ == "__main__":
    main()

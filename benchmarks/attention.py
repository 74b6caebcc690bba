"""Attention of one layer, forward and backward, compared with other kernels.

A workload is a packed row: groups of completions of one prompt. ``logitless`` attends to a prompt once a group;
``logitless-unshared`` and the others get every completion with a copy of its prompt. ``flash-attention-2`` is torch's
variable-length attention; ``cudnn`` runs where all sequences are of one length; ``flex`` is FlexAttention with a mask
that shares prompts as ``logitless`` does. Milliseconds are the device's, medians; what the file has already is kept,
so that a run that was cut short goes on where it ended.
"""

import argparse
import inspect
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.bench.machine import environment, release
from logitless.models.attention import AttentionLayout, prefix_attention
from logitless.types import PromptGroup
from script import RESULTS, Rows, main, milliseconds

ROUNDS = 7

CONTENDERS = ("logitless", "logitless-unshared", "flash-attention-2", "cudnn", "flex")


class Shape(NamedTuple):
    """Query heads, key heads and width of a head."""

    heads: int
    key_heads: int
    width: int

    def __str__(self) -> str:
        return f"{self.heads},{self.key_heads},{self.width}"


SHAPES = (Shape(14, 2, 64), Shape(16, 8, 128), Shape(32, 8, 128))


class Workload(NamedTuple):
    """Groups of completions whose lengths are drawn evenly from ``low`` to ``high``.

    With ``prompt_spread`` prompts are drawn, too, from ``prompt`` less it to ``prompt`` and it.
    """

    groups: int
    completions: int
    prompt: int
    low: int
    high: int
    prompt_spread: int = 0

    def layout(self, device: str) -> AttentionLayout:
        """The same lengths on every call."""
        generator = torch.Generator().manual_seed(7)

        def draw(low: int, high: int) -> int:
            return int(torch.randint(low, high + 1, (1,), generator=generator))

        found = []
        for _ in range(self.groups):
            spread = self.prompt_spread
            prompt = draw(self.prompt - spread, self.prompt + spread) if spread else self.prompt
            found.append(PromptGroup(prompt, tuple(draw(self.low, self.high) for _ in range(self.completions))))
        return AttentionLayout(found, device)


WORKLOADS = {
    "8 x 8, prompt 512, 64-256": Workload(8, 8, 512, 64, 256),
    "8 x 8, prompt 512, 128-1024": Workload(8, 8, 512, 128, 1024),
    "8 x 8, prompt 440-560, 128-1024": Workload(8, 8, 500, 128, 1024, prompt_spread=60),
    "2 x 8, prompt 256, 256-2048": Workload(2, 8, 256, 256, 2048),
    "4 x 16, prompt 2048, 128-512": Workload(4, 16, 2048, 128, 512),
    "8 sequences of 4096": Workload(8, 1, 0, 4096, 4096),
}


class Passes(NamedTuple):
    """A forward pass, and a backward pass of it."""

    forward: Callable[[], Any]
    backward: Callable[[], Any]


Contender = tuple[Callable[[], Tensor], list[Tensor]]
"""A forward pass, and what its backward pass makes gradients of."""


class NotMeasured(Exception):
    """Why a contender does not run here."""


def draw(shape: Shape, tokens: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and the gradient of the output."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(heads: int) -> Tensor:
        return torch.randn(tokens, heads, shape.width, device=device, generator=generator).to(dtype)

    query, key, value = (normal(heads) for heads in (shape.heads, shape.key_heads, shape.key_heads))
    return query, key, value, normal(shape.heads)


def passes(contender: str, shape: Shape, workload: Workload, device: str) -> Passes:
    """The contender's two passes on this workload.

    Raises:
        NotMeasured: it does not run on this workload.
    """
    layout = workload.layout(device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if contender not in ("logitless", "flex"):
        layout, _ = layout.unshared()
    *leaves, upstream = draw(shape, layout.num_tokens, device, dtype)
    for leaf in leaves:
        leaf.requires_grad_()
    attend, leaves = _CONTENDERS[contender](layout, leaves)
    output = attend()
    return Passes(attend, lambda: torch.autograd.grad(output, leaves, upstream, retain_graph=True))


def _ours(layout: AttentionLayout, leaves: list[Tensor]) -> Contender:
    return lambda: prefix_attention(leaves[0], leaves[1], leaves[2], layout)[0], leaves


def _flash(layout: AttentionLayout, leaves: list[Tensor]) -> Contender:
    """Where this torch takes no grouped heads it gets repeated ones; repeating is not measured."""
    from torch.nn.attention.varlen import varlen_attn

    lengths = layout.segments.length
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int().to(layout.device)
    longest = int(lengths.max())
    query, key, value = leaves
    grouped = query.shape[1] != key.shape[1]
    takes_grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters
    if grouped and not takes_grouped:
        repeats = query.shape[1] // key.shape[1]
        key, value = (x.detach().repeat_interleave(repeats, 1).requires_grad_() for x in (key, value))
    extra: dict[str, Any] = {"enable_gqa": True} if grouped and takes_grouped else {}

    def attend() -> Tensor:
        out = varlen_attn(query, key, value, offsets, offsets, longest, longest, window_size=(-1, 0), **extra)
        assert isinstance(out, Tensor)
        return out

    return attend, [query, key, value]


def _cudnn(layout: AttentionLayout, leaves: list[Tensor]) -> Contender:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    lengths = layout.segments.length.tolist()
    if len(set(lengths)) > 1:
        raise NotMeasured("cuDNN's kernels take sequences of one length")

    def side_by_side(x: Tensor) -> Tensor:
        return x.view(len(lengths), lengths[0], *x.shape[1:]).transpose(1, 2)

    def attend() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            query, key, value = (side_by_side(x) for x in leaves)
            out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(leaves[0].shape)

    return attend, leaves


def _flex(layout: AttentionLayout, leaves: list[Tensor]) -> Contender:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tokens, device = layout.num_tokens, layout.device
    segments = layout.segments
    segment = torch.repeat_interleave(torch.arange(len(segments.length)), segments.length)
    group = torch.where(segments.prefix_length > 0, segments.prefix_row, segments.row)[segment].to(device)
    is_prompt, segment = segments.is_prompt[segment].to(device), segment.to(device)

    def seen(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (group[q] == group[k]) & (is_prompt[k] | (segment[q] == segment[k]))

    mask = create_block_mask(seen, None, None, tokens, tokens, device=device)  # type: ignore[arg-type]
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend() -> Tensor:
        query, key, value = (x.transpose(0, 1)[None] for x in leaves)
        out = compiled(query, key, value, block_mask=mask, enable_gqa=query.shape[1] != key.shape[1])
        return out[0].transpose(0, 1)

    return attend, leaves


_CONTENDERS: dict[str, Callable[[AttentionLayout, list[Tensor]], Contender]] = {
    "logitless": _ours,
    "logitless-unshared": _ours,
    "flash-attention-2": _flash,
    "cudnn": _cudnn,
    "flex": _flex,
}


def median_ms(run: Callable[[], Any], device: str) -> float:
    """Of the device, after a run to warm up."""
    run()
    return statistics.median(milliseconds(run, device) for _ in range(ROUNDS))


def measure(contender: str, shape: Shape, workload: Workload, device: str) -> dict[str, float]:
    """Forward and backward milliseconds.

    Raises:
        NotMeasured: the contender does not run on this workload.
    """
    both = passes(contender, shape, workload, device)
    return {
        "forward_ms": median_ms(both.forward, device),
        "backward_ms": median_ms(both.backward, device),
    }


def result_file(device: str) -> str:
    """Name of the result file of this GPU.

    Example:
        >>> result_file("cpu")
        'attention-cpu.json'
    """
    gpu = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return f"attention-{gpu.removeprefix('NVIDIA ').replace(' ', '-')}.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command."""
    parser.add_argument("--shapes", nargs="*", default=[str(shape) for shape in SHAPES], help="H,K,E each")
    parser.add_argument("--workloads", nargs="*", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--contenders", nargs="*", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--again", action="store_true", help="measure what the file has already, too")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no measurement after so many")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")


def run(options: argparse.Namespace) -> int:
    """Measure what is missing, keep every row as it is found, print a table."""
    began = time.monotonic()
    path = options.out / result_file(options.device)
    machine = environment(options.device, ("triton",))
    results = Rows(path, machine, ("shape", "workload", "contender"))
    for shape in (Shape(*map(int, text.split(","))) for text in options.shapes):
        for name in options.workloads:
            for contender in options.contenders:
                key = {"shape": str(shape), "workload": name, "contender": contender}
                if (results.has(**key) and not options.again) or time.monotonic() - began > options.seconds:
                    continue
                try:
                    results.add(key | measure(contender, shape, WORKLOADS[name], options.device))
                except NotMeasured:
                    continue
                finally:
                    release(options.device)
    for row in results.rows:
        print(
            f"{row['shape']:10} {row['workload']:32} {row['contender']:20} forward {row['forward_ms']:8.3f} ms  "
            f"backward {row['backward_ms']:8.3f} ms"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))

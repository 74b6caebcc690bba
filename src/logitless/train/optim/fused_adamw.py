"""Clipping and AdamW over many tensors by Triton kernels: on the device, or in pieces from host memory.

Master weights and optimizer state on the host are in page-locked memory. While a piece is updated, the next one arrives
and the one before leaves by the GPU's copy engines, so that a step takes as long as copying 12 bytes a weight in one
direction. A kernel that reads and writes host memory itself is bitwise the same but slower: on an H200 it took 8.7 s
for 1.7 billion weights, 2.4 GB/s each way, where copies reach 54 GB/s.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from logitless.head.contract import on_device
from logitless.transfer import sent

CHUNK = 2**16
"""Elements of a tensor that one program of the kernel updates."""

BLOCK, WARPS, EVICT = 512, 4, "evict_first"
"""Elements at a time, warps and cache policy of the kernel; measured on an H200."""

PIECE = 2**22
"""Elements of a piece: 16 MiB, enough for the full rate of the bus."""

PLACES = 3
"""Pieces on the device at once: one that arrives, one at work, one that leaves."""


def chunks_of(tensors: Sequence[Tensor], device: torch.device | None = None) -> Int[Tensor, "C 3"]:
    """Split tensors into chunks for the kernels: index of the tensor, first element and length of each chunk.

    Example:
        >>> chunks_of([torch.zeros(CHUNK + 1), torch.zeros(2)]).tolist()
        [[0, 0, 65536], [0, 65536, 1], [1, 0, 2]]
    """
    parts = []
    for number, tensor in enumerate(tensors):
        first = torch.arange(0, tensor.numel(), CHUNK)
        length = (tensor.numel() - first).clamp(max=CHUNK)
        parts.append(torch.stack([torch.full_like(first, number), first, length], 1))
    return torch.cat(parts).to(device or tensors[0].device)


def clip_factor(norm: Float[Tensor, ""], max_grad_norm: float | None) -> Float[Tensor, "1"]:
    """The factor of gradients, on the device: at most 1; NaN if the norm is not finite.

    Example:
        >>> [clip_factor(torch.tensor(norm), limit) for norm, limit in ((4.0, 1.0), (0.5, 1.0), (4.0, None))]
        [tensor([0.2500]), tensor([1.]), tensor([1.])]
    """
    factor = torch.ones_like(norm) if max_grad_norm is None else (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
    return torch.where(torch.isfinite(norm), factor, torch.nan).view(1)


def fused_norm(chunks: Int[Tensor, "C 3"], gradients: Sequence[Tensor]) -> Float[Tensor, ""]:
    """The Euclidean norm of many tensors together, in one launch that reads each number once.

    Args:
        gradients: contiguous float32 tensors on one device.
    """
    from logitless.train.optim.kernels.adamw import squares_kernel

    addresses, aligned = _addresses([gradients], chunks.device)
    parts = torch.empty(len(chunks), dtype=torch.float32, device=chunks.device)
    with on_device(chunks.device):
        squares_kernel[(len(chunks),)](addresses, chunks, parts, ALIGNED=aligned, BLOCK=1024)
    return parts.double().sum().sqrt().float()


def fused_update(
    chunks: Int[Tensor, "C 3"],
    masters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    copies: Sequence[Tensor],
    *,
    scale: Float[Tensor, "1"],
    rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """One AdamW update of many tensors in one launch; see ``kernels.adamw``.

    Args:
        masters, gradients, exp_avgs, exp_avg_sqs: contiguous float32 tensors, P of each, on one device.
        copies: the model's parameters; contiguous, of one dtype.
        scale: float32, multiplies the gradients; if it is NaN nothing changes.
        step: counted from 1.
    """
    import triton.language as tl

    from logitless.train.optim.kernels.adamw import adamw_kernel

    device = gradients[0].device
    addresses, aligned = _addresses([masters, gradients, exp_avgs, exp_avg_sqs, copies], device)
    with on_device(device):
        adamw_kernel[(len(chunks),)](
            addresses,
            chunks,
            scale,
            len(masters),
            1 - rate * weight_decay,
            rate / (1 - betas[0] ** step),
            (1 - betas[1] ** step) ** 0.5,
            1 - betas[0],
            betas[1],
            1 - betas[1],
            eps,
            COPY=getattr(tl, str(copies[0].dtype).removeprefix("torch.")),
            ALIGNED=aligned,
            BLOCK=BLOCK,
            EVICT=EVICT,
            num_warps=WARPS,
        )


class Slice(NamedTuple):
    """A part of a tensor in a piece: index of the tensor, first element, length, and offset in the piece."""

    tensor: int
    first: int
    length: int
    place: int


def cut(sizes: Sequence[int], most: int) -> list[list[Slice]]:
    """Distribute tensors over pieces of ``most`` elements.

    Args:
        sizes: elements of each tensor.
        most: a multiple of 4: every slice begins at a multiple of 16 bytes.

    Example:
        >>> [[tuple(part) for part in piece] for piece in cut([3, 10, 2], most=8)]
        [[(0, 0, 3, 0)], [(1, 0, 8, 0)], [(1, 8, 2, 0), (2, 0, 2, 4)]]
    """
    pieces, room = list[list[Slice]](), 0
    for tensor, size in enumerate(sizes):
        for first in range(0, size, most):
            length = min(most, size - first)
            if length > room:
                pieces.append([])
                room = most
            pieces[-1].append(Slice(tensor, first, length, most - room))
            room -= length + -length % 4
    return pieces


@dataclass(frozen=True)
class Piece:
    """Parts of tensors that are copied to the device and back together."""

    slices: list[Slice]
    chunks: Int[Tensor, "C 3"]


def pieces_of(tensors: Sequence[Tensor], device: torch.device) -> list[Piece]:
    """Tensors in pieces, with the chunks that ``fused_update`` needs on the device."""
    pieces = cut([tensor.numel() for tensor in tensors], PIECE)
    return [Piece(slices, chunks_of(_slices(tensors, slices), device)) for slices in pieces]


def update_from_host(
    pieces: Sequence[Piece],
    masters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    copies: Sequence[Tensor],
    **numbers: Any,
) -> None:
    """``fused_update`` of master weights and state in host memory, piece by piece; bitwise the same.

    Args:
        masters, exp_avgs, exp_avg_sqs: contiguous float32 tensors in page-locked memory of the host, P of each.
        gradients: contiguous float32 tensors on one device.
        copies: contiguous, of one dtype, on that device.
    """
    device, held = gradients[0].device, (masters, exp_avgs, exp_avg_sqs)
    working, arriving, leaving = _Stream.current(device), _Stream.new(device), _Stream.new(device)
    widest = max(last.place + last.length for last in (piece.slices[-1] for piece in pieces))
    places = [torch.empty(len(held), widest + -widest % 4, dtype=torch.float32, device=device) for _ in pieces[:PLACES]]
    left = [working.mark() for _ in places]
    for number, piece in enumerate(pieces):
        at = number % len(places)
        on_host = [part for tensors in held for part in _slices(tensors, piece.slices)]
        arrived = [[row[part.place :][: part.length] for part in piece.slices] for row in places[at]]
        on_device = [part for parts in arrived for part in parts]
        arriving.after(left[at])
        with arriving.run():
            _copy(on_host, on_device)
        working.after(arriving.mark())
        master, exp_avg, exp_avg_sq = arrived
        gradient, copy = _slices(gradients, piece.slices), _slices(copies, piece.slices)
        fused_update(piece.chunks, master, gradient, exp_avg, exp_avg_sq, copy, **numbers)
        leaving.after(working.mark())
        with leaving.run():
            _copy(on_device, on_host)
        left[at] = leaving.mark()
    working.after(leaving.mark())


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy each source to its target, asynchronously."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)


def _slices(tensors: Sequence[Tensor], slices: Sequence[Slice]) -> list[Tensor]:
    return [tensors[part.tensor].detach().view(-1)[part.first :][: part.length] for part in slices]


@dataclass(frozen=True)
class _Stream:
    """A CUDA stream; on a CPU, where Triton's interpreter runs the kernels, every method does nothing."""

    stream: "torch.cuda.Stream | None"

    @classmethod
    def current(cls, device: torch.device) -> "_Stream":
        return cls(torch.cuda.current_stream(device) if device.type == "cuda" else None)

    @classmethod
    def new(cls, device: torch.device) -> "_Stream":
        return cls(torch.cuda.Stream(device) if device.type == "cuda" else None)  # type: ignore[no-untyped-call]

    def run(self) -> AbstractContextManager[object]:
        """Inside, work is queued on this stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def mark(self) -> "torch.cuda.Event | None":
        """An event after all work that is queued now."""
        return None if self.stream is None else self.stream.record_event()

    def after(self, mark: "torch.cuda.Event | None") -> None:
        """Work that is queued from now on waits for the event."""
        if self.stream is not None and mark is not None:
            self.stream.wait_event(mark)


def _addresses(columns: Sequence[Sequence[Tensor]], device: torch.device) -> tuple[Int[Tensor, "c P"], bool]:
    """Addresses of the tensors, on the device, and whether all are multiples of 16 bytes."""
    numbers = torch.tensor([[t.data_ptr() for t in part] for part in columns])
    aligned = not bool((numbers % 16).any())
    return sent(numbers, device), aligned

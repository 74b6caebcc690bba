"""Kernels of a decoding step around the model: positions before it, updates after sampling, and copies of pages.

State is indexed by slot, a number that a completion keeps while it is decoded; a step's rows are slots in any order.
The last slot is for empty rows. Its position is -1, as is that of a finished completion.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["max_pages", "num_steps"])
def begin_kernel(
    slot,  # [R] int32
    slot_token,  # [S] int64, the newest token
    slot_position,  # [S] int32, of that token; -1: none
    page_table,  # [R, max_pages] int32
    token,  # [R] int64, written, as all below
    position,  # [R] int32
    place,  # [R] int32, at least 0
    cache_row,  # [R] int64, where its key and value go; -1: nowhere
    step,  # [1] int64, of the steps between two looks
    max_pages, num_steps,
    PAGE: tl.constexpr,
):  # fmt: skip
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.load(slot + row)
    where = tl.load(slot_position + at)
    tl.store(token + row, tl.load(slot_token + at))
    tl.store(position + row, where)
    inside = tl.maximum(where, 0)
    tl.store(place + row, inside)
    page = tl.load(page_table + row * max_pages + inside // PAGE).to(tl.int64)
    tl.store(cache_row + row, tl.where(where < 0, -1, page * PAGE + inside % PAGE))
    if row == 0:
        now = tl.load(step) + 1
        tl.store(step, tl.where(now == num_steps, 0, now))


@triton.jit(do_not_specialize=["num_ends", "log_rows"])
def end_kernel(
    slot,  # [R] int32
    slot_token,  # [S] int64, written
    slot_position,  # [S] int32, written
    slot_last,  # [S] int32, the position at which the last token is sampled
    position,  # [R] int32, at which the token was sampled
    token,  # [R] int64, sampled
    finite,  # [R] bool
    ends,  # [num_ends] int64
    step,  # [1] int64
    log,  # [steps, 2, log_rows] int32: token, and what became of the row
    hidden,  # [R, D]
    log_hidden,  # [steps, log_rows, D]
    num_ends, log_rows,
    D: tl.constexpr, ENDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: log its token and flags, and update its slot. Flags: 1 sampled, 2 from finite logits, 4 finished."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.load(slot + row)
    where = tl.load(position + row)
    sampled = tl.load(token + row)
    sound = tl.load(finite + row).to(tl.int32)
    i = tl.arange(0, ENDS)
    stop = tl.max((tl.load(ends + i, mask=i < num_ends, other=-1) == sampled).to(tl.int32), 0)
    over = (stop != 0) | (where >= tl.load(slot_last + at)) | (sound == 0)
    now = tl.load(step)
    line = log + now * 2 * log_rows + row
    tl.store(line, sampled.to(tl.int32))
    tl.store(line + log_rows, tl.where(where < 0, 0, 1 + 2 * sound + 4 * over.to(tl.int32)))
    if where >= 0:
        tl.store(slot_token + at, sampled)
        tl.store(slot_position + at, tl.where(over, -1, where + 1))
    target = log_hidden + (now * log_rows + row) * D
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        tl.store(target + d, tl.load(hidden + row * D + d, mask=d < D), mask=d < D)


@triton.jit(do_not_specialize_on_alignment=["source", "target"])
def copy_pages_kernel(
    cache,  # [layers * 2] parts of pages, ``part_stride`` apart
    source,  # [n] int32
    target,  # [n] int32
    part_stride,
    SIZE: tl.constexpr,  # numbers in a page of a part
    BLOCK: tl.constexpr,
):
    """One page of one part."""
    which, part = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start = cache + part * part_stride
    read = start + tl.load(source + which).to(tl.int64) * SIZE
    write = start + tl.load(target + which).to(tl.int64) * SIZE
    for first in range(0, SIZE, BLOCK):
        i = first + tl.arange(0, BLOCK)
        tl.store(write + i, tl.load(read + i, mask=i < SIZE), mask=i < SIZE)


def begin(
    slot: Tensor, slot_token: Tensor, slot_position: Tensor, page_table: Tensor, token: Tensor, position: Tensor,
    place: Tensor, cache_row: Tensor, step: Tensor, *, num_steps: int, page: int,
) -> None:  # fmt: skip
    """Set tokens, positions and cache rows of a step; see ``begin_kernel``."""
    begin_kernel[(len(slot),)](
        slot, slot_token, slot_position, page_table, token, position, place, cache_row, step, page_table.shape[1],
        num_steps, PAGE=page, num_warps=1,
    )  # fmt: skip


def end(
    slot: Tensor, slot_token: Tensor, slot_position: Tensor, slot_last: Tensor, position: Tensor, token: Tensor,
    finite: Tensor, ends: Tensor, step: Tensor, log: Tensor, hidden: Tensor, log_hidden: Tensor,
) -> None:  # fmt: skip
    """Log sampled tokens and update slots; see ``end_kernel``. ``log`` and ``log_hidden`` may start at a later row."""
    width = hidden.shape[1]
    end_kernel[(len(slot),)](
        slot, slot_token, slot_position, slot_last, position, token, finite, ends, step, log, hidden, log_hidden,
        len(ends), log.stride(1), D=width, ENDS=triton.next_power_of_2(max(1, len(ends))),
        BLOCK=min(2048, triton.next_power_of_2(width)), num_warps=4,
    )  # fmt: skip


def copy_slots(states: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy slots of every layer; ``states`` is [layers, slots, ...], contiguous."""
    size = states[0, 0].numel()
    copy_pages_kernel[(len(source), len(states))](
        states, source, target, states.stride(0), SIZE=size, BLOCK=min(4096, triton.next_power_of_2(size)), num_warps=4
    )


def copy_pages(cache: Tensor, source: Tensor, target: Tensor, *, page: int) -> None:
    """Copy pages of every layer; ``cache`` is [layers, 2, pages * page, K, E], rows contiguous."""
    size = page * cache.shape[3] * cache.shape[4]
    copy_pages_kernel[(len(source), cache.shape[0] * 2)](
        cache, source, target, cache.stride(1), SIZE=size, BLOCK=min(4096, triton.next_power_of_2(size)), num_warps=4
    )

"""AdamW over many tensors in one launch: float32 master weights and state, and the copies the model reads.

Equals clipping, ``torch.optim.AdamW`` on the master weights, and rounding to the copies, up to float32 rounding.
Memory traffic for each weight: 16 bytes read, 12 written, and 2 for the copy. The gradient's norm must be known before:
``squares_kernel`` reads 4 bytes more.
Determinism: elementwise, and sums in one order, so bitwise repeatable.
"""

import triton
import triton.language as tl


@triton.jit
def adamw_kernel(
    pointers,  # [5, P] int64: addresses of master, gradient, first moment, second moment and copy of each tensor
    chunks,  # [C, 3] int64: tensor, first element and number of elements of each program's part
    scale,  # [1] float32: of the gradients; where it is NaN nothing changes
    num_tensors,
    decay,  # 1 - learning rate * weight decay
    rate,  # learning rate / (1 - beta1 ** step)
    correction,  # sqrt(1 - beta2 ** step)
    rest1,  # 1 - beta1
    beta2,
    rest2,  # 1 - beta2
    eps,
    COPY: tl.constexpr,  # dtype of the copies
    ALIGNED: tl.constexpr,  # whether every address is a multiple of 16 bytes
    BLOCK: tl.constexpr,
    EVICT: tl.constexpr,  # policy of the cache for numbers that are read once and written once
):
    """One part of one tensor, in blocks of ``BLOCK`` elements."""
    part = chunks + tl.program_id(0) * 3
    tensor, first, length = tl.load(part), tl.load(part + 1), tl.load(part + 2)
    address = pointers + tensor
    master = tl.load(address).to(tl.pointer_type(tl.float32))
    gradient = tl.load(address + num_tensors).to(tl.pointer_type(tl.float32))
    moment1 = tl.load(address + 2 * num_tensors).to(tl.pointer_type(tl.float32))
    moment2 = tl.load(address + 3 * num_tensors).to(tl.pointer_type(tl.float32))
    copy = tl.load(address + 4 * num_tensors).to(tl.pointer_type(COPY))
    if ALIGNED:
        master, gradient = tl.multiple_of(master, 16), tl.multiple_of(gradient, 16)
        moment1, moment2 = tl.multiple_of(moment1, 16), tl.multiple_of(moment2, 16)
        copy, first = tl.multiple_of(copy, 16), tl.multiple_of(first, 16)
    factor = tl.load(scale)
    length = tl.where(factor == factor, length, 0)
    for start in range(0, length, BLOCK):
        at = first + start + tl.arange(0, BLOCK)
        inside = start + tl.arange(0, BLOCK) < length
        g = tl.load(gradient + at, mask=inside, other=0.0, eviction_policy=EVICT) * factor
        m = tl.load(moment1 + at, mask=inside, other=0.0, eviction_policy=EVICT)
        v = tl.load(moment2 + at, mask=inside, other=0.0, eviction_policy=EVICT)
        w = tl.load(master + at, mask=inside, other=0.0, eviction_policy=EVICT) * decay
        m = m + rest1 * (g - m)
        v = beta2 * v + rest2 * g * g
        w = w - rate * m / (tl.sqrt(v) / correction + eps)
        tl.store(moment1 + at, m, mask=inside, eviction_policy=EVICT)
        tl.store(moment2 + at, v, mask=inside, eviction_policy=EVICT)
        tl.store(master + at, w, mask=inside, eviction_policy=EVICT)
        tl.store(copy + at, w.to(COPY), mask=inside)


@triton.jit
def squares_kernel(
    gradients,  # [P] int64: addresses
    chunks,  # [C, 3] int64, as above
    out,  # [C] float32: sum of squares of each part
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One part of one tensor."""
    part = chunks + tl.program_id(0) * 3
    tensor, first, length = tl.load(part), tl.load(part + 1), tl.load(part + 2)
    gradient = tl.load(gradients + tensor).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        gradient, first = tl.multiple_of(gradient, 16), tl.multiple_of(first, 16)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        g = tl.load(gradient + first + at, mask=at < length, other=0.0)
        total += g * g
    tl.store(out + tl.program_id(0), tl.sum(total, 0))

"""The scoring pass on Hopper: exponentials of one half of a tile beside the products of the other.

Two groups of warps own the upper and the lower half of a tile's rows. They multiply with the same columns in shared
memory, but each at its own pace: while one turns its products into exponentials the other has steps left to multiply,
and then the first is ahead in the next tile. The matrix units hardly wait for an epilogue, and no column is read twice.
A third group, one warp, does nothing but load. What this gives up: softcap, bias, maxima and lists of rows, which stay
with the plain kernel, ``forward.anchored_exp_product``. Exponentials and sums have the same bits from both; with LoRA,
where D is a multiple of 16, or the plain kernel has products of both kinds in one instruction. Gluon changes with every
release of Triton (``variants.GLUON``).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

HALF = gl.constexpr(64)
COLUMNS = gl.constexpr(256)
DEPTH = gl.constexpr(64)
STAGES = gl.constexpr(4)
"""All that fits in shared memory beside what leaves a tile; groups of warps can be as many steps apart."""
NEVER = gl.constexpr(-1e4)


@gluon.jit
def tile_place(tile, num_m, num_n, GROUP: gl.constexpr):
    """As ``forward.tile_place``."""
    width = GROUP * num_n
    first = (tile // width) * GROUP
    size = gl.minimum(num_m - first, GROUP)
    inside = tile % width
    return first + inside % size, inside // size


@gluon.jit
def load_step(x, w, x_steps, w_steps, full, empty, step, m, n, k):
    """The k-th step of depth of a tile into the next stage, when both halves have multiplied what is there."""
    stage = step % STAGES
    mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
    loaded = full.index(stage)
    mbarrier.expect(loaded, (2 * HALF + COLUMNS) * DEPTH * 2)
    tma.async_copy_global_to_shared(x, [m * 2 * HALF, k * DEPTH], loaded, x_steps.index(2 * stage))
    tma.async_copy_global_to_shared(x, [m * 2 * HALF + HALF, k * DEPTH], loaded, x_steps.index(2 * stage + 1))
    tma.async_copy_global_to_shared(w, [n * COLUMNS, k * DEPTH], loaded, w_steps.index(stage))


@gluon.jit
def load_steps(
    x, w, x_low, w_low,  # of ``overlapped_exp_product``
    x_steps,  # shared [2 STAGES, HALF, DEPTH]: both halves of a stage in turn
    w_steps,  # shared [STAGES, COLUMNS, DEPTH]
    full, empty,  # shared [STAGES] barriers: a stage is loaded; both halves have multiplied it
    num_m, num_n, num_steps, RANK: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    """All steps of depth of this program's tiles, as far ahead as there are stages."""
    step = 0
    for tile in range(gl.program_id(0), num_m * num_n, PROGRAMS):
        m, n = tile_place(tile, num_m, num_n, GROUP)
        for k in range(num_steps):
            load_step(x, w, x_steps, w_steps, full, empty, step, m, n, k)
            step += 1
        for k in gl.static_range(0, RANK, DEPTH):
            load_step(x_low, w_low, x_steps, w_steps, full, empty, step, m, n, k // DEPTH)
            step += 1


@gluon.jit
def multiply(acc, x_steps, w_steps, full, empty, step, inside, PART: gl.constexpr, WIDTH: gl.constexpr):
    """The products of a step of depth, of its first WIDTH columns, on top of ``acc`` where it is ``inside`` a tile.

    They are under way when this returns; those of the step before are done, whose stage is given back.
    """
    stage = step % STAGES
    mbarrier.wait(full.index(stage), (step // STAGES) & 1)
    a = x_steps.index(2 * stage + PART)
    b = w_steps.index(stage)
    if WIDTH < DEPTH:
        a = a.slice(0, WIDTH, dim=1)
        b = b.slice(0, WIDTH, dim=1)
    acc = warpgroup_mma(a, b.permute((1, 0)), acc, use_acc=inside, is_async=True)
    acc = warpgroup_mma_wait(1, deps=[acc])
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=inside)
    return acc


@gluon.jit
def powers(z, scale, zero, own, inside, width):
    """S and T of some columns of products, and E; ``width`` columns there are, the ``own``-th is the target's."""
    d = z * scale[:, None] - zero[:, None]
    d = gl.where(inside[None, :] == own[:, None], NEVER, d)
    if width < z.shape[1]:
        d = gl.where((inside < width)[None, :], d, NEVER)
    e = gl.exp2(d)
    return gl.sum(e, 1), gl.sum(e * d, 1), e.to(gl.bfloat16)


@gluon.jit
def store_half(e, kept, staging, row, column):
    """Columns of exponentials by way of shared memory, when the last ones have left it."""
    tma.store_wait(0)
    staging.store(e)
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(kept, [row, column], staging)


@gluon.jit
def exponentials(
    x_steps, w_steps, full, empty,  # of ``load_steps``
    staging,  # shared [HALF, COLUMNS / 2]
    kept, multiplier, gain, anchor, target, part_s, part_t, N, V,  # of ``forward.anchored_exp_product``
    num_m, num_n, num_steps, PART: gl.constexpr, RANK: gl.constexpr, KEEP: gl.constexpr, GROUP: gl.constexpr,
    PROGRAMS: gl.constexpr,
):  # fmt: skip
    """One half of the rows of this program's tiles."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    step = 0
    acc = gl.zeros([HALF, COLUMNS], gl.float32, layout)
    for tile in range(gl.program_id(0), num_m * num_n, PROGRAMS):
        m, n = tile_place(tile, num_m, num_n, GROUP)
        first = m * 2 * HALF + PART * HALF
        row = first + gl.arange(0, HALF, gl.SliceLayout(1, layout))
        row_ok = row < N
        scale = gl.load(multiplier + row, mask=row_ok, other=0.0) * gain
        zero = gl.load(anchor + row, mask=row_ok, other=0.0)
        own = (gl.load(target + row, mask=row_ok, other=-1) - n * COLUMNS).to(gl.int32)
        for k in range(num_steps):
            acc = multiply(acc, x_steps, w_steps, full, empty, step, k > 0, PART, DEPTH)
            step += 1
        for k in gl.static_range(0, RANK, DEPTH):
            acc = multiply(acc, x_steps, w_steps, full, empty, step, True, PART, min(DEPTH, RANK - k))
            step += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))

        left, right = acc.reshape([HALF, 2, COLUMNS // 2]).permute([0, 2, 1]).split()
        by_row: gl.constexpr = gl.SliceLayout(1, left.type.layout)
        inside = gl.arange(0, COLUMNS // 2, gl.SliceLayout(0, left.type.layout))
        row, scale = gl.convert_layout(row, by_row), gl.convert_layout(scale, by_row)
        zero, own = gl.convert_layout(zero, by_row), gl.convert_layout(own, by_row)
        s, t, e = powers(left, scale, zero, own, inside, V - n * COLUMNS)
        if KEEP:
            store_half(e, kept, staging, first, n * COLUMNS)
        s_right, t_right, e = powers(right, scale, zero, own - COLUMNS // 2, inside, V - n * COLUMNS - COLUMNS // 2)
        if KEEP:
            store_half(e, kept, staging, first, n * COLUMNS + COLUMNS // 2)
        part = n.to(gl.int64) * N + row
        gl.store(part_s + part, s + s_right, mask=row < N)
        gl.store(part_t + part, t + t_right, mask=row < N)
    if KEEP:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["N"])
def overlapped_exp_product(
    x, w,  # TMA descriptors of [N, D] and [V, D]
    x_low, w_low,  # TMA descriptors of what stands beside x and w, if RANK is not 0
    kept,  # out: TMA descriptor of [kept_rows, V]; not used without KEEP
    multiplier, gain, anchor, target, part_s, part_t, N, V, D,  # of ``forward.anchored_exp_product``
    KEEP: gl.constexpr, RANK: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    """``forward.anchored_exp_product`` of all rows in order; RANK is a power of two, from the columns of x_low up."""
    num_m = gl.cdiv(N, 2 * HALF)
    num_n = gl.cdiv(V, COLUMNS)
    num_steps = gl.cdiv(D, DEPTH)
    x_steps = gl.allocate_shared_memory(x.dtype, [2 * STAGES, HALF, DEPTH], x.layout)
    w_steps = gl.allocate_shared_memory(x.dtype, [STAGES, COLUMNS, DEPTH], w.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    upper = gl.allocate_shared_memory(gl.bfloat16, [HALF, COLUMNS // 2], kept.layout)
    lower = gl.allocate_shared_memory(gl.bfloat16, [HALF, COLUMNS // 2], kept.layout)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (exponentials, (
                x_steps, w_steps, full, empty, upper, kept, multiplier, gain, anchor, target, part_s, part_t, N,
                V, num_m, num_n, num_steps, 0, RANK, KEEP, GROUP, PROGRAMS,
            )),
            (exponentials, (
                x_steps, w_steps, full, empty, lower, kept, multiplier, gain, anchor, target, part_s, part_t, N,
                V, num_m, num_n, num_steps, 1, RANK, KEEP, GROUP, PROGRAMS,
            )),
            (load_steps, (
                x, w, x_low, w_low, x_steps, w_steps, full, empty, num_m, num_n, num_steps, RANK, GROUP, PROGRAMS,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip

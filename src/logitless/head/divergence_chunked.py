"""Divergences of two models by blocks of the vocabulary, on any device, within a memory budget.

Equal to ``divergence_reference`` up to rounding. Logits of both streams are computed for the same rows and columns, one
tile at a time. KL divergences and centering need one pass over the vocabulary; Jensen-Shannon and total variation need
both normalisers first, and so a second pass. The backward recomputes the logits of both streams.

The ``fused`` backend is the same loop with three differences (``Call.one_pass``): Triton kernels read each tile of both
streams once where torch's operations read it about ten times; products that fit into the budget are kept, and neither
the second pass nor the backward computes them again; and the forward always multiplies the same number of rows.
"""

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from logitless.distributed.collectives import all_gathered
from logitless.head.blockwise import (
    FLOOR,
    MIN_COLUMNS,
    MIN_ROWS,
    Call,
    HeadBlock,
    Rows,
    Scored,
    Tile,
    anchor,
    at,
    block_of,
    call_of,
    even,
    gradients,
    in_all_rows,
    logits_and_tanh,
    logits_of,
    of_product,
    product,
    rows_of,
    scales,
    scored,
    slices,
    tile,
    write_target,
)
from logitless.head.contract import on_device, without_autocast
from logitless.head.measure import Measure, Measured, Stream
from logitless.head.sharded import Shard
from logitless.head.vocab_parallel import Partial, merged
from logitless.second_derivative import refuse_second_derivative

if TYPE_CHECKING:
    from logitless.head.kernels import launch

BUFFERS = 5
"""The largest number of tiles in memory at once."""

CPU_ROWS, CPU_COLUMNS = 64, 4096
"""The forward's tiles on the CPU: always this many rows, so that a row's bits do not depend on the number of rows, and
at most this many columns, so that a tile stays in the cache."""

FUSED_ROWS, FUSED_COLUMNS = 2048, 16896
"""Rows and columns of a product in the fused forward on CUDA, whatever the number of rows, so that a row's bits do not
depend on it. 2048 x 16,896 are 1056 tiles of 128 x 256, eight rounds of 132 multiprocessors, and nine such blocks are a
vocabulary of 151,936."""

FUSED_BYTES, KEPT_BYTES = 12, 8
"""Bytes by entry of the fused backend's blocks: two float32 products and a gradient; two products that are kept."""

NOMINAL_ROWS = 8192
"""Rows that set the width of the forward's tiles on other devices."""

FAR = 80.0
"""Log-ratios are clamped to this before they are exponentiated: 1 + exp(-80) rounds to 1, and exp(80) is finite."""


def measured(
    student: Stream,
    teacher: Stream,
    target: Tensor | None,
    vocabulary: int,
    measure: Measure,
    memory_budget: int | None = None,
    *,
    fused: bool = False,
    group: ProcessGroup | None = None,
) -> Measured:
    """The measure over the first ``vocabulary`` tokens, and both streams' scores, one block of columns at a time.

    With ``fused`` by the kernels, for 16 and 32 bit floats. With ``group`` heads, vocabulary and targets are of this
    rank's shards (``vocab_parallel``): sums of both passes are merged in rank order, bitwise identical on every rank.

    Sums omit the target y, which is added by its log-probs: results and gradients stay accurate when both probabilities
    of y are nearly 1. With d = z - max z, Z = sum exp(d), p the student and q the teacher:

        forward KL    sum_{v != y} q (d_q - d_p) - (log Z_q - log Z_p) sum_{v != y} q + q_y (log q_y - log p_y)
    """
    call, outside = call_of(*student, memory_budget, one_pass=fused, group=group)
    call_teacher, outside_teacher = call_of(*teacher, memory_budget, one_pass=fused)
    own, other = ((each.hidden, *HeadBlock.of(each.head)) for each in (student, teacher))
    trained = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in own)
    plan = _Plan(call, call_teacher, vocabulary, measure, has_target=target is not None, trained=trained)
    if target is None:
        target = student.hidden.new_full((len(student.hidden),), -1, dtype=torch.long)
    value, logp, entropy, logp_teacher, entropy_teacher = _Measured.apply(  # type: ignore[no-untyped-call]
        *own, target, outside, *other, outside_teacher, plan
    )
    if not plan.has_target:
        logp = logp_teacher = None
    return Measured(value, logp, entropy, logp_teacher, entropy_teacher)


class _Plan(NamedTuple):
    """The arguments of a call other than tensors."""

    call: Call
    call_teacher: Call
    vocabulary: int
    measure: Measure
    has_target: bool
    trained: bool


Kept = dict[int, tuple[Tensor, Tensor | None]]
"""Products of both streams, of all rows and a block of columns, by its first column."""


class _Side(NamedTuple):
    """One stream, converted for the products: its head, cut to the common vocabulary, and its rows.

    Args:
        unit: rows to multiply at a time, a divisor of their number; None for all of a tile.
    """

    head: HeadBlock
    rows: Rows
    call: Call
    unit: int | None

    def block(self, columns: slice) -> HeadBlock:
        return block_of(self.head, Shard(0, self.head.weight, 0), columns, self.call)

    def logits(self, rows: slice, first_column: int, block: HeadBlock) -> Tensor:
        some = self.rows.cut(rows, first_column)
        return logits_of(product(some, block, self.call), some, self.call)

    def product(self, rows: slice, block: HeadBlock) -> Tensor:
        """The product alone, of each unit of rows on its own."""
        some = self.rows.cut(rows, 0)
        z = some.hidden.new_empty(len(some.hidden), len(block.weight), dtype=self.call.wide)
        for unit in slices(len(z), self.unit or max(len(z), 1)):
            product(some.cut(unit, 0), block, self.call, out=z[unit])
        return z


class _PairSums(NamedTuple):
    """Sums over some columns v != y of both streams.

    Args:
        student, teacher: each stream's own.
        gap: sum of exp(d_w) (d_w - d_o), with w the stream whose probabilities are the weights and o the other one; d
            is relative to the maxima of these columns. inf where o excludes a token that w does not.
    """

    student: Partial
    teacher: Partial
    gap: Tensor


class _Row(NamedTuple):
    """What the forward saves of each row: ``Scored`` of both streams, the measure's value, and ``expected``.

    ``expected`` is sum_{v != y} p_v g_v, with g_v the derivative of the measure by p_v. For the reverse KL it is the
    value's own sum over v != y, for Jensen-Shannon KL(p || mixture), for total variation sum p_v sign(p_v - q_v) / 2.
    The forward KL and centering do not use it.
    """

    student: Scored
    teacher: Scored
    value: Tensor
    expected: Tensor


class _Measured(torch.autograd.Function):
    """(value, logp, entropy, logp_teacher, entropy_teacher), [N] each."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        """Of hidden states and head, targets and last factors of the logits, the same of the teacher, and the plan."""
        hidden, *own, target, outside, hidden_teacher = arguments[:8]
        *others, outside_teacher, plan = arguments[8:]
        head, head_teacher = HeadBlock(*own), HeadBlock(*others)
        size, unit, num_kept = _forward_plan(len(hidden), plan, hidden.device)
        kept: Kept = {}
        with on_device(hidden.device), without_autocast(hidden.device):
            student = _side(hidden, head, target, outside, plan.call, plan.vocabulary, unit)
            teacher = _side(
                hidden_teacher, head_teacher, target, outside_teacher, plan.call_teacher, plan.vocabulary, unit
            )
            row = _row(student, teacher, plan, size, kept, num_kept)
        row = _Row(*(_cut(part, len(hidden)) for part in row))
        ctx.plan, ctx.kept = plan, kept if plan.trained else {}
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            hidden, *head, target, outside, hidden_teacher, *head_teacher, outside_teacher, *row.student, *row.teacher,
            row.value, row.expected,
        )  # fmt: skip
        ctx.mark_non_differentiable(row.teacher.logp, row.teacher.entropy)
        return row.value, row.student.logp, row.student.entropy, row.teacher.logp, row.teacher.entropy

    @staticmethod
    def backward(
        ctx: Any, grad_value: Tensor | None, grad_logp: Tensor | None, grad_entropy: Tensor | None, *_: Any
    ) -> tuple[Tensor | None, ...]:
        backend = "fused" if ctx.plan.call.one_pass else "chunked"
        refuse_second_derivative("a head of two streams", given=f"{backend=}", remedy="Use backend='reference'.")
        saved, plan = ctx.saved_tensors, ctx.plan  # read once: activation checkpointing recomputes them for one reading
        hidden, *own, target, outside, hidden_teacher = saved[:8]
        *others, outside_teacher = saved[8:13]
        arriving = [gradient for gradient in (grad_value, grad_logp, grad_entropy) if gradient is not None]
        if not arriving:
            return (None,) * 14
        nonzero = torch.stack([gradient != 0 for gradient in arriving]).any(0).nonzero().squeeze(1)
        row = _Row(Scored(*at(nonzero, *saved[13:18])), Scored(*at(nonzero, *saved[18:23])), *at(nonzero, *saved[23:]))
        target, outside, outside_teacher = at(nonzero, target, outside, outside_teacher)
        kept, ctx.kept = ctx.kept, {}  # a second backward computes these products again
        if plan.call.one_pass:
            size = fused_tile(len(nonzero), plan.vocabulary, plan.call.memory_budget, hidden.device)[0]
        else:
            size = tile(len(nonzero), plan.vocabulary, plan.call.wide, plan.call.memory_budget * 3 // BUFFERS)
        with on_device(hidden.device), without_autocast(hidden.device):
            live, live_teacher = (x if len(nonzero) == len(x) else x[nonzero] for x in (hidden, hidden_teacher))
            student = _side(live, HeadBlock(*own), target, outside, plan.call, plan.vocabulary)
            teacher = _side(
                live_teacher, HeadBlock(*others), target, outside_teacher, plan.call_teacher, plan.vocabulary
            )
            gradient = _Gradient(student, teacher, row, plan.measure, *at(nonzero, grad_value, grad_logp, grad_entropy))
            gradient.take(kept, None if len(nonzero) == len(hidden) else nonzero)
            of_live, *of_head = gradients(
                student.head, student.rows, gradient, ctx.needs_input_grad[:5], plan.call, size
            )
            of_hidden = in_all_rows(of_live, nonzero, hidden)
        return (of_hidden, *(_like(found, leaf) for found, leaf in zip(of_head, own, strict=True)), *(None,) * 9)


def forward_tile(num_rows: int, vocabulary: int, dtype: torch.dtype, memory_budget: int, device: torch.device) -> Tile:
    """The forward's tile. Its columns, and on the CPU its rows too, do not depend on the number of rows.

    Example:
        >>> forward_tile(3, 151_936, torch.float32, 2**28, torch.device("cpu"))
        Tile(rows=64, columns=4096)
        >>> forward_tile(16_384, 151_936, torch.float32, 2**31, torch.device("cuda"))
        Tile(rows=8473, columns=12672)
    """
    entries = memory_budget // (BUFFERS * dtype.itemsize)
    if device.type == "cpu":
        return Tile(CPU_ROWS, even(min(max(entries // CPU_ROWS, MIN_COLUMNS), CPU_COLUMNS), vocabulary))
    columns = even(max(entries // NOMINAL_ROWS, MIN_COLUMNS), vocabulary)
    return Tile(min(max(entries // columns, MIN_ROWS), max(num_rows, 1)), columns)


def fused_tile(num_rows: int, vocabulary: int, memory_budget: int, device: torch.device) -> tuple[Tile, int]:
    """The fused backend's tile, and how many blocks of columns fit beside it with all rows, to be kept.

    Neither the budget nor the number of rows changes the columns: sums over blocks keep their bits.

    Example:
        >>> fused_tile(16_000, 151_936, 10 * 2**30, torch.device("cuda"))
        (Tile(rows=16384, columns=16896), 3)
        >>> fused_tile(16_000, 151_936, 2**30, torch.device("cuda"))
        (Tile(rows=4096, columns=16896), 0)
    """
    rows, columns = (CPU_ROWS, CPU_COLUMNS) if device.type == "cpu" else (FUSED_ROWS, FUSED_COLUMNS)
    columns = even(columns, vocabulary)
    all_rows = max(-(-num_rows // rows), 1) * rows
    most = max(memory_budget // (FUSED_BYTES * columns * rows), 1) * rows
    if all_rows > most:
        return Tile(most, columns), 0
    return Tile(all_rows, columns), max(memory_budget // (all_rows * columns) - FUSED_BYTES, 0) // KEPT_BYTES


def _forward_plan(num_rows: int, plan: _Plan, device: torch.device) -> tuple[Tile, int | None, int]:
    """The forward's tile, the rows to multiply at a time (None for the tile's), and how many blocks are kept."""
    if not plan.call.one_pass:
        size = forward_tile(num_rows, plan.vocabulary, plan.call.wide, plan.call.memory_budget, device)
        return size, CPU_ROWS if device.type == "cpu" else None, 0
    size, num_kept = fused_tile(num_rows, plan.vocabulary, plan.call.memory_budget, device)
    passes = 1 if plan.measure.kind in ("forward_kl", "reverse_kl", "centering") else 2
    return size, CPU_ROWS if device.type == "cpu" else FUSED_ROWS, num_kept if plan.trained or passes == 2 else 0


def _side(
    hidden: Tensor,
    head: HeadBlock,
    target: Tensor,
    outside: Tensor | None,
    call: Call,
    vocabulary: int,
    unit: int | None = None,
) -> _Side:
    """A stream cut to the common vocabulary; with ``unit`` padded to a multiple of so many rows."""
    bias, lora_b = at(slice(vocabulary), head.bias, head.lora_b)
    head = HeadBlock(head.weight[:vocabulary], bias, head.lora_a, lora_b)
    if unit is None or not len(hidden):
        return _Side(head, rows_of(hidden, head, target, outside, call), call, unit)
    missing = -len(hidden) % unit
    if missing:
        hidden, target = pad(hidden, (0, 0, 0, missing)), pad(target, (0, missing), value=-1)
        outside = None if outside is None else pad(outside, (0, missing), value=1.0)
    if head.lora_a is None:
        return _Side(head, rows_of(hidden, head, target, outside, call), call, unit)
    # LoRA's first product is computed per unit of rows as well, since its bits depend on the number of rows.
    low = [rows_of(hidden[some], head, target, None, call).low for some in slices(len(hidden), unit)]
    return _Side(head, Rows(hidden.to(call.narrow), torch.cat(low), target, outside), call, unit)  # type: ignore[arg-type]


def _cut(part: Any, num_rows: int) -> Any:
    """The first rows of a tensor, or of each tensor of a tuple."""
    return part[:num_rows] if isinstance(part, Tensor) else type(part)(*at(slice(num_rows), *part))


def _like(gradient: Tensor | None, leaf: Tensor | None) -> Tensor | None:
    """The gradient in the dtype of its leaf, with 0 for tokens outside of the common vocabulary."""
    if gradient is None or leaf is None:
        return None
    beyond = len(leaf) - len(gradient)
    if beyond:
        gradient = torch.cat([gradient, gradient.new_zeros(beyond, *gradient.shape[1:])])
    return gradient.to(leaf.dtype)


def _row(student: _Side, teacher: _Side, plan: _Plan, size: Tile, kept: Kept, num_kept: int) -> _Row:
    """The forward of all rows; puts the products of the first ``num_kept`` blocks of columns into ``kept``."""
    kind = plan.measure.kind
    sums = _first_pass(student, teacher, plan, size, kept, num_kept)
    if not plan.has_target:
        nowhere = torch.full_like(sums.gap, -torch.inf)
        sums = sums._replace(
            student=sums.student._replace(target_logit=nowhere), teacher=sums.teacher._replace(target_logit=nowhere)
        )
    p, q = scored(sums.student), scored(sums.teacher)
    if kind in ("forward_kl", "centering"):
        others = _kl_of_others(sums.gap, q, p)
        value = others + _weighted(q.logp.exp(), q.logp - p.logp)
        return _Row(p, q, value if kind == "forward_kl" else p.entropy - q.entropy - value, others)
    if kind == "reverse_kl":
        others = _kl_of_others(sums.gap, p, q)
        return _Row(p, q, others + _weighted(p.logp.exp(), p.logp - q.logp), others)
    value, expected = _second_pass(student, teacher, p, q, plan, size, kept)
    log_p, log_q = p.logp.clamp(min=FLOOR), q.logp.clamp(min=FLOOR)
    if kind == "jensen_shannon":
        at_target, _ = _jensen_shannon(log_p.exp(), log_q.exp(), log_q - log_p, plan.measure.beta)
    else:
        at_target = torch.maximum(log_p, log_q).exp() * -torch.expm1(-(log_p - log_q).abs()) / 2
    return _Row(p, q, value + at_target, expected)


def _kl_of_others(gap: Tensor, weighing: Scored, other: Scored) -> Tensor:
    """The terms v != y of KL(weighing || other)."""
    share = weighing.others / weighing.normaliser
    return gap / weighing.normaliser - share * (weighing.normaliser.log() - other.normaliser.log())


def _weighted(weight: Tensor, value: Tensor) -> Tensor:
    """``weight * value``, and 0 where the weight is 0 even if the value is infinite."""
    return torch.where(weight == 0, 0, weight * value)


def _first_pass(student: _Side, teacher: _Side, plan: _Plan, size: Tile, kept: Kept, num_kept: int) -> _PairSums:
    if plan.call.one_pass:
        from logitless.head.kernels import launch

    num_rows, total = len(student.rows.target), None
    for columns in slices(plan.vocabulary, size.columns):
        blocks = student.block(columns), teacher.block(columns)
        sums = student.rows.hidden.new_empty(9, num_rows, dtype=plan.call.wide)
        for some in slices(num_rows, size.rows):
            if plan.call.one_pass:
                pair = _pair(student, teacher, some, columns.start, blocks, kept)
                sums[:, some] = launch.pair_sums(pair, plan.measure.kind)
                if columns.start < num_kept * size.columns:
                    kept[columns.start] = pair.z, pair.y
                del pair  # before the next one is made
                continue
            z, y = (
                side.logits(some, columns.start, block) for side, block in zip((student, teacher), blocks, strict=True)
            )
            masked = blocks[0].bias is not None, blocks[1].bias is not None
            sums[:, some] = _tile_sums(z, y, student.rows.target[some] - columns.start, masked, plan.measure)
        part = _pair_sums(sums)
        total = part if total is None else _merged(total, part, plan.measure)
    assert total is not None
    if plan.call.group is not None:
        mine = torch.stack([*total.student, *total.teacher, total.gap])
        of_ranks = [_pair_sums(each) for each in all_gathered(mine, plan.call.group)]
        total = functools.reduce(functools.partial(_merged, measure=plan.measure), of_ranks)
    return total


def _pair_sums(rows: Tensor) -> _PairSums:
    """From [9, N]."""
    return _PairSums(Partial(*rows[:4]), Partial(*rows[4:8]), rows[8])


def _tile_sums(z: Tensor, y: Tensor, target: Tensor, masked: tuple[bool, bool], measure: Measure) -> Tensor:
    """``_PairSums`` of one tile as [9, n], of the student's logits z and the teacher's y, which it overwrites."""
    top, target_logit = anchor(z, target, masked=masked[0])
    top_teacher, target_logit_teacher = anchor(y, target, masked=masked[1])
    p, q = z.exp(), y.exp()
    student = [top, p.sum(1), (p * z).sum(1), target_logit]
    teacher = [top_teacher, q.sum(1), (q * y).sum(1), target_logit_teacher]
    if measure.kind in ("jensen_shannon", "total_variation"):
        return torch.stack([*student, *teacher, torch.zeros_like(top)])
    weight, of_weight, other, may_lack = (p, z, y, masked[1]) if measure.kind == "reverse_kl" else (q, y, z, masked[0])
    lacking = ((other <= FLOOR) & (weight > 0)).any(1) if may_lack else None
    gap = weight.mul_(torch.sub(of_weight, other, out=other)).sum(1)
    return torch.stack([*student, *teacher, gap if lacking is None else gap.masked_fill_(lacking, torch.inf)])


def _merged(one: _PairSums, two: _PairSums, measure: Measure) -> _PairSums:
    student, teacher = merged([one.student, two.student]), merged([one.teacher, two.teacher])
    gap = torch.zeros_like(one.gap)
    for part in (one, two):
        ends = (part.student.top - student.top, part.teacher.top - teacher.top)
        own, other = ends if measure.kind == "reverse_kl" else ends[::-1]
        others = part.student.others if measure.kind == "reverse_kl" else part.teacher.others
        scale = own.clamp(min=FLOOR).exp()
        gap += _weighted(scale, part.gap) + scale * others * (own - other)
    return _PairSums(student, teacher, gap)


def _second_pass(
    student: _Side, teacher: _Side, p: Scored, q: Scored, plan: _Plan, size: Tile, kept: Kept
) -> tuple[Tensor, Tensor]:
    """Value and ``_Row.expected`` over v != y, once both normalisers are known."""
    if plan.call.one_pass:
        from logitless.head.kernels import launch

    num_rows = len(student.rows.target)
    total = student.rows.hidden.new_zeros(2, num_rows, dtype=plan.call.wide)
    normalisers = torch.stack([p.top, p.normaliser.log(), q.top, q.normaliser.log()])
    for columns in slices(plan.vocabulary, size.columns):
        blocks = student.block(columns), teacher.block(columns)
        for some in slices(num_rows, size.rows):
            if plan.call.one_pass:
                pair = _pair(student, teacher, some, columns.start, blocks, kept)
                total[:, some] += launch.pair_terms(pair, *plan.measure, normalisers[:, some])
                del pair  # before the next one is made
                continue
            z, y = (
                _relative_to_all(side, block, some, columns.start, of)
                for side, block, of in zip((student, teacher), blocks, (p, q), strict=True)
            )
            total[:, some] += _tile_terms(z, y, p.normaliser[some, None], q.normaliser[some, None], plan.measure)
    if plan.call.group is not None:
        total = torch.stack(all_gathered(total, plan.call.group)).sum(0)
    return total[0], total[1]


def _pair(
    student: _Side,
    teacher: _Side,
    some: slice,
    first_column: int,
    blocks: tuple[HeadBlock, HeadBlock | None],
    kept: Kept,
) -> "launch.Pair":
    """The kernels' input for a tile, with kept or new products; ``y`` is None if the teacher's block is."""
    from logitless.head.kernels import launch

    of_student, of_teacher = blocks
    z, y = kept.get(first_column) or (
        student.product(some, of_student),
        None if of_teacher is None else teacher.product(some, of_teacher),
    )
    outside, outside_teacher = at(some, student.rows.outside, teacher.rows.outside)
    return launch.Pair(
        z=z,
        y=None if of_teacher is None else y,
        outside=outside,
        outside_teacher=outside_teacher,
        target=student.rows.target[some] - first_column,
        inside=student.call.inside,
        inside_teacher=teacher.call.inside,
        masked=student.head.bias is not None or teacher.head.bias is not None,
    )


def _relative_to_all(side: _Side, block: HeadBlock, rows: slice, first_column: int, of: Scored) -> Tensor:
    """Logits of one tile minus their row's maximum over all columns; FLOOR at the target."""
    top = of.top[rows]
    z = _relative(side.logits(rows, first_column, block), top, masked=block.bias is not None)
    write_target(z, side.rows.target[rows] - first_column, torch.full_like(top, FLOOR))
    return z


def _tile_terms(z: Tensor, y: Tensor, of_z: Tensor, of_y: Tensor, measure: Measure) -> Tensor:
    """The second pass's two sums of one tile, [2, n], from logits minus their maxima, which it overwrites."""
    if measure.kind == "jensen_shannon":
        ratio = (y - z).sub_(of_y.log() - of_z.log())
        terms = _jensen_shannon(z.exp_().div_(of_z), y.exp_().div_(of_y), ratio, measure.beta)
        return torch.stack([term.sum(1) for term in terms])
    p = z.exp_().div_(of_z)
    change = torch.sub(p, y.exp_().div_(of_y), out=y)
    return torch.stack([change.abs().sum(1), change.sign_().mul_(p).sum(1)]).div_(2)


def _relative(z: Tensor, top: Tensor, *, masked: bool) -> Tensor:
    """Logits minus their row's maximum, in place."""
    z -= top[:, None]
    return z.clamp_(min=FLOOR) if masked else z


def _jensen_shannon(p: Tensor, q: Tensor, log_ratio: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Terms of the divergence and of KL(p || m), with ``log_ratio`` = log q - log p, which it overwrites.

    log(m / p) = log1p(beta expm1(log_ratio));   log(m / q) = log1p((1 - beta) expm1(-log_ratio))
    """
    log_ratio.clamp_(-FAR, FAR)
    of_p = log_ratio.expm1().mul_(beta).log1p_().mul_(p).neg_()
    of_q = log_ratio.neg_().expm1_().mul_(1 - beta).log1p_().mul_(q).mul_(-beta)
    return of_q.add_(of_p, alpha=1 - beta), of_p


class _Gradient:
    """``LogitGradient`` of the measure, and of the student's log-prob and entropy.

        u_v = grad_value D_v - p_v (grad_logp + grad_entropy (log p_v + entropy))   (v != y),   u_y = at_target

    with D the measure's own gradient by the student's logits:

        forward KL         p - q                 reverse KL        p (log p - log q - KL)
        centering          q - p                 Jensen-Shannon    (1 - beta) p (log p - log m - KL(p || m))
        total variation    p (sign(p - q) - sum p sign(p - q)) / 2
    """

    def __init__(
        self,
        student: _Side,
        teacher: _Side,
        row: _Row,
        measure: Measure,
        grad_value: Tensor | None,
        grad_logp: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> None:
        self._student, self._teacher, self._measure = student, teacher, measure
        self._p, self._q = row.student, row.teacher
        self._at_hand: tuple[slice, HeadBlock] | None = None
        size = functools.reduce(
            torch.maximum, [g.abs() for g in (grad_value, grad_logp, grad_entropy) if g is not None]
        )
        divisor, self.factor = scales(size, student.rows.outside, student.call)
        self._value, self._logp, self._entropy = (
            None if g is None else g / divisor for g in (grad_value, grad_logp, grad_entropy)
        )
        p, log_p = row.student, row.student.logp.clamp(min=FLOOR)
        self._expected, of_measure = self._at_target(row)
        self._target = torch.zeros_like(size)
        if self._value is not None:
            self._target += self._value * of_measure
        if self._logp is not None:
            self._target += self._logp * p.others / p.normaliser
        if self._entropy is not None:
            self._target -= self._entropy * log_p.exp() * (log_p + p.entropy)
        self._kept: Kept = {}
        self._source: Tensor | None = None
        if student.call.one_pass:
            q, zero = row.teacher, torch.zeros_like(size)
            self._slopes = torch.stack([
                p.top, p.normaliser.log(), q.top, q.normaliser.log(), self._expected,
                *(zero if g is None else g for g in (self._value, self._logp, self._entropy)), p.entropy, self._target,
            ])  # fmt: skip

    def take(self, kept: Kept, source: Tensor | None) -> None:
        """Use kept products, each once, in place of new ones; ``source``: their rows that are wanted, None for all."""
        self._kept, self._source = kept, source

    def _at_target(self, row: _Row) -> tuple[Tensor, Tensor]:
        """(sum_v p_v g_v over all v, D_y), computed from sums over v != y."""
        p, q, kind, beta = row.student, row.teacher, *self._measure
        log_p, log_q = p.logp.clamp(min=FLOOR), q.logp.clamp(min=FLOOR)
        p_y, rest = log_p.exp(), p.others / p.normaliser
        if kind in ("forward_kl", "centering"):
            likely = torch.maximum(log_p, log_q) > -0.5  # then subtract the complements, which are smaller
            change = torch.where(likely, q.others / q.normaliser - rest, p_y - log_q.exp())
            return row.expected, change if kind == "forward_kl" else -change
        if kind == "reverse_kl":
            return row.value, p_y * ((log_p - log_q) * rest - row.expected)
        if kind == "jensen_shannon":
            _, of_p = _jensen_shannon(p_y, log_q.exp(), log_q - log_p, beta)
            return row.expected + of_p, (1 - beta) * (of_p * rest - p_y * row.expected)
        sign = (log_p - log_q).sign() / 2
        return row.expected + p_y * sign, p_y * (sign * rest - row.expected)

    def of_tile(self, rows: slice, first_column: int, block: HeadBlock, *, wide: bool) -> tuple[Tensor, Tensor]:
        """u of one tile, in the logits' dtype and in that of operands; needs ``BUFFERS`` tiles of memory."""
        if self._student.call.one_pass:
            return self._of_tile_in_one_pass(rows, first_column, block, wide=wide)
        call, some = self._student.call, self._student.rows.cut(rows, first_column)
        z, tanh = logits_and_tanh(product(some, block, call), some, call)
        top, normaliser, entropy = (x[rows] for x in (self._p.top, self._p.normaliser, self._p.entropy))
        _relative(z, top, masked=block.bias is not None)
        p = z.exp().div_(normaliser[:, None])
        of_measure = None
        if self._value is not None:
            of_measure = self._measures(rows, slice(first_column, first_column + z.shape[1]), z, p).mul_(
                self._value[rows, None]
            )
        if self._entropy is not None:
            z += (entropy - normaliser.log())[:, None]
            z *= -self._entropy[rows, None]
            if self._logp is not None:
                z -= self._logp[rows, None]
            u = p.mul_(z)
        elif self._logp is not None:
            u = p.mul_(-self._logp[rows, None])
        else:
            u = None
        if of_measure is not None:
            u = of_measure if u is None else u.add_(of_measure)
        assert u is not None
        write_target(u, some.target, self._target[rows])
        return of_product(u, tanh, call)

    def _of_tile_in_one_pass(
        self, rows: slice, first_column: int, block: HeadBlock, *, wide: bool
    ) -> tuple[Tensor, Tensor]:
        from logitless.head.kernels import launch

        columns = slice(first_column, first_column + len(block.weight))
        blocks = block, None if self._value is None else self._teacher_block(columns)
        source = self._source if first_column in self._kept else None
        pair = _pair(self._student, self._teacher, rows, first_column, blocks, self._kept)
        self._kept.pop(first_column, None)
        return launch.pair_gradient(
            pair, *self._measure, self._slopes[:, rows], source, self._student.call.narrow, wide=wide
        )

    def _measures(self, rows: slice, columns: slice, z: Tensor, p: Tensor) -> Tensor:
        """D of one tile, in a new buffer, from the student's logits z minus their maximum and its probabilities p."""
        kind, beta = self._measure
        y = self._teacher_logits(rows, columns)
        expected = self._expected[rows, None]
        normaliser, normaliser_teacher = (x.normaliser[rows, None] for x in (self._p, self._q))
        if kind in ("reverse_kl", "jensen_shannon"):
            ratio = torch.sub(y, z, out=y).sub_(normaliser_teacher.log() - normaliser.log())
            if kind == "reverse_kl":
                return ratio.add_(expected).mul_(p).neg_()
            ratio = ratio.clamp_(-FAR, FAR).expm1_().mul_(beta).log1p_()
            return ratio.add_(expected).mul_(p).mul_(beta - 1)
        change = torch.sub(p, y.exp_().div_(normaliser_teacher), out=y)
        if kind == "total_variation":
            return change.sign_().div_(2).sub_(expected).mul_(p)
        return change if kind == "forward_kl" else change.neg_()

    def _teacher_logits(self, rows: slice, columns: slice) -> Tensor:
        """The teacher's logits of one tile, minus their row's maximum."""
        block = self._teacher_block(columns)
        y = self._teacher.logits(rows, columns.start, block)
        return _relative(y, self._q.top[rows], masked=block.bias is not None)

    def _teacher_block(self, columns: slice) -> HeadBlock:
        if self._at_hand is None or self._at_hand[0] != columns:  # one block serves several tiles of rows
            self._at_hand = columns, self._teacher.block(columns)
        return self._at_hand[1]

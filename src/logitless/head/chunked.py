"""The chunked backend: blocks of the vocabulary, on any device, within a memory budget.

Equal to ``reference`` to rounding. Slower than ``fused``: forward and backward each compute the logits (four matrix
products). A tile of logits is processed in torch, or on a GPU with Triton by one kernel (``kernels/tiles.py``). A tile
spans all rows unless they exceed the budget, so that a block of the weight's gradient is one product, rounded once.
"""

import functools
import importlib.util
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from logitless.distributed.sharding import is_sharded
from logitless.head import sharded, vocab_parallel
from logitless.head.contract import logits_dtype, without_autocast
from logitless.head.kernels.variants import truncation
from logitless.head.sharded import Shard, shards
from logitless.head.vocab_parallel import Partial, merged
from logitless.second_derivative import refuse_second_derivative
from logitless.types import LMHead, TokenScores

logger = logging.getLogger("logitless")

CPU_BUDGET = 256 * 2**20
"""Default memory budget off CUDA, in bytes."""

CUDA_SHARE = 32
"""The default budget on CUDA is this fraction of the device's memory: 4.4 GiB of 140, 0.75 GiB of 24."""

MIN_ROWS, MIN_COLUMNS = 16, 512
"""Tiles are not made smaller than this, however small the budget."""

FLOOR = -1e4
"""Stands for -inf in differences of logits: its exp is exactly 0, and 0 times it is 0."""


def token_scores(
    hidden: Float[Tensor, "N D"],
    head: LMHead,
    target: Int[Tensor, "N"],
    *,
    temperature: float | Float[Tensor, "N"] = 1.0,
    memory_budget: int | None = None,
    anchor: Float[Tensor, "N"] | None = None,  # noqa: ARG001 - rows are anchored at their maximum
    nonzero: Bool[Tensor, "N"] | None = None,  # noqa: ARG001 - known once the gradient arrives
    group: ProcessGroup | None = None,
) -> TokenScores:
    """Log-probability of each target and entropy of each distribution, a block of the vocabulary at a time.

        S = sum_{v != y} exp(z_v - max z);   d = z_y - max z
        logp = d - log(S + e^d), written d - log1p(S + expm1(d)) so that it is exact when p_y is nearly 1

    Gradient: to hidden, weight, bias and LoRA factors that require grad, for rows whose incoming gradient is not zero
    (finding them synchronizes once). It cannot be differentiated again.

    Args:
        hidden: [N, D].
        head: the weights; shapes as checked by ``contract.checked``.
        target: [N] int64.
        temperature: divides the logits; a number or [N].
        memory_budget: bytes for temporaries of size rows x columns; by default 256 MiB off CUDA and a 32nd of the
            device's memory on CUDA. Tile sizes depend on it, and with them the last bits of results.
        anchor, nonzero: hints for other backends.
        group: the process group over which the vocabulary is sharded (see ``vocab_parallel``).

    Returns:
        float32 (float64 for float64), the same with and without grad.

    Raises:
        UnavailableError: the backward runs under ``create_graph=True``.

    Equals: ``reference.token_scores``.
    Memory: ``memory_budget``, but no less than three tiles of 16 x 512; in the backward ``4 N D`` bytes for hidden's
        gradient, and a scaled copy of hidden if the weight is trained.
    Accumulation: float32 or wider. Off CUDA, float16 and bfloat16 operands are multiplied in float32.
    Determinism: bitwise repeatable. A NaN stays in its row, except in the weight's gradient.

    Example:
        >>> scores = token_scores(torch.zeros(1, 3), LMHead(weight=torch.zeros(4, 3)), torch.tensor([2]))
        >>> scores.logp, scores.entropy
        (tensor([-1.3863]), tensor([1.3863]))
    """
    last = (head.scale if head.softcap is None else head.softcap) / temperature
    outside: Tensor | None
    if isinstance(last, Tensor):
        outside = last
    else:
        outside = None if last == 1 else torch.full_like(target, last, dtype=logits_dtype(hidden.dtype))
    wide = logits_dtype(hidden.dtype)
    call = _Call(
        product=hidden.dtype,
        narrow=_multiplied_in(hidden),
        wide=wide,
        one_pass=_has_kernels(hidden.device) and wide == torch.float32,
        gain=1 + truncation(hidden.device, _multiplied_in(hidden)) * hidden.shape[1],
        inside=None if head.softcap is None else head.scale / head.softcap,
        lora_scale=head.lora_scale,
        memory_budget=default_budget(hidden.device) if memory_budget is None else memory_budget,
        group=group,
    )
    logp, entropy = _TokenScores.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, head.lora_a, head.lora_b, target, outside, call
    )
    return TokenScores(logp=logp, entropy=entropy)


class Tile(NamedTuple):
    """Rows and columns of the largest block of logits."""

    rows: int
    columns: int


def tile(num_rows: int, vocabulary: int, dtype: torch.dtype, memory_budget: int) -> Tile:
    """The tile of which three fit into the budget: all rows and some columns where that is possible.

    Example:
        >>> tile(1000, 50_000, torch.float32, 12 * 1000 * 10_300)
        Tile(rows=1000, columns=10112)
        >>> tile(100_000, 50_000, torch.float32, 12 * 512 * 9_000)
        Tile(rows=9000, columns=512)
    """
    entries = memory_budget // (3 * dtype.itemsize)
    columns = max(entries // max(num_rows, 1), MIN_COLUMNS)
    if columns < vocabulary:
        blocks = -(-vocabulary // columns)
        columns = min(columns, -(-vocabulary // (128 * blocks)) * 128)
    columns = min(columns, vocabulary)
    return Tile(rows=min(max(entries // columns, MIN_ROWS), max(num_rows, 1)), columns=columns)


def default_budget(device: torch.device) -> int:
    """Bytes for temporaries by default."""
    if device.type != "cuda":
        return CPU_BUDGET
    return torch.cuda.get_device_properties(device).total_memory // CUDA_SHARE


class _Call(NamedTuple):
    """The arguments of a call that are no tensors.

    Args:
        product: the dtype that operands are rounded to.
        narrow: the dtype in which the wide products then take them.
        wide: the dtype of their results, of logits and of every sum.
        one_pass: whether kernels go over a tile, each once, in place of torch's operations.
        gain: factor of the wide products that undoes the mean error of matrix units that truncate (docs/numerics.md).
        inside: logits are ``outside * tanh(inside * product)``, or with None ``outside * product``.
    """

    product: torch.dtype
    narrow: torch.dtype
    wide: torch.dtype
    one_pass: bool
    gain: float
    inside: float | None
    lora_scale: float
    memory_budget: int
    group: ProcessGroup | None


class _Head(NamedTuple):
    """All columns of this rank's head, or some."""

    weight: Tensor
    bias: Tensor | None
    lora_a: Tensor | None
    lora_b: Tensor | None


class _Rows(NamedTuple):
    """Rows, as the products take them.

    Args:
        hidden: [n, D], in the dtype of the wide products.
        low: [n, R] lora_scale * hidden @ lora_a.T, in the logits' dtype, or None.
        target: [n] index among the columns of a tile.
        outside: [n] what multiplies the logits last, or None for 1.
    """

    hidden: Tensor
    low: Tensor | None
    target: Tensor
    outside: Tensor | None

    def cut(self, rows: slice, first_column: int) -> "_Rows":
        some = _Rows(*_at(rows, *self))
        return some._replace(target=some.target - first_column)


class _Slopes(NamedTuple):
    """Values of each row with a gradient, for the backward.

    The gradient of the products' output is ``factor * u``, with u of the order of a probability:

        u_v = (grad_logp + grad_entropy (z_v - top + offset)) exp(z_v - top) over   (v != y),   u_y = at_target

    Args:
        top: the maximum that exponentials are relative to.
        over: -1 / sum_v exp(z_v - top).
        offset: entropy - log sum_v exp(z_v - top).
        at_target: u_y, computed from the other columns' sum so that it is exact when p_y is nearly 1.
        grad_logp, grad_entropy: the incoming gradients, scaled so that the larger one is 1 in size; None for none.
        factor: their common factor, times the derivative of scale and temperature.
    """

    top: Tensor
    over: Tensor
    offset: Tensor
    at_target: Tensor
    grad_logp: Tensor | None
    grad_entropy: Tensor | None
    factor: Tensor

    def cut(self, rows: slice) -> "_Slopes":
        return _Slopes(*_at(rows, *self))


class _Scored(NamedTuple):
    """Values of each row that the forward saves: ``Partial.top`` and ``others``, the sum over all v, the results."""

    top: Tensor
    others: Tensor
    normaliser: Tensor
    logp: Tensor
    entropy: Tensor


class _TokenScores(torch.autograd.Function):
    """(logp [N], entropy [N]) of (hidden, weight, bias, lora_a, lora_b, target, outside, call)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lora_a: Tensor | None,
        lora_b: Tensor | None,
        target: Tensor,
        outside: Tensor | None,
        call: _Call,
    ) -> tuple[Tensor, Tensor]:
        head = _Head(weight, *map(sharded.whole, (bias, lora_a, lora_b)))
        with without_autocast(hidden.device):
            if call.group is not None:
                target = vocab_parallel.within_shard(target, len(weight), call.group)
            partial = _partial(head, _rows(hidden, head, target, outside, call), call)
            if call.group is not None:
                partial = vocab_parallel.gathered(partial, call.group)
            below = partial.target_logit - partial.top
            at_target = below.exp()
            normaliser = partial.others + at_target
            log_normaliser = torch.log1p(partial.others + torch.expm1(below))
            logp = below - log_normaliser
            entropy = log_normaliser - (partial.weighted + at_target * below.clamp(min=FLOOR)) / normaliser
        ctx.call = call
        ctx.set_materialize_grads(False)
        scored = _Scored(partial.top, partial.others, normaliser, logp, entropy)
        ctx.save_for_backward(hidden, bias, lora_a, lora_b, *head, target, outside, *scored)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("a head", given="backend='chunked'", remedy="Use backend='reference'.")
        saved = ctx.saved_tensors  # read once: activation checkpointing recomputes them for one reading
        hidden, bias, lora_a, lora_b, weight, *whole, target, outside = saved[:10]
        head, scored = _Head(weight, *whole), saved[10:]
        if grad_logp is None and grad_entropy is None:
            if not is_sharded(weight):
                return (None,) * 8
            grad_logp = torch.zeros_like(scored[-2])  # the other ranks wait for this one's collectives
        arriving = [gradient for gradient in (grad_logp, grad_entropy) if gradient is not None]
        nonzero = torch.stack([gradient != 0 for gradient in arriving]).any(0).nonzero().squeeze(1)
        with without_autocast(hidden.device):
            all_nonzero = len(nonzero) == len(hidden)
            target, outside = _at(nonzero, target, outside)
            rows = _rows(hidden if all_nonzero else hidden[nonzero], head, target, outside, ctx.call)
            grad_logp, grad_entropy = _at(nonzero, grad_logp, grad_entropy)
            slopes = _slopes(_Scored(*_at(nonzero, *scored)), outside, grad_logp, grad_entropy, ctx.call)
            of_rows, *of_head = _gradients(head, rows, slopes, ctx.needs_input_grad[:5], ctx.call)
            of_hidden = None if of_rows is None else of_rows.to(hidden.dtype)
            if of_hidden is not None and not all_nonzero:
                of_hidden = torch.zeros_like(hidden).index_copy_(0, nonzero, of_hidden)
        of_weight, *small = of_head
        summed = [sharded.summed_like(g, x) for g, x in zip(small, (bias, lora_a, lora_b), strict=True)]
        return (of_hidden, None if of_weight is None else of_weight.to(weight.dtype), *summed, None, None, None)


def _at(index: slice | Tensor, *columns: Any) -> list[Any]:
    """Some rows of each column; None stays None."""
    return [None if column is None else column[index] for column in columns]


def _rows(hidden: Tensor, head: _Head, target: Tensor, outside: Tensor | None, call: _Call) -> _Rows:
    low = None
    if head.lora_a is not None:
        low = call.lora_scale * (hidden.to(call.wide) @ _multiplied(head.lora_a, call).T)
    return _Rows(hidden.to(call.narrow), low, target, outside)


def _block(head: _Head, shard: Shard, columns: slice, call: _Call) -> _Head:
    """Some columns of a shard, as the products take them: ``weight`` narrow, ``bias`` and ``lora_b`` wide."""
    among_all = slice(shard.first + columns.start, shard.first + columns.stop)
    return _Head(
        weight=shard.weight[columns].to(call.product).to(call.narrow),
        bias=None if head.bias is None else head.bias[among_all].to(call.wide),
        lora_a=None,
        lora_b=None if head.lora_b is None else _multiplied(head.lora_b[among_all], call),
    )


def _multiplied(factor: Tensor, call: _Call) -> Tensor:
    """A LoRA factor as the products take it: rounded like the weight, in the logits' dtype."""
    return factor.to(call.product).to(call.wide)


def _partial(head: _Head, rows: _Rows, call: _Call) -> Partial:
    """The sums over all columns of this rank's head."""
    size = tile(len(rows.target), len(head.weight), call.wide, call.memory_budget)
    total: Partial | None = None
    for shard in shards(head.weight, call.product):
        for columns in _slices(len(shard.weight), size.columns):
            block = _block(head, shard, columns, call)
            sums = rows.hidden.new_empty(4, len(rows.target), dtype=call.wide)
            for some in _slices(len(rows.target), size.rows):
                sums[:, some] = _tile_sums(rows.cut(some, shard.first + columns.start), block, call)
            total = Partial(*sums) if total is None else merged([total, Partial(*sums)])
    assert total is not None
    return total


def _tile_sums(rows: _Rows, block: _Head, call: _Call) -> Tensor:
    """``Partial`` of one tile as [4, n]; two buffers of its size."""
    z = _product(rows, block, call)
    if call.one_pass:
        from logitless.head.kernels import launch

        return launch.tile_sums(z, rows.outside, rows.target, call.inside)
    if call.inside is not None:
        z.mul_(call.inside).tanh_()
    if rows.outside is not None:
        z *= rows.outside[:, None]
    # a shard of padding, masked with -inf, needs a finite maximum too
    top = z.amax(1).clamp(min=torch.finfo(z.dtype).min)
    owned, column = _owned(rows.target, z.shape[1])
    target_logit = torch.where(owned, z.gather(1, column).squeeze(1), 0)
    z -= top[:, None]
    if block.bias is not None:
        z.clamp_(min=FLOOR)
    _write_target(z, rows.target, torch.full_like(top, FLOOR))
    exponential = z.exp()
    others = exponential.sum(1)
    return torch.stack([top, others, exponential.mul_(z).sum(1), target_logit])


def _slopes(
    scored: _Scored, outside: Tensor | None, grad_logp: Tensor | None, grad_entropy: Tensor | None, call: _Call
) -> _Slopes:
    size = functools.reduce(torch.maximum, [g.abs() for g in (grad_logp, grad_entropy) if g is not None])
    at_target = torch.zeros_like(size)
    if grad_logp is not None:
        grad_logp = grad_logp / size
        at_target += grad_logp * scored.others / scored.normaliser
    if grad_entropy is not None:
        grad_entropy = grad_entropy / size
        at_target -= grad_entropy * scored.logp.exp() * (scored.logp.clamp(min=FLOOR) + scored.entropy)
    factor = size if outside is None else size * outside
    return _Slopes(
        top=scored.top,
        over=-1 / scored.normaliser,
        offset=scored.entropy - scored.normaliser.log(),
        at_target=at_target,
        grad_logp=grad_logp,
        grad_entropy=grad_entropy,
        factor=factor if call.inside is None else factor * call.inside,
    )


def _gradients(
    head: _Head, rows: _Rows, slopes: _Slopes, needed: Sequence[bool], call: _Call
) -> tuple[Tensor | None, ...]:
    """Gradients of hidden (of these rows), weight, bias, lora_a and lora_b; None where not needed."""
    sums = _Sums(head, rows, slopes, needed, call)
    is_dtensor = is_sharded(head.weight)
    size = tile(len(rows.target), len(head.weight), call.wide, call.memory_budget)
    of_weight = None
    of_shards = sharded.GradientOfShards(head.weight) if is_dtensor else None
    for shard in shards(head.weight, call.product):
        dtype = call.wide if is_dtensor else head.weight.dtype
        of_shard = torch.zeros_like(shard.weight, dtype=dtype) if sums.for_weight else None
        for columns in _slices(len(shard.weight), size.columns):
            block = _block(head, shard, columns, call)
            # in place if the gradient's dtype is wide; else a copy, rounded once
            of_block = None if of_shard is None else of_shard[columns].to(call.wide)
            for some in _slices(len(rows.target), size.rows):
                sums.add(some, shard.first + columns.start, block, of_block)
            if of_block is not None and of_shard is not None:
                if sums.unit is not None:
                    of_block *= sums.unit
                if of_shard.dtype != call.wide:
                    of_shard[columns] = of_block
        if of_shard is not None and of_shards is not None:
            of_shards.add(of_shard, shard)
        else:
            of_weight = of_shard
    if sums.for_weight and of_shards is not None:
        of_weight = sharded.like(head.weight, of_shards.mine())
    of_hidden, of_lora_a = sums.of_hidden_and_lora_a()
    return of_hidden, of_weight, sums.of_bias, of_lora_a, sums.of_lora_b


class _Sums:
    """Sums of gradients over tiles, in the logits' dtype; None where not needed.

    With float16 the weight's gradient is divided by ``unit``, the largest factor, so that small values survive.
    """

    def __init__(self, head: _Head, rows: _Rows, slopes: _Slopes, needed: Sequence[bool], call: _Call) -> None:
        for_hidden, self.for_weight, for_bias, self.for_lora_a, for_lora_b = needed
        self.rows, self.slopes, self.call, self.lora_a = rows, slopes, call, head.lora_a
        self.factor = slopes.factor[:, None]
        self.unit = slopes.factor.abs().amax() if call.narrow == torch.float16 and len(self.factor) else None
        scale = self.factor if self.unit is None else self.factor / self.unit
        self.scaled = (rows.hidden * scale).to(call.narrow) if self.for_weight else None
        self.of_hidden = torch.zeros_like(rows.hidden, dtype=call.wide) if for_hidden else None
        self.of_bias = None if head.bias is None or not for_bias else torch.zeros_like(head.bias, dtype=call.wide)
        self.of_low = self.of_lora_b = None
        if rows.low is not None and head.lora_b is not None:
            self.of_low = torch.zeros_like(rows.low) if for_hidden or self.for_lora_a else None
            self.of_lora_b = torch.zeros_like(head.lora_b, dtype=call.wide) if for_lora_b else None

    def add(self, some: slice, first_column: int, block: _Head, of_weight: Tensor | None) -> None:
        """Add a tile, the weight's gradient to ``of_weight``."""
        slopes = self.slopes.cut(some)
        wide = self.of_bias is not None or self.of_lora_b is not None or self.of_low is not None
        u, narrow = _logit_gradient(self.rows.cut(some, first_column), block, slopes, self.call, wide=wide)
        columns = slice(first_column, first_column + u.shape[1])
        if of_weight is not None and self.scaled is not None:
            _add_product(of_weight, narrow.T, self.scaled[some])
        if self.of_hidden is not None:
            _add_product(self.of_hidden[some], narrow, block.weight)
        if self.of_bias is not None:
            self.of_bias[columns].addmv_(u.T, slopes.factor)
        if self.of_lora_b is not None and self.rows.low is not None:
            self.of_lora_b[columns].addmm_(u.T, slopes.factor[:, None] * self.rows.low[some])
        if self.of_low is not None and block.lora_b is not None:
            self.of_low[some].addmm_(u, block.lora_b)

    def of_hidden_and_lora_a(self) -> tuple[Tensor | None, Tensor | None]:
        """Gradients that are sums over all columns, those of the group's other ranks included."""
        call, of_hidden, of_lora_a = self.call, self.of_hidden, None
        if self.of_low is not None and self.lora_a is not None:
            if self.for_lora_a:
                of_lora_a = call.lora_scale * (self.factor * self.of_low).T @ self.rows.hidden.to(call.wide)
            if of_hidden is not None:
                of_hidden.addmm_(self.of_low, _multiplied(self.lora_a, call), alpha=call.lora_scale)
        if of_hidden is not None:
            of_hidden *= self.factor
        if call.group is not None:
            for partial in (of_hidden, of_lora_a):
                if partial is not None:
                    vocab_parallel.summed(partial, call.group)
        return of_hidden, of_lora_a


def _logit_gradient(rows: _Rows, block: _Head, slopes: _Slopes, call: _Call, *, wide: bool) -> tuple[Tensor, Tensor]:
    """u of ``_Slopes`` for one tile: in the logits' dtype (if ``wide``), and as operand. At most three tile buffers."""
    z = _product(rows, block, call)
    if call.one_pass:
        from logitless.head.kernels import launch

        return z, launch.tile_gradient(z, rows.outside, rows.target, call.inside, slopes[:-1], call.narrow, wide=wide)
    tanh = None
    if call.inside is not None:
        tanh = z.mul_(call.inside).tanh_()
        z = tanh.clone()
    if rows.outside is not None:
        z *= rows.outside[:, None]
    z -= slopes.top[:, None]
    if block.bias is not None:
        z.clamp_(min=FLOOR)
    if slopes.grad_entropy is None:
        u = z.exp_()
        weight = slopes.over if slopes.grad_logp is None else slopes.over * slopes.grad_logp
    else:
        u = z.exp()
        z += slopes.offset[:, None]
        z *= slopes.grad_entropy[:, None]
        if slopes.grad_logp is not None:
            z += slopes.grad_logp[:, None]
        u *= z
        weight = slopes.over
    u *= weight[:, None]
    _write_target(u, rows.target, slopes.at_target)
    if tanh is not None:
        u.mul_(tanh.square_().neg_().add_(1))
    return u, u.to(call.narrow)


def _product(rows: _Rows, block: _Head, call: _Call) -> Tensor:
    """hidden @ weight.T + low @ lora_b.T + bias of one tile, in the logits' dtype."""
    if call.narrow == call.wide:
        z = rows.hidden @ block.weight.T
    else:
        z = rows.hidden.new_empty(len(rows.hidden), len(block.weight), dtype=call.wide)
        torch.addmm(z, rows.hidden, block.weight.T, out_dtype=call.wide, beta=0, alpha=call.gain, out=z)
    if rows.low is not None and block.lora_b is not None:
        z.addmm_(rows.low, block.lora_b.T)
    return z if block.bias is None else z.add_(block.bias)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where total may be wider than a and b."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def _owned(target: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Whether each row's target is in the tile, and its column [n, 1] (0 if it is not)."""
    owned = (target >= 0) & (target < columns)
    return owned, torch.where(owned, target, 0)[:, None]


def _write_target(matrix: Tensor, target: Tensor, value: Tensor) -> None:
    """Set each row's target column, if it is in the tile."""
    owned, column = _owned(target, matrix.shape[1])
    matrix.scatter_(1, column, torch.where(owned, value, matrix.gather(1, column).squeeze(1))[:, None])


def _slices(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def _multiplied_in(hidden: Tensor) -> torch.dtype:
    """The dtype of the operands of wide products: hidden's if the device can multiply it into float32."""
    if hidden.dtype in (torch.float32, torch.float64) or _float32_output(hidden.device, hidden.dtype):
        return hidden.dtype
    return torch.float32


def _has_kernels(device: torch.device) -> bool:
    """Whether Triton kernels run on this device."""
    return device.type == "cuda" and torch.version.cuda is not None and importlib.util.find_spec("triton") is not None


@functools.cache
def _float32_output(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch can multiply half-precision matrices into float32 on this device; warns if it cannot."""
    if device.type != "cuda":
        return False
    operand = torch.zeros(16, 16, device=device, dtype=dtype)
    try:
        torch.mm(operand, operand, out_dtype=torch.float32)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        logger.warning(
            "torch %s cannot multiply %s into float32 on %s (%s); the chunked head multiplies in float32, several "
            "times slower. Use a newer torch.",
            torch.__version__,
            dtype,
            device,
            error,
        )
        return False
    return True

"""The kernels as functions of tensors. Nothing here synchronizes with the GPU."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from logitless.head.kernels import backward, divergence, forward, tiles
from logitless.head.kernels.variants import Tile, Variant

FEW_ROUNDS, FEW_PARTS = 6, 8
"""With at most FEW_ROUNDS rounds of tiles, a tile's sum is split into up to FEW_PARTS parts, to fill the last round."""

LOWEST = forward.LOWEST.value
"""The smallest anchor, in bits."""


@dataclass(frozen=True)
class Form:
    """How products become logits, ``multiplier * f(product)``, for any columns.

    Args:
        product: the dtype that operands are rounded to.
        inner: scale / softcap, the factor inside tanh; 1 without a softcap.
        softcap: whether there is one.
    """

    product: torch.dtype
    inner: float
    softcap: bool
    variant: Variant

    @property
    def slope(self) -> float:
        """``d logit / d product`` in nats is this times ``multiplier``, and with a softcap times the slope of tanh."""
        return self.inner * math.log(2)


@dataclass(frozen=True)
class Operands(Form):
    """Columns of the head, as the kernels take them: ``product = hidden @ weight.T + low @ low.T + bias``.

    Args:
        weight: [V, D] in hidden's dtype.
        low: [V, E] with LoRA: lora_b, repeated for each addend of ``rows.low``; or None.
        bias: [V] float32 or None.
        first: index of the first column among all columns.
    """

    weight: Tensor
    low: Tensor | None
    bias: Tensor | None
    first: int

    @property
    def gain(self) -> float:
        """Corrects the mean error of matrix units that truncate (docs/numerics.md)."""
        return 1 + self.variant.truncation * (self.weight.shape[1] + self.rank)

    @property
    def rank(self) -> int:
        """Columns of ``low``."""
        return 0 if self.low is None else self.low.shape[1]

    @cached_property
    def wide(self) -> Tensor:
        """``[weight, low]``, a copy for kernels that read one matrix."""
        return widened(self.weight, self.low)


class Rows(NamedTuple):
    """Per-row inputs of the products: ``hidden`` [N, D] and, with LoRA, lora_scale * hidden @ lora_a.T as ``low``."""

    hidden: Tensor
    low: Tensor | None
    multiplier: Tensor
    target: Tensor

    @property
    def wide(self) -> Tensor:
        """``[hidden, low]``."""
        return widened(self.hidden, self.low)


def widened(matrix: Tensor, low: Tensor | None) -> Tensor:
    """``[matrix, low]`` as a copy; without ``low`` the matrix itself."""
    return matrix if low is None else torch.cat([matrix, low], dim=1)


class Compaction(NamedTuple):
    """Which row each slot takes, and how many slots are taken (a device scalar)."""

    source: Tensor
    taken: Tensor


def compaction(nonzero: Tensor) -> Compaction:
    """Slots for the rows with a gradient ("nonzero"), first and with as few moves as possible.

    With ``count`` nonzero rows, slots ``0 .. count - 1`` are taken. Slot j keeps row j if that is nonzero; the i-th
    other slot takes the i-th nonzero row from ``count`` on.

    Example:
        >>> found = compaction(torch.tensor([True, False, False, True, True]))
        >>> found.taken, found.source[:3]  # slots 1 and 2 are free and take rows 3 and 4
        (tensor([3], dtype=torch.int32), tensor([0, 3, 4], dtype=torch.int32))
    """
    passed = nonzero.cumsum(0, dtype=torch.int32)  # [j]: nonzero rows up to and with row j
    count = passed[-1:]
    position = torch.arange(1, len(nonzero) + 1, dtype=torch.int32, device=nonzero.device)
    # ``position - passed`` counts the zero rows up to and with row j: 1 at the first free slot, 2 at the second, ...
    # ``inside`` nonzero rows are below ``count``, so the n-th one beyond is the (inside + n)-th of all.
    inside = passed[(count - 1).clamp(min=0)]
    beyond = torch.searchsorted(passed, inside + position - passed, out_int32=True)
    return Compaction(source=torch.where(nonzero, position - 1, beyond.clamp(max=len(nonzero) - 1)), taken=count)


def listed(chosen: Tensor) -> Compaction:
    """The chosen rows in order. The list is as long as ``chosen``; entries after the last chosen row are not used."""
    passed = chosen.cumsum(0, dtype=torch.int32)
    wanted = torch.arange(1, len(chosen) + 1, dtype=torch.int32, device=chosen.device)
    return Compaction(source=torch.searchsorted(passed, wanted, out_int32=True), taken=passed[-1:])


def kept_rows(rows: int, vocabulary: int, variant: Variant, device: torch.device) -> Tensor:
    """A buffer for the exponentials of this many rows, aligned to 16 bytes for TMA.

    Raises:
        torch.OutOfMemoryError: it does not fit. Fewer rows would fit, and would round the gradients differently.
    """
    stride = -(-vocabulary // 8) * 8
    try:
        return torch.empty(rows, stride, dtype=variant.kept, device=device)
    except torch.OutOfMemoryError as error:
        size = rows * stride * variant.kept.itemsize
        raise torch.OutOfMemoryError(
            f"needed {size:,} bytes for the exponentials of {rows:,} rows in the head; given too little free memory. "
            f"Set memory_budget (train.head_memory_budget) below {size}, or score fewer rows at once. {error}"
        ) from error


def low_rows(hidden: Tensor, lora_a: Tensor, scale: float, variant: Variant, *, addends: int) -> Tensor:
    """``scale * hidden @ lora_a.T`` as addends in hidden's dtype, side by side, padded to a multiple of 8 columns."""
    (n, d), rank = hidden.shape, len(lora_a)
    width = -(-rank * addends // 8) * 8
    out = torch.zeros(n, width, dtype=hidden.dtype, device=hidden.device)
    columns = min(64, max(16, triton.next_power_of_2(rank)))
    forward.low_rows[(triton.cdiv(n, 64), triton.cdiv(rank, columns))](
        hidden, lora_a, out, scale, n, rank, d, width, TWICE=addends == 2, PRECISION=variant.precision,
        BM=64, BN=columns, BK=64 if hidden.element_size() == 2 else 32, num_stages=3, num_warps=4,
    )  # fmt: skip
    return out


def target_logits(operands: Operands, rows: Rows, target_logit: Tensor, slope: Tensor) -> None:
    """z_y in bits, and the softcap's slope there, of rows whose target is in these columns."""
    v, d = operands.weight.shape
    forward.target_logits[(len(target_logit),)](
        rows.hidden, operands.weight, rows.low, operands.low, operands.bias, rows.target, rows.multiplier,
        operands.inner, target_logit, slope, v, d, operands.rank, SOFTCAP=operands.softcap,
        BLOCK=min(1024, triton.next_power_of_2(d)), num_warps=4,
    )  # fmt: skip


class Sums(NamedTuple):
    """S and T of each row, over columns v != y and relative to its anchor."""

    anchor: Tensor
    others: Tensor
    weighted: Tensor


class TileSums(NamedTuple):
    """S and T of each row over each tile of columns, before they are added up.

    Args:
        s, t: [tiles, N] float32.
    """

    s: Tensor
    t: Tensor

    @classmethod
    def of(cls, operands: Operands, rows: Rows) -> "TileSums":
        """Buffers for the sums of these columns."""
        tiles, n = triton.cdiv(len(operands.weight), operands.variant.score.columns), len(rows.multiplier)
        # Both begin at multiples of 16 bytes: kernels are compiled for what an address is a multiple of.
        both = torch.empty(2, -(-tiles * n // 4) * 4, dtype=torch.float32, device=rows.hidden.device)
        return cls(*(part[: tiles * n].view(tiles, n) for part in both))

    def sum(
        self, s: Tensor, t: Tensor, chosen: Compaction | None, anchor: Tensor | None = None, before: Sums | None = None,
        target_logit: Tensor | None = None, flagged: Tensor | None = None, *, maximum: bool = False,
    ) -> None:  # fmt: skip
        """Sum the tiles into ``s`` and ``t`` [N]; with ``maximum``, take their maximum into ``s``.

        Args:
            s, t: [N] results.
            chosen: the rows of the tiles; None for all.
            anchor: [N] of the tiles, in bits.
            before: sums over earlier columns, which are added.
            target_logit, flagged: [N]; ``flagged`` becomes True where the normaliser leaves the range.
            maximum: whether the tiles hold maxima.
        """
        row_list, count = (None, None) if chosen is None else chosen
        base = (None, None, None) if before is None else before
        n = len(s)
        forward.partial_sums[(triton.cdiv(n, 64),)](
            self.s, self.t, row_list, count, target_logit, anchor, *base, s, t, flagged, n, len(self.s),
            MAXIMUM=maximum, BLOCK=64, PARTS=64, num_warps=4,
        )  # fmt: skip


def exp_product(
    operands: Operands, rows: Rows, anchor: Tensor, kept: Tensor | None, num_kept: int, parts: TileSums,
    chosen: Compaction | None, maximum: bool,
) -> None:  # fmt: skip
    """Fill ``parts``, and the first ``num_kept`` rows of ``kept`` with the exponentials.

    Args:
        anchor: [N] bits.
        kept: [rows, V or more], or None.
        parts: with ``maximum``, its ``s`` gets the largest logit of each tile and nothing else is written.
        chosen: the rows to compute; None for all.
    """
    variant, tile = operands.variant, operands.variant.score
    tma = variant.tma and chosen is None
    v, n = len(operands.weight), len(anchor)
    row_list, count = (None, None) if chosen is None else chosen
    place = None if kept is None else _tiles(kept[:, :v], _store_block(tile), tma)
    apart = (rows.hidden, operands.weight, rows.low, operands.low)
    x, w, *low = (rows.wide, operands.wide, None, None) if tma else apart
    forward.anchored_exp_product[_grid(variant, n, v, tile)](
        _tiles(x, (tile.rows, tile.depth), tma), _tiles(w, (tile.columns, tile.depth), tma), *low, operands.bias,
        place, row_list, count, rows.multiplier, operands.inner, operands.gain, anchor, rows.target, parts.s, parts.t,
        n, v, x.shape[1], 0 if tma else operands.rank, num_kept, 0 if kept is None else kept.stride(0),
        SOFTCAP=operands.softcap, MAXIMUM=maximum, EVEN=v % tile.columns == 0, TMA=tma, SPLIT=tile.halves,
        PRECISION=variant.precision,
        **_blocks(variant, tile),
    )  # fmt: skip


def leading_maximum(operands: Operands, rows: Rows) -> Tensor:
    """The largest logit of each row in the first tile of columns, in bits."""
    some = slice(operands.variant.score.columns)
    bias = None if operands.bias is None else operands.bias[some]
    low = None if operands.low is None else operands.low[some]
    leading = replace(operands, weight=operands.weight[some], low=low, bias=bias)
    parts = TileSums.of(leading, rows)
    exp_product(leading, rows, rows.multiplier, None, 0, parts, None, maximum=True)
    return parts.s[0].clamp(min=LOWEST)


def rescale_rows(kept: Tensor, old: Tensor, new: Tensor, variant: Variant) -> None:
    """Change the anchors of kept exponentials from ``old`` to ``new``, in place."""
    programs, (rows, width) = variant.programs * 8, kept.shape
    forward.rescale_rows[(programs,)](
        kept, old, new, width, kept.stride(0), rows, BLOCK=4096, PROGRAMS=programs, num_warps=4
    )


class Scores(NamedTuple):
    """Results of the scoring pass by row; ``rounding`` is the exact target entry of E over the stored one."""

    logp: Tensor
    entropy: Tensor
    normaliser: Tensor
    rounding: Tensor


def row_scores(
    form: Form, sums: Sums, target_logit: Tensor, slope: Tensor, place: Tensor, width: int, kept: Tensor | None
) -> Scores:
    """Log-prob, entropy and normaliser from the sums; also writes the target's entry of ``kept``.

    Args:
        place: [N] the target's column in ``kept``; outside of range(width) if another rank has it.
    """
    n = len(place)
    num_kept, stride = (0, 0) if kept is None else (len(kept), kept.stride(0))
    out = Scores(*(torch.empty_like(target_logit) for _ in range(4)))
    forward.row_scores[(triton.cdiv(n, 128),)](
        sums.others, sums.weighted, sums.anchor, target_logit, slope, place, kept, *out, n, width, num_kept, stride,
        SOFTCAP=form.softcap, BLOCK=128, num_warps=4,
    )  # fmt: skip
    return out


def logit_gradient(
    operands: Operands, rows: Rows, count: Tensor, log_normaliser: Tensor, grad_logp: Tensor, grad_target: Tensor,
    grad_entropy: Tensor | None, entropy: Tensor, first: int, out: Tensor,
) -> None:  # fmt: skip
    """Write columns ``first`` to ``first + out.shape[1]`` of the products' gradient to ``out``."""
    variant, tile = operands.variant, operands.variant.score
    v, d = operands.wide.shape
    n, width = out.shape
    backward.logit_gradient_product[_grid(variant, n, width, tile)](
        _tiles(rows.wide, (tile.rows, tile.depth), variant.tma),
        _tiles(operands.wide, (tile.columns, tile.depth), variant.tma), operands.bias,
        _tiles(out, _store_block(tile), variant.tma), count, rows.multiplier, operands.inner, operands.gain,
        log_normaliser, rows.target, grad_logp, grad_target, grad_entropy, entropy, first, v, d, n, width,
        SOFTCAP=operands.softcap, TMA=variant.tma, SPLIT=tile.halves, PRECISION=variant.precision,
        **_blocks(variant, tile),
    )  # fmt: skip


def add_entropy_gradient(
    kept: Tensor, nonzero: Tensor, place: Tensor, entry: Tensor, shift: Tensor, grad_logp: Tensor, grad_entropy: Tensor,
    entropy: Tensor, variant: Variant,
) -> None:  # fmt: skip
    """Turn kept exponentials of nonzero rows into logit gradients of both results, in place."""
    programs, (rows, width) = variant.programs * 8, kept.shape
    backward.add_entropy_gradient[(programs,)](
        kept, nonzero, place, entry, shift, grad_logp, grad_entropy, entropy, width, kept.stride(0), rows,
        BLOCK=4096, PROGRAMS=programs, num_warps=4,
    )  # fmt: skip


def move_rows(kept: Tensor, chosen: Compaction, variant: Variant) -> None:
    """Move nonzero rows to the front, in place, and clear the rows after them that the weight's product also reads."""
    programs, width, stride, align = variant.programs * 8, kept.shape[1], kept.stride(0), 2 * variant.weight.depth
    backward.move_rows[(programs,)](
        kept, chosen.source, chosen.taken, width, stride, BLOCK=4096, PROGRAMS=programs, num_warps=4
    )
    backward.clear_rows[(align, triton.cdiv(width, 4096))](
        kept, chosen.taken, width, stride, len(kept), ALIGN=align, BLOCK=4096, num_warps=4
    )


def gather_rows(
    x: Tensor, row_of_slot: Tensor, factor: Tensor | None, count: Tensor, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Rows of x by slot, times ``factor`` [slots], 0 in free slots; written to ``out`` if given."""
    n, d = len(row_of_slot), x.shape[1]
    out = torch.empty(n, d, dtype=dtype, device=x.device) if out is None else out
    backward.gather_rows[(n,)](
        x, row_of_slot, factor, count, out, d, BLOCK=min(4096, triton.next_power_of_2(d)), num_warps=4
    )
    return out


def row_product(
    k: Tensor, w: Tensor, out: Tensor, count: Tensor, variant: Variant, *, row_of_slot: Tensor | None = None,
    factor: Tensor | None = None, base: Tensor | None = None, whole: bool = False,
) -> None:  # fmt: skip
    """out[row_of_slot[j]] = factor[j] (base[j] + k[j] @ w) for the taken slots; ``whole``: w has all columns."""
    v, stride = w.shape
    k = k[:, :v]
    for strip, tile in _strips(variant, variant.hidden, len(k), stride):
        width = strip.stop - strip.start
        tma = variant.tma and _aligned(k, w[:, strip])
        sharing = Sharing.of(len(k), width, v, tile, variant, whole=whole)
        end = (_strip(base, strip), out[:, strip], row_of_slot, factor)
        shares = torch.empty(sharing.room, width, dtype=torch.float32, device=k.device) if sharing.most > 1 else None
        before, to, row, scale = end if shares is None else (None, shares, None, None)
        backward.row_product[_grid(variant, len(k), width, tile, sharing.most)](
            _tiles(k, (tile.rows, tile.depth), tma), _tiles(w[:, strip], (tile.depth, tile.columns), tma),
            before, to, row, scale, count, v, width, k.stride(0), w.stride(0), stride if shares is None else width,
            *sharing, SHARED=shares is not None, TMA=tma, SPLIT=_wide(to, tile), UPCAST=not variant.narrow,
            PRECISION=variant.precision, **_blocks(variant, tile),
        )  # fmt: skip
        if shares is not None:
            backward.sum_parts[(len(k),)](
                shares, triton.cdiv(width, tile.columns), *sharing, *end, count, width, stride, BM=tile.rows,
                PROGRAMS=variant.programs, BLOCK=min(1024, triton.next_power_of_2(width)), num_warps=4,
            )  # fmt: skip


class Sharing(NamedTuple):
    """Bounds for splitting tiles of ``row_product`` between programs; the GPU decides, by the number of nonzero rows.

    Args:
        most: the most parts of a tile's sum; 1: no splitting.
        room: the most rows that the parts of all nonzero rows may take.
    """

    most: int
    room: int

    @classmethod
    def of(cls, rows: int, width: int, vocabulary: int, tile: Tile, variant: Variant, *, whole: bool) -> "Sharing":
        """Split only if tiles are few: at most FEW_ROUNDS rounds of programs, or without ``whole`` half a round.

        Example:
            >>> from logitless.head.kernels.variants import hopper
            >>> gpu = hopper(896, 132)
            >>> Sharing.of(16384, 896, 151936, gpu.hidden, gpu, whole=True)
            Sharing(most=8, room=25344)
            >>> Sharing.of(16384, 4096, 151936, gpu.hidden, gpu, whole=True).most
            1
        """
        across = triton.cdiv(width, tile.columns)
        tiles = max(1, triton.cdiv(rows, tile.rows) * across)
        rounds = FEW_ROUNDS if whole else 0.5
        if tiles > rounds * variant.programs:
            return cls(1, 0)
        most = min(max(FEW_PARTS, variant.programs // tiles), vocabulary // (4 * tile.depth))
        if most < 2:
            return cls(1, 0)
        return cls(most, max(rows, min(most * rows, FEW_ROUNDS * variant.programs * tile.rows // across)))


def column_product(
    k: Tensor, h: Tensor, out: Tensor, count: Tensor, variant: Variant, *, base: Tensor | None = None
) -> None:
    """``out = base + k.T @ h`` over the taken slots; ``out`` [V, D] may be rows of a larger matrix."""
    v, stride = out.shape
    k = k[:, :v]
    for strip, tile in _strips(variant, variant.weight, v, stride):
        width = strip.stop - strip.start
        tma = variant.tma and _aligned(k, h[:, strip])
        backward.column_product[_grid(variant, v, width, tile)](
            _tiles(k, (tile.depth, tile.rows), tma), _tiles(h[:, strip], (tile.depth, tile.columns), tma),
            _strip(base, strip), out[:, strip], count, v, width, k.stride(0), h.stride(0), stride, TMA=tma,
            SPLIT=_wide(out, tile), UPCAST=not variant.narrow, PRECISION=variant.precision, **_blocks(variant, tile),
        )  # fmt: skip


def tile_sums(product: Tensor, outside: Tensor | None, target: Tensor, inside: float | None) -> Tensor:
    """Maximum, S, T and the target's logit, as [4, n], of a tile of products [n, columns]."""
    n, columns = product.shape
    sums = product.new_empty(4, n)
    tiles.tile_sums[(n,)](
        product, outside, target, sums, inside or 1.0, columns, product.stride(0), SOFTCAP=inside is not None,
        BLOCK=4096, num_warps=8,
    )  # fmt: skip
    return sums


def tile_gradient(
    product: Tensor, outside: Tensor | None, target: Tensor, inside: float | None, slopes: Sequence[Tensor | None],
    dtype: torch.dtype, *, wide: bool,
) -> Tensor:  # fmt: skip
    """u of a tile of products, in ``dtype``; with ``wide`` also in place of the products.

    Args:
        slopes: [n] each: top, over, offset, at_target, grad_logp and grad_entropy of ``chunked._Slopes``.
    """
    n, columns = product.shape
    in_place = dtype == product.dtype
    narrow = product if in_place else product.new_empty(n, columns, dtype=dtype)
    tiles.tile_gradient[(n, triton.cdiv(columns, 4096))](
        product, narrow, outside, target, *slopes, inside or 1.0, columns, product.stride(0),
        SOFTCAP=inside is not None, WIDE=wide and not in_place, BLOCK=4096, num_warps=8,
    )  # fmt: skip
    return narrow


class Pair(NamedTuple):
    """One tile of products of a student and of a teacher, and how they become logits: see ``blockwise.logits_of``.

    Args:
        z, y: [rows, columns] float32 products, the student's and the teacher's.
        outside, outside_teacher: [n] last factors, or None.
        target: [n] int64, counted from the first column.
        inside, inside_teacher: factors inside tanh, or None.
        masked: whether a bias may have made logits -inf.
    """

    z: Tensor
    y: Tensor | None
    outside: Tensor | None
    outside_teacher: Tensor | None
    target: Tensor
    inside: float | None
    inside_teacher: float | None
    masked: bool

    @property
    def factors(self) -> tuple[float, float]:
        return self.inside or 1.0, self.inside_teacher or 1.0

    @property
    def options(self) -> dict[str, Any]:
        softcaps = {"SOFTCAP": self.inside is not None, "SOFTCAP_TEACHER": self.inside_teacher is not None}
        return {**softcaps, "MASKED": self.masked}


def pair_sums(pair: Pair, kind: str) -> Tensor:
    """``divergence_chunked._PairSums`` of a tile as [9, n]."""
    n, columns = pair.z.shape
    sums = pair.z.new_empty(9, n)
    divergence.pair_sums[(n,)](
        pair.z, pair.y, pair.outside, pair.outside_teacher, pair.target, sums, *pair.factors, columns,
        pair.z.stride(0), KIND=kind, BLOCK=1024, num_warps=4, **pair.options,
    )  # fmt: skip
    return sums


def pair_terms(pair: Pair, kind: str, beta: float, normalisers: Tensor) -> Tensor:
    """The second pass's two sums of a tile as [2, n]; ``normalisers`` [4, n] as the kernel says."""
    n, columns = pair.z.shape
    terms = pair.z.new_empty(2, n)
    divergence.pair_terms[(n,)](
        pair.z, pair.y, pair.outside, pair.outside_teacher, pair.target, normalisers, terms, *pair.factors, beta,
        1 - beta, columns, pair.z.stride(0), normalisers.stride(0), KIND=kind, BLOCK=1024,
        num_warps=4, **pair.options,
    )  # fmt: skip
    return terms


def pair_gradient(
    pair: Pair, kind: str, beta: float, slopes: Tensor, source: Tensor | None, dtype: torch.dtype, *, wide: bool
) -> tuple[Tensor, Tensor]:
    """u of a tile in float32 (only if ``wide``) and in ``dtype``; overwrites z if all of its rows are taken.

    Args:
        slopes: [10, n] as the kernel says.
        source: [n] the rows of z and y to take; None for all.
    """
    n, columns = len(pair.target), pair.z.shape[1]
    own = pair.z[:n]
    if source is not None and (wide or dtype == own.dtype):
        own = torch.empty_like(own)
    narrow = own if dtype == own.dtype else own.new_empty(n, columns, dtype=dtype)
    divergence.pair_gradient[(n, triton.cdiv(columns, 2048))](
        pair.z, pair.y, source, own if wide and narrow is not own else None, narrow, pair.outside,
        pair.outside_teacher, pair.target, slopes, *pair.factors, beta, 1 - beta, columns, pair.z.stride(0),
        slopes.stride(0), KIND=kind, BLOCK=2048, num_warps=8, **pair.options,
    )  # fmt: skip
    return own, narrow


def _tiles(matrix: Tensor, block: tuple[int, int], tma: bool) -> Any:
    return TensorDescriptor.from_tensor(matrix, list(block)) if tma else matrix


def _strip(matrix: Tensor | None, columns: slice) -> Tensor | None:
    return None if matrix is None else matrix[:, columns]


def _strips(variant: Variant, tile: Tile, rows: int, width: int) -> list[tuple[slice, Tile]]:
    """Strips of columns with a tile each: columns that would fill only part of a tile get a narrower one.

    That takes a second launch, which pays if there are several rounds of tiles.
    """
    rest = width % tile.columns
    narrow = max(16, triton.next_power_of_2(rest))
    if rest == 0 or narrow == tile.columns:
        return [(slice(0, width), tile)]
    deeper = replace(tile, columns=narrow, depth=2 * tile.depth) if narrow <= 64 else replace(tile, columns=narrow)
    if rest == width:
        return [(slice(0, width), deeper)]
    if triton.cdiv(rows, tile.rows) * triton.cdiv(width, tile.columns) < 3 * variant.programs:
        return [(slice(0, width), tile)]
    return [(slice(0, width - rest), tile), (slice(width - rest, width), deeper)]


def _wide(out: Tensor, tile: Tile) -> bool:
    """Whether shared memory is too small to store a tile of ``out`` at once: it is stored in halves."""
    return out.element_size() * tile.rows * tile.columns > 2**16


def _aligned(*operands: Tensor) -> bool:
    """Whether TMA can read them: every row starts at a multiple of 16 bytes."""
    return all(x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0 for x in operands)


def _store_block(tile: Tile) -> tuple[int, int]:
    return tile.rows, tile.columns // (2 if tile.halves else 1)


def _grid(variant: Variant, rows: int, columns: int, tile: Tile, parts: int = 1) -> tuple[int]:
    return (min(variant.programs, triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns) * parts),)


def _blocks(variant: Variant, tile: Tile) -> dict[str, int]:
    return {
        "BM": tile.rows,
        "BN": tile.columns,
        "BK": tile.depth,
        "GROUP": tile.group,
        "PROGRAMS": variant.programs,
        "num_stages": tile.stages,
        "num_warps": tile.warps,
    }

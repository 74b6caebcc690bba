"""Attention over sequences that lie end to end, as an attention function of transformers named ``logitless_packed``.

Equal to running every sequence alone. The sequences' lengths are known on the host, so no [T, T] mask is built and
nothing synchronises. Sequences of one length, a single one included, are a batch as they lie: torch's SDPA, whose
fastest kernel takes no other row (on an H200 half the time of the next). Other rows on CUDA in bfloat16 or float16 go
as they are to the variable-length kernel of torch. Everywhere else sequences of similar length are laid side by side,
padded on the right: under a causal mask no real token sees padding. Called without a layout (decoding with a cache)
it is transformers' SDPA attention, with grouped queries folded so that keys and values are not repeated. Ranks that
share a row (``sequence_group``) exchange their tokens for some of the heads before it and back after it; no other layer
knows.

Where completions share their prompt's tokens (an ``AttentionLayout``), bfloat16 and float16 on CUDA go to
``prefix_attention``, which reads a prompt once; everything else repeats the prompt's rows for this one operation, and
does what it would do without sharing.

Gives up: attention softcaps, sinks, position biases (ALiBi) and chunked attention. For those use ``attention="eager"``,
``"sdpa"`` or ``"flex_attention"``, which build transformers' block-diagonal mask from restarting positions.
"""

import importlib.util
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from logitless.distributed.collectives import exchanged
from logitless.errors import InputError, UnavailableError
from logitless.models.attention import MAX_GROUP, MAX_WIDTH, AttentionLayout, prefix_attention
from logitless.models.repeated_rows import RepeatedRows

PACKED = "logitless_packed"
_OTHER_ATTENTION = 'Load the model with attention="eager", "sdpa" or "flex_attention".'
_UNSUPPORTED = {
    "softcap": "attention logits with a softcap",
    "s_aux": "attention sinks",
    "position_bias": "a position bias (ALiBi)",
}
_MAX_PADDING = 1.25  # padded tokens a bucket may hold per real token


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length, laid side by side.

    Args:
        num_sequences: sequences in the bucket.
        max_length: length they are padded to.
        tokens: [n] index into T of the bucket's tokens; None when they are all of T, in order.
        slots: [n] index into ``num_sequences * max_length`` of each; None when there is no padding.
    """

    num_sequences: int
    max_length: int
    tokens: Int[Tensor, "n"] | None
    slots: Int[Tensor, "n"] | None


@dataclass(frozen=True)
class PackedLayout:
    """Where each sequence lies in a packed row: travels to every attention layer as a keyword argument.

    What only one of the two ways to attend needs is made when it is first asked for, once a forward pass.

    Args:
        lengths: B positive numbers, on the host.
        device: of the model.

    Raises:
        InputError: a length below 1, or none at all.

    Example:
        >>> layout = PackedLayout((3, 3, 100))
        >>> [(bucket.num_sequences, bucket.max_length) for bucket in layout.buckets]
        [(2, 3), (1, 100)]
    """

    lengths: tuple[int, ...]
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise InputError(
                needed="at least one sequence and no empty one",
                given=f"lengths {self.lengths[:8]}",
                remedy="Drop sequences without tokens before packing.",
            )

    @cached_property
    def num_tokens(self) -> int:
        """T."""
        return sum(self.lengths)

    @cached_property
    def max_length(self) -> int:
        """Of the longest sequence."""
        return max(self.lengths)

    @cached_property
    def is_even(self) -> bool:
        """Whether all sequences are of one length."""
        return self.num_tokens == len(self.lengths) * self.max_length

    @cached_property
    def offsets(self) -> Int[Tensor, "O"]:
        """[B + 1] int32: where each sequence starts and the last one ends."""
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device=self.device)

    @cached_property
    def attention(self) -> AttentionLayout:
        """The same sequences for ``prefix_attention``."""
        return AttentionLayout.of_sequences(self.lengths, self.device)

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The sequences sorted by length and cut so that no bucket holds more than 1.25 tokens per real token."""
        sizes = torch.tensor(self.lengths)
        starts = sizes.cumsum(0) - sizes
        groups = _groups_of_similar_length(self.lengths)
        in_order = len(groups) == 1
        buckets = []
        for group in groups:
            kept = sizes[group]
            longest = int(kept.max())
            within = torch.arange(int(kept.sum())) - torch.repeat_interleave(kept.cumsum(0) - kept, kept)
            tokens = torch.repeat_interleave(starts[group], kept) + within
            slots = torch.repeat_interleave(torch.arange(len(group)) * longest, kept) + within
            buckets.append(
                Bucket(
                    num_sequences=len(group),
                    max_length=longest,
                    tokens=None if in_order else tokens.to(self.device),
                    slots=None if len(tokens) == len(group) * longest else slots.to(self.device),
                )
            )
        return tuple(buckets)

    @cached_property
    def inverse(self) -> Int[Tensor, "T"] | None:
        """[T] index into the buckets' tokens, one bucket after the other; None when that is the identity."""
        tokens = [bucket.tokens for bucket in self.buckets if bucket.tokens is not None]
        return torch.argsort(torch.cat(tokens)) if tokens else None


def _groups_of_similar_length(lengths: Sequence[int]) -> list[list[int]]:
    """Sequences in buckets; a single bucket keeps their order."""
    if len(lengths) * max(lengths) <= _MAX_PADDING * sum(lengths):
        return [list(range(len(lengths)))]
    groups: list[list[int]] = []
    real = 0
    for s in sorted(range(len(lengths)), key=lambda s: (lengths[s], s)):
        if groups and (len(groups[-1]) + 1) * lengths[s] <= _MAX_PADDING * (real + lengths[s]):
            groups[-1].append(s)
            real += lengths[s]
        else:
            groups.append([s])
            real = lengths[s]
    return groups


def packed_attention(
    query: Float[Tensor, "1 H T E"],
    key: Float[Tensor, "1 K T E"],
    value: Float[Tensor, "1 K T F"],
    layout: PackedLayout,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
) -> Float[Tensor, "1 T H F"]:
    """Causal attention within each sequence of a packed row.

    ``out[t] = sum_s softmax_s(scaling * q[t] @ k[s]) v[s]`` over s of t's own sequence with
    ``t - sliding_window < s <= t``.

    Args:
        query, key, value: H query heads, K key heads with K dividing H.
        layout: of the row.
        scaling: default ``E ** -0.5``.
        dropout: of the attention weights.
        sliding_window: tokens a token sees, itself included; None for all.

    Raises:
        InputError: the layout is of another number of tokens.

    Example:
        >>> q = k = v = torch.randn(1, 1, 5, 8)
        >>> packed_attention(q, k, v, PackedLayout((3, 2))).shape
        torch.Size([1, 5, 1, 8])
    """
    _check_row(query, key, layout.num_tokens)
    dtype = torch.get_autocast_dtype("cuda") if query.is_cuda and torch.is_autocast_enabled("cuda") else query.dtype
    window = None if sliding_window is None or sliding_window >= layout.max_length else sliding_window
    as_batch = layout.is_even and window is None
    if not as_batch and _variable_length_kernel_runs(query, value, dtype, dropout):
        query, key, value = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))
        return _variable_length(query, key, value, layout, scaling, window)[None]
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    parts = [_bucket_attention(query, key, value, bucket, scaling, dropout, window) for bucket in layout.buckets]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    if layout.inverse is not None:
        out = out.index_select(0, layout.inverse)
    return out[None]


def shared_attention(
    query: Float[Tensor, "1 H T E"],
    key: Float[Tensor, "1 K T E"],
    value: Float[Tensor, "1 K T F"],
    layout: AttentionLayout,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
) -> Float[Tensor, "1 T H F"]:
    """Causal attention within each sequence of a row in which completions share their prompt.

    Equal to ``packed_attention`` of the row with every prompt repeated; a prompt's gradient is summed over its
    completions in float32.

    Args, Raises: as ``packed_attention``.

    Example:
        >>> from logitless.types import PromptGroup
        >>> q = k = v = torch.randn(1, 1, 5, 8)
        >>> shared_attention(q, k, v, AttentionLayout([PromptGroup(2, (1, 2))])).shape
        torch.Size([1, 5, 1, 8])
    """
    _check_row(query, key, layout.num_tokens)
    dtype = torch.get_autocast_dtype("cuda") if query.is_cuda and torch.is_autocast_enabled("cuda") else query.dtype
    if _shared_kernel_runs(query, key, value, dtype, dropout):
        q, k, v = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))
        return prefix_attention(q, k, v, layout, scale=scaling, window=sliding_window)[0][None]
    whole, repeated, kept = layout.kept("repeated", lambda: _repeated(layout))
    query, key, value = (repeated.take(x[0].transpose(0, 1)).transpose(0, 1)[None] for x in (query, key, value))
    out = packed_attention(query, key, value, whole, scaling=scaling, dropout=dropout, sliding_window=sliding_window)
    return out.index_select(1, kept)


def _repeated(layout: AttentionLayout) -> tuple[PackedLayout, RepeatedRows, Int[Tensor, "T"]]:
    """The row with every prompt repeated, the rows that it takes, and where each row is found again."""
    whole, rows = layout.unshared()
    repeated = RepeatedRows.of(rows.cpu())  # every row is taken: first[t] is a place of row t
    lengths = tuple(prompt for prompt, _ in whole.groups)
    return PackedLayout(lengths, layout.device), repeated.to(layout.device), repeated.first.to(layout.device)


def _shared_kernel_runs(query: Tensor, key: Tensor, value: Tensor, dtype: torch.dtype, dropout: float) -> bool:
    return (
        query.is_cuda
        and dtype in (torch.bfloat16, torch.float16)
        and dropout == 0
        and query.shape[-1] == value.shape[-1] <= MAX_WIDTH
        and query.shape[1] // key.shape[1] <= MAX_GROUP
        and _triton_is_there()
    )


@cache
def _triton_is_there() -> bool:
    return importlib.util.find_spec("triton") is not None


def _check_row(query: Tensor, key: Tensor, num_tokens: int) -> None:
    if query.shape[0] != 1 or not query.shape[2] == key.shape[2] == num_tokens:
        raise InputError(
            needed=f"one packed row of {num_tokens} tokens",
            given=f"queries {tuple(query.shape)} and keys {tuple(key.shape)}",
            remedy="Use a decoder without cross-attention or cache, or another attention implementation.",
        )


def _bucket_attention(
    query: Float[Tensor, "T H E"],
    key: Float[Tensor, "T K E"],
    value: Float[Tensor, "T K F"],
    bucket: Bucket,
    scaling: float | None,
    dropout: float,
    window: int | None,
) -> Float[Tensor, "n H F"]:
    """Attention of one bucket's tokens, in the bucket's order."""

    def side_by_side(x: Tensor) -> Tensor:
        if bucket.tokens is not None:
            x = x.index_select(0, bucket.tokens)
        if bucket.slots is not None:
            x = x.new_zeros(bucket.num_sequences * bucket.max_length, *x.shape[1:]).index_copy(0, bucket.slots, x)
        return x.reshape(bucket.num_sequences, bucket.max_length, *x.shape[1:]).transpose(1, 2)

    mask = None
    if window is not None and window < bucket.max_length:
        mask = _window_mask(bucket.max_length, window, query.device)
    out = F.scaled_dot_product_attention(
        side_by_side(query),
        side_by_side(key),
        side_by_side(value),
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    out = out.transpose(1, 2).flatten(0, 1)
    return out if bucket.slots is None else out.index_select(0, bucket.slots)


def _window_mask(length: int, window: int, device: torch.device) -> Bool[Tensor, "L L"]:
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < window)


@cache
def _variable_length_arguments() -> frozenset[str]:
    """Names that this torch's ``varlen_attn`` takes; empty where there is none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def _variable_length_kernel_runs(query: Tensor, value: Tensor, dtype: torch.dtype, dropout: float) -> bool:
    head_dim = query.shape[-1]
    return (
        query.is_cuda
        and dtype in (torch.bfloat16, torch.float16)
        and dropout == 0
        and head_dim == value.shape[-1]
        and head_dim % 8 == 0
        and head_dim <= 256
        and "window_size" in _variable_length_arguments()
    )


def _variable_length(
    query: Float[Tensor, "T H E"],
    key: Float[Tensor, "T K E"],
    value: Float[Tensor, "T K E"],
    layout: PackedLayout,
    scaling: float | None,
    window: int | None,
) -> Float[Tensor, "T H E"]:
    from torch.nn.attention.varlen import varlen_attn

    extra: dict[str, Any] = {}
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in _variable_length_arguments():
            extra["enable_gqa"] = True
        else:
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    out = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        layout.offsets,
        layout.offsets,
        layout.max_length,
        layout.max_length,
        scale=scaling,
        window_size=(-1, 0) if window is None else (window - 1, 0),
        **extra,
    )
    assert isinstance(out, Tensor)
    return out


@torch.compiler.disable  # a kernel for lengths that change with every row; compiled code around it calls it as it is
def _attention_layer(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    packed_layout: PackedLayout | AttentionLayout | None = None,
    sequence_group: ProcessGroup | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer."""
    for name, meaning in _UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise UnavailableError(
                needed="plain causal attention", given=f"{meaning} in {type(module).__name__}", remedy=_OTHER_ATTENTION
            )
    if packed_layout is not None:
        _check_layer(module, sliding_window, kwargs.get("is_causal"))
        options: Any = {"scaling": scaling, "dropout": dropout, "sliding_window": sliding_window}
        if sequence_group is not None:
            repeats = max(1, dist.get_world_size(sequence_group) // key.shape[1])  # a key head that several ranks need
            key, value = (x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (key, value))
            query, key, value = (exchanged(x, sequence_group, split=1, join=2) for x in (query, key, value))
        if isinstance(packed_layout, AttentionLayout):
            out = shared_attention(query, key, value, packed_layout, **options)
        else:
            out = packed_attention(query, key, value, packed_layout, **options)
        return out if sequence_group is None else exchanged(out, sequence_group, split=1, join=2), None
    if query.shape[2] == 1 and query.shape[1] != key.shape[1]:
        return _decode_grouped(query, key, value, attention_mask, scaling, dropout), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)


def _check_layer(module: nn.Module, sliding_window: int | None, is_causal: bool | None) -> None:
    """Refuse what a layout cannot express."""
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    index = getattr(module, "layer_idx", None)
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    kind = kinds[index] if kinds is not None and index is not None else "full_attention"
    known = kind == "full_attention" or (kind == "sliding_attention" and sliding_window is not None)
    if not causal or not known:
        raise UnavailableError(
            needed="causal attention, full or with a window known to the layer",
            given=f"{kind if causal else 'bidirectional attention'} in {type(module).__name__}",
            remedy=_OTHER_ATTENTION,
        )


def _decode_grouped(
    query: Float[Tensor, "B H 1 E"],
    key: Float[Tensor, "B K S E"],
    value: Float[Tensor, "B K S F"],
    attention_mask: Tensor | None,
    scaling: float | None,
    dropout: float,
) -> Float[Tensor, "B 1 H F"]:
    """One new token per row: the query heads of a group become rows of queries of their key head."""
    rows, heads, _, width = query.shape
    folded = query.reshape(rows, key.shape[1], heads // key.shape[1], width)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling)
    return out.reshape(rows, 1, heads, value.shape[-1])


AttentionInterface.register(PACKED, _attention_layer)
AttentionMaskInterface.register(PACKED, sdpa_mask)

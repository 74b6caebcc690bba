"""Attention over packed rows, registered with transformers as the attention function ``logitless_packed``.

Equal to running every sequence alone. Lengths are known on the host, so no [T, T] mask is built and the GPU is not
synchronised. The first line that applies chooses the kernel. "Half precision" is bfloat16 or float16 on CUDA, without
dropout, and heads of a size that the kernel supports:

- completions that share a prompt (an ``AttentionLayout``), half precision, not chunked: ``prefix_attention``, which
  computes a prompt once. Otherwise the prompt is repeated for this operation, and one of the next lines applies.
- softcap (Gemma 2) or sinks (gpt-oss): ``prefix_attention`` in half precision, else ``scored_attention``, which
  materialises the scores.
- sequences of equal length without a window: torch's SDPA on them as a batch.
- half precision: torch's variable-length attention.
- anything else: SDPA on padded batches of sequences of similar length.

Chunked attention (Llama 4) is causal attention within chunks of the sequences. Without a layout (decoding with a cache)
the function is transformers' SDPA attention. Ranks that share a row (``sequence_group``, Ulysses) exchange tokens for
heads before attention, and back after it.

Not supported: position biases (ALiBi). Use ``attention="eager"``, ``"sdpa"`` or ``"flex_attention"``, with which
transformers builds a block-diagonal mask from positions that restart at 0.
"""

import inspect
from functools import cache, partial
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
from logitless.installed import without_triton
from logitless.models.attention import MAX_GROUP, MAX_WIDTH, AttentionLayout, prefix_attention
from logitless.models.mixers import RECURRENT
from logitless.models.packed_layout import PackedLayout, WholeSequences
from logitless.models.scored_attention import scored_attention

PACKED = "logitless_packed"
_OTHER_ATTENTION = 'Load the model with attention="eager", "sdpa" or "flex_attention".'
_UNSUPPORTED = {"position_bias": "a position bias (ALiBi)"}
KINDS = {"full_attention", "sliding_attention", "chunked_attention", "moe", "mlp", *RECURRENT}
"""transformers' ``layer_types`` that packed rows support; ``moe`` and ``mlp`` (Nemotron-H) have no attention."""

_BESIDE_A_MIXER = {
    "hybrid": "full_attention",
    "hybrid_sliding": "sliding_attention",
    "linear_attention": "full_attention",
}
"""Kind of the attention in a layer that is also recurrent (Falcon-H1), or that shares its attention (Zamba 2)."""


def packed_attention(
    query: Float[Tensor, "1 H T E"],
    key: Float[Tensor, "1 K T E"],
    value: Float[Tensor, "1 K T F"],
    layout: PackedLayout | AttentionLayout,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, "H"] | None = None,
) -> Float[Tensor, "1 T H F"]:
    """Causal attention within each sequence of a packed row.

    ``out[t] = sum_s softmax_s(scaling * q[t] @ k[s]) v[s]`` over s of t's own sequence with
    ``t - sliding_window < s <= t``. Softcap and sinks are those of ``scored_attention``. Completions may share prompts
    (an ``AttentionLayout``): equal to the row with every prompt repeated, and gradients of a prompt are summed over its
    completions in float32.

    Args:
        query, key, value: H query heads, K key heads with K dividing H.
        layout: of the row.
        scaling: default ``E ** -0.5``.
        dropout: of the attention weights.
        sliding_window: number of tokens that a token attends to, itself included; None for all.
        chunk: each sequence is divided into chunks of this many tokens, and a token attends to its own chunk only.
        softcap: bound of the absolute scores.
        sinks: for each query head, a score that is part of the softmax and has no value.

    Raises:
        InputError: the layout has another number of tokens than the inputs.

    Example:
        >>> q = k = v = torch.randn(1, 1, 5, 8)
        >>> packed_attention(q, k, v, PackedLayout((3, 2))).shape
        torch.Size([1, 5, 1, 8])
        >>> from logitless.types import PromptGroup
        >>> packed_attention(q, k, v, AttentionLayout([PromptGroup(2, (1, 2))])).shape
        torch.Size([1, 5, 1, 8])
    """
    _check_row(query, key, layout.num_tokens)
    if isinstance(layout, AttentionLayout):
        in_chunks = chunk is not None and chunk < layout.longest
        if not in_chunks and _shared_kernel_runs(query, key, value, dropout):
            return _by_kernel(query, key, value, layout, scaling, sliding_window, softcap, sinks)
        whole, rows = WholeSequences.of(layout), (x[0].transpose(0, 1) for x in (query, key, value))
        query, key, value = (whole.repeated.take(x).transpose(0, 1)[None] for x in rows)
        options: Any = {"scaling": scaling, "dropout": dropout, "sliding_window": sliding_window, "chunk": chunk}
        out = packed_attention(query, key, value, whole.layout, **options, softcap=softcap, sinks=sinks)
        return out.index_select(1, whole.kept)
    if chunk is not None:
        layout = layout.cut(chunk)
    if (softcap is not None or sinks is not None) and _shared_kernel_runs(query, key, value, dropout):
        return _by_kernel(query, key, value, layout.attention, scaling, sliding_window, softcap, sinks)
    window = None if sliding_window is None or sliding_window >= layout.max_length else sliding_window
    # Sequences of equal length need no copy to be a batch, and SDPA's fastest kernel takes only batches: on an H200 it
    # needs half the time of the variable-length kernel.
    as_batch = layout.is_even and window is None
    plain = softcap is None and sinks is None
    dtype = _dtype(query)
    if plain and not as_batch and _variable_length_kernel_runs(query, value, dtype, dropout):
        query, key, value = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))
        return _variable_length(query, key, value, layout, scaling, window)[None]
    attend = partial(_of_batch, scaling=scaling, dropout=dropout, window=window, softcap=softcap, sinks=sinks)
    return layout.by_bucket(attend, *(x[0].transpose(0, 1) for x in (query, key, value)))[None]


def _by_kernel(
    query: Float[Tensor, "1 H T E"],
    key: Float[Tensor, "1 K T E"],
    value: Float[Tensor, "1 K T E"],
    layout: AttentionLayout,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Float[Tensor, "H"] | None,
) -> Float[Tensor, "1 T H E"]:
    dtype = _dtype(query)
    q, k, v = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))
    out, log_sum_exp = prefix_attention(q, k, v, layout, scale=scaling, window=window, softcap=softcap)
    if sinks is not None:
        # exp(lse) / (exp(lse) + exp(sink)): what remains of the softmax weights when the sink joins the denominator
        share = torch.sigmoid(log_sum_exp - sinks.float())
        out = (out * share[..., None]).to(dtype)
    return out[None]


def _dtype(query: Tensor) -> torch.dtype:
    """The dtype of the matrix products: autocast's, or the query's."""
    return torch.get_autocast_dtype("cuda") if query.is_cuda and torch.is_autocast_enabled("cuda") else query.dtype


def _shared_kernel_runs(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    return (
        query.is_cuda
        and _dtype(query) in (torch.bfloat16, torch.float16)
        and dropout == 0
        and query.shape[-1] == value.shape[-1] <= MAX_WIDTH
        and query.shape[1] // key.shape[1] <= MAX_GROUP
        and not without_triton()
    )


def _check_row(query: Tensor, key: Tensor, num_tokens: int) -> None:
    if query.shape[0] != 1 or not query.shape[2] == key.shape[2] == num_tokens:
        raise InputError(
            needed=f"one packed row of {num_tokens} tokens",
            given=f"queries {tuple(query.shape)} and keys {tuple(key.shape)}",
            remedy="Use a decoder without cross-attention or cache, or another attention implementation.",
        )


def _of_batch(
    query: Float[Tensor, "S L H E"],
    key: Float[Tensor, "S L K E"],
    value: Float[Tensor, "S L K F"],
    *,
    scaling: float | None,
    dropout: float,
    window: int | None,
    softcap: float | None,
    sinks: Float[Tensor, "H"] | None,
) -> Float[Tensor, "S L H F"]:
    """Causal attention on a batch of sequences, padded on the right."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    length = query.shape[2]
    mask = None if window is None or window >= length else _window_mask(length, window, query.device)
    if softcap is not None or sinks is not None:
        options: Any = {"scaling": scaling, "dropout": dropout, "softcap": softcap, "sinks": sinks}
        return scored_attention(query, key, value, mask, **options).transpose(1, 2)
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2)


def _window_mask(length: int, window: int, device: torch.device) -> Bool[Tensor, "L L"]:
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < window)


@cache
def _variable_length_arguments() -> frozenset[str]:
    """Parameters of the installed torch's ``varlen_attn``; empty if it has none."""
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


@torch.compiler.disable  # lengths differ in every row, and would recompile it each time
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
    """The attention function that transformers calls in every layer."""
    for name, meaning in _UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise UnavailableError(
                needed="plain causal attention", given=f"{meaning} in {type(module).__name__}", remedy=_OTHER_ATTENTION
            )
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if packed_layout is not None:
        options: Any = {"scaling": scaling, "dropout": dropout, "softcap": softcap}
        options |= _seen(module, sliding_window, kwargs.get("is_causal"))
        ranks, rank = (1, 0) if sequence_group is None else (dist.get_world_size(sequence_group), sequence_group.rank())
        query = _tuned_by_position(module, query, packed_layout, rank)
        if sequence_group is not None:
            repeats = max(1, ranks // key.shape[1])  # with fewer key heads than ranks, several ranks share a key head
            key, value = (x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (key, value))
            query, key, value = (exchanged(x, sequence_group, split=1, join=2) for x in (query, key, value))
            sinks = None if sinks is None else sinks.chunk(ranks)[rank]
        out = packed_attention(query, key, value, packed_layout, sinks=sinks, **options)
        return out if sequence_group is None else exchanged(out, sequence_group, split=1, join=2), None
    if softcap is not None or sinks is not None:
        own: Any = {"scaling": scaling, "dropout": dropout, "softcap": softcap, "sinks": sinks}
        return scored_attention(query, key, value, attention_mask, **own).transpose(1, 2).contiguous(), None
    if query.shape[2] == 1 and query.shape[1] != key.shape[1]:
        return _decode_grouped(query, key, value, attention_mask, scaling, dropout), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)


def _seen(module: nn.Module, sliding_window: int | None, is_causal: bool | None) -> dict[str, int | None]:
    """The layer's window and chunk, as arguments of ``packed_attention``.

    Raises:
        UnavailableError: the mask is not causal, of an unknown kind, or its window or chunk size is not known.
    """
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    index, config = getattr(module, "layer_idx", None), getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    kind = kinds[index] if kinds is not None and index is not None else "full_attention"
    kind = _BESIDE_A_MIXER.get(kind, kind)
    chunk = getattr(config, "attention_chunk_size", None) if kind == "chunked_attention" else None
    known = {
        "full_attention": True,
        "sliding_attention": sliding_window is not None,
        "chunked_attention": chunk is not None,
    }
    if not causal or not known.get(kind, False):
        raise UnavailableError(
            needed="causal attention: full, in chunks, or with a window known to the layer",
            given=f"{kind if causal else 'bidirectional attention'} in {type(module).__name__}",
            remedy=_OTHER_ATTENTION,
        )
    return {"sliding_window": sliding_window, "chunk": chunk}


def _tuned_by_position(
    module: Any, query: Float[Tensor, "1 H T E"], layout: PackedLayout | AttentionLayout, rank: int
) -> Float[Tensor, "1 H T E"]:
    """Llama 4's attention temperature (in layers without rotary embedding) by position in the sequence."""
    # The layer has already scaled the queries by their position in the row; the quotient below corrects that.
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return query

    def scale(position: Int[Tensor, "T"]) -> Float[Tensor, "T"]:
        return torch.log1p(torch.floor((position.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0

    of_sequences = (layout if isinstance(layout, AttentionLayout) else layout.attention).positions
    in_row = torch.arange(query.shape[2], device=query.device)
    in_sequence = of_sequences[rank * len(in_row) : (rank + 1) * len(in_row)]
    return query * (scale(in_sequence) / scale(in_row)).to(query.dtype)[:, None]


def _decode_grouped(
    query: Float[Tensor, "B H 1 E"],
    key: Float[Tensor, "B K S E"],
    value: Float[Tensor, "B K S F"],
    attention_mask: Tensor | None,
    scaling: float | None,
    dropout: float,
) -> Float[Tensor, "B 1 H F"]:
    """Decoding of one token per sequence, without repeating keys and values.

    The query heads that share a key head become the query positions of that head.
    """
    rows, heads, _, width = query.shape
    folded = query.reshape(rows, key.shape[1], heads // key.shape[1], width)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling)
    return out.reshape(rows, 1, heads, value.shape[-1])


AttentionInterface.register(PACKED, _attention_layer)
AttentionMaskInterface.register(PACKED, sdpa_mask)

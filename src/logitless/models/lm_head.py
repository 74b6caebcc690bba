"""The two halves of a causal language model: the backbone, run on packed tokens, and the LM head as an ``LMHead``.

``lm_head`` finds the head by transformers' names for attributes and config fields. A name can mislead, so
``verify_lm_head`` and ``verify_packing`` compare numbers with the model's own forward pass and refuse a model where
they differ.
"""

import inspect
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from logitless.errors import InputError, UnavailableError
from logitless.models.attention import AttentionLayout
from logitless.models.mixers import recurrent_mixers
from logitless.models.modes import evaluating, whole_float32
from logitless.models.packed import KINDS, PACKED
from logitless.models.packed_layout import PackedLayout
from logitless.models.rotary import LongRotary, check_rotary_lengths, scaling_begins
from logitless.types import LMHead, PackedInputs, PromptGroup, SharedInputs

_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap")
_WINDOWED = {"sliding_attention", "chunked_attention", "hybrid_sliding"}
_SCALING_MULTIPLIES = {"hyperclovax"}  # its `logits_scaling` multiplies; that of other models divides


def is_peft(model: nn.Module) -> bool:
    """Whether the model is a PEFT wrapper."""
    # the model inside the wrapper has a `peft_config` too
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


class AttentionHeads(NamedTuple):
    """Number of query heads, number of key/value heads, and head dimension of a model's attention."""

    query: int
    key: int
    width: int

    @classmethod
    def of(cls, config: Any) -> "AttentionHeads":
        """Read them from a transformers text config; the maximum of each where layers differ (Gemma 4)."""
        if getattr(config, "is_heterogeneous", False):
            return cls(*map(max, zip(*(cls.of(layer) for layer in config.per_layer_config), strict=True)))
        query = config.num_attention_heads
        key = getattr(config, "num_key_value_heads", None) or query
        return cls(query, key, getattr(config, "head_dim", None) or config.hidden_size // query)


def causal_lm(model: nn.Module) -> PreTrainedModel:
    """The transformers causal LM inside a PEFT wrapper, or the model itself.

    Raises:
        InputError: not a transformers model.
        UnavailableError: an adapter outside of the layers (prompt learning).
    """
    inner: Any = model
    if is_peft(model):
        prompts = [config.peft_type for config in inner.peft_config.values() if config.is_prompt_learning]
        if prompts:
            raise UnavailableError(
                needed="an adapter that lives inside the layers",
                given=f"prompt learning ({prompts[0]})",
                remedy="Use LoRA.",
            )
        inner = inner.get_base_model()
    if not isinstance(inner, PreTrainedModel):
        raise InputError(
            needed="a transformers model", given=type(inner).__name__, remedy="Load it with logitless.models.loading."
        )
    return inner


def backbone(model: nn.Module) -> PreTrainedModel:
    """The decoder without its LM head, through PEFT wrappers.

    Raises:
        UnavailableError: the model has no separate decoder.
    """
    inner = causal_lm(model)
    if inner.base_model is inner:
        decoder = getattr(inner, "model", None)  # Llama 4's prefix names the whole of its image model
        if isinstance(decoder, PreTrainedModel):
            return decoder
        raise UnavailableError(
            needed="a causal language model with a decoder below its LM head",
            given=type(inner).__name__,
            remedy="Load the model with AutoModelForCausalLM.",
        )
    return inner.base_model


def backbone_hidden(
    model: nn.Module, inputs: PackedInputs | SharedInputs, group: ProcessGroup | None = None
) -> Float[Tensor, "T D"]:
    """Last hidden states of packed sequences; the LM head does not run and no logits exist.

    Gradient: through the decoder. ``D`` is what the LM head reads (the final norm has been applied).

    Args:
        model: a transformers causal LM, PEFT-wrapped or not, with any attention implementation; with
            ``logitless_packed`` no mask is built.
        inputs: T tokens of B sequences, on the model's device; ``SharedInputs`` only if ``why_unshared`` returns None.
        group: ranks that split the packed row, checked by ``check_sequence_group``; each runs its ``rows_of_rank``.

    Returns:
        [T, D] in the decoder's dtype; the LM head needs the rows ``inputs.source``. With a group, this rank's rows.

    Raises:
        UnavailableError: the model's attention cannot be packed this way, or a sequence is so long that dynamic rotary
            scaling would change its frequencies.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...                      vocab_size=11, attn_implementation="logitless_packed")
        >>> ids = torch.tensor([5, 6, 7, 5, 8])
        >>> inputs = PackedInputs(ids, torch.tensor([0, 1, 2, 0, 1]), (3, 2), torch.tensor([0, 1, 3]), (2, 1))
        >>> backbone_hidden(LlamaForCausalLM(config), inputs).shape
        torch.Size([5, 8])
    """
    decoder = backbone(model)
    check_positions(decoder)
    check_rotary_lengths(decoder, inputs.longest if isinstance(inputs, SharedInputs) else max(inputs.lengths))
    mine, further = slice(0, len(inputs.input_ids)), dict[str, Any]()
    if group is not None:
        mine = rows_of_rank(len(inputs.input_ids), dist.get_rank(group), dist.get_world_size(group))
        inputs = _filled_up(inputs, (mine.stop - mine.start) * dist.get_world_size(group))
        further["sequence_group"] = group
    output = decoder(
        input_ids=inputs.input_ids[None, mine],
        position_ids=inputs.position_ids[None, mine],
        use_cache=False,
        **_packing_arguments(decoder, inputs),
        **further,
    )
    return output.last_hidden_state[0]


def rows_of_rank(num_tokens: int, rank: int, num_ranks: int) -> slice:
    """The slice of a packed row that one rank runs; slices are equally long, and the last may extend past the end.

    Example:
        >>> rows_of_rank(5, 1, 2)
        slice(3, 6, None)
    """
    each = -(-num_tokens // num_ranks)
    return slice(rank * each, (rank + 1) * each)


def check_sequence_group(model: nn.Module, num_ranks: int) -> None:
    """Refuse a model whose sequences cannot be split over ``num_ranks`` ranks.

    Raises:
        UnavailableError: the number of heads does not divide, the attention is not ``packed``, or the model has
            row-invariant layers, longrope or recurrent layers.
    """
    decoder = backbone(model)
    config = decoder.config.get_text_config()
    heads = AttentionHeads.of(config)
    odd = {
        f"{heads.query} query heads": heads.query % num_ranks > 0,
        f"{heads.key} key heads": heads.key % num_ranks > 0 and num_ranks % heads.key > 0,
        f"attention {config._attn_implementation}": config._attn_implementation != PACKED,
        "row-invariant layers": hasattr(decoder, "row_invariant"),
        "longrope": any(getattr(module, "turns_each_sequence", False) for module in decoder.modules()),
        "recurrent layers, which need every token of a sequence": bool(recurrent_mixers(decoder)),
    }
    if given := [what for what, holds in odd.items() if holds]:
        raise UnavailableError(
            needed=f"packed attention whose heads {num_ranks} processes can share",
            given=", ".join(given),
            remedy="Set parallel.sequence to a divisor of the heads, or to 1.",
        )


def _filled_up(inputs: PackedInputs | SharedInputs, num_tokens: int) -> PackedInputs | SharedInputs:
    """Append a padding sequence without targets, so that the row has ``num_tokens`` tokens."""
    more = num_tokens - len(inputs.input_ids)
    if not more:
        return inputs
    positions = torch.arange(more, device=inputs.input_ids.device)
    tokens: dict[str, Any] = {
        "input_ids": torch.cat([inputs.input_ids, torch.zeros_like(positions)]),
        "position_ids": torch.cat([inputs.position_ids, positions]),
    }
    if isinstance(inputs, SharedInputs):
        return replace(inputs, **tokens, groups=(*inputs.groups, PromptGroup(more)))
    lengths, counts = (*inputs.lengths, more), (*inputs.source_counts, 0)
    return PackedInputs(**tokens, lengths=lengths, source=inputs.source, source_counts=counts)


def _packing_arguments(decoder: PreTrainedModel, inputs: PackedInputs | SharedInputs) -> dict[str, Any]:
    """The decoder's arguments that keep sequences apart, besides positions that restart."""
    config, device = decoder.config.get_text_config(), inputs.input_ids.device
    attention = config._attn_implementation
    layout: AttentionLayout | PackedLayout
    if isinstance(inputs, SharedInputs):
        layout = AttentionLayout(inputs.groups, device)
    else:
        layout = PackedLayout(inputs.lengths, device)
    if hasattr(decoder, "row_invariant"):
        return {"packed_layout": layout}
    if attention == PACKED:
        # The layout separates the sequences. The mask is NaN so that a layer that adds it anyway is noticed.
        mask = torch.full((1, 1, 1, 1), float("nan"), device=device)
        return {"attention_mask": mask, "packed_layout": layout}
    for_mixers = {"packed_layout": layout} if recurrent_mixers(decoder) else {}
    if not _takes_mask(decoder):
        return for_mixers  # transformers makes a mask for each kind of layer from the positions
    # transformers uses a mask of four dimensions as it is
    allowed = (_shared_mask(layout) if isinstance(layout, AttentionLayout) else _packed_mask(layout))[None, None]
    if attention == "sdpa":
        return {"attention_mask": allowed, **for_mixers}
    mask = torch.zeros_like(allowed, dtype=decoder.dtype).masked_fill(~allowed, torch.finfo(decoder.dtype).min)
    return {"attention_mask": mask, **for_mixers}


def _takes_mask(decoder: PreTrainedModel) -> bool:
    """Whether one [T, T] mask serves all of a decoder's layers."""
    config = decoder.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or []
    windowed = any(kind not in KINDS - _WINDOWED for kind in kinds) or (
        not kinds and getattr(config, "sliding_window", None)
    )
    return config._attn_implementation in ("sdpa", "eager") and not windowed


def _packed_mask(layout: PackedLayout) -> Bool[Tensor, "T T"]:
    """True where a token (row) may attend to another one (column)."""
    lengths = torch.tensor(layout.lengths, device=layout.device)
    sequence = torch.repeat_interleave(
        torch.arange(len(layout.lengths), device=layout.device), lengths, output_size=layout.num_tokens
    )
    return (sequence[:, None] == sequence).tril()


def _shared_mask(layout: AttentionLayout) -> Bool[Tensor, "T T"]:
    """``_packed_mask`` for completions that attend to a shared prompt."""
    pieces, rows = layout.segments, torch.arange(layout.num_tokens)
    last_seen_by = torch.repeat_interleave(pieces.last_seen_by, pieces.length)
    return (rows[:, None] < last_seen_by).tril().to(layout.device)


def why_unshared(model: nn.Module) -> str | None:
    """Why completions cannot share their prompt's tokens in a packed row, in words; None if they can.

    Besides names it compares numbers: a few tokens are run with and without sharing.
    """
    decoder = backbone(model)
    if hasattr(decoder, "row_invariant"):
        return None
    config = decoder.config.get_text_config()
    if any(isinstance(module, LongRotary) for module in decoder.modules()):
        return "its rotary factors (longrope) are chosen by where positions restart"
    if config._attn_implementation != PACKED and not _takes_mask(decoder):
        return f"its attention ({config._attn_implementation}) makes masks from positions that restart"
    inner = causal_lm(model)
    if _is_meta(inner):
        return None
    tree = PromptGroup(4, (PromptGroup(2, (1, 2)), 2))  # sequences of 7, 8 and 6 tokens
    probe = _probe(inner, [7, 8, 6])
    ids = probe.input_ids.clone()
    ids[7:13], ids[15:19] = ids[:6], ids[:4]
    rows = torch.tensor([*range(7), 13, 14, 19, 20], device=ids.device)
    shared = SharedInputs(ids[rows], probe.position_ids[rows], (tree,), rows[:0])
    with torch.no_grad(), evaluating(inner), whole_float32():
        apart = backbone_hidden(model, replace(probe, input_ids=ids))[rows]
        together = backbone_hidden(model, shared)
    if not _close(together, apart, next(inner.parameters()).dtype, inner):
        return "its layers give other numbers where a prompt stands once"
    return None


def check_positions(decoder: PreTrainedModel) -> None:
    """Refuse a decoder whose positions cannot restart inside a packed row.

    Raises:
        UnavailableError: it takes no ``position_ids``.
    """
    if "position_ids" not in inspect.signature(type(decoder).forward).parameters:
        raise UnavailableError(
            needed="a decoder that takes position_ids",
            given=type(decoder).__name__,
            remedy="Use a model whose positions can restart inside a packed row.",
        )


def lm_head(model: nn.Module) -> LMHead:
    """The LM head of a causal LM in its current state: without LoRA factors while adapters are off.

    ``logits = scale * (hidden @ weight.T + bias + lora_scale * (hidden @ lora_a.T) @ lora_b.T)``, then the softcap.

    Gradient: the tensors are the model's own parameters, so gradients land in them.

    Args:
        model: a transformers causal LM, PEFT-wrapped or not.

    Raises:
        UnavailableError: no linear LM head, a quantized one, or an adapter on it that is not plain LoRA.

    Example:
        >>> from transformers import CohereConfig, CohereForCausalLM
        >>> config = CohereConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...                       vocab_size=11, logit_scale=0.0625)
        >>> head = lm_head(CohereForCausalLM(config))
        >>> head.weight.shape, head.scale
        (torch.Size([11, 8]), 0.0625)
    """
    inner = causal_lm(model)
    base, lora = _split_lora(_active_module(inner.get_output_embeddings()))
    weight = getattr(base, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        raise UnavailableError(
            needed="a linear LM head with a floating-point weight [V, D]",
            given=f"{type(base).__name__} in {type(inner).__name__}",
            remedy="Leave the LM head out of quantization, or use another model.",
        )
    config = inner.config.get_text_config()
    return LMHead(weight, getattr(base, "bias", None), _scale(config), _softcap(config), *(lora or ()))


def _scale(config: Any) -> float:
    scale = 1.0
    for name in _MULTIPLIERS:
        scale *= getattr(config, name, None) or 1.0
    for name in _DIVISORS:
        value = getattr(config, name, None) or 1.0
        scale = scale * value if config.model_type in _SCALING_MULTIPLIES else scale / value
    return float(scale)


def _softcap(config: Any) -> float | None:
    return next((float(cap) for name in _SOFTCAPS if (cap := getattr(config, name, None)) is not None), None)


def _active_module(layer: Any) -> Any:
    """The module that a ``modules_to_save`` wrapper currently runs, or the layer itself."""
    if not hasattr(layer, "modules_to_save") or not hasattr(layer, "original_module"):
        return layer
    if layer.disable_adapters or not layer.active_adapters:
        return layer.original_module
    return layer.modules_to_save[layer.active_adapters[0]]


def _split_lora(layer: Any) -> tuple[Any, tuple[Tensor, Tensor, float] | None]:
    """(linear layer, (A, B, scale) or None) of a layer that may carry a LoRA adapter."""
    if not hasattr(layer, "base_layer"):
        return layer, None
    base = layer.get_base_layer()
    active = [name for name in layer.active_adapters if name in getattr(layer, "lora_A", {})]
    if layer.disable_adapters or layer.merged or not active:
        return base, None
    name = active[0]
    dropout = layer.lora_dropout[name]
    odd = {
        "several active adapters": len(active) > 1,
        "a LoRA variant (DoRA, ...)": bool(layer.lora_variant),
        "LoRA with a bias": layer.lora_bias[name],
        "LoRA with dropout": getattr(dropout, "p", 0.0) > 0 and dropout.training,
    }
    given = [reason for reason, holds in odd.items() if holds]
    if given:
        raise UnavailableError(
            needed="plain LoRA on the LM head, without dropout",
            given=", ".join(given),
            remedy="Leave the LM head out of the adapter's target modules, or call disable_dropout.",
        )
    return base, (layer.lora_A[name].weight, layer.lora_B[name].weight, float(layer.scaling[name]))


def verify_lm_head(model: nn.Module, head: LMHead | None = None) -> None:
    """Compare the model's own logits of a few tokens with the formula of ``LMHead``.

    Args:
        model: a causal LM on its device; a meta model has no numbers and is not checked.
        head: default ``lm_head(model)``.

    Raises:
        UnavailableError: they differ: the model computes logits in a way that LMHead does not express.
    """
    inner = causal_lm(model)
    if _is_meta(inner):
        return
    head = lm_head(model) if head is None else head
    inputs = _probe(inner, (8,))
    with torch.no_grad(), evaluating(inner), whole_float32():
        logits = inner(input_ids=inputs.input_ids[None], use_cache=False).logits[0].double()
        mine = _logits(backbone_hidden(model, inputs), head)
    if mine.shape != logits.shape or not _close(mine, logits, head.weight.dtype, inner):
        error = (mine - logits).abs().max().item() if mine.shape == logits.shape else float("nan")
        raise UnavailableError(
            needed="logits = softcap(scale * (hidden @ weight.T + bias))",
            given=f"{type(inner).__name__}, whose logits differ by {error:.3g} (largest {logits.abs().max():.3g})",
            remedy="Describe this model's LM head with your own LMHead, or use another model.",
        )


def verify_packing(model: nn.Module) -> None:
    """Check that packed sequences do not affect each other and give the hidden states of the same sequences run alone.

    Args:
        model: a causal LM on its device; a meta model has no numbers and is not checked.

    Raises:
        UnavailableError: sequences affect each other (recurrent layers, a mask that is not built from positions), or
            the result differs from running alone (rotary frequencies that depend on the longest sequence).
    """
    inner = causal_lm(model)
    if _is_meta(inner):
        return
    dtype = next(inner.parameters()).dtype
    # The first sequence crosses the length where rotary frequencies may change; the others stay below it.
    inputs = _probe(inner, (7, 3, 6), first_position=max(0, scaling_begins(inner) - 3))
    lengths, first = list(inputs.lengths), inputs.lengths[0]
    ids = inputs.input_ids.clone()
    ids[:first] = ids[:first].flip(0)
    with torch.no_grad(), evaluating(inner), whole_float32():
        together = backbone_hidden(model, inputs)
        beside_another = backbone_hidden(model, replace(inputs, input_ids=ids))
        parts = zip(inputs.input_ids.split(lengths), inputs.position_ids.split(lengths), strict=True)  # type: ignore[no-untyped-call]
        runs = [backbone(model)(input_ids=part[None], position_ids=at[None], use_cache=False) for part, at in parts]
        alone = torch.cat([run.last_hidden_state[0] for run in runs])
    # An expert multiplies all tokens routed to it. Other sequences change their number, and so a product's last bits.
    experts = any(name.endswith(".experts") for name, _ in inner.named_modules())
    leak = not _close(beside_another[first:], together[first:], dtype, inner, ulps=1000.0 if experts else 2.0)
    if leak or not _close(together, alone, dtype, inner):
        raise UnavailableError(
            needed="packed sequences that equal the same sequences run alone",
            given=f"{type(inner).__name__} with attention {inner.config._attn_implementation!r}, "
            + ("whose sequences see each other" if leak else "which gives other hidden states"),
            remedy='Load it with another attention ("packed", "eager", "sdpa", "flex_attention"), call'
            " logitless.models.rotary.separate_long_sequences where its rotary scaling is longrope, or use another"
            " model.",
        )


def _logits(hidden: Tensor, head: LMHead) -> Tensor:
    """The formula of ``lm_head``, with products in the dtype of the weight as in the model itself."""
    hidden = hidden.to(head.weight.dtype)
    logits = F.linear(hidden, head.weight, head.bias).double()
    if head.lora_a is not None and head.lora_b is not None:
        low_rank = F.linear(F.linear(hidden.to(head.lora_a.dtype), head.lora_a), head.lora_b)
        logits = logits + head.lora_scale * low_rank.double()
    logits = head.scale * logits
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


def _close(a: Tensor, b: Tensor, dtype: torch.dtype, inner: PreTrainedModel, ulps: float = 1000.0) -> bool:
    """Equal up to rounding of the dtype in all layers, relative to the largest number.

    Roundings of L layers add up like a random walk: of bfloat16 hidden states, 0.3 to 0.6 eps sqrt(L) from exact ones.
    A product of other rows may round each number otherwise, so that two forwards differ by sqrt(2) as much.
    """
    eps, num_layers = torch.finfo(dtype).eps, getattr(inner.config.get_text_config(), "num_hidden_layers", 1)
    tolerance = min(ulps * max(eps, torch.finfo(torch.float32).eps), max(0.03, 2 * eps * math.sqrt(num_layers)))
    return bool((a.double() - b.double()).abs().max() <= tolerance * b.double().abs().max())


def _probe(inner: PreTrainedModel, lengths: Sequence[int], first_position: int = 0) -> PackedInputs:
    """A few tokens spread over the vocabulary; the first sequence begins at ``first_position``."""
    total = sum(lengths)
    vocabulary = inner.config.get_text_config().vocab_size
    ids = (torch.arange(total) * max(1, vocabulary // (total + 1)) + 1) % vocabulary
    positions = torch.cat([torch.arange(n) + (0 if i else first_position) for i, n in enumerate(lengths)])
    device = next(inner.parameters()).device
    rows = torch.arange(total)
    return PackedInputs(ids, positions, tuple(lengths), rows, tuple(lengths)).to(device)


def _is_meta(inner: PreTrainedModel) -> bool:
    return next(inner.parameters()).device.type == "meta"

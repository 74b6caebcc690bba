"""A decoder of transformers whose rows depend on nothing else: the same bits alone, in any packed row, and decoded.

``install_row_invariant`` exchanges the classes of a model's decoder and of its layers (``print(model)`` shows them).
Parameters, their names and the checkpoint stay what they are. Packed rows then run through products, norms, rotary
positions, gate and attention whose sums have one order each (docs/bits.md), with transformers' roundings, so that the
model keeps its meaning; anything else (``model.generate``) runs as before.

Needs Triton. What it gives up: dropout, quantized weights, positions whose scaling depends on the longest sequence, and
families that are not listed here. Such a model is left alone, and the report says why.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from logitless.errors import UnavailableError
from logitless.float32_sums import add_rows, gradient_dtype, sums_in_float32
from logitless.graph_capture import refuse_unwritten
from logitless.models.activations import can_be_made_again, recipes_are_kept
from logitless.models.attention import AttentionLayout, PrefixAttention
from logitless.models.kernels.gate import gated, gated_backward
from logitless.models.kernels.norm import norm, norm_backward
from logitless.models.kernels.rotary import HeadNorms, Heads, rotate, rotate_backward
from logitless.models.linear import Projection, lay_end_to_end, project, project_gated
from logitless.models.lm_head import _split_lora, backbone
from logitless.models.one_node import apply, one_node, refuse_twice
from logitless.models.packed import PackedLayout
from logitless.models.rotary import LongRotary

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3")
_GEMMA = ("gemma2", "gemma3_text")
_ACTIVATIONS = {"silu": False, "swish": False, "gelu_pytorch_tanh": True}
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")
_QKV = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
_GATE_UP = (("gate_proj", "up_proj"), ("gate_up_proj",))
_NORMS = ("input_layernorm", "post_attention_layernorm")
_GEMMA_NORMS = (*_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True)
class AttentionForm:
    """What one layer's attention is.

    Args:
        heads: counts and widths.
        scale: factor of the products.
        window: tokens a token sees, itself included; None for all.
        softcap: of the scaled products.
        rope: the name of the table of positions that the layer uses.
    """

    heads: Heads
    scale: float
    window: int | None
    softcap: float | None
    rope: str


@runtime_checkable
class Rows(Protocol):
    """Where a layer's rows stand and what they attend to: a packed row, or a step of decoding."""

    def attend(
        self, index: int, form: AttentionForm, query: Tensor, key: Tensor, value: Tensor, norms: HeadNorms | None
    ) -> Tensor:
        """[T, H * E] of the layer ``index``."""
        ...


@dataclass(frozen=True)
class PackedRows:
    """Sequences end to end, as training and prefilling read them.

    Args:
        layout: of the attention.
        position: [T] in each token's sequence.
        tables: cosines and sines by name.
    """

    layout: AttentionLayout
    position: Int[Tensor, "T"]
    tables: "RopeTables"

    def attend(
        self,
        index: int,  # noqa: ARG002 every layer reads the same layout
        form: AttentionForm,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        norms: HeadNorms | None,
    ) -> Tensor:
        """Rotary positions, then attention within the layout."""
        cos, sin = self.tables.of(form.rope)
        weights = (None, None) if norms is None else (norms.query, norms.key)
        options = (0.0, False) if norms is None else (norms.eps, norms.gemma)
        turned = apply(_Rotary, query, key, value, *weights, options, form.heads, self.position, cos, sin)
        out, _ = apply(PrefixAttention, *turned, self.layout, form.scale, form.window, form.softcap)
        return apply(_HeadsAsRows, out)


class RopeTables:
    """Cosines and sines by position, made by the model's own rotary embedding and kept."""

    def __init__(self, decoder: Any, names: Sequence[str]) -> None:
        self._decoder, self._names = decoder, tuple(dict.fromkeys(names))
        self._tables: dict[str, tuple[Tensor, Tensor]] = {}
        self._key: tuple[Any, ...] = ()

    def reach(self, length: int) -> "RopeTables":
        """The same with at least ``length`` positions, in the decoder's dtype and on its device."""
        weight = self._decoder.norm.weight
        have = self._tables[self._names[0]][0].shape[0] if self._tables else 0
        if have < length or self._key != (weight.dtype, weight.device):
            refuse_unwritten("the table of rotary positions", weight.device)
            reach = max(256, 1 << (length - 1).bit_length())
            self._key = (weight.dtype, weight.device)
            position = torch.arange(reach, device=weight.device)[None]
            like = torch.empty(1, 1, 1, dtype=weight.dtype, device=weight.device)
            with torch.no_grad():
                for name in self._names:
                    kind = () if name == "" else (name,)
                    cos, sin = self._decoder.rotary_emb(like, position, *kind)
                    self._tables[name] = cos[0].contiguous(), sin[0].contiguous()
        return self

    def of(self, name: str) -> tuple[Float[Tensor, "P R"], Float[Tensor, "P R"]]:
        """Cosines and sines [P, R]."""
        return self._tables[name]


class RowInvariantDecoder:
    """What ``install_row_invariant`` mixes into a decoder's class."""

    row_invariant: "Installation"

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        *args: Any,
        packed_layout: PackedLayout | AttentionLayout | None = None,
        rows: Rows | None = None,
        num_layers: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Hidden states of packed rows or of a step of decoding; everything else as transformers does it.

        With ``num_layers`` only the first few layers run, which is enough where all that is wanted is that their
        kernels have been launched.
        """
        own = cast(Any, self)
        if rows is None and packed_layout is None:
            return cast(Any, super()).forward(input_ids, attention_mask, position_ids, *args, **kwargs)
        assert input_ids is not None
        _check_dtype(own.norm.weight)
        if rows is None:
            assert packed_layout is not None
            assert position_ids is not None
            rows = self.row_invariant.packed_rows(packed_layout, position_ids.flatten())
        device = input_ids.device
        with torch.autocast(device.type, enabled=False), torch.cuda.device(device if device.type == "cuda" else -1):
            residual, delta = _embedded(own.embed_tokens, input_ids.flatten()), None
            for layer in own.layers[: own.config.num_hidden_layers][:num_layers]:
                residual, delta = layer(residual, delta, rows=rows)
            _, hidden = _add_and_norm(residual, delta, own.norm.weight, _epsilon(own.norm), self.row_invariant.gemma)
        return BaseModelOutputWithPast(last_hidden_state=hidden.view(*input_ids.shape, -1))


class RowInvariantLayer:
    """What ``install_row_invariant`` mixes into a decoder layer's class.

    A layer takes the residual stream and what is still to be added to it, and returns the same two: the addition
    belongs to the next norm's kernel. For autograd it is one node.
    """

    row_invariant_form: AttentionForm
    row_invariant_gemma: bool
    row_invariant_gelu: bool

    def forward(self, hidden_states: Tensor, delta: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """(residual, delta) of the next layer."""
        rows: Rows | None = kwargs.pop("rows", None)
        own = cast(Any, self)
        if rows is None:
            if delta is not None:
                args = (delta, *args)
            return cast(Any, super()).forward(hidden_states, *args, **kwargs)
        weights = _LayerWeights.of(own, gemma=self.row_invariant_gemma)
        given = [hidden_states, *([] if delta is None else [delta])]
        made = one_node(partial(self._rows, rows, weights), given, weights.tensors)
        return made if len(made) == 2 else (*made, None)

    def _rows(
        self, rows: Rows, weights: "_LayerWeights", residual: Tensor, delta: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """(residual, delta) of the next layer; the former alone where there is nothing to be added."""
        norms, eps, gemma = weights.norms, weights.eps, self.row_invariant_gemma
        residual, x = _add_and_norm(residual, delta, norms[0], eps[0], gemma)
        delta = self._attention(x, rows, weights)
        if gemma:
            residual = _norm_and_add(residual, delta, norms[1], eps[1])
            residual, x = _add_and_norm(residual, None, norms[2], eps[2], gemma)
            return (_norm_and_add(residual, self._mlp(x, weights), norms[3], eps[3]),)
        residual, x = _add_and_norm(residual, delta, norms[1], eps[1], gemma)
        return residual, self._mlp(x, weights)

    def _attention(self, x: Tensor, rows: Rows, weights: "_LayerWeights") -> Tensor:
        form = self.row_invariant_form
        heads = form.heads
        query, key, value = _project(x, weights.qkv, (heads.query * heads.width, *[heads.key * heads.width] * 2))
        attended = rows.attend(weights.index, form, query, key, value, weights.head_norms)
        return project(attended, [weights.out])[0]

    def _mlp(self, x: Tensor, weights: "_LayerWeights") -> Tensor:
        width = weights.down.weight.shape[1]
        product = project_gated(x, weights.gate_up, gelu=self.row_invariant_gelu)
        if product is not None:
            return project(product, [weights.down])[0]
        gate, up = _project(x, weights.gate_up, (width, width))
        return project(apply(_Gate, gate, up, self.row_invariant_gelu), [weights.down])[0]


@dataclass(frozen=True)
class _LayerWeights:
    """What a layer multiplies and scales by, read from its modules now: adapters come and go.

    Args:
        index: of the layer.
        norms, eps: in the order in which they come: two, or Gemma's four.
        head_norms: of queries and keys.
        qkv, gate_up: one or several projections.
        out, down: of attention and MLP.
    """

    index: int
    norms: list[Tensor]
    eps: list[float]
    head_norms: HeadNorms | None
    qkv: list[Projection]
    out: Projection
    gate_up: list[Projection]
    down: Projection

    @classmethod
    def of(cls, layer: Any, *, gemma: bool) -> "_LayerWeights":
        """Of a decoder layer."""
        attention, mlp = layer.self_attn, layer.mlp
        names = _GEMMA_NORMS if gemma else _NORMS
        norms = [layer._modules[name] for name in names]
        head_norms = None
        if "q_norm" in attention._modules:
            query, key = attention.q_norm, attention.k_norm
            head_norms = HeadNorms(query.weight, key.weight, _epsilon(query), gemma)
        return cls(
            attention.layer_idx,
            [norm.weight for norm in norms],
            [_epsilon(norm) for norm in norms],
            head_norms,
            [_projection(module) for module in _modules(attention, _QKV)],
            _projection(attention.o_proj),
            [_projection(module) for module in _modules(mlp, _GATE_UP)],
            _projection(mlp.down_proj),
        )

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        of_heads = [] if self.head_norms is None else [self.head_norms.query, self.head_norms.key]
        projections = [*self.qkv, self.out, *self.gate_up, self.down]
        return [*self.norms, *of_heads, *(t for each in projections for t in each[:4] if t is not None)]


@dataclass
class Installation:
    """What ``install_row_invariant`` did.

    Args:
        model: as it was given.
        missing: what the model has that is not covered; the model was left alone unless this is empty.
        gemma: whether norms are Gemma's.
        tables: of positions.
    """

    model: nn.Module
    missing: tuple[str, ...]
    gemma: bool = False
    tables: RopeTables | None = None

    @property
    def exact(self) -> bool:
        """Whether rows of this model keep their bits."""
        return not self.missing

    def packed_rows(self, layout: PackedLayout | AttentionLayout, position: Int[Tensor, "T"]) -> PackedRows:
        """The rows of a packed forward pass."""
        if isinstance(layout, PackedLayout):
            longest = layout.max_length
            layout = layout.attention
        else:
            longest = layout.longest
        return PackedRows(layout, position, self.reach(longest))

    def reach(self, length: int) -> RopeTables:
        """Tables of at least so many positions."""
        assert self.tables is not None, "installed"
        return self.tables.reach(length)

    def remove(self) -> None:
        """Gives the model its own classes back; its parameters stay where they lie."""
        if self.tables is None:
            return
        decoder = backbone(self.model)
        for module in (decoder, *decoder.layers):
            own = next((c for c in type(module).__mro__ if _is_ours(c)), None)
            if own is not None:
                module.__class__ = own.__bases__[1]
        for module in decoder.layers:
            for name in ("row_invariant_form", "row_invariant_gemma", "row_invariant_gelu"):
                delattr(module, name)
        del decoder.row_invariant
        self.tables = None


def install_row_invariant(model: nn.Module) -> Installation:
    """Gives a loaded model layers whose rows keep their bits.

    Weights of query, key and value, and of gate and up, are moved to lie end to end, so that they are one product;
    every parameter stays the parameter it was, under its name. Install before the model is sharded.

    Args:
        model: a transformers causal LM, PEFT-wrapped (LoRA, applied unmerged) or not; of one floating dtype.

    Returns:
        Whether it was done, what stood in the way, and how to take it back.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=11))
        >>> install_row_invariant(model).missing
        ('the architecture gpt2',)
    """
    missing = uncovered(model)
    if missing:
        return Installation(model, missing)
    decoder: Any = backbone(model)
    config = decoder.config.get_text_config()
    gemma = config.model_type in _GEMMA
    forms = [_form(decoder, layer, config) for layer in decoder.layers]
    installation = Installation(model, (), gemma, RopeTables(decoder, [form.rope for form in forms]))
    for layer, form in zip(decoder.layers, forms, strict=True):
        layer.row_invariant_form, layer.row_invariant_gemma = form, gemma
        layer.row_invariant_gelu = _ACTIVATIONS[_activation(config)]
        for owner, names in ((layer.self_attn, _QKV), (layer.mlp, _GATE_UP)):
            linears = [_linear(module) for module in _modules(owner, names)]
            lay_end_to_end([linear.weight for linear in linears])
            if all(linear.bias is not None for linear in linears):
                lay_end_to_end([linear.bias for linear in linears])
            _lay_adapters_end_to_end(_modules(owner, names))
        layer.__class__ = _mixed(RowInvariantLayer, layer.__class__)
    decoder.row_invariant = installation
    decoder.__class__ = _mixed(RowInvariantDecoder, decoder.__class__)
    return installation


def uncovered(model: nn.Module) -> tuple[str, ...]:
    """What a model has that the row-invariant layers do not cover, in words; empty for a model they can serve.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...                      vocab_size=11, attention_dropout=0.1)
        >>> uncovered(LlamaForCausalLM(config))
        ('attention dropout of 0.1',)
    """
    decoder: Any = backbone(model)
    config = decoder.config.get_text_config()
    if (
        config.model_type not in FAMILIES
        or f".{config.model_type.removesuffix('_text')}." not in type(decoder).__module__
    ):
        return (f"the architecture {config.model_type}",)
    found = []
    if getattr(config, "attention_dropout", 0.0):
        found.append(f"attention dropout of {config.attention_dropout}")
    for name in ("resid_pdrop", "embd_pdrop"):
        if getattr(config, name, 0.0) and config.model_type == "phi3":
            found.append(f"dropout {name} of {getattr(config, name)}")
    if _activation(config) not in _ACTIVATIONS:
        found.append(f"the activation {_activation(config)}")
    if getattr(config, "use_bidirectional_attention", False):
        found.append("attention in both directions")
    rotary = decoder.rotary_emb
    ropes = "longrope" if isinstance(rotary, LongRotary) else rotary.rope_type
    for rope in sorted(set(ropes.values() if isinstance(ropes, dict) else [ropes])):
        if rope not in _FIXED_ROPE:
            found.append(f"positions scaled by {rope}, which depends on the longest sequence")
    kinds = {kind for kind in getattr(config, "layer_types", None) or () if kind not in _LAYER_TYPES}
    found.extend(f"layers of the kind {kind}" for kind in sorted(kinds))
    found.extend(_uncovered_modules(decoder))
    return tuple(dict.fromkeys(found))


_LAYER_TYPES = ("full_attention", "sliding_attention")


def _uncovered_modules(decoder: Any) -> list[str]:
    found = []
    dtypes = set()
    for layer in decoder.layers:
        modules = [*_modules(layer.self_attn, _QKV), layer.self_attn.o_proj]
        modules += [*_modules(layer.mlp, _GATE_UP), layer.mlp.down_proj]
        for module in modules:
            linear = module.get_base_layer() if hasattr(module, "base_layer") else module
            if type(linear) is not nn.Linear:
                found.append(f"linear layers of the class {type(linear).__name__}")
            elif not linear.weight.is_floating_point() or linear.weight.dtype == torch.float64:
                found.append(f"weights in {linear.weight.dtype}")
            else:
                dtypes.add(linear.weight.dtype)
    for module in decoder.modules():
        if any(getattr(each, "p", 0.0) > 0 for each in getattr(module, "lora_dropout", {}).values()):
            found.append("dropout in an adapter")
        if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
            found.append("modules of the decoder that are trained whole beside adapters")
        if type(module).__name__.endswith("RMSNorm"):
            dtypes.add(module.weight.dtype)
    if len(dtypes) > 1:
        found.append("weights of several dtypes: " + ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes)))
    return found


def _form(decoder: Any, layer: Any, config: Any) -> AttentionForm:
    attention = layer.self_attn
    kind = (getattr(config, "layer_types", None) or ["full_attention"] * (attention.layer_idx + 1))[attention.layer_idx]
    by_kind = isinstance(decoder.rotary_emb.rope_type, dict)
    parameters = config.rope_parameters[kind] if by_kind else config.rope_parameters
    whole = config.model_type in ("mistral", "phi3")
    return AttentionForm(
        heads=Heads(
            config.num_attention_heads,
            config.num_key_value_heads,
            attention.head_dim,
            int(attention.head_dim * (parameters.get("partial_rotary_factor") or 1.0)),
        ),
        scale=attention.scaling,
        window=getattr(config if whole else attention, "sliding_window", None),
        softcap=config.attn_logit_softcapping if config.model_type == "gemma2" else None,
        rope=kind if by_kind else "",
    )


def _activation(config: Any) -> str:
    return getattr(config, "hidden_activation", None) or config.hidden_act


def _modules(owner: Any, names: Sequence[tuple[str, ...]]) -> list[Any]:
    """The submodules of the first tuple of names that the owner has."""
    modules = owner._modules
    return next([modules[name] for name in group] for group in names if group[0] in modules)


def _linear(module: Any) -> nn.Linear:
    return module.get_base_layer() if hasattr(module, "base_layer") else module


def _projection(module: Any) -> Projection:
    if type(module) is nn.Linear:  # seven a layer, and for an attribute nn.Module looks through three dictionaries
        parameters = module._parameters
        return Projection(cast(Tensor, parameters["weight"]), parameters["bias"])
    base, lora = _split_lora(module)
    if lora is None:
        return Projection(base.weight, base.bias)
    return Projection(base.weight, base.bias, *lora)


def _project(x: Tensor, projections: list[Projection], columns: tuple[int, ...]) -> tuple[Tensor, ...]:
    return project(x, projections, columns if len(projections) == 1 else None)


def _lay_adapters_end_to_end(modules: Sequence[Any]) -> None:
    """The factors of each LoRA adapter that all of these modules carry."""
    for name in getattr(modules[0], "lora_A", {}):
        for factors in ([getattr(module, factor, {}) for module in modules] for factor in ("lora_A", "lora_B")):
            weights = [factor[name].weight for factor in factors if name in factor]
            if len(weights) == len(modules) and len({(w.shape[1], w.dtype, w.device) for w in weights}) == 1:
                lay_end_to_end(weights)


def _epsilon(module: Any) -> float:
    fields = vars(module)
    return float(fields["variance_epsilon"] if "variance_epsilon" in fields else fields["eps"])


def _add_and_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, gemma: bool
) -> tuple[Tensor, Tensor]:
    """(residual + delta, its norm)."""
    return apply(_Norm, residual, delta, weight, eps, gemma)


def _norm_and_add(residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual + norm(delta), as Gemma has it."""
    return apply(_NormAfter, residual, delta, weight, eps)


@cache
def _mixed(mixin: type, original: Any) -> type:
    """One class for all layers: Python's caches are by class."""
    return type(f"RowInvariant{original.__name__}", (mixin, original), {"__module__": mixin.__module__})


def _check_dtype(weight: Tensor) -> None:
    device = weight.device.type
    if weight.dtype == torch.float32 and torch.is_autocast_enabled(device):
        raise UnavailableError(
            needed="weights in the dtype that the layers compute in",
            given=f"float32 weights under autocast to {torch.get_autocast_dtype(device)}",
            remedy="Load the model in bfloat16, or remove the row-invariant layers.",
        )


def _is_ours(kind: type) -> bool:
    return bool(kind.__bases__) and kind.__bases__[0] in (RowInvariantDecoder, RowInvariantLayer)


def _embedded(layer: nn.Module, ids: Tensor) -> Tensor:
    if type(layer) is nn.Embedding and layer.max_norm is None and not torch.is_grad_enabled():
        return layer.weight[ids]  # one kernel for any number of rows; that of the layer is slow for a few
    if type(layer) is nn.Embedding and layer.padding_idx is None and sums_in_float32(layer.weight):
        return _Embedded.apply(layer.weight, ids)  # type: ignore[no-untyped-call, no-any-return]
    return cast(Tensor, layer(ids))


class _Embedded(torch.autograd.Function):
    """Rows of a weight that sums its gradient in float32."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight
        return weight.detach()[ids]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        refuse_twice()
        add_rows(ctx.weight, grad, *ctx.saved_tensors)
        return None, None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, gemma: bool
    ) -> tuple[Tensor, Tensor]:
        total, out = norm(x, weight, eps, delta=delta, gemma=gemma)
        assert out is not None
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.gemma, ctx.weight_dtype = eps, gemma, gradient_dtype(weight)
        if recipes_are_kept():
            kept, scale = total.detach(), weight.detach()
            can_be_made_again(out, lambda: cast(Tensor, norm(kept, scale, eps, gemma=gemma)[1]))
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor | None, grad_out: Tensor | None) -> tuple[Any, ...]:
        refuse_twice()
        total, weight = ctx.saved_tensors
        grad, grad_weight = grad_total, None
        if grad_out is not None:
            grad, grad_weight = norm_backward(
                total, weight, ctx.eps, grad_out.contiguous(), grad_total,
                gemma=ctx.gemma, weight_dtype=ctx.weight_dtype if ctx.needs_input_grad[2] else None,
            )  # fmt: skip
        return grad, grad if ctx.needs_input_grad[1] else None, grad_weight, None, None


class _NormAfter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(delta, weight)
        ctx.eps, ctx.weight_dtype = eps, gradient_dtype(weight)
        return norm(x, weight, eps, delta=delta, gemma=True, after=True)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        refuse_twice()
        delta, weight = ctx.saved_tensors
        weight_dtype = ctx.weight_dtype if ctx.needs_input_grad[2] else None
        grad_delta, grad_weight = norm_backward(
            delta, weight, ctx.eps, grad.contiguous(), None, gemma=True, weight_dtype=weight_dtype
        )
        return grad, grad_delta, grad_weight, None


class _Once:
    """Several results of one call, made when the first of them is asked for and given away one after the other."""

    def __init__(self, make: Callable[[], tuple[Tensor, ...]]) -> None:
        self._make, self._made = make, dict[int, Tensor]()

    def part(self, number: int) -> Tensor:
        """The result of this number, to be asked for once a backward pass."""
        if number not in self._made:
            self._made = dict(enumerate(self._make()))
        return self._made.pop(number)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, query_norm: Tensor | None, key_norm: Tensor | None,
        options: tuple[float, bool], heads: Heads, position: Tensor, cos: Tensor, sin: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        norms = None if query_norm is None or key_norm is None else HeadNorms(query_norm, key_norm, *options)
        raw = () if norms is None else (query, key, query_norm, key_norm)
        ctx.save_for_backward(position, cos, sin, *raw)
        ctx.heads, ctx.options = heads, options
        ctx.norm_dtypes = None if norms is None else (gradient_dtype(norms.query), gradient_dtype(norms.key))
        turned = rotate(query, key, value, heads, position, cos, sin, norms)
        if norms is not None and recipes_are_kept():  # norms keep queries and keys as they were
            raw_query, raw_key, raw_value = query.detach(), key.detach(), value.detach()
            again = _Once(partial(rotate, raw_query, raw_key, raw_value, heads, position, cos, sin, norms))
            for number, out in enumerate(turned):
                can_be_made_again(out, partial(again.part, number))
        return turned

    @staticmethod
    def backward(ctx: Any, grad_query: Tensor, grad_key: Tensor, grad_value: Tensor) -> tuple[Any, ...]:
        refuse_twice()
        position, cos, sin, *raw = ctx.saved_tensors
        heads = ctx.heads
        grads = [grad.contiguous() for grad in (grad_query, grad_key, grad_value)]
        query, key = raw[:2] if raw else (grads[0].flatten(1), grads[1].flatten(1))
        norms = HeadNorms(*raw[2:], *ctx.options) if raw else None
        grad, grad_query_norm, grad_key_norm = rotate_backward(
            query, key, heads, position, cos, sin, norms, *grads,
            norm_dtypes=ctx.norm_dtypes if any(ctx.needs_input_grad[3:5]) else None,
        )  # fmt: skip
        columns = (heads.query * heads.width, heads.key * heads.width, heads.key * heads.width)
        return *grad.split(columns, 1), grad_query_norm, grad_key_norm, *(None,) * 5  # type: ignore[no-untyped-call]


class _HeadsAsRows(torch.autograd.Function):
    """[T, H, E] as [T, H * E]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.flatten(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.view(ctx.shape)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.gelu = gelu
        out = gated(gate, up, gelu=gelu)
        if recipes_are_kept():
            kept_gate, kept_up = gate.detach(), up.detach()
            can_be_made_again(out, lambda: gated(kept_gate, kept_up, gelu=gelu))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        refuse_twice()
        gate, up = ctx.saved_tensors
        return *gated_backward(gate, up, grad.contiguous(), gelu=ctx.gelu), None

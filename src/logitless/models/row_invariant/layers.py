"""Row-invariant layers for decoders of transformers: a token is bitwise the same alone, in any packed row, and decoded.

``install_row_invariant`` replaces a model's decoder and its layers by modules of this file (``print(model)`` shows
them). They hold the same submodules, so that parameters, their names and the checkpoint do not change. Packed rows run
through products, norms, rotary positions, gate and attention with a fixed order of sums (docs/bits.md), rounded as in
transformers; anything else (``model.generate``) runs as before.

Needs Triton. Not supported: dropout, quantized weights, positions whose scaling depends on the longest sequence, and
families that ``coverage`` does not list. Such a model is not changed, and the report says why.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

from logitless.distributed.layer_shards import LayerShards
from logitless.errors import UnavailableError
from logitless.graph_capture import refuse_unwritten
from logitless.models.attention import AttentionLayout, PrefixAttention
from logitless.models.kernels.rotary import HeadNorms, Heads, PositionTable
from logitless.models.kernels.window import Chunks, Window
from logitless.models.lm_head import _split_lora, backbone, causal_lm
from logitless.models.one_node import apply, one_node
from logitless.models.packed_layout import PackedLayout
from logitless.models.row_invariant.adapters import AdapterStack, RowAdapters, SpanAdapters
from logitless.models.row_invariant.coverage import (
    ACTIVATIONS,
    GATE_UP,
    GATED_ATTENTION,
    ONE_PLUS,
    ROUNDED_ONCE,
    activation_of,
    delta_net_of,
    dense_mlp,
    gates_of_shared,
    inputs_of,
    linear_of,
    mlp_of,
    modules_of,
    output_of,
    uncovered,
)
from logitless.models.row_invariant.delta_net import (
    Convolved,
    DecayAndBeta,
    DeltaForm,
    DeltaRows,
    DeltaRule,
    DeltaWeights,
    GatedNorm,
    HeadsApart,
)
from logitless.models.row_invariant.experts import (
    Mixed,
    MixtureForm,
    MixtureWeights,
    call_hooks,
    mixture,
    mixture_form,
    router_of,
)
from logitless.models.row_invariant.functions import (
    Gate,
    GateOfToken,
    HeadsAsRows,
    QueryAndGate,
    Rotary,
    Sinks,
    add_and_norm,
    embedded,
    norm_and_add,
)
from logitless.models.row_invariant.layer_graphs import LayerGraphs, PaddedLayout
from logitless.models.row_invariant.linear import Projection, lay_end_to_end, project, project_gated

_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip


@dataclass(frozen=True)
class AttentionForm:
    """The configuration of a layer's attention.

    Args:
        heads: counts and widths.
        scale: factor of query-key products.
        window: tokens a token attends to, itself included, or chunks; None for all.
        softcap: of the scaled products.
        rope: name of the layer's table of positions.
        gated: whether the output is multiplied by a gate.
        tuning: ``(floor_scale, attn_scale)`` of queries multiplied by
            ``1 + attn_scale * log1p(floor((position + 1) / floor_scale))``; None for none.
        norm_eps: of norms of query and key heads without weights; None for none.
    """

    heads: Heads
    scale: float
    window: Window | None
    softcap: float | None
    rope: str
    gated: bool = False
    tuning: tuple[float, float] | None = None
    norm_eps: float | None = None


@runtime_checkable
class Rows(Protocol):
    """The positions of a layer's rows and what they attend to: a packed row, or a step of decoding.

    ``adapters`` are the rows' own; None for those of the modules.
    """

    @property
    def adapters(self) -> RowAdapters | None: ...

    def attend(
        self, index: int, form: AttentionForm, query: Tensor, key: Tensor, value: Tensor, norms: HeadNorms | None,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Attention [T, H * E] in layer ``index``."""
        ...

    def continue_states(
        self, index: int, form: DeltaForm, weights: DeltaWeights, mixed: Tensor, b: Tensor, a: Tensor
    ) -> Tensor:
        """Convolution and gated delta rule [T, HV, V] in layer ``index``."""
        ...


@dataclass(frozen=True)
class PackedRows:
    """Sequences end to end, as in training.

    Args:
        layout: of the attention.
        position: [T] in each token's sequence.
        tables: cosines and sines by name.
        adapters: of the rows; None: those of the modules.
    """

    layout: AttentionLayout | PaddedLayout
    position: Int[Tensor, "T"]
    tables: "RopeTables"
    adapters: RowAdapters | None = None

    def attend(
        self,
        index: int,  # noqa: ARG002 every layer reads the same layout
        form: AttentionForm,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        norms: HeadNorms | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Rotary positions, then attention within the layout."""
        table = self.tables.of(form.rope)
        norms = table.norms or norms
        weights = (None, None) if norms is None else (norms.query, norms.key)
        turned = apply(Rotary, query, key, value, *weights, norms, form.heads, self.position, table)
        out, log_sum_exp = apply(PrefixAttention, *turned, self.layout, form.scale, form.window, form.softcap)
        return apply(HeadsAsRows, out) if sinks is None else apply(Sinks, out, log_sum_exp, sinks)

    def continue_states(
        self,
        index: int,  # noqa: ARG002
        form: DeltaForm,
        weights: DeltaWeights,
        mixed: Tensor,
        b: Tensor,
        a: Tensor,
    ) -> Tensor:
        """Convolution and rule, from zeros at the start of each sequence."""
        assert isinstance(self.layout, AttentionLayout), "layers with states have no graphs"
        rows = DeltaRows.of(self.layout, form.taps)
        heads = apply(Convolved, mixed, weights.convolution, rows, form)
        log_decay, beta = apply(DecayAndBeta, b, a, weights.a_log, weights.dt_bias, rows)
        return cast(Tensor, apply(DeltaRule, *heads, log_decay, beta, rows.chunks, rows.own))


class RopeTables:
    """Cosines and sines by position, computed by the model's rotary embedding and cached."""

    def __init__(self, decoder: Any, forms: Sequence[AttentionForm]) -> None:
        self._decoder, self._forms = decoder, {form.rope: form for form in forms}
        self._position = torch.Size([3, 1, -1]) if hasattr(decoder.rotary_emb, "mrope_section") else torch.Size([1, -1])
        self._tables: dict[str, PositionTable] = {}
        self._key: tuple[Any, ...] = ()
        self._length = 0

    def reach(self, length: int) -> "RopeTables":
        """These tables, extended to at least ``length`` positions, in the decoder's dtype and on its device."""
        weight = self._decoder.norm.weight
        if self._length < length or self._key != (weight.dtype, weight.device):
            refuse_unwritten("the table of rotary positions", weight.device)
            reach = max(256, 1 << (length - 1).bit_length())
            self._key, self._length = (weight.dtype, weight.device), reach
            position = torch.arange(reach, device=weight.device)
            like = torch.empty(1, 1, 1, dtype=weight.dtype, device=weight.device)
            with torch.no_grad():
                self._tables = {name: self._table(form, position, like) for name, form in self._forms.items()}
        return self

    def _table(self, form: AttentionForm, position: Int[Tensor, "P"], like: Tensor) -> PositionTable:
        norms = None
        if form.norm_eps is not None:
            ones = like.new_ones(form.heads.width)
            norms = HeadNorms(ones, ones, form.norm_eps)
        if form.heads.rotary == 0:
            factor = None
            if form.tuning is not None:
                floor_scale, attn_scale = form.tuning
                factor = torch.log1p(torch.floor((position.float() + 1.0) / floor_scale)) * attn_scale + 1.0
            return PositionTable(None, None, factor, norms)
        kind = () if form.rope == "" else (form.rope,)
        found = self._decoder.rotary_emb(like, position.expand(self._position), *kind)
        if form.heads.interleaved:  # complex numbers, one for each pair
            cos, sin = (x[0].repeat_interleave(2, 1) for x in (found.real, found.imag))
            return PositionTable(cos, sin, norms=norms)
        cos, sin = found
        halves = form.heads.rotary // cos.shape[2]  # gpt-oss computes one half: the other is the same
        return PositionTable(cos[0].repeat(1, halves), sin[0].repeat(1, halves), norms=norms)

    def of(self, name: str) -> PositionTable:
        """Cosines and sines for layers with this name."""
        return self._tables[name]

    @property
    def all(self) -> list[Tensor]:
        """Every tensor of the tables."""
        return [each for table in self._tables.values() for each in table.tensors]

    @property
    def addresses(self) -> tuple[int, ...]:
        """Addresses of the tables in memory."""
        return tuple(each.data_ptr() for each in self.all)


class RowInvariantDecoder(nn.Module):
    """Replaces a decoder; it holds the decoder's embedding, layers and norm under the same names."""

    config: Any
    embed_tokens: Any
    layers: Any
    norm: Any

    def __init__(self, original: nn.Module, installation: "Installation") -> None:
        _hold(self, original)
        self.row_invariant = installation

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
        """Hidden states of packed rows or of a step of decoding; any other call runs transformers' forward.

        ``num_layers`` runs the first few layers only, which is enough to compile their kernels.
        """
        if rows is None and packed_layout is None:
            return super().forward(input_ids, attention_mask, position_ids, *args, **kwargs)
        assert input_ids is not None
        _check_dtype(self.norm.weight)
        if rows is None:
            assert packed_layout is not None
            assert position_ids is not None
            rows = self.row_invariant.packed_rows(packed_layout, position_ids.flatten())
        device = input_ids.device
        with torch.autocast(device.type, enabled=False), torch.cuda.device(device if device.type == "cuda" else -1):
            given, hidden = embedded(self.embed_tokens, input_ids.flatten()), None
            if isinstance(rows, PackedRows) and num_layers is None and self._keeps_all():
                hidden = self.row_invariant.through_a_graph(rows, given)
            if hidden is None:
                hidden = self.run_layers(given, rows, num_layers)
        return BaseModelOutputWithPast(last_hidden_state=hidden.view(*input_ids.shape, -1))

    def run_layers(self, hidden: Tensor, rows: Rows, num_layers: int | None = None) -> Tensor:
        """Hidden states [T, D] after the layers and the last norm."""
        residual, delta = hidden, None
        shards = self.row_invariant.shards if num_layers is None else None  # a few layers run to be compiled alone
        with nullcontext(_at_hand) if shards is None else shards.a_pass() as ready:
            for number, layer in enumerate(self.layers[: self.config.num_hidden_layers][:num_layers]):
                ready(number)
                residual, delta = layer(residual, delta, rows=rows)
        rounding = self.row_invariant.gemma, self.row_invariant.once
        return add_and_norm(residual, delta, self.norm.weight, _epsilon(self.norm), *rounding)[1]

    def _keeps_all(self) -> bool:
        """Whether no layer is recomputed in the backward pass."""
        return not self.training or not any(layer.gradient_checkpointing for layer in self.layers)


class RowInvariantLayer(GradientCheckpointingLayer):
    """Replaces a decoder layer; it holds the layer's norms, attention and MLP under the same names.

    A layer takes and returns the residual stream and a delta that the next norm's kernel adds to it. For autograd it is
    one node.

    Args:
        original: transformers' layer.
        form: of its attention or gated delta net.
        mixture: the form of its experts; None for a dense layer.
        gemma: whether norms multiply by ``1 + weight``.
        once: whether norms round only after multiplying with their weight.
        gelu: whether the activation is GELU, else SiLU.
    """

    def __init__(
        self, original: nn.Module, form: AttentionForm | DeltaForm, mixture: MixtureForm | None, *, gemma: bool,
        once: bool, gelu: bool,
    ) -> None:  # fmt: skip
        _hold(self, original)
        self.row_invariant_form, self.row_invariant_mixture = form, mixture
        self.row_invariant_gemma, self.row_invariant_once, self.row_invariant_gelu = gemma, once, gelu

    @property
    def row_invariant_kind(self) -> tuple[AttentionForm | DeltaForm, MixtureForm | None]:
        """Equal for layers that launch the same kernels."""
        return self.row_invariant_form, self.row_invariant_mixture

    def forward(self, hidden_states: Tensor, delta: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """The next layer's (residual, delta)."""
        rows: Rows | None = kwargs.pop("rows", None)
        if rows is None:
            if delta is not None:
                args = (delta, *args)
            return super().forward(hidden_states, *args, **kwargs)
        weights = _LayerWeights.of(self, rows.adapters)
        given = [hidden_states, *([] if delta is None else [delta])]
        made = one_node(partial(self._rows, rows, weights), given, weights.tensors)
        if weights.mixture is not None:  # outside of the node, so that what its router says has a gradient
            call_hooks(router_of(mlp_of(self)), Mixed(*made[1:]))
        return made[:2] if len(made) > 1 else (*made, None)

    def _rows(
        self, rows: Rows, weights: "_LayerWeights", residual: Tensor, delta: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """(residual, delta) of the next layer; with experts (residual, *Mixed); without a delta the residual alone."""
        norms, eps, gemma, once = weights.norms, weights.eps, self.row_invariant_gemma, self.row_invariant_once
        residual, x = add_and_norm(residual, delta, norms[0], eps[0], gemma, once)
        mix = self._delta_net if isinstance(self.row_invariant_form, DeltaForm) else self._attention
        delta = mix(x, rows, weights)
        if len(norms) == 4:
            residual = norm_and_add(residual, delta, norms[1], eps[1])
            residual, x = add_and_norm(residual, None, norms[2], eps[2], gemma)
            return (norm_and_add(residual, self._mlp(x, weights)[0], norms[3], eps[3]),)
        residual, x = add_and_norm(residual, delta, norms[1], eps[1], gemma, once)
        return residual, *self._mlp(x, weights)

    def _attention(self, x: Tensor, rows: Rows, weights: "_LayerWeights") -> Tensor:
        form = cast(AttentionForm, self.row_invariant_form)
        heads, gate = form.heads, None
        query, key, value = _project(x, weights.inputs, (heads.query * heads.width, *[heads.key * heads.width] * 2))
        if form.gated:
            query, gate = apply(QueryAndGate, query, heads.query)
        attended = rows.attend(weights.index, form, query, key, value, weights.head_norms, weights.sinks)
        if gate is not None:
            attended = apply(Gate, gate, attended, False, True)
        return project(attended, [weights.out])[0]

    def _delta_net(self, x: Tensor, rows: Rows, weights: "_LayerWeights") -> Tensor:
        form, delta = cast(DeltaForm, self.row_invariant_form), weights.delta
        assert delta is not None
        made = project(x, weights.inputs)
        mixed, gate, b, a = made if len(made) == 4 else apply(HeadsApart, *made, form)
        out = rows.continue_states(weights.index, form, delta, mixed, b, a)
        return project(apply(GatedNorm, out, gate, delta.norm, form.eps), [weights.out])[0]

    def _mlp(self, x: Tensor, weights: "_LayerWeights") -> tuple[Tensor, ...]:
        dense = None if weights.down is None else self._dense(x, weights.gate_up, weights.down)
        if weights.shared_gate and dense is not None:
            dense = apply(GateOfToken, *project(x, weights.shared_gate), dense)
        if weights.mixture is not None:
            return mixture(x, weights.mixture, dense)
        assert dense is not None
        return (dense,)

    def _dense(self, x: Tensor, gate_up: list[Projection], down: Projection) -> Tensor:
        width = down.weight.shape[1]
        product = project_gated(x, gate_up, gelu=self.row_invariant_gelu)
        if product is not None:
            return project(product, [down])[0]
        gate, up = _project(x, gate_up, (width, width))
        return project(apply(Gate, gate, up, self.row_invariant_gelu), [down])[0]


@dataclass(frozen=True)
class _LayerWeights:
    """A layer's weights, read from its modules at each call, because adapters may be added or removed.

    Args:
        index: of the layer.
        norms, eps: in order of use: two, or Gemma's four.
        head_norms: of queries and keys.
        sinks: [H] of attention.
        delta: of a gated delta net.
        inputs, gate_up: one or several projections; no ``gate_up`` where all experts are chosen by the router.
        out, down: last projections of attention or delta net, and MLP.
        shared_gate: whose sigmoid shared experts are multiplied by, if there is one.
        mixture: the experts of a mixture, beside which ``gate_up`` and ``down`` are its shared experts.
    """

    index: int
    norms: list[Tensor]
    eps: list[float]
    head_norms: HeadNorms | None
    sinks: Tensor | None
    delta: DeltaWeights | None
    inputs: list[Projection]
    out: Projection
    gate_up: list[Projection]
    down: Projection | None
    shared_gate: list[Projection]
    mixture: MixtureWeights | None

    @classmethod
    def of(cls, layer: Any, adapters: RowAdapters | None = None) -> "_LayerWeights":
        maps = _projections if adapters is None else adapters.projections
        mixer, mlp, form = delta_net_of(layer), mlp_of(layer), layer.row_invariant_mixture
        dense = dense_mlp(mlp)
        attention = layer.self_attn if mixer is None else mixer
        norms = [layer._modules[name] for name in _NORMS if name in layer._modules]
        head_norms = None
        if "q_norm" in attention._modules:
            query, key = attention.q_norm, attention.k_norm
            head_norms = HeadNorms(query.weight, key.weight, _epsilon(query), layer.row_invariant_gemma)
        return cls(
            attention.layer_idx,
            [norm.weight for norm in norms],
            [_epsilon(norm) for norm in norms],
            head_norms,
            attention._parameters.get("sinks"),
            None if mixer is None else DeltaWeights.of(mixer),
            maps(inputs_of(layer)),
            maps([output_of(layer)])[0],
            [] if dense is None else maps(modules_of(dense, GATE_UP)),
            None if dense is None else maps([dense.down_proj])[0],
            [_projection(module) for module in gates_of_shared(mlp)],
            None if form is None else MixtureWeights.of(mlp, form),
        )

    @property
    def tensors(self) -> list[Tensor]:
        of_heads = [] if self.head_norms is None else [self.head_norms.query, self.head_norms.key]
        of_heads += [] if self.sinks is None else [self.sinks]
        of_heads += self.delta or []
        projections = [*self.inputs, self.out, *self.gate_up, *([] if self.down is None else [self.down])]
        projections += self.shared_gate
        of_experts = [] if self.mixture is None else self.mixture.tensors
        return [*self.norms, *of_heads, *(t for each in projections for t in each.tensors), *of_experts]


@dataclass
class Installation:
    """The result of ``install_row_invariant``.

    Args:
        model: the caller's.
        missing: what is not supported in the model, which was not changed unless this is empty.
        gemma, once: see ``RowInvariantLayer``.
        tables: of positions.
        originals: the layers, and the decoder, that were replaced.
        graphs: of ``graph_short_rows``.
        adapters: of the rows of packed passes, while ``adapted``.
        stack: of adapters for decoding; None for those of the modules.
        shards: of the layers, for sampling; None if they are whole.
    """

    model: nn.Module
    missing: tuple[str, ...]
    gemma: bool = False
    once: bool = False
    tables: RopeTables | None = None
    originals: list[nn.Module] = field(default_factory=list)
    graphs: LayerGraphs | None = None
    adapters: SpanAdapters | None = None
    stack: AdapterStack | None = None
    shards: LayerShards | None = None

    @property
    def exact(self) -> bool:
        """Whether this model is row-invariant."""
        return not self.missing

    def packed_rows(self, layout: PackedLayout | AttentionLayout, position: Int[Tensor, "T"]) -> PackedRows:
        if isinstance(layout, PackedLayout):
            longest = layout.max_length
            layout = layout.attention
        else:
            longest = layout.longest
        if self.adapters is not None:
            layout.divide(self.adapters.lengths)
        return PackedRows(layout, position, self.reach(longest), self.adapters)

    @contextmanager
    def adapted(self, adapters: SpanAdapters) -> Iterator[None]:
        """Inside, packed passes use the adapters of these spans in place of the modules'."""
        self.adapters = adapters
        try:
            yield
        finally:
            self.adapters = None

    def reach(self, length: int) -> RopeTables:
        assert self.tables is not None, "installed"
        return self.tables.reach(length)

    def graph_short_rows(self) -> None:
        """Use CUDA graphs for packed rows with gradients if those are faster (``layer_graphs``).

        A parameter's ``grad`` is then a tensor that the next backward adds to in place: copy it to keep its value.
        """
        decoder: Any = backbone(self.model)
        layers = decoder.layers[: decoder.config.num_hidden_layers]
        if any(layer.row_invariant_mixture is not None for layer in layers):
            return  # padding rows would be counted among those that the routers send to experts
        if any(isinstance(layer.row_invariant_form, DeltaForm) for layer in layers):
            return  # a graph's launches are fixed, and those of gated delta nets depend on the tree of prompts
        forms = dict.fromkeys(layer.row_invariant_form for layer in layers)

        def run(hidden: Tensor, layout: PaddedLayout) -> Tensor:
            assert self.tables is not None, "installed"
            return cast(Tensor, decoder.run_layers(hidden, PackedRows(layout, layout.position, self.tables)))

        def tensors() -> list[Tensor]:
            weights = [_LayerWeights.of(layer).tensors for layer in layers]
            return [decoder.norm.weight, *(tensor for each in weights for tensor in each)]

        self.graphs = LayerGraphs(run, tensors, list(forms), _kept_bytes(decoder))

    def through_a_graph(self, rows: PackedRows, hidden: Float[Tensor, "T D"]) -> Tensor | None:
        """Hidden states [T, D] after the layers; None if no graph can be used."""
        if self.graphs is None or not isinstance(rows.layout, AttentionLayout):
            return None
        return self.graphs(rows.layout, hidden, rows.tables.addresses)

    def remove(self) -> None:
        """Restore the model's own decoder and layers; parameters are not moved."""
        if self.tables is None:
            return
        inner, decoder = causal_lm(self.model), cast(Any, backbone(self.model))
        *layers, original = self.originals
        for number, layer in enumerate(layers):
            decoder.layers[number] = _given_back(decoder.layers[number], layer)
        setattr(inner, _name_of(decoder, inner), _given_back(decoder, original))
        self.tables, self.originals = None, []


def install_row_invariant(model: nn.Module) -> Installation:
    """Replace a loaded model's decoder layers by row-invariant ones.

    Weights of query, key and value, and of gate and up, become adjacent in memory, so that they are one product; every
    parameter stays the same object, under its name. The decoder and its layers are new modules: look them up again.
    Install before the model is sharded.

    Args:
        model: a transformers causal LM, PEFT-wrapped (LoRA, applied unmerged) or not; of one floating dtype.

    Returns:
        Whether the layers were installed, what prevented it, and ``remove``.

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
    gemma, once = config.model_type in ONE_PLUS, config.model_type in ROUNDED_ONCE
    forms = [_form(decoder, layer, config) for layer in decoder.layers]
    tables = RopeTables(decoder, [form for form in forms if isinstance(form, AttentionForm)])
    originals = [*decoder.layers, decoder]
    installation = Installation(model, (), gemma, once, tables, originals)
    for number, (layer, form) in enumerate(zip(decoder.layers, forms, strict=True)):
        mlp = mlp_of(layer)
        dense = dense_mlp(mlp)
        for modules in (inputs_of(layer), *([] if dense is None else [modules_of(dense, GATE_UP)])):
            linears = [linear_of(module) for module in modules]
            lay_end_to_end([linear.weight for linear in linears])
            if all(linear.bias is not None for linear in linears):
                lay_end_to_end([linear.bias for linear in linears])
            _lay_adapters_end_to_end(modules)
        kind = _of_family(RowInvariantLayer, layer.__class__)
        experts = None if router_of(mlp) is None else mixture_form(mlp, config)
        gelu = ACTIVATIONS[activation_of(config)]
        decoder.layers[number] = kind(layer, form, experts, gemma=gemma, once=once, gelu=gelu)
    inner, name = causal_lm(model), _name_of(decoder, causal_lm(model))
    setattr(inner, name, _of_family(RowInvariantDecoder, decoder.__class__)(decoder, installation))
    return installation


def _name_of(decoder: nn.Module, inner: nn.Module) -> str:
    return next(name for name, module in inner.named_children() if module is decoder)


def _form(decoder: Any, layer: Any, config: Any) -> AttentionForm | DeltaForm:
    if (mixer := delta_net_of(layer)) is not None:
        return DeltaForm.of(mixer)
    attention = layer.self_attn
    kind = (getattr(config, "layer_types", None) or ["full_attention"] * (attention.layer_idx + 1))[attention.layer_idx]
    by_kind = isinstance(decoder.rotary_emb.rope_type, dict)
    parameters = config.rope_parameters[kind] if by_kind else config.rope_parameters
    whole = config.model_type in ("mistral", "mixtral", "phi3")
    window: Window | None = getattr(config if whole else attention, "sliding_window", None)
    rotary = int(attention.head_dim * (parameters.get("partial_rotary_factor") or 1.0))
    turns, llama4 = getattr(attention, "use_rope", True), config.model_type == "llama4_text"
    return AttentionForm(
        heads=Heads(
            config.num_attention_heads, config.num_key_value_heads, attention.head_dim, rotary if turns else 0,
            interleaved=llama4,
        ),
        scale=attention.scaling,
        window=Chunks(config.attention_chunk_size) if kind == "chunked_attention" else window,
        softcap=config.attn_logit_softcapping if config.model_type == "gemma2" else None,
        rope=kind if by_kind else "" if turns else "none",
        gated=config.model_type in GATED_ATTENTION,
        tuning=(attention.floor_scale, attention.attn_scale) if _is_tuned(attention) else None,
        norm_eps=attention.qk_norm.eps if "qk_norm" in attention._modules else None,
    )  # fmt: skip


def _is_tuned(attention: Any) -> bool:
    """Whether queries are scaled by a function of their position."""
    return getattr(attention, "attn_temperature_tuning", False) and not attention.use_rope


def _projections(modules: Sequence[Any]) -> list[Projection]:
    return [_projection(module) for module in modules]


def _projection(module: Any) -> Projection:
    if type(module) is nn.Linear:  # fast path: nn.Module looks attributes up in three dictionaries
        parameters = module._parameters
        return Projection(cast(Tensor, parameters["weight"]), parameters["bias"])
    base, lora = _split_lora(module)
    if lora is None:
        return Projection(base.weight, base.bias)
    return Projection(base.weight, base.bias, *lora)


def _project(x: Tensor, projections: list[Projection], columns: tuple[int, ...]) -> tuple[Tensor, ...]:
    return project(x, projections, columns if len(projections) == 1 else None)


def _lay_adapters_end_to_end(modules: Sequence[Any]) -> None:
    """Make the factors of each LoRA adapter that all of these modules have adjacent in memory."""
    for name in getattr(modules[0], "lora_A", {}):
        for factors in ([getattr(module, factor, {}) for module in modules] for factor in ("lora_A", "lora_B")):
            weights = [factor[name].weight for factor in factors if name in factor]
            if len(weights) == len(modules) and len({(w.shape[1], w.dtype, w.device) for w in weights}) == 1:
                lay_end_to_end(weights)


def _kept_bytes(decoder: Any) -> int:
    """Upper bound of a token's activations kept for the backward pass: inputs of norms, attention and MLPs."""
    total = 0
    for layer in decoder.layers:
        heads = layer.row_invariant_form.heads
        width = linear_of(mlp_of(layer).down_proj).weight.shape[1]
        outs = 2 if "sinks" in layer.self_attn._parameters else 1
        # before and after rotary, and out
        of_attention = (2 + outs) * heads.query * heads.width + 4 * heads.key * heads.width
        total += 6 * decoder.norm.weight.numel() + of_attention + 3 * width
    return total * int(decoder.norm.weight.itemsize)


def _at_hand(number: int) -> None:
    """Does nothing: stands in for gathering a layer whose weights are whole."""


def _epsilon(module: Any) -> float:
    fields = vars(module)
    return float(fields["variance_epsilon"] if "variance_epsilon" in fields else fields["eps"])


@cache
def _of_family(kind: type[nn.Module], family: type[nn.Module]) -> Any:
    """A subclass of both our module and the family's, which transformers looks for and whose ``forward`` serves its
    other calls. The same class for all layers, because Python caches attributes by class."""
    return type(f"RowInvariant{family.__name__}", (kind, family), {"__module__": kind.__module__})


def _hold(module: nn.Module, original: nn.Module) -> None:
    """Copy the original's attributes to a new module: the same submodules, parameters, buffers and hooks."""
    vars(module).update(vars(original))


def _given_back(module: nn.Module, original: nn.Module) -> nn.Module:
    """The original module, with the attributes that have changed since."""
    vars(original).update((name, value) for name, value in vars(module).items() if not name.startswith("row_invariant"))
    return original


def _check_dtype(weight: Tensor) -> None:
    device = weight.device.type
    if weight.dtype == torch.float32 and torch.is_autocast_enabled(device):
        raise UnavailableError(
            needed="weights in the dtype that the layers compute in",
            given=f"float32 weights under autocast to {torch.get_autocast_dtype(device)}",
            remedy="Load the model in bfloat16, or remove the row-invariant layers.",
        )

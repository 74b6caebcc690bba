"""A mixture of experts as one row-invariant function: router, choice, experts and their sum.

    y = sum_k weight_k * down_k(act(gate_k(x)) * up_k(x))  (+ shared experts),  k over the chosen experts

or, where weights scale the input (Llama 4), ``gate_k(weight_k * x)``, ``up_k(weight_k * x)`` and no weight in the sum.
Each is a kernel with a fixed order of sums (``kernels/route.py``, ``kernels/experts.py``), so a token has the same
router logits, experts and output alone, in any packed row, and decoded.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from logitless.float32_sums import add_product, float32_product, gradient_dtype, sums_in_float32
from logitless.models.kernels.experts import (
    NO_TERM,
    Act,
    LowRank,
    LowRankTerm,
    Slots,
    by_expert,
    combined,
    gated_products,
    gated_products_backward,
    grouped_product,
    low_rank_term,
    outer_products,
)
from logitless.models.kernels.route import Routing, Score, route, route_backward
from logitless.models.one_node import apply, gradients_wanted, refuse_twice
from logitless.models.row_invariant.linear import product

SCORES: dict[str, Score] = {
    "qwen3_moe": "softmax",
    "qwen3_next": "softmax",
    "qwen3_5_moe_text": "softmax",
    "olmoe": "softmax",
    "mixtral": "softmax",
    "glm4_moe": "sigmoid",
    "gpt_oss": "softmax of the chosen",
    "llama4_text": "sigmoid of the chosen",
}
"""How the routers of the supported mixtures score, by model type."""

_ROUTERS = ("gate", "router")


class Adapter(NamedTuple):
    """PEFT's factors for all experts of a weight [E, N, M].

    Args:
        a: [E * R, M].
        b: [N, R * E], experts innermost.
        scale: a number.
        swapped: PEFT takes the weight's input for its output, so that ``b @ a`` is transposed.
    """

    a: Tensor
    b: Tensor
    scale: float
    swapped: bool

    def of(self, num_experts: int, dtype: torch.dtype) -> LowRank:
        """The factors by expert."""
        a = self.a.to(dtype).view(num_experts, -1, self.a.shape[1])
        b = by_expert(self.b.to(dtype), num_experts)
        if self.swapped:
            a, b = (x.transpose(1, 2).contiguous() for x in (b, a))
        return LowRank(a, b, self.scale)


@dataclass(frozen=True)
class MixtureForm:
    """The configuration of a layer's mixture.

    Args:
        routing: how experts are chosen.
        act: activation between an expert's products.
        transposed: whether weights are stored [E, M, N].
        float32_router: whether router logits are float32, else in the layer's dtype.
        scales_input: whether routing weights scale the input of the chosen experts, else their output.
    """

    routing: Routing
    act: Act
    transposed: bool
    float32_router: bool
    scales_input: bool


@dataclass(frozen=True)
class MixtureWeights:
    """The weights of a layer's mixture, read from its modules at each call; all but router, gate_up and down may be
    None.

    ``router`` is [E, D]; ``router_bias`` and ``correction`` are [E]; ``gate_up_bias`` and ``down_bias`` are [E, N].
    """

    form: MixtureForm
    router: Tensor
    router_bias: Tensor | None
    correction: Tensor | None
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    gate_up_adapter: Adapter | None
    down_adapter: Adapter | None

    @classmethod
    def of(cls, mlp: Any, form: MixtureForm) -> "MixtureWeights":
        """From transformers' module, with or without PEFT's wrappers of its experts."""
        router = router_of(mlp)
        experts, adapters = experts_of(mlp, transposed=form.transposed)
        return cls(
            form,
            router.weight,
            getattr(router, "bias", None),
            getattr(router, "e_score_correction_bias", None),
            experts.gate_up_proj,
            experts.down_proj,
            getattr(experts, "gate_up_proj_bias", None),
            getattr(experts, "down_proj_bias", None),
            adapters.get("gate_up_proj"),
            adapters.get("down_proj"),
        )

    @property
    def parameters(self) -> tuple[Tensor | None, ...]:
        """Everything that may need a gradient, in the order of ``_Mixture``'s arguments."""
        none = None, None
        of_gate_up = none if self.gate_up_adapter is None else self.gate_up_adapter[:2]
        of_down = none if self.down_adapter is None else self.down_adapter[:2]
        biases = self.gate_up_bias, self.down_bias
        return (self.router, self.router_bias, self.gate_up, self.down, *biases, *of_gate_up, *of_down)

    def low_ranks(self, dtype: torch.dtype) -> list[LowRank | None]:
        """The adapters of both products, by expert."""
        adapters = self.gate_up_adapter, self.down_adapter
        return [None if adapter is None else adapter.of(len(self.router), dtype) for adapter in adapters]

    @property
    def tensors(self) -> list[Tensor]:
        """``parameters`` without None."""
        return [tensor for tensor in self.parameters if tensor is not None]


def router_of(mlp: Any) -> Any:
    """The router of a mixture; None for a dense MLP."""
    return next((mlp._modules[name] for name in _ROUTERS if name in mlp._modules and "experts" in mlp._modules), None)


def experts_of(mlp: Any, *, transposed: bool = False) -> tuple[Any, dict[str, Adapter]]:
    """The experts of a mixture without PEFT's wrappers, and their adapters by the name of the weight."""
    experts, adapters = mlp.experts, dict[str, Adapter]()
    for wrapper in _wrappers(mlp):
        experts = wrapper.base_layer
        for name in wrapper.active_adapters:
            if name in wrapper.lora_A and not wrapper.disable_adapters:
                a, b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
                swapped = transposed == wrapper._did_swap_in_out_features
                adapters[wrapper.parameter_name] = Adapter(a, b, wrapper.scaling[name], swapped)
    return experts, adapters


def _wrappers(mlp: Any) -> Iterator[Any]:
    """PEFT's wrappers of the experts, one a weight, the outermost first."""
    module = mlp.experts
    while hasattr(module, "base_layer"):
        yield module
        module = module.base_layer


def mixture_form(mlp: Any, config: Any) -> MixtureForm:
    """The form of a supported mixture.

    Example:
        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> config = MixtralConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...                        num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1, vocab_size=11)
        >>> mixture_form(MixtralForCausalLM(config).model.layers[0].mlp, config).routing
        Routing(experts_per_token=1, score='softmax', normalized=True, scale=1.0, groups=1, chosen_groups=1)
    """
    router, (experts, _) = router_of(mlp), experts_of(mlp)
    score = SCORES[config.model_type]
    routing = Routing(
        router.top_k,
        score,
        bool(getattr(router, "norm_topk_prob", True)),
        float(getattr(router, "routed_scaling_factor", 1.0)),
        int(getattr(router, "num_group", 1)),
        int(getattr(router, "topk_group", 1)),
    )
    gpt_oss, llama4 = config.model_type == "gpt_oss", config.model_type == "llama4_text"
    act = Act(interleaved=gpt_oss, limit=experts.limit, alpha=experts.alpha) if gpt_oss else Act()
    return MixtureForm(
        routing, act, transposed=gpt_oss or llama4, float32_router=score == "sigmoid", scales_input=llama4
    )


def uncovered_mixture(mlp: Any, config: Any) -> list[str]:
    """What is not supported in a mixture, in words."""
    if config.model_type not in SCORES:
        return [f"the experts of {config.model_type}"]
    found = []
    if getattr(config, "hidden_act", "silu") not in ("silu", "swish"):
        found.append(f"the activation {config.hidden_act} in experts")
    if getattr(config, "router_jitter_noise", 0.0):
        found.append("noise in the router's input")
    if any(len(wrapper.active_adapters) > 1 for wrapper in _wrappers(mlp)):
        found.append("several adapters of the experts")
    if any(hasattr(each, "base_layer") for each in router_of(mlp).modules()):
        found.append("an adapter of the router")
    return found


class Mixed(NamedTuple):
    """The result of a mixture.

    Args:
        out: [T, D].
        logits: [T, E] of the router.
        weights, chosen: [T, K] weights and indices of the chosen experts.
    """

    out: Tensor
    logits: Tensor
    weights: Tensor
    chosen: Tensor


def mixture(x: Tensor, weights: MixtureWeights, shared: Tensor | None = None) -> Mixed:
    """The output of a mixture, with the router's logits and choices.

    Gradient: to x, the router, weights, biases and adapters of the experts, and ``shared``; choices have none.

    Args:
        x: [T, D].
        weights: of the layer.
        shared: [T, D] the output of the shared experts, which every token passes.
    """
    return Mixed(*apply(_Mixture, x, shared, *weights.parameters, weights, gradients_wanted()))


_X, _SHARED, _ROUTER, _ROUTER_BIAS, _GATE_UP, _DOWN, _GATE_UP_BIAS, _DOWN_BIAS = range(8)
_GATE_UP_A, _GATE_UP_B, _DOWN_A, _DOWN_B = range(8, 12)
"""Places of the tensors among the arguments of ``_Mixture``."""
_NUM_ARGUMENTS = 14


class _Mixture(torch.autograd.Function):
    """``Mixed`` of (x, shared, ``MixtureWeights.parameters``, the same weights, whether gradients will be wanted)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shared: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        *parameters, given, differentiated = arguments
        form, num_experts = given.form, len(given.router)
        out_dtype = torch.float32 if form.float32_router else None
        logits = product(x, given.router, given.router_bias, out_dtype=out_dtype).contiguous()
        weights, chosen = route(logits, form.routing, given.correction)
        rows, of_rows = x, chosen
        shares: Tensor | None = weights.view(-1)
        if form.scales_input:
            rows, of_rows, shares = _scaled(x, weights), chosen.view(-1, 1), None
        slots = Slots.of(of_rows, num_experts)
        first, second = given.low_ranks(x.dtype)
        low = low_rank_term(rows, first, slots, of_tokens=True)
        hidden, both = gated_products(
            rows, _stored(given.gate_up, form), slots, form.act, bias=given.gate_up_bias, low=low,
            keeps_both=differentiated,
        )  # fmt: skip
        parts = grouped_product(
            hidden, _stored(given.down, form), slots, to_slots=True, bias=given.down_bias,
            low=low_rank_term(hidden, second, slots),
        )  # fmt: skip
        # the parameters too, so that autograd notices if one is changed before the backward
        ctx.save_for_backward(x, *parameters, logits, weights, chosen, both, low.rows)
        ctx.given, ctx.slots = given, slots
        return combined(parts, form.routing.experts_per_token, shares, shared), logits, weights, chosen

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        refuse_twice()
        x, *_, logits, weights, chosen, both, low_rows = ctx.saved_tensors
        given, slots, needed = ctx.given, ctx.slots, ctx.needs_input_grad
        of_out, of_logits, of_weights, _ = grads
        grad = torch.zeros_like(x) if of_out is None else of_out.contiguous()
        form = given.form
        first, second = given.low_ranks(x.dtype)
        tokens, out = weights.view(-1), _Gradients((None, None, *given.parameters), needed, slots)
        out.found[_SHARED] = grad if needed[_SHARED] else None
        rows, shares = x, None
        if form.scales_input:  # then each slot is a token of the products
            rows, grad = _scaled(x, weights), grad[:, None].expand(*weights.shape, -1).flatten(0, 1)
            tokens, shares = torch.ones_like(tokens), weights.to(x.dtype).float().view(-1)
        # the second product, and the activation
        back = _low_rank_back(grad, second, slots, of_tokens=True)
        grad_both, grad_weights, hidden = gated_products_backward(
            grad, tokens, _stored(given.down, form), both, slots, form.act,
            low=NO_TERM if second is None else LowRankTerm(back, second.a),
            keeps_hidden=bool(needed[_DOWN] or second is not None),
        )  # fmt: skip
        if hidden is not None:
            out.add(_DOWN, grad, hidden, transposed=form.transposed, a_of_tokens=True, weights=tokens)
        out.add_bias(_DOWN_BIAS, grad, a_of_tokens=True, weights=tokens)
        if second is not None and back is not None and hidden is not None:
            to_a, to_b = _places(_DOWN_A, given.down_adapter)
            out.add_factor(to_a, back, hidden, rank_first=True, weights=tokens)
            low_again = grouped_product(hidden, second.a, slots)
            out.add_factor(
                to_b, grad, low_again, rank_first=False, scale=second.scale, a_of_tokens=True, weights=tokens
            )
        # the first product
        out.add(_GATE_UP, grad_both, rows, transposed=form.transposed, b_of_tokens=True)
        out.add_bias(_GATE_UP_BIAS, grad_both)
        low_back = _low_rank_back(grad_both, first, slots)
        if first is not None and low_back is not None:
            to_a, to_b = _places(_GATE_UP_A, given.gate_up_adapter)
            out.add_factor(to_a, low_back, rows, rank_first=True, b_of_tokens=True)
            out.add_factor(to_b, grad_both, low_rows, rank_first=False, scale=first.scale)
        parts = None
        if needed[_X] or form.scales_input:
            parts = grouped_product(
                grad_both, _stored(given.gate_up, form).transpose(1, 2), slots, to_slots=True,
                low=NO_TERM if first is None else LowRankTerm(low_back, first.a.transpose(1, 2)),
            )  # fmt: skip
        # the router
        grad_weights = grad_weights.view_as(weights)
        if form.scales_input and parts is not None:
            by_token = parts.view(*weights.shape, -1) * x[:, None]
            grad_weights = by_token.sum(-1, dtype=torch.float32)
        elif given.down_bias is not None:
            of_bias = float32_product(grad, given.down_bias.to(grad.dtype).t())  # [T, E]
            grad_weights = grad_weights + of_bias.gather(1, chosen.long())
        grad_weights = grad_weights if of_weights is None else grad_weights + of_weights
        grad_logits = route_backward(logits, form.routing, weights, chosen, grad_weights)
        grad_logits = grad_logits if of_logits is None else grad_logits + of_logits  # of a load-balancing loss
        out.add_router(grad_logits, x)
        if parts is not None and needed[_X]:
            of_router = (grad_logits @ given.router.to(grad_logits.dtype)).to(x.dtype)
            out.found[_X] = combined(parts, form.routing.experts_per_token, shares, of_router)
        return tuple(out.found)


def _scaled(x: Tensor, weights: Tensor) -> Tensor:
    """The input [T * K, D] of the chosen experts, rounded as in transformers."""
    return (x[:, None] * weights.to(x.dtype)[..., None]).flatten(0, 1)


def _places(first: int, adapter: Adapter | None) -> tuple[int, int]:
    """The places of the gradients of a ``LowRank``'s factors: PEFT's a and b, or the other way round."""
    return (first + 1, first) if adapter is not None and adapter.swapped else (first, first + 1)


def _low_rank_back(grad: Tensor, adapter: LowRank | None, slots: Slots, *, of_tokens: bool = False) -> Tensor | None:
    """The gradient of an adapter's first product, from that of its output."""
    if adapter is None:
        return None
    return grouped_product(grad, adapter.b.transpose(1, 2), slots, of_tokens=of_tokens) * adapter.scale


class _Gradients:
    """Gradients of the arguments of ``_Mixture``, by place; each is computed only if it is needed."""

    def __init__(self, parameters: Sequence[Tensor | None], needed: Sequence[bool], slots: Slots) -> None:
        self.found: list[Tensor | None] = [None] * _NUM_ARGUMENTS
        self._parameters, self._needed, self._slots = parameters, needed, slots

    def add(self, place: int, a: Tensor, b: Tensor, *, transposed: bool = False, **options: Any) -> None:
        """Add the gradient of a weight of all experts; a float32 sum is added to in place."""
        parameter = self._parameters[place]
        if parameter is None or not self._needed[place]:
            return
        adds = sums_in_float32(parameter)
        before = parameter.grad if adds else None
        total = self._empty(place, *parameter.shape) if before is None else before
        target = total.transpose(1, 2) if transposed else total
        outer_products(a, b, self._slots, target, adds=before is not None, **options)
        if adds:
            parameter.grad = total
        else:
            self.found[place] = total

    def add_bias(self, place: int, rows: Tensor, **options: Any) -> None:
        """Add the gradient of a bias [E, N] of all experts: the sum of each expert's rows."""
        parameter = self._parameters[place]
        if parameter is None or not self._needed[place]:
            return
        total = self._empty(place, *parameter.shape, 1)
        outer_products(rows, rows.new_ones(self._slots.count, 1), self._slots, total, **options)
        self.found[place] = total[..., 0]

    def add_factor(self, place: int, a: Tensor, b: Tensor, *, rank_first: bool, **options: Any) -> None:
        """Add the gradient of an adapter's factor: [R, M] with ``rank_first``, else [N, R], by expert."""
        if not self._needed[place]:
            return
        rank, width = (a.shape[1], b.shape[1]) if rank_first else (b.shape[1], a.shape[1])
        num_experts = len(self._slots.begin) - 1
        if place in (_GATE_UP_A, _DOWN_A):
            total = self._empty(place, num_experts, rank, width)
            target, self.found[place] = total, total.flatten(0, 1)
        else:
            total = self._empty(place, width, rank, num_experts)
            target, self.found[place] = total.permute(2, 1, 0), total.flatten(1)
        outer_products(a, b, self._slots, target if rank_first else target.transpose(1, 2), **options)

    def add_router(self, grad_logits: Tensor, x: Tensor) -> None:
        """Add the gradients of the router's weight and bias."""
        router, bias = self._parameters[_ROUTER], self._parameters[_ROUTER_BIAS]
        wide = x.to(grad_logits.dtype)  # float32 where logits are
        if self._needed[_ROUTER] and router is not None:
            if sums_in_float32(router) and wide.dtype == router.dtype:
                add_product([cast(nn.Parameter, router)], grad_logits, wide)
            else:
                self.found[_ROUTER] = float32_product(grad_logits.t(), wide).to(gradient_dtype(router))
        if self._needed[_ROUTER_BIAS] and bias is not None:
            self.found[_ROUTER_BIAS] = grad_logits.sum(0, dtype=torch.float32).to(gradient_dtype(bias))

    def _empty(self, place: int, *shape: int) -> Tensor:
        """A tensor in the dtype of this parameter's gradient."""
        parameter = self._parameters[place]
        assert parameter is not None
        return torch.empty(shape, dtype=gradient_dtype(parameter), device=parameter.device)


def _stored(weight: Tensor, form: MixtureForm) -> Tensor:
    """A weight as [E, N, M]."""
    weight = weight.detach()
    return weight.transpose(1, 2) if form.transposed else weight


def call_hooks(router: Any, mixed: Mixed) -> None:
    """Call the router's forward hooks, since its forward does not run."""
    for hook in router._forward_hooks.values():
        hook(router, (), mixed[1:])

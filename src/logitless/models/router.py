"""The routers of a mixture of experts: finding them, freezing them, and recording their choices in a forward pass.

A router gives each token one logit per expert and sends it to the experts that it chooses. Statistics are sums over
tokens, so that those of micro-batches and ranks add up to those of the optimizer step.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd import Function

from logitless.errors import ConfigurationError
from logitless.models.lm_head import backbone, causal_lm
from logitless.types import PackedInputs, PromptGroup, SharedInputs

_NAMES = ("gate", "router")  # what transformers calls the router beside `experts`
_CHOOSING = ("HunYuanMoEV1Gate", "AfmoeTokenChoiceRouter")  # classes of routers, beside those that end in TopkRouter


def router_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The routers of a model by name, through PEFT wrappers; empty for a dense model.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...                      vocab_size=11)
        >>> router_modules(LlamaForCausalLM(config))
        {}
    """
    found: dict[str, nn.Module] = {}
    for name, module in backbone(model).named_modules():
        if hasattr(module, "experts"):
            found |= {f"{name}.{child}": inner for child, inner in module.named_children() if child in _NAMES}
    return found


def freeze_routers(model: nn.Module, *, dtype: torch.dtype | None = None) -> None:
    """Stop training the routers; gradients still flow through the weights of chosen experts to the hidden states.

    Args:
        model: changed in place.
        dtype: to round the routers to, as the weights around them will be; None: unchanged.

    Raises:
        ConfigurationError: the model has no routers, or one has an adapter or is among ``modules_to_save``.

    Example:
        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> config = MixtralConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...                        num_key_value_heads=1, num_local_experts=2, vocab_size=11)
        >>> model = MixtralForCausalLM(config)
        >>> freeze_routers(model)
        >>> [name for name, weight in model.named_parameters() if not weight.requires_grad]
        ['model.layers.0.mlp.gate.weight']
    """
    routers = router_modules(model)
    if not routers:
        raise _no_router(model, "frozen: true")
    trained = hasattr(model, "peft_config")
    for name, module in routers.items():
        if trained and any(weight.requires_grad for weight in module.parameters()):
            raise ConfigurationError(
                needed="routers without an adapter for model.router.frozen",
                given=f"{name.rsplit('.', 1)[-1]!r} in model.lora.targets or model.lora.modules_to_save",
                remedy="Leave it out there, or leave model.router.frozen out.",
            )
        module.requires_grad_(False)
        for weight in module.parameters():
            weight.data = weight.data.to(dtype or weight.dtype)


class Choice(NamedTuple):
    """The output of one router in one forward pass.

    Args:
        logits: [T, E].
        experts: [T, K] indices of the chosen experts.
    """

    logits: Float[Tensor, "T E"]
    experts: Int[Tensor, "T K"]


class Routers:
    """Records what the routers of a mixture of experts choose while its layers run.

    Args:
        model: PEFT-wrapped or not; its routers get forward hooks.

    Attributes:
        num_layers: layers with a router.
        num_experts: E.
        experts_per_token: K.

    Example:
        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> config = MixtralConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1,
        ...                        num_key_value_heads=1, num_local_experts=4, vocab_size=11)
        >>> model = MixtralForCausalLM(config)
        >>> with Routers(model).read() as choices:
        ...     _ = model(torch.tensor([[1, 2, 3]]))
        >>> [(each.logits.shape, each.experts.shape) for each in choices]
        [(torch.Size([3, 4]), torch.Size([3, 2])), (torch.Size([3, 4]), torch.Size([3, 2]))]
    """

    def __init__(self, model: nn.Module) -> None:
        self._reading: list[list[tuple[_Reader, Any]]] = []
        readers = _readers(model)
        for reader in readers:
            reader.module.register_forward_hook(partial(self._note, reader))
        self.num_layers = len(router_modules(model))
        self.num_experts = readers[0].num_experts
        self.experts_per_token = readers[0].experts_per_token

    def _note(self, reader: "_Reader", _module: nn.Module, _given: Any, output: Any) -> None:
        # Outside of ``read`` nothing is recorded, as when the backward recomputes a layer. No tensor operation here: a
        # checkpointed layer must run the same operations both times.
        if self._reading:
            self._reading[-1].append((reader, output))

    @classmethod
    def of(cls, model: nn.Module) -> "Routers | None":
        """``Routers(model)``, or None if the model has no routers that can be read."""
        return cls(model) if _readers(model) else None

    @contextmanager
    def read(self) -> Iterator[list[Choice]]:
        """After it, the list has the choices of the routers of a forward pass inside, by layer; differentiable."""
        choices: list[Choice] = []
        self._reading.append([])
        try:
            yield choices
        finally:
            noted = self._reading.pop()
        choices += [reader.choice(output) for reader, output in noted]


@dataclass(frozen=True)
class RoutingSums:
    """Router statistics of a forward pass, summed over its tokens.

    Args:
        probability: [E] the softmax of the logits, summed over layers; differentiable.
        counted: [E] tokens that have the expert among their K most probable ones, summed over layers.
        load: [L, E] tokens that each layer sent to each expert.
        entropy: of the softmax, in nats, summed over layers.
    """

    probability: Float[Tensor, "E"]
    counted: Float[Tensor, "E"]
    load: Float[Tensor, "L E"]
    entropy: Float[Tensor, ""]

    @classmethod
    def zero(cls, routers: Routers, device: torch.device) -> "RoutingSums":
        """The sums over no tokens."""
        each = torch.zeros(routers.num_experts, dtype=torch.float64, device=device)
        return cls(each, each, each.repeat(routers.num_layers, 1), each[0])

    def __add__(self, other: "RoutingSums") -> "RoutingSums":
        """The sums over the tokens of both."""
        return RoutingSums(*(getattr(self, name) + getattr(other, name) for name in vars(self)))

    def detach(self) -> "RoutingSums":
        """The same in float64, without gradient."""
        return RoutingSums(*(part.detach().double() for part in vars(self).values()))

    @property
    def flat(self) -> Float[Tensor, "F"]:
        """All numbers in one vector, without gradient."""
        return torch.cat([part.flatten() for part in vars(self.detach()).values()])

    def unflat(self, flat: Float[Tensor, "F"]) -> "RoutingSums":
        """The inverse of ``flat``, for sums of the same shapes as these."""
        parts = vars(self).values()
        split = flat.split([part.numel() for part in parts])  # type: ignore[no-untyped-call]
        return RoutingSums(*(new.view_as(part) for new, part in zip(split, parts, strict=True)))


def routing_sums(choices: Sequence[Choice], weight: Float[Tensor, "T"]) -> RoutingSums:
    """Sum the router outputs of a forward pass over its tokens.

    Gradient: of ``probability``, to the logits. Counts are float64, and exact.

    Args:
        choices: one per router, at least one.
        weight: how often each token counts (``token_copies``).
    """
    parts = [_Sums.apply(each.logits, each.experts, weight) for each in choices]  # type: ignore[no-untyped-call]
    probability, counted, load, entropy = (list(column) for column in zip(*parts, strict=True))
    return RoutingSums(
        torch.stack(probability).sum(0), torch.stack(counted).sum(0), torch.stack(load), torch.stack(entropy).sum()
    )


class _Sums(Function):
    """The sums of one router."""

    @staticmethod
    def forward(
        ctx: Any, logits: Float[Tensor, "T E"], experts: Int[Tensor, "T K"], weight: Float[Tensor, "T"]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # the logits and not their softmax, which may be twice as large
        ctx.save_for_backward(logits, weight)
        log_probability = _log_softmax(logits)
        probability = log_probability.exp()
        of_tokens = weight.to(probability.dtype)
        entropy = -(of_tokens @ (probability * log_probability).sum(-1)).double()
        most_probable = probability.topk(experts.shape[1], dim=-1).indices
        counted, load = (_count(each, weight, logits.shape[1]) for each in (most_probable, experts))
        ctx.mark_non_differentiable(counted, load, entropy)
        return of_tokens @ probability, counted, load, entropy

    @staticmethod
    def backward(ctx: Any, gradient: Float[Tensor, "E"], *_: Any) -> tuple[Tensor, None, None]:  # type: ignore[override]
        logits, weight = ctx.saved_tensors
        probability = _log_softmax(logits).exp()
        change = gradient - (probability @ gradient)[:, None]
        return (weight.to(change.dtype)[:, None] * probability * change).to(logits.dtype), None, None


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _count(experts: Int[Tensor, "T K"], weight: Float[Tensor, "T"], num_experts: int) -> Float[Tensor, "E"]:
    """How often each expert was chosen; in float64, where whole numbers add up exactly in any order."""
    counts = torch.zeros(num_experts, dtype=torch.float64, device=experts.device)
    return counts.scatter_add_(0, experts.flatten(), weight.double()[:, None].expand_as(experts).flatten())


def token_copies(inputs: PackedInputs | SharedInputs) -> Float[Tensor, "T"]:
    """How many sequences contain each token of a packed row; on the CPU.

    Example:
        >>> from logitless.types import PromptGroup
        >>> ids = torch.tensor([5, 6, 7, 8])  # prompt 5 6, then 7, or 8
        >>> token_copies(SharedInputs(ids, torch.tensor([0, 1, 2, 2]), (PromptGroup(2, (1, 1)),), ids[:0]))
        tensor([2., 2., 1., 1.])
    """
    if not isinstance(inputs, SharedInputs):
        return torch.ones(len(inputs.input_ids))
    pieces = [piece for group in inputs.groups for piece in _pieces(group)]
    copies, sizes = zip(*pieces, strict=True)
    return torch.repeat_interleave(torch.tensor(copies, dtype=torch.float32), torch.tensor(sizes))


def _pieces(group: PromptGroup) -> list[tuple[int, int]]:
    """(number of sequences, number of tokens) of each contiguous piece of a group, in packed order."""
    if not group.completions:
        return [(1, group.prompt)]
    below = [_pieces(branch) for branch in group.branches]
    return [(_sequences(group), group.prompt), *(piece for each in below for piece in each)]


def _sequences(group: PromptGroup) -> int:
    return sum(map(_sequences, group.branches)) if group.completions else 1


def router_loss_coefficient(model: nn.Module, loss: float | str | None) -> float:
    """The coefficient of the load-balancing loss; 0 means that the loss is not computed.

    Args:
        model: PEFT-wrapped or not.
        loss: the coefficient; None: 0; ``config``: as in transformers, ``router_aux_loss_coef`` of the model's config
            if ``output_router_logits`` is set there, else 0.

    Raises:
        ConfigurationError: a number above 0 for a model for which transformers has no such loss.

    Example:
        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> config = MixtralConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...                        num_key_value_heads=1, num_local_experts=2, vocab_size=11)
        >>> model = MixtralForCausalLM(config)
        >>> router_loss_coefficient(model, "config"), router_loss_coefficient(model, 0.01)
        (0.0, 0.01)
    """
    if loss == "config":
        config: Any = causal_lm(model).config.get_text_config()
        return configured_router_loss(model) if getattr(config, "output_router_logits", False) else 0.0
    coefficient = float(loss or 0.0)
    if coefficient and not router_modules(model):
        raise _no_router(model, f"loss: {coefficient:g}")
    if coefficient and not _has_loss(model):
        raise ConfigurationError(
            needed="a mixture that is trained with a load-balancing loss, for model.router.loss",
            given=f"{causal_lm(model).config.model_type}, for which transformers has none: a correction bias of the "
            "router's choices keeps its experts evenly loaded, or nothing does",
            remedy="Set model.router.loss: 0.",
        )
    return coefficient


def configured_router_loss(model: nn.Module) -> float:
    """The coefficient in a model's config, even if the config leaves the loss off; 0 if there is none."""
    config: Any = causal_lm(model).config.get_text_config()
    return float(getattr(config, "router_aux_loss_coef", None) or 0.0) if _has_loss(model) else 0.0


def _has_loss(model: nn.Module) -> bool:
    """Whether transformers has the loss for this model, and its routers can be read."""
    module = sys.modules[type(causal_lm(model)).__module__]
    return hasattr(module, "load_balancing_loss_func") and bool(_readers(model))


class _Reader(NamedTuple):
    """How to read one router.

    Args:
        module: whose output is read.
        block: it, or the module around it that chooses.
        gives: ``choice``: logits and chosen experts, in either order; ``probabilities``: instead of logits; ``logits``:
            alone, of which the block takes the largest.
    """

    module: nn.Module
    block: Any
    gives: Literal["choice", "probabilities", "logits"]

    @property
    def num_experts(self) -> int:
        return next(len(weight) for weight in self.module.parameters() if weight.ndim == 2)

    @property
    def experts_per_token(self) -> int:
        found = getattr(self.block, "top_k", None)
        return int(self.block.config.top_k_experts if found is None else found)

    def choice(self, output: Any) -> Choice:
        parts = [output] if isinstance(output, Tensor) else list(output)
        if self.gives == "logits" and parts[-1].is_floating_point():  # else row-invariant layers say what they chose
            return Choice(parts[-1], parts[-1].topk(self.experts_per_token, dim=-1).indices)
        logits, experts = parts[0], parts[-1]
        if experts.is_floating_point():  # Granite's are the other way round
            logits, experts = experts, logits
        return Choice(logits.log() if self.gives == "probabilities" else logits, experts.long())


def _readers(model: nn.Module) -> list[_Reader]:
    """Of all routers, or of none: those of LongCat give no logits."""
    found, inside = list[_Reader](), dict(backbone(model).named_modules())
    for name, router in router_modules(model).items():
        block, before = inside[name.rpartition(".")[0]], len(found)
        for module in router.modules():  # PEFT wraps routers
            kind = type(module).__name__
            if kind == "Gemma4TextRouter":
                found.append(_Reader(module, module, "probabilities"))
            elif kind == "Llama4Router":
                found.append(_Reader(module, module, "logits"))
            elif kind in _CHOOSING or (kind.lower().endswith("topkrouter") and "Longcat" not in kind):
                found.append(_Reader(module, module, "choice"))
        if type(block).__name__ == "JambaSparseMoeBlock":
            found.append(_Reader(router, block, "logits"))
        if len(found) == before:
            return []
    return found


def _no_router(model: nn.Module, given: str) -> ConfigurationError:
    return ConfigurationError(
        needed=f"a mixture of experts for model.router.{given}",
        given=f"{causal_lm(model).config.model_type}, which has no routers",
        remedy="Leave model.router out.",
    )

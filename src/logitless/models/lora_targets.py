"""LoRA targets by name, and in a mixture of experts, whose expert weights and routers are not linear modules."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from logitless.errors import ConfigurationError
from logitless.models.lm_head import backbone, causal_lm
from logitless.models.router import router_modules

_PEFT_RENAMES = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""Names that PEFT renames in any module, as names of experts or routers from before transformers fused these."""


@dataclass(frozen=True)
class LoraTargets:
    """PEFT's ``target_modules`` and ``target_parameters``: ends of the names of what is adapted.

    Args:
        modules: linear modules.
        parameters: weights of other modules; each expert gets its own factors.
    """

    modules: tuple[str, ...]
    parameters: tuple[str, ...]


def expert_weights(model: nn.Module) -> list[str]:
    """Names of the weights that hold all experts of a layer, [E, ., .]; empty for a dense model.

    Example:
        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> config = MixtralConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...                        num_key_value_heads=1, num_local_experts=2, vocab_size=11)
        >>> expert_weights(MixtralForCausalLM(config))
        ['model.layers.0.mlp.experts.gate_up_proj', 'model.layers.0.mlp.experts.down_proj']
    """
    named = causal_lm(model).named_parameters()
    return [name for name, weight in named if "experts" in name.split(".") and weight.ndim == 3]


def lora_targets(model: nn.Module, targets: tuple[str, ...] | Literal["all-linear"]) -> LoraTargets:
    """Resolve a recipe's targets in a mixture of experts.

    Args:
        model: a mixture, not PEFT-wrapped.
        targets: ends of names of linear modules, of expert weights, or of routers. ``all-linear``: every linear module
            but the LM head, and every expert weight; no router.

    Raises:
        ConfigurationError: a target names nothing.

    Example:
        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> config = MixtralConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...                        num_key_value_heads=1, num_local_experts=2, vocab_size=11)
        >>> lora_targets(MixtralForCausalLM(config), ("q_proj", "down_proj"))
        LoraTargets(modules=('q_proj',), parameters=('experts.down_proj',))
    """
    inner = causal_lm(model)
    head = inner.get_output_embeddings()
    prefix = next(name for name, module in inner.named_modules() if module is backbone(inner))
    routers = [f"{prefix}.{name}" for name in router_modules(model)]
    # A router that is a linear module with more outputs than logits (Llama 4, Phi-3.5-MoE) is adapted by its weight.
    linear = {
        name: module
        for name, module in inner.named_modules()
        if isinstance(module, nn.Linear) and (name not in routers or type(module) is nn.Linear)
    }
    experts = expert_weights(model)
    if targets == "all-linear":
        linear = {
            name: module
            for name, module in linear.items()
            if module is not head and not any(f"{name}.".startswith(f"{router}.") for router in routers)
        }
        routers, ends = [], [name.rsplit(".", 1)[-1] for name in (*linear, *experts)]
    else:
        ends = list(targets)
        names = [*linear, *routers, *experts]
        check_targets(ends, names, offered=names, kinds="linear modules, expert weights or routers")
    modules, parameters = set[str](), set[str]()
    for end in ends:
        for name in _named(list(linear), end):
            if name.rsplit(".", 1)[-1] in _PEFT_RENAMES:
                parameters.add(_end(name, 2) + ".weight")
            else:
                modules.add(end)
        parameters |= {_end(name, 2) + ".weight" for name in _named(routers, end) if name not in linear}
        parameters |= {_end(name, 2) for name in _named(experts, end)}
    return LoraTargets(tuple(sorted(modules)), tuple(sorted(parameters)))


def _named(names: list[str], end: str) -> list[str]:
    return [name for name in names if f".{name}".endswith(f".{end}")]


def _end(name: str, parts: int) -> str:
    return ".".join(name.split(".")[-parts:])


def check_targets(targets: Sequence[str], names: list[str], *, offered: Iterable[str], kinds: str) -> None:
    """Refuse targets of which one names nothing. PEFT refuses only if none of them does.

    Args:
        targets: ends of names.
        names: that a target may end.
        offered: names whose last parts the error offers.
        kinds: what these are.

    Raises:
        ConfigurationError: a target names nothing.
    """
    unknown = [target for target in targets if not _named(names, target)]
    if unknown:
        raise ConfigurationError(
            needed=f"targets that name {kinds} of the model",
            given=", ".join(map(repr, unknown)),
            remedy=f"Choose from {', '.join(sorted({_end(name, 1) for name in offered}))}, or use 'all-linear'.",
        )

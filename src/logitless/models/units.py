"""The FSDP units of a causal LM: modules whose sharded weights are all-gathered together."""

from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from logitless.distributed.sharding import unsharded_names
from logitless.errors import UnavailableError
from logitless.models.lm_head import backbone, causal_lm


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a causal LM's decoder, in the order in which a pass runs them."""
    decoder: Any = backbone(model)
    return list(decoder.layers[: decoder.config.num_hidden_layers])


def units_of(model: nn.Module) -> list[nn.Module]:
    """The modules to shard: each layer, then the decoder (embedding and final norm), then the LM head.

    A tied LM head is not a unit, because its weight is the decoder's embedding. Adapters belong to their layer's unit.

    Args:
        model: a causal LM, with or without PEFT.

    Raises:
        UnavailableError: the model has no layers of transformers' ``GradientCheckpointingLayer``, or has weights
            outside the units.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...                      vocab_size=11)
        >>> [type(unit).__name__ for unit in units_of(LlamaForCausalLM(config))]
        ['LlamaDecoderLayer', 'LlamaModel', 'Linear']
    """
    inner, decoder = causal_lm(model), backbone(model)
    layers: list[nn.Module] = [m for m in decoder.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise UnavailableError(
            needed="decoder layers to shard",
            given=type(inner).__name__,
            remedy="Give every process a copy: set parallel.replicate to the number of processes.",
        )
    units = [*layers, decoder]
    head = inner.get_output_embeddings()
    held = {id(parameter) for parameter in decoder.parameters()}
    if head is not None and any(id(parameter) not in held for parameter in head.parameters()):
        units.append(head)
    if left := unsharded_names(model, units):
        raise UnavailableError(
            needed="weights in the decoder and the LM head alone",
            given=f"{', '.join(left[:3])} in {type(inner).__name__}",
            remedy="Give every process a copy: set parallel.replicate to the number of processes.",
        )
    return units

"""The parts of a model that are gathered together when its weights are sharded: layers, decoder, LM head."""

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from logitless.distributed.sharding import unsharded_names
from logitless.errors import UnavailableError
from logitless.models.lm_head import backbone, causal_lm


def units_of(model: nn.Module) -> list[nn.Module]:
    """The units of a causal LM in the order of its forward: layers, decoder (embedding, last norm), LM head.

    A tied LM head is the decoder's embedding and no unit of its own. Adapters belong to the layer that they are in.

    Args:
        model: PEFT-wrapped or not.

    Raises:
        UnavailableError: the architecture does not mark its layers, or has weights outside of these.

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

"""What a process holds at its fullest in a training step, counted from shapes, moment by moment.

    always    weights (or shards of them, which are the masters), masters, AdamW's moments
    head      + what the head kept of its forward and makes in its backward, the inputs of all layers,
                the gradient of the LM head
    layers    + what the last layer made again, the inputs of all layers, the gradient of the LM head
    end       + all gradients, what the first layer made again
    embedding + all gradients, that of the embedding before it is summed

The peak is the fullest moment: while layers go backward, gradients take the place of their inputs. Inputs and products
of a decoder layer are counted as transformers' layers keep them (norms in float32, a gated MLP); kernels of our own
keep less. What torch's allocator wastes between blocks is not counted.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from logitless.distributed.arrangement import Arrangement
from logitless.models.lm_head import causal_lm
from logitless.models.units import units_of
from logitless.train.masters import master_of

BLOCK = 192 * 2**20
"""Bytes of logit gradients that the head makes anew at once; ``head.passes.BLOCK_BYTES``."""


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of one process, by part.

    Args:
        always: held during the whole step.
        moments: held beside them at each moment, by its name.

    Example:
        >>> TrainingMemory({"weights": 3}, {"head": {"kept": 4}, "end": {"gradients": 5, "inputs": 1}}).peak_bytes
        9
    """

    always: Mapping[str, int]
    moments: Mapping[str, Mapping[str, int]]

    @property
    def fullest(self) -> str:
        """The moment of the peak."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def at_peak(self) -> dict[str, int]:
        """Part by part what is held at the fullest moment."""
        return {**self.always, **self.moments[self.fullest]}

    @property
    def peak_bytes(self) -> int:
        """All that is held at the fullest moment."""
        return sum(self.always.values()) + sum(self.moments[self.fullest].values())


def training_memory(
    model: nn.Module,
    arrangement: Arrangement,
    *,
    tokens: int,
    head_budget: int | None = None,
    in_order: bool = False,
    micro_batches: int = 1,
    number: int | None = None,
    recomputes: bool | None = None,
) -> TrainingMemory:
    """The bytes of one process in a step.

    Args:
        model: not sharded yet, on any device, ``meta`` included.
        arrangement: of the processes.
        tokens: N, read by this process in a micro-batch, all of them scored.
        head_budget: bytes for kept exponentials; None: all that there are.
        in_order: gradients are summed along a tree (``parallel.deterministic``).
        micro_batches: of a step; under ``in_order`` sums of some of them wait for the others.
        number: bytes of a number in activations; None: of the narrowest weight.
        recomputes: layers keep their input alone; None: as the model is set.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        ...                      vocab_size=11)
        >>> found = training_memory(LlamaForCausalLM(config), Arrangement(), tokens=4)
        >>> found.always["AdamW moments"] == 2 * found.always["weights"]
        True
    """
    inner: Any = causal_lm(model)
    cut = arrangement.weights
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    if number is None:
        number = min(p.element_size() for p in parameters if p.is_floating_point())
    if recomputes is None:
        recomputes = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    head = inner.get_output_embeddings().weight
    vocabulary, width = head.shape

    held = sum(shard_bytes(master_of(p), cut) for p in trained)
    always = {"weights": sum(shard_bytes(p, cut) for p in parameters), "AdamW moments": 2 * held}
    if any(master_of(p) is not p for p in trained):
        if arrangement.is_sharded:  # shards are masters
            always["weights"] = held + sum(shard_bytes(p, cut) for p in parameters if not p.requires_grad)
        else:
            always["masters"] = held
    of_head = shard_bytes(master_of(head), cut) if head.requires_grad else 0
    one = sum(layer_bytes(model, number)) * tokens
    all_layers, made_again = layers_bytes(model, number, tokens=tokens, recomputes=recomputes)
    in_use, around, unsummed = _gathered(model, number) if arrangement.is_sharded else (0, 0, 0)
    row = 2 * width * number * tokens  # the last hidden states and their gradient
    start = {"inputs of layers": all_layers, "gradient of the LM head": of_head}
    end = {"gradients": held, "inputs of layers": one - made_again, "units in use": in_use}
    embedding = {"gradients": held, "units in use": around, "gradient of the embedding": unsummed}
    if in_order:
        end["sums along the tree"] = held * (micro_batches - 1).bit_length()
        if arrangement.replicate > 1:  # the largest gradient, laid flat, and that of every rank
            flat = 4 * max((p.numel() for p in trained), default=0)
            end["gradients of all ranks"] = max(0, flat * (1 + arrangement.replicate) - one - row)
    return TrainingMemory(
        always,
        {
            "head": start | {"head": row + _head_bytes(tokens, width, vocabulary, number, head_budget, head, cut)},
            "layers": start | {"made again in a layer": made_again + row, "units in use": in_use},
            "end": end | {"made again in a layer": made_again + row},
            **({"embedding": embedding} if unsummed else {}),
        },
    )


def layers_bytes(model: nn.Module, number: int, *, tokens: int, recomputes: bool) -> tuple[int, int]:
    """Bytes that all decoder layers keep for their backward, and that one of them makes in its own.

    Args:
        model: on any device.
        number: bytes of a number in activations.
        tokens: that are read.
        recomputes: layers keep their input alone, and make the rest again.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=16, num_hidden_layers=3, num_attention_heads=1,
        ...                      vocab_size=11)
        >>> model = LlamaForCausalLM(config)
        >>> layers_bytes(model, 2, tokens=1, recomputes=True), layers_bytes(model, 2, tokens=1, recomputes=False)
        ((48, 640), (960, 320))
    """
    config: Any = causal_lm(model).config.get_text_config()  # type: ignore[union-attr]
    kept, made = layer_bytes(model, number)
    if recomputes:
        return tokens * config.hidden_size * number * config.num_hidden_layers, tokens * (kept + made)
    return tokens * kept * config.num_hidden_layers, tokens * made


def layer_bytes(model: nn.Module, number: int) -> tuple[int, int]:
    """Bytes a token that a decoder layer of transformers keeps for its backward, and that the backward makes at once.

    With D, F the inner width of the gated MLP, H and K all heads' widths of queries and of keys, and n bytes a number:
    two norms keep their input in float32 and, rounded, what is scaled and what comes of it (8 D + 4 n D), attention
    keeps queries, keys, values and output (n (2 H + 2 K)), the MLP gate, its activation, the other half and their
    product (4 n F). The backward makes as much again of norms (8 D + 4 n D), queries and keys before they were turned
    with the pieces that turning cuts (n (2 H + 4 K)), and gradients of three parts of the MLP (3 n F).

    Over a frozen base, linear maps and norms keep no input for gradients of weights: what is left is the norms' input
    in float32 (8 D bytes), queries, keys, values and output, and of the MLP three parts (3 n F). A float32
    adapter keeps a float32 copy of its input instead, whose gradient comes in both dtypes.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        ...                      vocab_size=11)
        >>> layer_bytes(LlamaForCausalLM(config), number=2)
        (320, 320)
    """
    config: Any = causal_lm(model).config.get_text_config()  # type: ignore[union-attr]
    width = config.hidden_size
    heads = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    each = getattr(config, "head_dim", None) or width // heads
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * width
    layer = next((module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)), None)
    parts: Any = () if layer is None else layer.modules()
    inputs = [part.in_features for part in parts if hasattr(part, "lora_A")]
    attention = 2 * heads * each + 2 * keys * each
    if inputs and number < 4:
        kept = 8 * width + number * (attention + 3 * inner) + 4 * sum(inputs)
        return kept, max((4 + number) * max(inputs), 3 * number * inner)
    norms = (8 + 4 * number) * width
    return norms + number * (attention + 4 * inner), norms + number * (attention + 2 * keys * each + 3 * inner)


def _head_bytes(
    tokens: int, width: int, vocabulary: int, number: int, budget: int | None, head: torch.Tensor, cut: int
) -> int:
    """Of the fused head beyond its inputs and returned gradients; ``fused.peak_bytes`` counts them where Triton is."""
    row = vocabulary * number
    kept = tokens if budget is None else min(tokens, budget // row)
    most = math.ceil(vocabulary / cut)
    total = kept * row + 320 * tokens
    if kept:
        total += tokens * number * width
    if anew := tokens - kept:
        columns = min(most, BLOCK // (anew * number))
        total += anew * (columns * number + (4 * width if columns < vocabulary else 0))
        total += 4 * columns * width if kept else 0
    if cut > 1:
        total += 4 * kept * width
        total += most * width * (2 * number + ((8 if cut > 2 else 6) if head.requires_grad else 0))
    return total


def _gathered(model: nn.Module, number: int) -> tuple[int, int, int]:
    """Bytes of the units that are whole at once, of the decoder around the layers among them, and of what the gradient
    of that decoder takes until it is summed.

    It is whole all the time; of layers, the one in use and the next one. The gradient of a unit is copied into a buffer
    that is summed.
    """
    own = own_parameters(model)
    units = units_of(model)
    is_layer = [isinstance(unit, GradientCheckpointingLayer) for unit in units]
    layers = [sum(p.numel() for p in unit) for unit, whether in zip(own, is_layer, strict=True) if whether]
    around = [p for unit, whether in zip(own, is_layer, strict=True) if not whether for p in unit]
    head: Any = causal_lm(model)
    tied = {id(p) for p in head.get_output_embeddings().parameters()}
    untied = len(units) > len(layers) + 1
    decoder = [p for p in around if not (untied and id(p) in tied)]
    of_decoder = number * sum(p.numel() for p in decoder)
    unsummed = 8 * sum(p.numel() for p in decoder if p.requires_grad)
    return of_decoder + 2 * number * max(layers, default=0), of_decoder, unsummed


def own_parameters(model: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters of each unit, those of units inside it left out."""
    seen: set[int] = set()
    found = []
    for unit in units_of(model):
        own = [p for p in dict.fromkeys(unit.parameters()) if id(p) not in seen]
        seen |= {id(p) for p in own}
        found.append(own)
    return found


def shard_bytes(parameter: torch.Tensor, cut: int) -> int:
    """Of the rank with the most: parameters are cut by rows.

    Example:
        >>> shard_bytes(torch.zeros(5, 2), 2)
        24
    """
    rows = parameter.shape[0] if parameter.ndim else 1
    return math.ceil(rows / cut) * (parameter.numel() // max(rows, 1)) * parameter.element_size()

"""Memory of a process in training, counted from shapes, at each moment of a step.

    always    weights (or shards, which are master weights), master weights, AdamW's moments, value head, reference
    head      + what the head kept of its forward and makes in its backward, the inputs of all layers,
                the gradient of the LM head
    layers    + what the last layer recomputed, the inputs of all layers, the gradient of the LM head
    end       + all gradients, what the first layer recomputed
    embedding + all gradients, that of the embedding before it is summed
    sampling  + the key-value cache, and gathered weights

The peak is at the moment that holds most: during the backward pass, gradients replace the inputs of layers. Activations
of a decoder layer are counted as transformers' layers keep them (norms in float32, a gated MLP); our own kernels keep
less. Fragmentation of torch's allocator is not counted.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from logitless.distributed.arrangement import Arrangement
from logitless.distributed.layer_shards import CopyBytes
from logitless.models.four_bit import saved_bytes
from logitless.models.lm_head import AttentionHeads, causal_lm, lm_head
from logitless.models.lora_targets import expert_weights
from logitless.models.units import decoder_layers, units_of
from logitless.models.value_head import ValueHead
from logitless.train.assembly.policies import held_versions, needs_start
from logitless.train.assembly.teacher import teachers_on_meta
from logitless.train.optim.master_weights import master_weight
from logitless.train.plan.recurrent_memory import DeltaNets
from logitless.train.recipe.config import Recipe

BLOCK = 192 * 2**20
"""Bytes of logit gradients that the head recomputes at once; ``head.passes.BLOCK_BYTES``."""


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of one process, by part.

    Args:
        always: held during the whole step.
        moments: held besides at each moment, by its name.

    Example:
        >>> TrainingMemory({"weights": 3}, {"head": {"kept": 4}, "end": {"gradients": 5, "inputs": 1}}).peak_bytes
        9
    """

    always: Mapping[str, int]
    moments: Mapping[str, Mapping[str, int]]

    @property
    def fullest(self) -> str:
        """The moment that holds most."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes by part at the fullest moment."""
        return {**self.always, **self.moments[self.fullest]}

    @property
    def peak_bytes(self) -> int:
        """Bytes at the fullest moment."""
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
    optimizer_state: Literal["float32", "8bit", "host"] = "float32",
) -> TrainingMemory:
    """Memory of one process in a training step.

    Args:
        tokens: N, read by this process in a micro-batch, all of them scored.
        head_budget: bytes of exponentials that the head keeps; None: all.
        in_order: gradients are summed along a tree (``parallel.deterministic``).
        micro_batches: of a step; under ``in_order`` some sums wait for others.
        number: bytes of a number in activations; None: that of the narrowest weight.
        recomputes: layers keep only their input; None: by the model's setting.
        optimizer_state: AdamW's moments: 8 bits with a float32 scale for each 256, or on the host with master weights.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        ...                      vocab_size=11)
        >>> found = training_memory(LlamaForCausalLM(config), Arrangement(), tokens=4)
        >>> found.always["AdamW moments"] == 2 * found.always["trained weights"]
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

    always = _always(parameters, arrangement, optimizer_state)
    held = num_bytes(map(master_weight, trained), cut)
    of_head = shard_bytes(master_weight(head), cut) if head.requires_grad else 0
    one = sum(layer_bytes(model, number)) * tokens
    all_layers, recomputed = layers_bytes(model, number, tokens=tokens, recomputes=recomputes)
    in_use, around, unsummed = _gathered(model, number) if arrangement.is_sharded else (0, 0, 0)
    row = 2 * width * number * tokens  # the last hidden states and their gradient
    start = {"inputs of layers": all_layers, "gradient of the LM head": of_head}
    end = {"gradients": held, "inputs of layers": one - recomputed, "units in use": in_use}
    embedding = {"gradients": held, "units in use": around, "gradient of the embedding": unsummed}
    if in_order:
        end["sums along the tree"] = held * (micro_batches - 1).bit_length()
    if in_order and arrangement.replicate > 1:  # the largest gradient, laid flat, and that of every rank
        flat = 4 * max((p.numel() for p in trained), default=0)
        end["gradients of all ranks"] = max(0, flat * (1 + arrangement.replicate) - one - row)
    return TrainingMemory(
        always,
        {
            "head": start | {"head": row + _head_bytes(tokens, width, vocabulary, number, head_budget, head, cut)},
            "layers": start | {"recomputed in a layer": recomputed + row, "units in use": in_use},
            "end": end | {"recomputed in a layer": recomputed + row},
            **({"embedding": embedding} if unsummed else {}),
        },
    )


def _always(parameters: Sequence[nn.Parameter], arrangement: Arrangement, optimizer_state: str) -> dict[str, int]:
    """Bytes of weights, master weights and AdamW's moments."""
    cut, sharded = arrangement.weights, arrangement.is_sharded
    trained = [p for p in parameters if p.requires_grad]
    masters = num_bytes(map(master_weight, trained), cut)
    parts = {
        "trained weights": masters if sharded else num_bytes(trained, cut),  # shards are masters
        "AdamW moments": {"float32": 2 * masters, "8bit": 2 * masters // 4 * 65 // 64, "host": 0}[optimizer_state],
        "frozen weights": num_bytes((p for p in parameters if not p.requires_grad), cut),
    }
    if not sharded and optimizer_state != "host" and any(master_weight(p) is not p for p in trained):
        parts["float32 masters"] = masters
    return parts


def memory_of_rank(
    recipe: Recipe, model: nn.Module, arrangement: Arrangement, value_head: ValueHead | None = None
) -> TrainingMemory:
    """Memory of one process of a recipe, in training and sampling.

    Weights, master weights and AdamW's moments are exact; activations and the key-value cache are estimates. Shards
    have the dtype of master weights; for sampling, gathered weights have that of the products.

    Args:
        model: of ``policy_model``, not sharded yet, on any device, ``meta`` included.
    """
    section, train, parallel = recipe.model, recipe.train, recipe.parallel
    trained = [p for p in model.parameters() if p.requires_grad]
    tokens = math.ceil(train.tokens_per_micro_batch / arrangement.sequence)
    found = training_memory(
        model,
        arrangement,
        tokens=tokens,
        head_budget=train.head_memory_budget,
        in_order=parallel.deterministic,
        micro_batches=rows_of_step(recipe, arrangement),
        number=2 if section.autocast is not None else None,
        recomputes=section.gradient_checkpointing or train.activation_memory is not None,
        optimizer_state=train.optimizer.moments,
    )
    always = dict(found.always)
    if section.quantize is not None:
        always["frozen weights"] -= saved_bytes(model) // arrangement.weights
    if value_head is not None:  # weights, gradients and two moments
        always["value head"] = 4 * num_bytes(value_head.parameters())
    on_device = parallel.reference == "device" or not arrangement.is_sharded
    if needs_start(recipe) and on_device:
        reference = getattr(torch, section.dtype).itemsize * sum(p.numel() for p in trained)
        always["reference"] = math.ceil(reference / arrangement.weights)
    moments = {name: dict(parts) for name, parts in found.moments.items()}
    if recipe.teacher is not None and recipe.teacher.models and recipe.teacher.device is None:
        teacher = math.ceil(teacher_bytes(recipe) / arrangement.weights)
        for parts in [always] if recipe.teacher.place == "device" else moments.values():
            parts["teacher"] = teacher
    elif recipe.teacher is not None and recipe.teacher.divergence is not None:
        heads = [lm_head(each).weight for each in teachers_on_meta(recipe).values()]
        if heads:
            always["heads of teachers on another device"] = num_bytes(heads)
    if place := recipe.algorithm.score_centering:  # of those on the host one is on the device during a pass
        number = held_versions(recipe) if place == "device" else 1
        for parts in [always] if place == "device" else moments.values():
            parts[SAMPLER_WEIGHTS] = number * num_bytes(trained)
    for parts in moments.values():
        if section.autocast is not None:  # a copy of each trained matrix in its dtype, during a pass
            parts["autocast copies"] = 2 * sum(p.numel() for p in trained if p.ndim >= 2)
        if train.activation_memory is not None and "inputs of layers" in parts:
            # not at the moment "embedding", when no inputs are left
            everything, _ = layers_bytes(model, section.activation_bytes, tokens=tokens, recomputes=False)
            parts["inputs of layers"] = max(parts["inputs of layers"], min(everything, train.activation_memory))
    if recipe.parallel.num_sampling:  # one for each version that is still to be sampled with
        always["weights to send"] = (1 + recipe.rollout.staleness) * num_bytes(trained)
    if recipe.rollout.engine.samples_policy:
        moments["sampling"] = {"cache": sampling_bytes(recipe, model)}
        if parallel.has_copy:
            copy = CopyBytes.of(model, decoder_layers(model), int(parallel.sampling_shards))
            always["copy that samples"] = copy.total
        elif arrangement.is_sharded:
            moments["sampling"]["whole weights"] = sum(map(num_bytes, own_parameters(model)))
    return TrainingMemory(always, moments)


SAMPLER_WEIGHTS = "weights that sampled"
"""Of earlier versions, for score centering."""


def memory_of_sampler(recipe: Recipe, model: nn.Module) -> dict[str, int]:
    """Bytes of a process that only samples, by part: weights and buffers of layers exactly, the cache by estimate."""
    weights = CopyBytes.of(model, decoder_layers(model), recipe.parallel.shards_of_sampling)
    return {"weights": weights.total, "cache": sampling_bytes(recipe, model)}


def teacher_bytes(recipe: Recipe) -> int:
    """Bytes of the weights of the teachers that have their own."""
    return sum(num_bytes(model.parameters()) for model in teachers_on_meta(recipe).values())


def tokens_of_step(recipe: Recipe, arrangement: Arrangement) -> int:
    """Most tokens of a step for each group of ranks that split sequences."""
    return math.ceil(recipe.train.tokens_per_step / (arrangement.replicate * arrangement.shard))


def rows_of_step(recipe: Recipe, arrangement: Arrangement) -> int:
    """Micro-batches of a rank in a step."""
    return max(1, math.ceil(tokens_of_step(recipe, arrangement) / recipe.train.tokens_per_micro_batch))


def kept_bytes(recipe: Recipe, model: nn.Module) -> int:
    """Estimated bytes that layers keep of a micro-batch for its backward pass, and make in it."""
    train, checkpointing = recipe.train, recipe.model.gradient_checkpointing
    number = recipe.model.activation_bytes
    layers = sum(layers_bytes(model, number, tokens=train.tokens_per_micro_batch, recomputes=checkpointing))
    return layers if train.activation_memory is None else min(layers, train.activation_memory)


def sampling_bytes(recipe: Recipe, model: nn.Module) -> int:
    """Estimated bytes of sampling beside the weights: the key-value cache with recurrent states, and one layer's
    activations of a prefill."""
    rollout, number, longest = recipe.rollout, recipe.model.activation_bytes, recipe.data.max_prompt_tokens
    config: Any = causal_lm(model).config.get_text_config()  # type: ignore[union-attr]
    heads = AttentionHeads.of(config)
    rows = min(rollout.max_rows, rollout.prompts_per_block * rollout.completions_per_prompt)
    length = longest + rollout.longest_completion
    nets = DeltaNets.of(config)
    cache = rows * length * (config.num_hidden_layers - nets.layers) * 2 * heads.key * heads.width * number
    cache += nets.sampling_bytes(rows, number)
    if rollout.engine.cache_bytes is not None:
        cache = min(cache, rollout.engine.cache_bytes)
    prompts = -(-rows // rollout.completions_per_prompt)
    read_at_once = max(longest, min(rollout.prefill_tokens, prompts * longest))
    return cache + read_at_once * 17 * config.hidden_size * number


def layers_bytes(model: nn.Module, number: int, *, tokens: int, recomputes: bool) -> tuple[int, int]:
    """Bytes that all decoder layers keep for the backward pass, and that one of them makes in it.

    Args:
        number: bytes of a number in activations.
        recomputes: layers keep only their input, and recompute the rest.

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
    """Bytes for each token that a decoder layer of transformers keeps for its backward, and that the backward makes.

    D is the hidden size, F the inner width of the gated MLP, H and K the widths of all queries and of all keys, n the
    bytes of a number. Kept are: by two norms the input in float32, and rounded the normalised input and the output
    (8 D + 4 n D); by attention queries, keys, values and output (n (2 H + 2 K)); by the MLP the gate, its activation,
    the other half and their product (4 n F). The backward makes as much of norms (8 D + 4 n D), queries and keys before
    the rotary embedding with the slices of the rotation (n (2 H + 4 K)), and gradients of three parts of the MLP
    (3 n F).

    A mixture's F is that of a token's experts and shared experts together, and 2 n D for each of these experts are kept
    besides: its input and its output.

    Where layers have gated delta nets, what is kept is the mean over the layers (``DeltaNets``).

    Over a frozen base nothing is kept for gradients of weights. What is left: the norms' input in float32 (8 D),
    queries, keys, values and output, and three parts of the MLP (3 n F). A float32 adapter keeps a float32 copy of its
    input, whose gradient comes in both dtypes.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        ...                      vocab_size=11)
        >>> layer_bytes(LlamaForCausalLM(config), number=2)
        (320, 320)
    """
    config: Any = causal_lm(model).config.get_text_config()  # type: ignore[union-attr]
    width, heads = config.hidden_size, AttentionHeads.of(config)
    inner, outputs = _inner_width(model, config)
    layer = next((module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)), None)
    parts: Any = () if layer is None else layer.modules()
    inputs = [part.in_features for part in parts if hasattr(part, "lora_A")]
    attention = 2 * number * (heads.query + heads.key) * heads.width
    made = attention + 2 * number * heads.key * heads.width
    if (nets := DeltaNets.of(config)).layers:
        layers, made = config.num_hidden_layers, max(made, nets.made(number))
        attention = (nets.layers * nets.kept(number) + (layers - nets.layers) * attention) // layers
    if inputs and number < 4:
        kept = 8 * width + attention + number * (3 * inner + outputs) + 4 * sum(inputs)
        return kept, max((4 + number) * max(inputs), 3 * number * inner, nets.made(number))
    norms = (8 + 4 * number) * width + number * outputs
    return norms + attention + 4 * number * inner, norms + made + 3 * number * inner


def _inner_width(model: nn.Module, config: Any) -> tuple[int, int]:
    """(numbers of a token inside the MLP, numbers of the inputs and outputs of its experts)."""
    dense = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size
    dense = dense if isinstance(dense, int) else max(dense)  # Gemma 3n's, of each layer
    per_token = getattr(config, "num_experts_per_tok", None)
    if not per_token or not expert_weights(model):
        return dense, 0
    shared = getattr(config, "n_shared_experts", None) or 0
    width = getattr(config, "moe_intermediate_size", None) or dense
    gated = getattr(config, "shared_expert_intermediate_size", None) or 0  # Qwen's one shared expert
    return (per_token + shared) * width + gated, 2 * per_token * config.hidden_size


def _head_bytes(
    tokens: int, width: int, vocabulary: int, number: int, budget: int | None, head: torch.Tensor, cut: int
) -> int:
    """Bytes of the fused head beyond its inputs and returned gradients, without Triton."""
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
    """Bytes of FSDP2 units that are gathered at once, of the decoder's unit among them, and of that unit's gradient
    before it is summed.

    The decoder's unit (all but the layers) is gathered all the time; of layers, the current one and the next one. The
    gradient of a unit is copied into a buffer, which is summed over the ranks.
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
    """The parameters of each FSDP2 unit, without those of units inside it."""
    seen: set[int] = set()
    found = []
    for unit in units_of(model):
        own = [p for p in dict.fromkeys(unit.parameters()) if id(p) not in seen]
        seen |= {id(p) for p in own}
        found.append(own)
    return found


def num_bytes(parameters: Iterable[torch.Tensor], cut: int = 1) -> int:
    """Bytes of parameters, or of one rank's shards if each is cut into several."""
    return sum(shard_bytes(p, cut) for p in parameters)


def shard_bytes(parameter: torch.Tensor, cut: int) -> int:
    """Bytes of the largest shard of a parameter; parameters are cut by rows.

    Example:
        >>> shard_bytes(torch.zeros(5, 2), 2)
        24
    """
    rows = parameter.shape[0] if parameter.ndim else 1
    return math.ceil(rows / cut) * (parameter.numel() // max(rows, 1)) * parameter.element_size()

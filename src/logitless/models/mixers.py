"""Recurrent layers (gated delta nets, Mamba, short convolutions) over packed rows: no state crosses sequences.

Such a layer would carry its state, and its convolution, from one packed sequence into the next. So it gets a padded
batch of the sequences instead (``PackedLayout.by_bucket``), in which each begins with an empty state. Padding is on the
right, which a causal recurrence does not see. This holds for any such layer, with transformers' own forward and the
kernels that it chooses.

With shared prompts the layer reads every sequence in full, its prompt repeated; a stored token's result is taken from
one of its copies.

The decoder layer around it gets the layout as the keyword argument ``packed_layout``, and a hook keeps it for the
recurrent layer inside; so recomputation in the backward pass works too.
"""

import inspect
import threading
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from logitless.models.attention import AttentionLayout
from logitless.models.packed_layout import PackedLayout, WholeSequences

RECURRENT = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
"""What transformers calls kinds of layers that carry a state from token to token."""

_CACHES = {"cache_params", "past_key_values"}


class _Current(threading.local):
    """The layout of the decoder layer that this thread is running; None for a plain batch, or decoding."""

    layout: PackedLayout | AttentionLayout | None = None


_current = _Current()


def recurrent_mixers(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that carry a state from token to token: they convolve over time and can keep a cache.

    Example:
        >>> from transformers import Lfm2Config, Lfm2ForCausalLM
        >>> config = Lfm2Config(vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=2,
        ...                     num_attention_heads=1, num_key_value_heads=1, layer_types=["conv", "full_attention"])
        >>> [type(mixer).__name__ for mixer in recurrent_mixers(Lfm2ForCausalLM(config))]
        ['Lfm2ShortConv']
    """
    return [module for module in model.modules() if _is_mixer(module)]


def _is_mixer(module: nn.Module) -> bool:
    if not any(isinstance(child, nn.Conv1d) for child in module.children()):
        return False
    parameters = inspect.signature(type(module).forward).parameters
    return "hidden_states" in parameters and not _CACHES.isdisjoint(parameters)


def keep_sequences_apart(model: nn.Module) -> int:
    """Make every recurrent layer of a model start each packed sequence with an empty state, in place; returns how many.

    Names of weights, and results without a ``packed_layout``, stay as they are.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> keep_sequences_apart(LlamaForCausalLM(LlamaConfig(
        ...     hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=11)))
        0
    """
    mixers = recurrent_mixers(model)
    around: dict[int, nn.Module] = {}
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            around.update((id(mixer), layer) for mixer in recurrent_mixers(layer))  # an inner layer comes later
    for mixer in mixers:
        mixer.forward = MethodType(_forward, mixer)  # of the instance: a deep copy binds it to the copied module
    for layer in {id(each): each for each in around.values()}.values():
        layer.register_forward_pre_hook(_enter, with_kwargs=True)
        layer.register_forward_hook(_leave, always_call=True)
    return len(mixers)


@torch.compiler.disable
def _enter(_layer: nn.Module, _args: Any, kwargs: Any) -> None:
    _current.layout = kwargs.get("packed_layout")


@torch.compiler.disable
def _leave(_layer: nn.Module, _args: Any, _output: Any) -> None:
    _current.layout = None


@torch.compiler.disable  # buckets have other shapes in every row
def _forward(mixer: Any, *args: Any, **kwargs: Any) -> Any:
    """The layer's own forward, on each sequence of a packed row; without a layout on its whole input."""
    layout = _current.layout
    if layout is None:
        return type(mixer).forward(mixer, *args, **kwargs)
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]

    def run(batch: Tensor) -> Tensor:
        return type(mixer).forward(mixer, hidden_states=batch)  # type: ignore[no-any-return]

    if isinstance(layout, PackedLayout):
        return layout.by_bucket(run, hidden[0])[None]
    whole = WholeSequences.of(layout)
    return whole.layout.by_bucket(run, whole.repeated.take(hidden[0])).index_select(0, whole.kept)[None]

"""Recurrent layers (gated delta nets, Mamba, short convolutions) over packed rows: the state restarts in each sequence.

On a packed row such a layer would carry the state of one sequence into the next. Here it runs on padded batches of the
sequences instead (``PackedLayout.by_bucket``), each from an empty state. Padding is on the right, so it cannot change a
causal layer's results. The layer keeps transformers' own forward, with its kernels.

With shared prompts the layer runs on every sequence in full, its prompt repeated, so it saves no compute. The result
of a shared token is that of its first copy.
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
"""transformers' ``layer_types`` that have a recurrent layer."""

_CACHES = {"cache_params", "past_key_values"}


class _Current(threading.local):
    """The packed layout of the decoder layer that runs in this thread; None for a plain batch, or in decoding."""

    layout: PackedLayout | AttentionLayout | None = None


_current = _Current()


def recurrent_mixers(model: nn.Module) -> list[nn.Module]:
    """The recurrent modules of a model: those with a ``Conv1d`` child, and a cache among the arguments of forward.

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
    """Makes every recurrent layer of a model restart its state in each packed sequence, in place; returns how many.

    Names of weights, and results without a ``packed_layout``, do not change.
    """
    mixers = recurrent_mixers(model)
    around: dict[int, nn.Module] = {}
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            # modules() yields outer layers first, so the innermost layer around a mixer stays
            around.update((id(mixer), layer) for mixer in recurrent_mixers(layer))
    for mixer in mixers:
        mixer.forward = MethodType(_forward, mixer)  # a bound method: a deep copy of it is bound to the copied module
    # The decoder layer gets ``packed_layout`` as an argument, also when it is recomputed in the backward pass.
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


@torch.compiler.disable  # the shapes of buckets differ in every row, and would recompile it each time
def _forward(mixer: Any, *args: Any, **kwargs: Any) -> Any:
    """The layer's own forward, on each sequence of a packed row or on a plain batch."""
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

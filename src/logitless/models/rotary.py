"""Rotary embeddings whose frequencies depend on the sequence's length, computed for each sequence of a packed row.

``longrope`` (Phi-3) has short factors up to ``original_max_position_embeddings`` tokens and long ones beyond.
transformers chooses by the largest position of the batch, so that one long sequence of a packed row would change all
others. ``separate_long_sequences`` gives every sequence the factors of its own length.

``dynamic`` (NTK) changes its frequencies with every length beyond ``max_position_embeddings``, and in transformers with
the inputs before. Sequences that long are refused.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from logitless.errors import UnavailableError


class LongRotary(nn.Module):
    """A ``longrope`` module of transformers, with short or long factors for each sequence of a row.

    A sequence starts where the position is 0, and is as long as its last position says. Equal in every bit to the
    module alone with that sequence.

    Args:
        rotary: the module, called with ``(x, position_ids)``.

    Example:
        >>> from transformers import Phi3Config
        >>> from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
        >>> scaling = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0], "long_factor": [4.0],
        ...            "original_max_position_embeddings": 2}
        >>> config = Phi3Config(hidden_size=2, num_attention_heads=1, max_position_embeddings=8, pad_token_id=None,
        ...                     original_max_position_embeddings=2, rope_parameters=scaling)
        >>> rotary = LongRotary(Phi3RotaryEmbedding(config))
        >>> cos, sin = rotary(torch.zeros(1), torch.tensor([[0, 1, 2, 0, 1]]))  # three tokens, then two
        >>> (sin[0, :, 0] / cos[0, :, 0]).atan()  # a quarter of the angle, then the whole
        tensor([0.0000, 0.2500, 0.5000, 0.0000, 1.0000])
    """

    turns_each_sequence = True

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary: Any = rotary

    def forward(self, x: Tensor, position_ids: Int[Tensor, "R L"]) -> Any:
        last_short = self.rotary.config.rope_parameters["original_max_position_embeddings"]
        # The module goes by the largest position that it sees: below the bound, or one column beyond it.
        short = self.rotary(x, position_ids.clamp(max=last_short - 1))
        long = self.rotary(x, F.pad(position_ids, (0, 1), value=last_short))
        is_long = (_sequence_length(position_ids) > last_short)[..., None]
        if isinstance(short, Tensor):
            return torch.where(is_long, long[:, :-1], short)
        return tuple(torch.where(is_long, b[:, :-1], a) for a, b in zip(short, long, strict=True))


def separate_long_sequences(model: nn.Module) -> int:
    """Put a ``LongRotary`` around every ``longrope`` module of a model, in place; returns how many.

    Raises:
        UnavailableError: only some of the layers have it.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> separate_long_sequences(LlamaForCausalLM(LlamaConfig(
        ...     hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=11)))
        0
    """
    wrapped = {id(module.rotary) for module in model.modules() if isinstance(module, LongRotary)}
    found = []
    for name, module in model.named_modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, Mapping) and "longrope" in kind.values():
            raise UnavailableError(
                needed="one rotary embedding for all layers",
                given=f"longrope in some of them ({type(module).__name__})",
                remedy="Set another rope_type in the model's config.",
            )
        if kind == "longrope" and id(module) not in wrapped:
            found.append(name)
    for name in found:
        model.set_submodule(name, LongRotary(model.get_submodule(name)))
    return len(found)


def scaling_begins(model: PreTrainedModel) -> int:
    """The longest sequence whose rotary frequencies are certain not to change, in tokens; 0 if unknown.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> scaling_begins(GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=11)))
        0
    """
    return max((each.get("original_max_position_embeddings") or 0 for each in _rope_parameters(model)), default=0)


def check_rotary_lengths(model: PreTrainedModel, longest: int) -> None:
    """Refuse a sequence so long that ``dynamic`` frequencies would change.

    Args:
        model: a decoder.
        longest: tokens of the longest sequence.

    Raises:
        UnavailableError: more than ``max_position_embeddings`` under dynamic scaling.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> check_rotary_lengths(GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=11)), 10**6)
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is None or longest <= limit:
        return
    if any("dynamic" in str(each.get("rope_type")) for each in _rope_parameters(model)):
        raise UnavailableError(
            needed=f"sequences of at most {limit} tokens, where dynamic rotary scaling begins",
            given=f"one of {longest} in {type(model).__name__}",
            remedy="Drop longer sequences, or set another rope_type in the model's config (yarn does not depend on the"
            " length).",
        )


def _rope_parameters(model: PreTrainedModel) -> list[Mapping[str, Any]]:
    """Rope parameters, of the whole model or of each kind of layer."""
    parameters = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    nested = [each for each in parameters.values() if isinstance(each, Mapping)]
    return nested or [parameters]


def _sequence_length(position_ids: Int[Tensor, "R L"]) -> Int[Tensor, "R L"]:
    """The length of each token's sequence, as far as it is in this row."""
    length = position_ids.shape[1]
    start = torch.where(position_ids == 0, torch.arange(length, device=position_ids.device), length)
    following = F.pad(start[:, 1:], (0, 1), value=length)
    end = following.flip(1).cummin(1).values.flip(1)
    return position_ids.gather(1, end - 1) + 1

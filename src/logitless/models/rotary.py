"""Rotary embeddings whose frequencies depend on the sequence's length, in packed rows.

``longrope`` (Phi-3) uses short factors for sequences of up to ``original_max_position_embeddings`` tokens, and long
factors for longer ones. transformers chooses by the largest position of the batch, so one long sequence would change
all the others in a packed row. ``separate_long_sequences`` makes it choose for each sequence.

``dynamic`` (NTK) changes the frequencies with every length above ``max_position_embeddings``, and in transformers they
also depend on earlier calls. ``check_rotary_lengths`` refuses such sequences; shorter ones need nothing special.
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
    """transformers' ``longrope`` module, with short or long factors chosen for each sequence of a packed row.

    A sequence starts at each position 0, and its length is its last position + 1. The result is bitwise identical to
    the module's on that sequence alone.

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
        # The module chooses by the largest position. Clamping forces the short factors; an extra column, which is
        # dropped below, forces the long ones.
        short = self.rotary(x, position_ids.clamp(max=last_short - 1))
        long = self.rotary(x, F.pad(position_ids, (0, 1), value=last_short))
        is_long = (_sequence_length(position_ids) > last_short)[..., None]
        if isinstance(short, Tensor):
            return torch.where(is_long, long[:, :-1], short)
        return tuple(torch.where(is_long, b[:, :-1], a) for a, b in zip(short, long, strict=True))


def separate_long_sequences(model: nn.Module) -> int:
    """Wraps every ``longrope`` module of a model in a ``LongRotary``, in place; returns how many.

    Raises:
        UnavailableError: only some of the layers use longrope.
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
    """``original_max_position_embeddings``: up to this length the rotary frequencies do not change; 0 if not set."""
    return max((each.get("original_max_position_embeddings") or 0 for each in _rope_parameters(model)), default=0)


def check_rotary_lengths(model: PreTrainedModel, longest: int) -> None:
    """Refuses sequences for which dynamic NTK scaling would change the frequencies.

    Args:
        model: a decoder.
        longest: length of the longest sequence.

    Raises:
        UnavailableError: it exceeds ``max_position_embeddings``, and the scaling is dynamic.
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
    """The config's ``rope_parameters``: one mapping for the model, or one for each layer type."""
    parameters = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    nested = [each for each in parameters.values() if isinstance(each, Mapping)]
    return nested or [parameters]


def _sequence_length(position_ids: Int[Tensor, "R L"]) -> Int[Tensor, "R L"]:
    """The length of each token's sequence, taken as the position of its last token in the row + 1."""
    length = position_ids.shape[1]
    start = torch.where(position_ids == 0, torch.arange(length, device=position_ids.device), length)
    following = F.pad(start[:, 1:], (0, 1), value=length)
    end = following.flip(1).cummin(1).values.flip(1)
    return position_ids.gather(1, end - 1) + 1

"""Refuses gated delta nets whose gradients flash-linear-attention computes wrongly on this GPU.

Triton 3.4 to 3.7.0 miscompiles a product in its backward pass on Hopper GPUs. Newer versions of flash-linear-attention
raise there, at the first optimizer step; older ones give wrong gradients. Row-invariant layers do not use it.
"""

import importlib.util
import re
import sys

import torch
from torch import nn

from logitless.errors import UnavailableError
from logitless.installed import version_of
from logitless.models.mixers import recurrent_mixers

_HOPPER = 9
_WRONG = (3, 4), (3, 7, 1)
"""The first version of Triton that miscompiles it, and the first that does not."""


def check_delta_gradients(model: nn.Module, device: torch.device) -> None:
    """Raises if a model that is to be trained through transformers' layers has such layers on such a GPU.

    Args:
        model: to be trained; it may still be elsewhere.
        device: that it is trained on.

    Raises:
        UnavailableError: flash-linear-attention would compute its gradients, and cannot.
    """
    triton = version_of("triton")
    if device.type != "cuda" or triton is None or importlib.util.find_spec("fla") is None:
        return
    found = tuple(map(int, re.findall(r"\d+", triton)[:3]))
    wrong = torch.cuda.get_device_capability(device)[0] == _HOPPER and _WRONG[0] <= found < _WRONG[1]
    if not wrong or importlib.util.find_spec("tilelang"):
        return
    if any(_is_gated_delta_net(mixer) for mixer in recurrent_mixers(model)):
        raise UnavailableError(
            needed="flash-linear-attention with right gradients of gated delta nets, on a Hopper GPU",
            given=f"Triton {triton}, which miscompiles them",
            remedy="Install Triton 3.7.1 or newer, or tilelang; or uninstall flash-linear-attention. Row-invariant"
            " layers, where they cover the model (docs/models.md), do without it.",
        )


def _is_gated_delta_net(mixer: nn.Module) -> bool:
    return hasattr(sys.modules[type(mixer).__module__], "torch_chunk_gated_delta_rule")

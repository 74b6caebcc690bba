"""AdamW with 8-bit optimizer state: torchao's ``AdamW8bit``, on master weights if there are any.

Each 256 numbers of the state share a scale (Dettmers et al. 2021, arXiv:2110.02861): 2 bytes a weight instead of 8.
Small tensors keep float32 state. torch compiles the update at the first step, for each shape.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from logitless.train.optim.master_weights import round_master_weights, with_master_weights

PARTS = ("codes", "scale", "qmap")
"""Tensors of an 8-bit moment: the 8-bit codes, the scale of each block, and the values of the 256 codes."""


def eight_bit_adamw(groups: Iterable[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    """torchao's optimizer; each step also rounds master weights to the parameters.

    Returns:
        An optimizer whose attribute ``lowered`` maps each master weight to its parameter.
    """
    from torchao.optim import AdamW8bit

    groups, lowered = with_master_weights(groups)
    optimizer: Any = AdamW8bit(groups, **options)
    optimizer.lowered = lowered
    optimizer.register_step_post_hook(lambda *_: round_master_weights(lowered.values()))
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


def parts_of(moment: Any) -> dict[str, Tensor]:
    """The tensors of an 8-bit moment by name; any other tensor itself, under an empty name.

    Example:
        >>> list(parts_of(torch.zeros(2)))
        ['']
    """
    return {f".{part}": getattr(moment, part) for part in PARTS} if hasattr(moment, PARTS[0]) else {"": moment}


def packed_moment(key: str, parts: Mapping[str, Tensor], like: nn.Parameter) -> Any:
    """The 8-bit moment of which ``parts_of`` gave the tensors.

    Args:
        key: of the optimizer's state; the first moment (``exp_avg``) is signed.
    """
    from torchao.optim.subclass_8bit import OptimState8bit

    tensors = [parts[f".{part}"].to(like.device) for part in PARTS]
    return OptimState8bit(*tensors, key == "exp_avg", dtype=like.dtype)

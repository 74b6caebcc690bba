"""AdamW with 8-bit optimizer state: torchao's ``AdamW8bit``, over master weights where there are some.

Each 256 numbers of the state share a scale (Dettmers et al. 2021, arXiv:2110.02861): 2 bytes a weight instead of 8. The
update is compiled by torch at the first step, a shape at a time. Small tensors keep float32 state. torchao is an
extra of its own; a recipe without it is refused.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from logitless.train.optim.master_weights import round_master_weights, with_master_weights

PARTS = ("codes", "scale", "qmap")
"""What a packed moment is made of: numbers of 8 bits, the largest of each block, and what the 256 codes mean."""


def eight_bit_adamw(groups: Iterable[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    """torchao's optimizer; each step also writes the parameters that master weights are rounded to.

    Args:
        groups: as for ``torch.optim.AdamW``, with the model's parameters.
        options: ``lr``, ``betas`` and ``eps`` of AdamW.

    Returns:
        An optimizer whose attribute ``lowered`` has the parameter of each master weight.
    """
    from torchao.optim import AdamW8bit

    groups, lowered = with_master_weights(groups)
    optimizer: Any = AdamW8bit(groups, **options)
    optimizer.lowered = lowered
    optimizer.register_step_post_hook(lambda *_: round_master_weights(lowered.values()))
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


def parts_of(moment: Any) -> dict[str, Tensor]:
    """A packed moment's tensors by name; of any other tensor itself, without a name.

    Example:
        >>> list(parts_of(torch.zeros(2)))
        ['']
    """
    return {f".{part}": getattr(moment, part) for part in PARTS} if hasattr(moment, PARTS[0]) else {"": moment}


def packed_moment(key: str, parts: Mapping[str, Tensor], like: nn.Parameter) -> Any:
    """What ``parts_of`` took apart.

    Args:
        key: of the optimizer's state; the first moment has a sign.
        parts: by name.
        like: the parameter that it is of.
    """
    from torchao.optim.subclass_8bit import OptimState8bit

    tensors = [parts[f".{part}"].to(like.device) for part in PARTS]
    return OptimState8bit(*tensors, key == "exp_avg", dtype=like.dtype)

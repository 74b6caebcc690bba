"""AdamW whose two moments are 8-bit numbers: torchao's ``AdamW8bit``, over masters where there are some.

Each 256 numbers of a moment share a scale (Dettmers et al. 2021, arXiv:2110.02861): 2 bytes a weight instead of 8. The
update is compiled by torch at the first step, a shape at a time. Small tensors keep float32 moments. torchao is an
extra of its own; without it the option is refused.
"""

import importlib.util
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from logitless.errors import UnavailableError
from logitless.train.masters import over_masters, round_masters

PARTS = ("codes", "scale", "qmap")
"""What a packed moment is made of: numbers of 8 bits, the largest of each block, and what the 256 codes mean."""


def eight_bit_adamw(groups: Iterable[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    """torchao's optimizer; each step also writes the rounded parameters of masters.

    Args:
        groups: as for ``torch.optim.AdamW``, with the model's parameters.
        options: ``lr``, ``betas`` and ``eps`` of AdamW.

    Returns:
        An optimizer whose attribute ``lowered`` has the parameter of each master.

    Raises:
        UnavailableError: no torchao.
    """
    check_torchao()
    from torchao.optim import AdamW8bit

    groups, lowered = over_masters(groups)
    optimizer: Any = AdamW8bit(groups, **options)
    optimizer.lowered = lowered
    optimizer.register_step_post_hook(lambda *_: round_masters(lowered.values()))
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


def check_torchao() -> None:
    """Refuse 8-bit moments where torchao is not installed.

    Raises:
        UnavailableError: it is not.
    """
    if importlib.util.find_spec("torchao") is None:
        raise UnavailableError(
            needed="torchao for train.optimizer.moments: 8bit",
            given="none installed",
            remedy="pip install 'logitless[torchao]', or leave train.optimizer.moments at float32.",
        )


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

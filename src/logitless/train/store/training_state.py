"""What a checkpoint holds of torch: trained weights, optimizer state and random generators, as tensors by name."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from logitless.distributed.sharding import local_part, part_of, sharded_like
from logitless.errors import CheckpointError
from logitless.train.optim.eight_bit import PARTS, packed_moment, parts_of


def parameter_tensors(parameters: Mapping[str, nn.Parameter]) -> Mapping[str, nn.Parameter]:
    """Trained parameters as ``parameter/<name>``; frozen ones are left out."""
    return {f"parameter/{name}": p for name, p in parameters.items() if p.requires_grad}


def restore_parameters(parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> None:
    """Load ``parameter_tensors`` into the parameters, one at a time.

    Raises:
        CheckpointError: the checkpoint is of another model.
    """
    trained = parameter_tensors(parameters)
    stored = {name for name in tensors if name.startswith("parameter/")}
    if trained.keys() != stored:
        differ = sorted(name.partition("/")[2] for name in trained.keys() ^ stored)
        raise CheckpointError(
            needed="a checkpoint with exactly the weights that are trained",
            given=f"one that differs in {', '.join(differ[:5])}{' ...' if len(differ) > 5 else ''}",
            remedy="Resume with the recipe, the model and the versions of packages that the run was started with.",
        )
    with torch.no_grad():
        for name, parameter in trained.items():
            value = tensors[name]
            if value.shape != parameter.shape or value.dtype != parameter.dtype:
                raise CheckpointError(
                    needed=f"{name.partition('/')[2]} of shape {tuple(parameter.shape)} in {parameter.dtype}",
                    given=f"{tuple(value.shape)} in {value.dtype}",
                    remedy="Resume with the recipe and the model that the run was started with.",
                )
            local_part(parameter).copy_(part_of(value, parameter))


def optimizer_tensors(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as ``optimizer/<parameter>/<key>``; 8-bit state as several tensors."""
    return {
        f"optimizer/{name}/{key}{part}": tensor
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        for part, tensor in parts_of(value).items()
    }


def restore_optimizer(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    """Load ``optimizer_tensors``, one at a time, to the devices where AdamW keeps them."""
    for name in tensors:
        kind, _, rest = name.partition("/")
        if kind == "optimizer":
            parameter_name, _, key = rest.rpartition("/")
            parameter = parameters[parameter_name]
            key, packed, _ = key.partition(".")
            if packed:
                if key not in optimizer.state[parameter]:
                    whole = name.rpartition(".")[0]
                    parts = {f".{part}": tensors[f"{whole}.{part}"] for part in PARTS}
                    optimizer.state[parameter][key] = packed_moment(key, parts, parameter)
                continue
            on_host = key == "step" and not optimizer.defaults.get("fused")
            value = tensors[name]
            if value.shape == parameter.shape:
                optimizer.state[parameter][key] = sharded_like(value, parameter)
            else:
                optimizer.state[parameter][key] = value if on_host else value.to(parameter.device)


def random_tensors() -> dict[str, Tensor]:
    """State of torch's and NumPy's global generators, which code of others may use."""
    _, keys, *_ = _of_numpy()
    states = {"random/torch": torch.get_rng_state(), "random/numpy": torch.tensor(keys.tolist())}
    if torch.cuda.is_available():
        states["random/cuda"] = torch.cuda.get_rng_state()
    return states


def random_state() -> dict[str, Any]:
    """State of Python's global generator, and the scalars of NumPy's."""
    _, _, pos, has_gauss, of_numpy = _of_numpy()
    version, internal, gauss = random.getstate()
    scalars = {"pos": int(pos), "has_gauss": int(has_gauss), "gauss": float(of_numpy)}
    return {"python": [version, list(internal), gauss], "numpy": scalars}


def restore_random(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Restore ``random_tensors`` and ``random_state``."""
    torch.set_rng_state(tensors["random/torch"])
    if "random/cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random/cuda"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    scalars = state["numpy"]
    keys = tensors["random/numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, scalars["pos"], scalars["has_gauss"], scalars["gauss"]))


def _of_numpy() -> Any:
    return np.random.get_state()

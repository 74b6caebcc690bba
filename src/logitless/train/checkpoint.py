"""Checkpoints that appear whole or not at all, and from which a run goes on bitwise.

A checkpoint is written to a hidden folder beside its place, flushed to disk and renamed; a crash at any moment leaves
the earlier checkpoints as they were. Tensors are safetensors, everything else JSON: nothing is ever unpickled.

    checkpoints/step-000012/
        model/                  Hugging Face format (an adapter under LoRA), float32, loads with from_pretrained
        value_head.safetensors  weight [1, D] and bias [1], where the algorithm has a value loss
        tensors.safetensors     optimizer moments, random generators, the tokens of a block in flight
        state.json              progress, KL coefficient, data order, block in flight
"""

import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from logitless.errors import CheckpointError

VALUE_HEAD = "value_head.safetensors"
_PREFIX = "step-"


@dataclass(frozen=True)
class Checkpoint:
    """What is read back: the folder, its tensors by name and its JSON state."""

    folder: Path
    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]


def save_checkpoint(
    root: Path,
    step: int,
    *,
    save_model: Callable[[Path], None],
    save_value_head: Callable[[Path], None] | None = None,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write checkpoint ``step`` under ``root`` and delete all but the latest ``keep``.

    Args:
        root: the run's checkpoint folder.
        step: optimizer steps done.
        save_model: writes the weights into the folder it is given.
        save_value_head: writes the value head to the path it is given; None where there is none.
        tensors: anything a tensor; moved to the CPU.
        state: anything JSON.
        keep: checkpoints left after this one is in place.

    Raises:
        CheckpointError: the disk is full or not writable; earlier checkpoints are untouched.
    """
    final = root / f"{_PREFIX}{step:06d}"
    if final.exists():  # the same step of a deterministic run
        return final
    partial = root / f".saving-{final.name}"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "model").mkdir(parents=True)
        save_model(partial / "model")
        if save_value_head is not None:
            save_value_head(partial / VALUE_HEAD)
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, partial / "tensors.safetensors")
        (partial / "state.json").write_text(json.dumps(state))
        _flush(partial)
        partial.rename(final)
        _flush_folder(root)
    except (OSError, SafetensorError, CheckpointError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            needed=f"room and permission to write {final}",
            given=str(error),
            remedy="Free disk space or choose another `output`, then continue with --resume from the last checkpoint.",
        ) from error
    for old in checkpoints(root)[:-keep]:
        shutil.rmtree(old)
    return final


def checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints, oldest first.

    Example:
        >>> checkpoints(Path("/nonexistent"))
        []
    """
    return sorted(path for path in root.glob(f"{_PREFIX}*") if path.is_dir())


def load_checkpoint(root: Path) -> Checkpoint:
    """Read the latest complete checkpoint under ``root``; remains of an interrupted save are removed.

    Raises:
        CheckpointError: there is none, or its files are damaged.
    """
    for partial in root.glob(".saving-*"):
        shutil.rmtree(partial)
    found = checkpoints(root)
    if not found:
        raise CheckpointError(
            needed=f"a checkpoint under {root}",
            given="none",
            remedy="Start without --resume, under another name or after removing the run folder.",
        )
    folder = found[-1]
    try:
        return Checkpoint(
            folder, load_file(folder / "tensors.safetensors"), json.loads((folder / "state.json").read_text())
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            needed=f"readable files in {folder}",
            given=str(error),
            remedy="Delete this checkpoint to continue from the one before it.",
        ) from error


def optimizer_tensors(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state by parameter name: ``optimizer/<parameter>/<moment>``."""
    return {
        f"optimizer/{name}/{key}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    """Put ``optimizer_tensors`` back; AdamW's step counters stay where AdamW keeps them."""
    for name, value in tensors.items():
        kind, _, rest = name.partition("/")
        if kind == "optimizer":
            parameter_name, _, key = rest.rpartition("/")
            parameter = parameters[parameter_name]
            on_host = key == "step" and not optimizer.defaults.get("fused")
            optimizer.state[parameter][key] = value.clone() if on_host else value.to(parameter.device)


def random_tensors() -> dict[str, Tensor]:
    """State of torch's generators and of NumPy's global one (library code may draw from them)."""
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    keys = torch.tensor(numpy_state["state"]["key"].tolist())
    states = {"random/torch": torch.get_rng_state(), "random/numpy": keys}
    if torch.cuda.is_available():
        states["random/cuda"] = torch.cuda.get_rng_state()
    return states


def random_state() -> dict[str, Any]:
    """State of Python's global generator and the scalars of NumPy's."""
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    scalars = {"pos": int(numpy_state["state"]["pos"]), "has_gauss": int(numpy_state["has_gauss"])}
    version, internal, gauss = random.getstate()
    return {"python": [version, list(internal), gauss], "numpy": {**scalars, "gauss": float(numpy_state["gauss"])}}


def restore_random(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Put ``random_tensors`` and ``random_state`` back."""
    torch.set_rng_state(tensors["random/torch"])
    if "random/cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random/cuda"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    scalars = state["numpy"]
    keys = tensors["random/numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, scalars["pos"], scalars["has_gauss"], scalars["gauss"]))


def _flush(folder: Path) -> None:
    """Push every file and folder below to the disk."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            _flush_folder(path)
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

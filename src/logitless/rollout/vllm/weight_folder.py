"""Weights in a folder, for an engine in another process: whole, or as a difference to the version before.

A folder is complete when it contains its marker, ``weights.json``, which is written last. transformers and vLLM can
load a whole folder. A difference contains the changed values of each tensor and their indices, or the whole tensor if
that is shorter; it names the folder that it is based on. Reading gives bitwise identical weights. Writing differences
needs a second copy of the weights in memory.
"""

import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from logitless.errors import EngineError

MARKER = "weights.json"
_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Written:
    """The folder of one version.

    Args:
        folder: with the marker.
        kind: ``whole`` or ``difference``.
        num_bytes: of its tensors.
        num_weights: of the model.
        num_changed: weights that differ in any bit from the version before; None if unknown.
    """

    folder: Path
    kind: Literal["whole", "difference"]
    num_bytes: int
    num_weights: int
    num_changed: int | None


def private_folder(owner: object) -> tuple[Path, Callable[[], object]]:
    """A new folder for weights, and a function that removes it; it is removed with its owner at the latest.

    Example:
        >>> folder, remove = private_folder(owner := Written(Path(), "whole", 0, 0, None))
        >>> remove()
        >>> folder.exists()
        False
    """
    folder = Path(tempfile.mkdtemp(prefix="logitless-weights-"))
    return folder, weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)


_KEPT_WHOLE = "correction_bias"
"""Of a router, which servers hold in float32: rounded, it would send tokens to other experts."""


class WeightFolders:
    """Writes one folder a version, and removes those that are not needed any more.

    Args:
        root: parent of the folders.
        dtype: that weights are rounded to before they are compared and written, except a router's correction bias; None
            keeps each tensor's own.
        differences_in_a_row: the most differences before weights are written whole again; 0 always writes them whole,
            without a second copy in memory.
        shard_bytes: the most bytes of a file.

    Example:
        >>> import tempfile
        >>> folders = WeightFolders(Path(tempfile.mkdtemp()), dtype=torch.bfloat16, differences_in_a_row=4)
        >>> weight = torch.ones(1000)
        >>> folders.write([("w", weight)], version=0).kind
        'whole'
        >>> weight[7] = 2.0
        >>> second = folders.write([("w", weight)], version=1)
        >>> second.kind, second.num_changed, second.num_bytes, dict(read_weights(second.folder))["w"][7].item()
        ('difference', 1, 6, 2.0)
    """

    def __init__(
        self,
        root: Path,
        *,
        dtype: torch.dtype | None = None,
        differences_in_a_row: int = 0,
        shard_bytes: int = 4 * 2**30,
    ) -> None:
        self.root, self.dtype, self.shard_bytes = root, dtype, shard_bytes
        self._most, self._in_a_row = differences_in_a_row, 0
        self._last: dict[str, Tensor] | None = None
        self._needed: list[Path] = []

    def write(
        self,
        tensors: Iterator[tuple[str, Tensor]] | list[tuple[str, Tensor]],
        version: int,
        config: Callable[[Path], Any] | None = None,
    ) -> Written:
        """Write the folder of a version; an incomplete one of the same version is replaced.

        Args:
            tensors: every weight by its Hugging Face name; read once.
            version: of the weights.
            config: called with a whole folder, to write the model's configuration.
        """
        folder = self.root / f"{version:09d}"
        shutil.rmtree(folder, ignore_errors=True)
        # No difference is based on a version that is written again, or whose writing fails.
        before, self._last = None if folder in self._needed else self._last, None
        self._needed = [each for each in self._needed if each != folder]
        folder.mkdir(parents=True)
        rounded = ((name, _rounded(name, tensor, self.dtype)) for name, tensor in tensors)
        if self._most == 0:
            num_bytes, num_weights = self._write_whole(folder, rounded)
            written = Written(folder, "whole", num_bytes, num_weights, None)
        else:
            written = self._write_shorter(folder, before, now := dict(rounded))
        if written.kind == "whole" and config is not None:
            config(folder)
        base = self._needed[-1].name if written.kind == "difference" else None
        _write_marker(folder, {"version": version, "kind": written.kind, "base": base, "bytes": written.num_bytes})
        self._forget(written)
        if self._most > 0:
            self._last = {name: tensor.clone() for name, tensor in now.items()}
        return written

    def _write_shorter(self, folder: Path, before: dict[str, Tensor] | None, now: dict[str, Tensor]) -> Written:
        """Write a difference to the version before if that is shorter, else all weights."""
        num_weights, whole = sum(t.numel() for t in now.values()), sum(t.nbytes for t in now.values())
        num_changed = None
        if before is not None and before.keys() == now.keys():
            difference = dict[str, Tensor]()
            num_changed = 0
            for name, tensor in now.items():
                places = _changed(before[name], tensor)
                num_changed += len(places)
                difference |= _shorter(name, tensor, places)
            num_bytes = sum(t.nbytes for t in difference.values())
            if num_bytes < whole and self._in_a_row < self._most:
                self._in_a_row += 1
                save_file(difference, folder / "difference.safetensors")
                return Written(folder, "difference", num_bytes, num_weights, num_changed)
        self._in_a_row = 0
        self._write_whole(folder, iter(now.items()))
        return Written(folder, "whole", whole, num_weights, num_changed)

    def _write_whole(self, folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> tuple[int, int]:
        """Write files of at most ``shard_bytes`` each and their index; returns (bytes, weights)."""
        shard: dict[str, Tensor] = {}
        files: dict[str, str] = {}
        num_bytes = num_weights = held = 0

        def flush() -> None:
            name = f"model-{len(set(files.values())):05d}.safetensors"
            files.update(dict.fromkeys(shard, name))
            save_file(shard, folder / name, metadata={"format": "pt"})
            shard.clear()

        for name, tensor in tensors:
            if shard and held + tensor.nbytes > self.shard_bytes:
                flush()
                held = 0
            shard[name] = tensor
            held, num_bytes, num_weights = held + tensor.nbytes, num_bytes + tensor.nbytes, num_weights + tensor.numel()
        if shard:
            flush()
        index = {"metadata": {"total_size": num_bytes}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        return num_bytes, num_weights

    def _forget(self, written: Written) -> None:
        """Remove the folders that the new one is not based on."""
        if written.kind == "whole":
            for folder in self._needed:
                shutil.rmtree(folder, ignore_errors=True)
            self._needed = []
        self._needed.append(written.folder)


def read_weights(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Every weight by name, a tensor at a time.

    Raises:
        EngineError: the folder, or one that it is based on, is not complete.
    """
    folder = Path(folder)
    marker = read_marker(folder)
    if marker["kind"] == "whole":
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    yield name, file.get_tensor(name)
        return
    with safe_open(folder / "difference.safetensors", framework="pt") as file:
        there = set(file.keys())
        for name, tensor in read_weights(folder.parent / marker["base"]):
            if f"{name}:whole" in there:
                yield name, file.get_tensor(f"{name}:whole")
            elif f"{name}:places" in there:
                flat = tensor.flatten()
                flat[file.get_tensor(f"{name}:places").long()] = file.get_tensor(f"{name}:values")
                yield name, flat.view(tensor.shape)
            else:
                yield name, tensor


def read_marker(folder: Path) -> dict[str, Any]:
    """The marker of a complete folder.

    Raises:
        EngineError: it is absent or invalid.
    """
    try:
        marker = json.loads((folder / MARKER).read_text())
        if marker["kind"] not in ("whole", "difference"):
            raise ValueError(f"kind {marker['kind']!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(
            needed=f"a complete folder of weights with its {MARKER}",
            given=f"{folder}: {error}",
            remedy="Wait until it is written; remove a folder that a stopped run left half written.",
        ) from error
    return marker


def _write_marker(folder: Path, marker: dict[str, Any]) -> None:
    part = folder / f"{MARKER}.part"
    part.write_text(json.dumps(marker))
    os.replace(part, folder / MARKER)  # noqa: PTH105


def _rounded(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    moved = tensor.detach().cpu().contiguous()
    keeps = name.endswith(_KEPT_WHOLE) or not moved.is_floating_point()
    return moved if dtype is None or keeps else moved.to(dtype)


def _changed(before: Tensor, now: Tensor) -> Tensor:
    """Flat indices where the bits differ; so -0.0 differs from 0.0, and equal NaN do not differ."""
    if before.dtype != now.dtype or before.shape != now.shape:
        return torch.arange(now.numel())
    kind = _SAME_SIZE[now.element_size()]
    return (before.flatten().view(kind) != now.flatten().view(kind)).nonzero()[:, 0]


def _shorter(name: str, tensor: Tensor, places: Tensor) -> dict[str, Tensor]:
    """The entry of a tensor in a difference: nothing, its changed values with their indices, or the whole tensor."""
    if not len(places):
        return {}
    kind = torch.int32 if tensor.numel() < 2**31 else torch.int64
    if len(places) * (kind.itemsize + tensor.element_size()) >= tensor.nbytes:
        return {f"{name}:whole": tensor}
    return {f"{name}:places": places.to(kind), f"{name}:values": tensor.flatten()[places]}

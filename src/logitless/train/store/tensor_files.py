"""Safetensors files, written and read one tensor at a time, with a checksum of each.

The safetensors library needs all tensors of a file at once; here the host holds one. The format is the same: eight
bytes with the header's length, the header in JSON, the numbers.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LARGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class Place:
    """Where a tensor is in a file.

    Args:
        start: offset of its first byte in the file.
        num_bytes: its size.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def dtype_name(dtype: torch.dtype) -> str:
    """The format's name of a dtype."""
    return _NAMES[dtype]


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Write a safetensors file and flush it to disk; the host holds a copy of one tensor at most.

    Returns:
        The SHA-256 of each tensor's numbers.

    Raises:
        OSError: the disk is full or not writable.

    Example:
        >>> import tempfile
        >>> from safetensors.torch import load_file
        >>> path = Path(tempfile.mkdtemp()) / "a.safetensors"
        >>> _ = write_tensors(path, {"x": torch.tensor([1.0, 2.0])})
        >>> load_file(path)
        {'x': tensor([1., 2.])}
    """
    header, end = dict[str, object](), 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    sums = {}
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            numbers = _bytes(tensor.detach().cpu().contiguous())
            file.write(numbers)
            sums[name] = hashlib.sha256(numbers).hexdigest()
            del numbers
        file.flush()
        os.fsync(file.fileno())
    return sums


def read_places(path: Path) -> dict[str, Place]:
    """The tensors in a file, by its header.

    Raises:
        OSError: no such file.
        ValueError: it is not a safetensors file, or shorter than its header says.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.safetensors"
        >>> _ = write_tensors(path, {"x": torch.ones(3, dtype=torch.int8)})
        >>> read_places(path)["x"].shape
        (3,)
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(size - 8, _LARGEST_HEADER):
            raise ValueError(f"{path.name} is cut or not a safetensors file")
        header = json.loads(file.read(length))
    places = {}
    try:
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            dtype, shape = _DTYPES[entry["dtype"]], tuple(map(int, entry["shape"]))
            start, end = entry["data_offsets"]
            place = Place(dtype, shape, 8 + length + start, end - start)
            fits = place.num_bytes == math.prod(shape) * dtype.itemsize
            if not (start >= 0 and place.start + place.num_bytes <= size and fits):
                raise ValueError(f"{path.name} is cut: {name!r} should end at byte {8 + length + end} of {size}")
            places[name] = place
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name} has a damaged header: {error!r}") from error
    return places


def read_tensor(path: Path, place: Place) -> tuple[Tensor, str]:
    """A tensor on the CPU, in memory of its own, and the SHA-256 of its numbers.

    Raises:
        OSError: no such file.
        ValueError: the file ends before the tensor does.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.safetensors"
        >>> sums = write_tensors(path, {"x": torch.tensor([[1.0], [2.0]])})
        >>> tensor, found = read_tensor(path, read_places(path)["x"])
        >>> tensor.tolist(), found == sums["x"]
        ([[1.0], [2.0]], True)
    """
    tensor = torch.empty(place.shape, dtype=place.dtype)
    numbers = _bytes(tensor)
    with path.open("rb", buffering=0) as file:
        file.seek(place.start)
        done = 0
        while done < place.num_bytes:
            read = file.readinto(numbers[done:])
            if not read:
                raise ValueError(f"{path.name} ends at byte {place.start + done}, in the middle of a tensor")
            done += read
    return tensor, hashlib.sha256(numbers).hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, not copied."""
    numbers: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(numbers)

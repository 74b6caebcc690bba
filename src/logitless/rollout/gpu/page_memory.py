"""Memory for pages at fixed addresses, so that CUDA graphs stay valid although training uses the memory in between.

A graph contains the addresses that it was captured with. Here a range of addresses as large as the device is reserved
once; memory is mapped to it when sampling begins and unmapped when it ends. torch has no call for that, so the CUDA
driver is called directly. On a CPU it is ordinary memory.
"""

import ctypes
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

_u64, _size = ctypes.c_uint64, ctypes.c_size_t
_OUT_OF_MEMORY = 2
_PINNED, _DEVICE, _READ_WRITE = 1, 1, 3  # of the driver's enumerations


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("security", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Bytes:
    """Device memory in the interface from which torch makes a tensor without copying."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "|u1", "data": (address, False), "version": 2}


class PageMemory:
    """Equal parts of memory with fixed addresses, whatever the size of the parts.

    Args:
        parts: their number.
        device: of the memory.

    Example:
        >>> memory = PageMemory(2, torch.device("cpu"))
        >>> memory.open(100).shape
        torch.Size([2, 100])
        >>> memory.close()
    """

    def __init__(self, parts: int, device: torch.device) -> None:
        self.parts, self.device = parts, device
        self._first, self._span, self._unit = 0, 0, 1
        self._mapped: list[int] = []  # addresses of parts that have memory
        self._size = 0
        if device.type == "cuda":
            self._reserve()

    def open(self, part_bytes: int) -> Tensor:
        """[parts, part_bytes] uint8, uninitialised; the distance between rows never changes.

        Raises:
            torch.OutOfMemoryError: there is not enough memory.
        """
        if self.device.type != "cuda":
            return torch.empty(self.parts, part_bytes, dtype=torch.uint8)
        self.close()
        size = -(-part_bytes // self._unit) * self._unit
        try:
            self._map(size)
        except torch.OutOfMemoryError:
            self.close()
            torch.cuda.empty_cache()
            try:
                self._map(size)
            except torch.OutOfMemoryError:
                self.close()
                raise
        whole: Any = torch.as_tensor(_Bytes(self._first, self._span * (self.parts - 1) + size), device=self.device)
        return whole.as_strided((self.parts, part_bytes), (self._span, 1))

    def close(self) -> None:
        """Free the memory, after the device has finished all work."""
        if not self._mapped:
            return
        torch.cuda.synchronize(self.device)
        for address in self._mapped:
            _driver("cuMemUnmap", _u64(address), _size(self._size))
        self._mapped = []

    def __del__(self) -> None:
        if self._span:
            with suppress(Exception):  # at the end of the process the driver may be gone
                self.close()
                _driver("cuMemAddressFree", _u64(self._first), _size(self._span * self.parts))

    def _properties(self) -> _Properties:
        return _Properties(type=_PINNED, location=_Location(_DEVICE, self.device.index or 0))

    def _reserve(self) -> None:
        torch.cuda.synchronize(self.device)  # makes the device's context current in this thread
        unit, properties = _size(), self._properties()
        _driver("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(properties), 0)
        self._unit = unit.value
        total = torch.cuda.get_device_properties(self.device).total_memory
        self._span = -(-total // self.parts // self._unit) * self._unit
        first = _u64()
        _driver("cuMemAddressReserve", ctypes.byref(first), _size(self._span * self.parts), _size(0), _u64(0), _u64(0))
        self._first = first.value

    def _map(self, size: int) -> None:
        self._size = size
        properties = self._properties()
        access = _Access(properties.location, _READ_WRITE)
        for part in range(self.parts):
            address, handle = self._first + part * self._span, _u64()
            _driver("cuMemCreate", ctypes.byref(handle), _size(size), ctypes.byref(properties), _u64(0))
            try:
                _driver("cuMemMap", _u64(address), _size(size), _size(0), handle, _u64(0))
            finally:
                _driver("cuMemRelease", handle)  # the mapping keeps the memory
            self._mapped.append(address)
            _driver("cuMemSetAccess", _u64(address), _size(size), ctypes.byref(access), _size(1))


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _driver(name: str, *arguments: Any) -> None:
    result = getattr(_library(), name)(*arguments)
    if result == _OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"{name} found no memory")
    if result:
        raise RuntimeError(f"the CUDA driver's {name} failed with error {result}")

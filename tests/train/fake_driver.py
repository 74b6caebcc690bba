"""A driver that locks any memory, for machines without a GPU."""

import mmap

import torch

from logitless.train.optim import locked_memory


class FakeDriver:
    """In the place of the driver's calls; ``locked`` holds the bytes by address.

    Args:
        why_not: what it says instead of locking.
    """

    def __init__(self, why_not: str = ""):
        self.why_not, self.locked = why_not, dict[int, int]()

    def register(self, address: int, size: int, _: torch.device) -> str:
        assert address % mmap.PAGESIZE == size % mmap.PAGESIZE == 0
        assert all(address + size <= other or other + its <= address for other, its in self.locked.items())
        if not self.why_not:
            self.locked[address] = size
        return self.why_not

    def unregister(self, address: int, _: torch.device, pages: mmap.mmap) -> None:
        assert len(pages) == self.locked.pop(address)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """As torch asks: of the first byte of the storage."""
        first = tensor.untyped_storage().data_ptr()
        return any(address <= first < address + size for address, size in self.locked.items())

    def install(self, monkeypatch) -> "FakeDriver":
        monkeypatch.setattr(locked_memory, "_register", self.register)
        monkeypatch.setattr(locked_memory, "_unregister", self.unregister)
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: self.is_pinned(tensor))
        return self

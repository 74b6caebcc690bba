"""Slots of recurrent states at fixed addresses, so that CUDA graphs stay valid although training uses their memory.

A slot continues one sequence in every gated delta net of a model: a completion that is decoded, or a prompt whose
completions have not all begun. Each completion begins with a copy of its prompt's slot.
"""

from collections.abc import Sequence
from math import prod

import torch
from jaxtyping import Int
from torch import Tensor

from logitless.models.kernels.delta_launch import DeltaCache
from logitless.models.row_invariant.delta_net import CHUNK, DeltaForm, DeltaSlots
from logitless.rollout.gpu.page_memory import PageMemory

_ALIGNED = 256


def slots_for(max_rows: int) -> int:
    """Slots for so many rows: of each, of prompts (a quarter as many), and one that stays empty.

    Example:
        >>> slots_for(1), slots_for(512)
        (3, 641)
    """
    return max_rows + 1 + prompt_slots(max_rows)


def prompt_slots(max_rows: int) -> int:
    """Prompts whose states are kept at once.

    Example:
        >>> prompt_slots(1), prompt_slots(512)
        (1, 128)
    """
    return -(-max_rows // 4)


def slot_bytes(forms: Sequence[DeltaForm], dtype: torch.dtype) -> int:
    """Bytes of a slot, all layers together.

    Example:
        >>> slot_bytes([DeltaForm(16, 32, 128, 128, 4, 1e-6)], torch.bfloat16)
        3342336
    """
    return sum(prod(shape) * kind.itemsize for form in forms for shape, kind in _fields(form, dtype))


def _fields(form: DeltaForm, dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each tensor of a slot: the convolution's inputs, then those of ``DeltaCache``."""
    heads = (form.key_heads, form.heads, form.key_width, form.width)
    of_rule = DeltaCache.fields(*heads, size=CHUNK, dtype=dtype)
    return [((form.taps - 1, form.channels), dtype), *(field for field in of_rule if field is not None)]


class StateMemory:
    """The slots of a model's gated delta nets.

    Args:
        forms: of the layers, all equal.
        dtype: of the layers.
        max_rows: completions at once.
        device: of the memory.

    Example:
        >>> memory = StateMemory([DeltaForm(1, 1, 16, 16, 2, 1e-6)], torch.float32, 2, torch.device("cpu"))
        >>> memory.open()
        >>> memory.slots[0].history.shape
        torch.Size([4, 1, 48])
        >>> memory.close()
    """

    def __init__(self, forms: Sequence[DeltaForm], dtype: torch.dtype, max_rows: int, device: torch.device) -> None:
        self.forms, self.dtype, self.max_rows = forms, dtype, max_rows
        self.slots: list[DeltaSlots] = []
        self._memory = PageMemory(1, device)
        self._parts: list[Tensor] = []  # [layers, slots, ...] of each field

    def open(self) -> None:
        """Allocate the slots, uninitialised except for the empty one; raises OutOfMemoryError if they do not fit."""
        fields, rows = _fields(self.forms[0], self.dtype), (len(self.forms), slots_for(self.max_rows))
        sizes = [prod((*rows, *shape)) * kind.itemsize for shape, kind in fields]
        room = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
        parts = self._memory.open(sum(room))[0].split(room)  # type: ignore[no-untyped-call]
        self._parts = [
            part[:size].view(kind).view(*rows, *shape)
            for part, size, (shape, kind) in zip(parts, sizes, fields, strict=True)
        ]
        for part in self._parts:
            part[:, self.max_rows].zero_()
        for layer in range(len(self.forms)):
            history, high, *rest = (part[layer] for part in self._parts)
            low = None if self.dtype == torch.float32 else rest.pop(0)
            self.slots.append(DeltaSlots(history, DeltaCache(high, low, *rest)))

    def close(self) -> None:
        self.slots, self._parts = [], []
        self._memory.close()

    def copy(self, source: Int[Tensor, "n"], target: Int[Tensor, "n"]) -> None:
        """Copy slots, int32 on the device, in every layer."""
        from logitless.rollout.gpu.kernels.step import copy_slots  # needs Triton

        for part in self._parts:
            copy_slots(part, source, target)

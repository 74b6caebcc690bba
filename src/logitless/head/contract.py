"""Checked arguments and the dtype rule of every backend of the head.

Matrix products take operands rounded to ``hidden.dtype``; logits, and everything computed from them, are float32
(float64 for float64). A float32 weight with bfloat16 hidden states is rounded to bfloat16 for the product; its gradient
stays float32. Autocast changes nothing.
"""

import functools
import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from logitless.distributed.sharding import is_sharded
from logitless.errors import InputError, UnavailableError
from logitless.types import LMHead

logger = logging.getLogger("logitless")

Backend = Literal["reference", "chunked", "fused"]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def checked(
    hidden: Tensor,
    head: LMHead | Tensor,
    target: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    memory_budget: int | None = None,
    anchor: Tensor | None = None,
    nonzero: Tensor | None = None,
    group: ProcessGroup | None = None,
) -> tuple[LMHead, Tensor, float | Tensor]:
    """The head as an ``LMHead``, the targets as int64 and the temperature in the logits' dtype, or an error.

    On a GPU values are checked without a synchronization: a target out of range is a device-side assertion.

    Raises:
        InputError: shapes, dtypes or devices that do not fit; a target out of range; a temperature that is not positive
            or that requires grad; a negative memory budget.
    """
    if isinstance(head, Tensor):
        head = LMHead(weight=head)
    if not isinstance(head, LMHead):
        raise InputError(
            needed="a head: a weight [V, D] or an LMHead",
            given=f"a {type(head).__name__}",
            remedy="Give logitless.models.lm_head.lm_head(model), or the module's weight.",
        )
    if hidden.dim() != 2 or hidden.dtype not in FLOATS:
        raise InputError(
            needed="hidden states [N, D] in float16, bfloat16, float32 or float64",
            given=_described(hidden),
            remedy="Select the scored rows first: hidden.flatten(0, 1)[source].",
        )
    num_rows = len(hidden)
    vocabulary = _check_head(head, hidden)
    if target.shape != (num_rows,) or target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise InputError(
            needed=f"one integer target per row ({num_rows})",
            given=_described(target),
            remedy="Give target[t], the token predicted from hidden[t].",
        )
    _check_hints(num_rows, anchor, nonzero)
    for name, value in (("target", target), ("anchor", anchor), ("nonzero", nonzero), ("temperature", temperature)):
        if isinstance(value, Tensor):
            _check_device(name, value, hidden, f"Move it: {name}.to(hidden.device).")
    if memory_budget is not None and memory_budget < 0:
        raise InputError(
            needed="a memory budget of 0 bytes or more",
            given=str(memory_budget),
            remedy="Leave it at None for the default.",
        )
    if group is not None and is_sharded(head.weight):
        raise InputError(
            needed="one way of sharding the weight",
            given="a DTensor and a process group of vocabulary shards",
            remedy="Give this rank's shard as a plain tensor with group, or the DTensor without.",
        )
    target = target.long()
    if group is None:
        require(
            (target >= 0) & (target < vocabulary),
            needed=f"targets in range({vocabulary})",
            given="one outside of it",
            remedy="Give rows of scored tokens only (no padding, no ignore index), ids of this head's vocabulary.",
        )
    return head, target, _checked_temperature(temperature, num_rows, logits_dtype(hidden.dtype))


def _check_head(head: LMHead, hidden: Tensor) -> int:
    """The size of the head's vocabulary, if its shapes fit the hidden states."""
    width = hidden.shape[1]
    vocabulary = head.weight.shape[0] if head.weight.dim() == 2 else 0
    rank = head.lora_a.shape[0] if head.lora_a is not None else 0
    _check("weight", head.weight, (vocabulary, width), hidden)
    _check("bias", head.bias, (vocabulary,), hidden)
    _check("lora_a", head.lora_a, (rank, width), hidden)
    _check("lora_b", head.lora_b, (vocabulary, rank), hidden)
    if not vocabulary:
        raise InputError(
            needed="a head over at least one token", given=_described(head.weight), remedy="Give a weight [V, D]."
        )
    return vocabulary


def _check_hints(num_rows: int, anchor: Tensor | None, nonzero: Tensor | None) -> None:
    for name, hint in (("anchor", anchor), ("nonzero", nonzero)):
        fits = hint is None or (hint.is_floating_point() if name == "anchor" else hint.dtype == torch.bool)
        if hint is not None and (hint.shape != (num_rows,) or not fits):
            raise InputError(
                needed=f"{name} [{num_rows}] of {'floats' if name == 'anchor' else 'booleans'}",
                given=_described(hint),
                remedy="Leave the hint out: it never changes a result.",
            )


def _checked_temperature(temperature: float | Tensor, num_rows: int, dtype: torch.dtype) -> float | Tensor:
    if not isinstance(temperature, Tensor):
        if not (temperature > 0 and math.isfinite(temperature)):
            raise InputError(
                needed="a positive, finite temperature",
                given=str(temperature),
                remedy="Score greedy decoding at the temperature of the distribution you train, usually 1.0.",
            )
        return float(temperature)
    if temperature.shape != (num_rows,) or not temperature.is_floating_point():
        raise InputError(
            needed=f"a number or one temperature per row ({num_rows})",
            given=_described(temperature),
            remedy="Give a float, or a float tensor [N].",
        )
    if temperature.requires_grad:
        raise InputError(
            needed="a temperature without gradient",
            given="one that requires grad",
            remedy="Detach it: temperature.detach(); the head does not learn temperatures.",
        )
    require(
        (temperature > 0) & temperature.isfinite(),
        needed="positive, finite temperatures",
        given="one that is not",
        remedy="Score greedy decoding at the temperature of the distribution you train, usually 1.0.",
    )
    return temperature.to(dtype)


def chosen_backend(backend: str, why_not: Callable[[Backend], str | None], what: str) -> Backend:
    """The backend that runs: for ``auto``, fused where it can, else chunked, which is logged with the reason.

    Args:
        backend: its name, or ``auto``.
        why_not: why a backend cannot run; None when it can.
        what: in the log.

    Raises:
        InputError: another name.
        UnavailableError: a named backend that cannot run.
    """
    if backend not in ("auto", "reference", "chunked", "fused"):
        raise InputError(
            needed="a backend 'auto', 'reference', 'chunked' or 'fused'",
            given=repr(backend),
            remedy="Use 'auto' unless you compare backends.",
        )
    name: Backend = "fused" if backend == "auto" else backend  # type: ignore[assignment]
    reason = why_not(name)
    if backend == "auto":
        name = "fused" if reason is None else "chunked"
        _log_once(what, name, "it can run here and is the fastest" if reason is None else f"fused cannot run: {reason}")
    elif reason is not None:
        raise UnavailableError(
            needed=f"a machine and tensors on which backend={backend!r} can run",
            given=reason,
            remedy="Use backend='auto' or backend='chunked'.",
        )
    return name


@functools.cache
def _log_once(what: str, backend: Backend, reason: str) -> None:
    logger.info("%s: %s (%s)", what, backend, reason)


def refuse_budget(memory_budget: int | None) -> None:
    """Raises UnavailableError for a memory budget of the reference backend."""
    if memory_budget is not None:
        raise UnavailableError(
            needed="a backend that can bound its memory",
            given="backend='reference'",
            remedy="Use backend='chunked', or leave memory_budget out.",
        )


def require(condition: Tensor, *, needed: str, given: str, remedy: str) -> None:
    """Raise unless the condition holds everywhere: at once on the CPU, asynchronously on a GPU."""
    if condition.device.type == "meta":
        return
    if condition.device.type == "cpu":
        if not bool(condition.all()):
            raise InputError(needed=needed, given=given, remedy=remedy)
    else:
        torch._assert_async(condition.all(), f"needed {needed}; given {given}. {remedy}")


def logits_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of logits, log-probs and entropies for hidden states of this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Disable autocast inside."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make this GPU the current device inside: Triton launches kernels on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _check(name: str, value: Tensor | None, shape: tuple[int, ...], hidden: Tensor) -> None:
    if value is None:
        return
    if value.shape != shape:
        raise InputError(
            needed=f"{name} of shape {list(shape)} for hidden states of width {hidden.shape[1]}",
            given=_described(value),
            remedy="Take head and hidden states from the same model (weights as [V, D]).",
        )
    if value.dtype not in FLOATS:
        raise InputError(
            needed=f"{name} in float16, bfloat16, float32 or float64",
            given=_described(value),
            remedy="Dequantise the head, or load the model without quantising it.",
        )
    _check_device(name, value, hidden, "Keep head and hidden states on one device.")


def _check_device(name: str, value: Tensor, hidden: Tensor, remedy: str) -> None:
    if value.device != hidden.device:
        raise InputError(needed=f"{name} on {hidden.device}, like hidden", given=str(value.device), remedy=remedy)


def _described(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"

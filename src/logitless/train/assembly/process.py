"""Settings of the process: device, allocator, matmul precision, attention kernels; and which are really in force."""

import os
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from logitless.errors import ConfigurationError
from logitless.models.four_bit import num_weights
from logitless.models.lm_head import causal_lm
from logitless.train.recipe.model import ModelSection
from logitless.train.recipe.precision import dtype_line


def runs_kernels(device: torch.device) -> bool:
    """Whether Triton kernels run on a device: on a GPU, or in Triton's interpreter, for tests."""
    return device.type != "cpu" or os.environ.get("TRITON_INTERPRET") == "1"


def device_of(section: ModelSection) -> torch.device:
    """The device a recipe asks for; ``auto`` is CUDA where there is one.

    Raises:
        ConfigurationError: CUDA by name on a machine without it.
    """
    if section.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return named_device(section.device, "model.device", "auto")


def named_device(name: str, key: str, default: str) -> torch.device:
    """The device that a key of a recipe names.

    Args:
        name: ``cpu``, ``cuda`` or ``cuda:<number>``.
        key: of the recipe.
        default: a value of this key that is right everywhere.

    Raises:
        ConfigurationError: another name, or a GPU that this machine does not have.
    """
    if re.fullmatch(r"cpu|cuda(:\d+)?", name) is None:
        raise ConfigurationError(
            needed=f"{default}, cpu, cuda or cuda:<number> as {key}", given=repr(name), remedy=f"Set {key}: {default}."
        )
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ConfigurationError(
                needed=f"a CUDA device for {key}",
                given=f"{name}, and {count or 'none'} on this machine",
                remedy=f"Set {key}: cpu or {default}" + (f", or at most cuda:{count - 1}." if count else "."),
            )
    return device


def autocast_of(section: ModelSection) -> torch.dtype | None:
    """The dtype of the products under ``model.autocast``; None: that of the weights."""
    return None if section.autocast is None else getattr(torch, section.autocast)


_SDPA: dict[str, tuple[Callable[[bool], Any], Callable[[], Any]]] = {
    "flash": (torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.flash_sdp_enabled),
    "efficient": (torch.backends.cuda.enable_mem_efficient_sdp, torch.backends.cuda.mem_efficient_sdp_enabled),
    "cudnn": (torch.backends.cuda.enable_cudnn_sdp, torch.backends.cuda.cudnn_sdp_enabled),
    "math": (torch.backends.cuda.enable_math_sdp, torch.backends.cuda.math_sdp_enabled),
}


def sdpa_allowed() -> list[str]:
    """Kernels that scaled_dot_product_attention may choose from in this process.

    Example:
        >>> "math" in sdpa_allowed()
        True
    """
    return [name for name, (_, enabled) in _SDPA.items() if enabled()]


def set_process(section: ModelSection, *, seed: int) -> None:
    """Set up the process; before the first tensor on a GPU.

    Global random generators are seeded for code of others: logitless does not use them.
    """
    set_allocator(section.allocator)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.set_float32_matmul_precision(section.matmul_precision)
    for name, (enable, _) in _SDPA.items():
        if section.sdpa_backends is not None:
            enable(name in section.sdpa_backends)
    transformers.utils.logging.disable_progress_bar()


def set_allocator(setting: str | None) -> None:
    """Set torch's CUDA allocator for this process and its children, unless it is set already.

    Args:
        setting: as of ``PYTORCH_CUDA_ALLOC_CONF``; None leaves it to torch.
    """
    if setting is not None and allocator_of_environment() is None:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = setting
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # CUDA was initialised before (by ranks or doctor), and the variable is not read any more.
            torch._C._accelerator_setAllocatorSettings(setting)


def allocator_of_environment() -> str | None:
    """The setting of torch's CUDA allocator in the environment, under either of its names; None if there is none."""
    return os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or None


def effects(section: ModelSection, device: torch.device, model: nn.Module, *, layers: str) -> list[str]:
    """Lines that describe what is in force, read back from torch and the model.

    Args:
        layers: which layers it has and why, in words.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    checkpointing = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    compiled = any(module._compiled_call_impl is not None for module in model.modules())
    sdpa, products = sdpa_allowed(), section.autocast or _dtypes(trained)
    lines = [
        f"device {device}" + (_gpu(device, section.device) if device.type == "cuda" else ""),
        dtype_line(section),
        f"trained: {sum(p.numel() for p in trained):,} weights in {_dtypes(trained)}",
        f"frozen: {sum(map(num_weights, frozen)):,} weights in {_dtypes(frozen)}" if frozen else "frozen: none",
        f"matrix products in {products}{', ' if products == 'float32' else '; those in float32 '}at torch's precision "
        f"{torch.get_float32_matmul_precision()!r}",
        f"attention {causal_lm(model).config._attn_implementation}; SDPA may use {', '.join(sdpa)}",
        f"layers {layers}",
        f"gradient checkpointing {'on' if checkpointing else 'off'}, compile {'on' if compiled else 'off'}",
    ]
    if section.quantize is not None:
        lines.append(
            f"base in four bits a weight ({section.quantize}, uint8 above), by bitsandbytes: sampling is not "
            "bitwise identical to training"
        )
    if device.type == "cuda":
        lines.append(f"allocator {allocator_of_environment() or 'default'}")
    return lines


def _gpu(device: torch.device, named: str) -> str:
    """The GPU's name, and how to use the others if there are some that this process alone leaves idle."""
    name, count = torch.cuda.get_device_name(device), torch.cuda.device_count()
    if count == 1 or torch.distributed.is_initialized() or ":" in named:
        return f" ({name})"
    return f" ({name}), one of {count}: torchrun --nproc-per-node {count} -m logitless train RECIPE uses all"


def _dtypes(parameters: Sequence[nn.Parameter]) -> str:
    return ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})) or "none"

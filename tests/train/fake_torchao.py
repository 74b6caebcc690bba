"""A stand-in for torchao's 8-bit AdamW: its interface, with rounding that a test can follow."""

import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


@dataclass
class OptimState8bit:
    """A moment in its parts."""

    codes: Tensor
    scale: Tensor
    qmap: Tensor
    signed: bool
    dtype: torch.dtype | None = None

    def dequantize(self) -> Tensor:
        return self.qmap[self.codes.int()] * self.scale


class AdamW8bit(torch.optim.Optimizer):
    """The first moment alone, packed; the learning rate is a tensor and must stay one, as torchao has it."""

    def __init__(self, params: Any, *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})
        for group in self.param_groups:
            group["lr"] = torch.tensor(group["lr"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert isinstance(group["lr"], Tensor)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                before = state["exp_avg"].dequantize() if state else torch.zeros_like(p)
                state["step"] = state.get("step", torch.tensor(0.0)) + 1
                mean = before.lerp(p.grad, 1 - group["betas"][0])
                scale = mean.abs().max().view(1)
                qmap = torch.linspace(-1, 1, 255)
                codes = torch.bucketize(mean / scale, qmap).clamp(max=254).to(torch.uint8)
                state["exp_avg"] = OptimState8bit(codes, scale, qmap, True)
                p -= group["lr"] * mean


def installed(monkeypatch: Any) -> None:
    """Put it where torchao is imported from."""
    for name in ("torchao", "torchao.optim", "torchao.optim.subclass_8bit"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["torchao.optim"].AdamW8bit = AdamW8bit  # type: ignore[attr-defined]
    sys.modules["torchao.optim.subclass_8bit"].OptimState8bit = OptimState8bit  # type: ignore[attr-defined]

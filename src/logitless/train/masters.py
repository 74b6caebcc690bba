"""Float32 masters of weights that the model holds in bfloat16, and the AdamW that updates both.

Forward, backward and sampling read the model's bfloat16 parameters; the optimizer adds its small steps to float32
masters and rounds them to the parameters. Gradients arrive in float32: ``Tensor.grad_dtype`` makes autograd add up
micro-batches in it, and a product that has a float32 gradient hands it on unrounded.
Equal to training in float32 with weights that are rounded before every use. Gives up: 4 bytes a weight for the master
where float32 training under autocast has 2 for the copy.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

CHUNK = 2**16
"""Elements of a tensor that one program of the fused update works on."""


def lower_to(dtype: torch.dtype, parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Round trained float32 parameters to ``dtype`` in place and return their masters, the values they had.

    Afterwards ``parameter.grad`` is float32.

    Args:
        dtype: bfloat16 (or float16).
        parameters: of a model by name; frozen ones and those of another dtype than float32 are left alone.

    Returns:
        Float32 leaves by the same names, for the optimizer.

    Example:
        >>> layer = nn.Linear(2, 2, bias=False)
        >>> masters = lower_to(torch.bfloat16, dict(layer.named_parameters()))
        >>> layer.weight.dtype, masters["weight"].dtype
        (torch.bfloat16, torch.float32)
        >>> bool((masters["weight"].bfloat16() == layer.weight).all())
        True
    """
    masters = {}
    for name, parameter in parameters.items():
        if parameter.requires_grad and parameter.dtype == torch.float32:
            masters[name] = nn.Parameter(parameter.detach())
            parameter.data = parameter.detach().to(dtype)
            parameter.grad_dtype = torch.float32
    return masters


class MasterAdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` whose parameters are masters; each step also writes the model's rounded copies.

    On CUDA one kernel updates master, moments and copy; elsewhere torch's own update is followed by a rounding pass.
    A step takes the gradients of the copies.

    Args:
        groups: as for ``torch.optim.AdamW``; masters, or plain float32 parameters without a copy.
        copies: the model's parameter of each master.
        options: of ``torch.optim.AdamW``.

    Example:
        >>> layer = nn.Linear(2, 2, bias=False)
        >>> masters = lower_to(torch.bfloat16, dict(layer.named_parameters()))
        >>> optimizer = MasterAdamW([{"params": list(masters.values())}], {masters["weight"]: layer.weight}, lr=1e-4)
        >>> layer(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.take_gradients()
        >>> _ = optimizer.step()
        >>> bool((masters["weight"].bfloat16() == layer.weight).all())
        True
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], copies: Mapping[nn.Parameter, nn.Parameter], **options: Any
    ) -> None:
        super().__init__(groups, **options)
        self.copies = dict(copies)

    def take_gradients(self) -> None:
        """Move the gradients of the copies to their masters."""
        for master, copy in self.copies.items():
            master.grad, copy.grad = copy.grad, None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient, and of its copy."""
        assert closure is None
        updated = [m for group in self.param_groups for m in group["params"] if m.grad is not None and m in self.copies]
        if not updated or updated[0].device.type != "cuda":
            super().step()
            self.round()
            return
        held_back = {master: master.grad for master in updated}
        for master in updated:  # torch updates what has no copy
            master.grad = None
        super().step()
        for master, gradient in held_back.items():
            master.grad = gradient
        self._fused(set(updated))

    def round(self) -> None:
        """Write the copies of all masters, as after loading masters from a checkpoint."""
        if self.copies:
            torch._foreach_copy_([c.detach() for c in self.copies.values()], [m.detach() for m in self.copies])

    def _fused(self, updated: set[nn.Parameter]) -> None:
        """The kernel, once a parameter group and step counter (counters differ only where gradients were missing)."""
        for group in self.param_groups:
            by_step: dict[int, list[nn.Parameter]] = {}
            for master in group["params"]:
                if master in updated:
                    state = self.state[master]
                    if not state:
                        state["step"] = torch.tensor(0.0)
                        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
                    state["step"] += 1
                    by_step.setdefault(int(state["step"]), []).append(master)
            for step, masters in by_step.items():
                fused_update(
                    masters,
                    [m.grad for m in masters if m.grad is not None],
                    [self.state[m]["exp_avg"] for m in masters],
                    [self.state[m]["exp_avg_sq"] for m in masters],
                    [self.copies[m].detach() for m in masters],
                    rate=group["lr"],
                    betas=group["betas"],
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    step=step,
                )


def fused_update(
    masters: list[nn.Parameter],
    gradients: list[Tensor],
    moments1: list[Tensor],
    moments2: list[Tensor],
    copies: list[Tensor],
    *,
    rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """One AdamW update of many tensors in one launch; see ``kernels.adamw``.

    Args:
        masters, gradients, moments1, moments2: contiguous float32 tensors, P of each, on one device.
        copies: contiguous, of one dtype.
        rate, betas, eps, weight_decay: of AdamW.
        step: counted from 1.
    """
    import triton.language as tl

    from logitless.train.kernels.adamw import adamw_kernel

    device = masters[0].device
    columns = [[t.detach().data_ptr() for t in part] for part in (masters, gradients, moments1, moments2, copies)]
    chunks = [
        (tensor, first, min(CHUNK, master.numel() - first))
        for tensor, master in enumerate(masters)
        for first in range(0, master.numel(), CHUNK)
    ]

    def on_device(values: Any) -> Tensor:
        host = torch.tensor(values)
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host

    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        adamw_kernel[(len(chunks),)](
            on_device(columns),
            on_device(chunks),
            len(masters),
            1 - rate * weight_decay,
            rate / (1 - betas[0] ** step),
            (1 - betas[1] ** step) ** 0.5,
            1 - betas[0],
            betas[1],
            1 - betas[1],
            eps,
            COPY=getattr(tl, str(copies[0].dtype).removeprefix("torch.")),
            ALIGNED=all(address % 16 == 0 for column in columns for address in column),
            BLOCK=1024,
        )

"""AdamW and its learning rate; the rate is a function of the step, so that no schedule has to be saved."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from logitless.distributed.ranks import Ranks
from logitless.distributed.sharding import is_sharded, local_part, sum_over_shards
from logitless.errors import ConfigurationError
from logitless.train.optim.eight_bit import eight_bit_adamw
from logitless.train.optim.master_weights import MasterAdamW, master_weight, take_gradients
from logitless.train.recipe.training import OptimizerSection


def adamw(
    parameters: Iterable[nn.Parameter],
    options: OptimizerSection,
    device: torch.device,
    *,
    value_head: Iterable[nn.Parameter] = (),
    value_head_factor: float = 1.0,
) -> torch.optim.Optimizer:
    """AdamW over the trained parameters or their master weights; vectors and the value head are not decayed.

    ``implementation="auto"`` is ``fused`` on CUDA and ``foreach`` elsewhere.

    Args:
        parameters: of the model; frozen ones are left out.
        value_head_factor: the value head's learning rate over that of the model.

    Raises:
        ConfigurationError: state on the host without a GPU, or of weights without a master weight.
        UnavailableError: 8-bit state without torchao.

    Example:
        >>> optimizer = adamw([nn.Parameter(torch.ones(2, 2))], OptimizerSection(), torch.device("cpu"))
        >>> len(optimizer.param_groups)
        1
    """
    trained = [p for p in parameters if p.requires_grad]
    chosen = automatic_implementation(device) if options.implementation == "auto" else options.implementation
    matrices: dict[str, Any] = {"params": [p for p in trained if p.ndim >= 2], "weight_decay": options.weight_decay}
    vectors: dict[str, Any] = {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0}
    readout: dict[str, Any] = {"params": list(value_head), "weight_decay": 0.0, "rate_factor": value_head_factor}
    groups = [group for group in (matrices, vectors, readout) if group["params"]]
    numbers: dict[str, Any] = {"lr": options.learning_rate, "betas": options.betas, "eps": options.eps}
    if options.moments == "8bit":
        return eight_bit_adamw(groups, **numbers)
    numbers |= {"foreach": chosen == "foreach", "fused": chosen == "fused"}
    lowered = [p for group in groups for p in group["params"] if master_weight(p) is not p]
    if options.moments == "host":
        if device.type != "cuda" or len(lowered) < sum(len(group["params"]) for group in groups):
            raise ConfigurationError(
                needed="a GPU, and a float32 master weight of every trained weight, for train.optimizer.moments: host",
                given=f"{device.type}"
                + ("" if lowered else " and float32 weights")
                + (", a value head" * bool(readout["params"])),
                remedy="Set model.trained_dtype: bfloat16, without a value head, or leave moments at float32.",
            )
        return MasterAdamW(groups, on_host=True, **numbers)
    plain = ShardAdamW if any(map(is_sharded, trained)) else torch.optim.AdamW
    return (MasterAdamW if lowered else plain)(groups, **numbers)


def automatic_implementation(device: torch.device) -> str:
    """What ``implementation="auto"`` is for parameters on a device."""
    return "fused" if device.type == "cuda" else "foreach"


class ShardAdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` that updates the local shards of sharded parameters as plain tensors.

    With DTensors torch would derive their shardings anew in every step, which takes a tenth of a short one. The state
    is sharded as the parameters are.
    """

    def _init_group(self, group: Any, *columns: list[Tensor]) -> bool:
        """Let torch fill the lists for its update (parameters, gradients, state, counters), and take local shards."""
        is_complex: bool = super()._init_group(group, *columns)  # type: ignore[no-untyped-call]
        for column in columns:
            column[:] = [local_part(tensor) for tensor in column]
        return is_complex


def implementation(optimizer: torch.optim.Optimizer) -> str:
    """How the update is computed, in words.

    Example:
        >>> implementation(adamw([nn.Parameter(torch.ones(2, 2))], OptimizerSection(), torch.device("cpu")))
        'foreach'
    """
    if isinstance(optimizer, MasterAdamW) and optimizer.on_host:
        return "fused, master weights and state on the host"
    if "fused" not in optimizer.defaults:
        return "8-bit state by torchao"
    return next((name for name in ("fused", "foreach") if optimizer.defaults[name]), "loop")


def learning_rate(step: int, progress: float, options: OptimizerSection) -> float:
    """Learning rate of an optimizer step.

    ``peak * min(1, (step + 1) / warmup_steps) * decay(progress)``, decay being 1, ``1 - progress`` or
    ``(1 + cos(pi progress)) / 2``.

    Args:
        step: optimizer steps taken before this one.
        progress: fraction of the run's blocks that are done, in [0, 1]. The number of steps is not known beforehand,
            for it depends on the lengths of completions.

    Example:
        >>> learning_rate(0, 0.5, OptimizerSection(learning_rate=1.0, schedule="linear", warmup_steps=4))
        0.125
    """
    warmup = min(1.0, (step + 1) / options.warmup_steps) if options.warmup_steps else 1.0
    decay = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[options.schedule]
    return options.learning_rate * warmup * decay


def take_step(
    optimizer: torch.optim.Optimizer,
    *,
    rate: float,
    max_grad_norm: float | None,
    ranks: Ranks = Ranks.alone(),
    as_several: bool = False,
    meanwhile: Callable[[], object] = lambda: None,
) -> tuple[Float[Tensor, ""], bool]:
    """Clip the summed gradients by their global norm and step, unless a gradient is not finite.

    The value head is clipped by a norm of its own: its gradient grows with the width and scale of the hidden states,
    and in a common norm it would shrink the policy's gradient.

    Args:
        rate: learning rate of this step; parameter groups with a ``rate_factor`` use that multiple of it.
        max_grad_norm: norm to clip at; None leaves gradients as they are.
        ranks: that hold the same sums of gradients, and take or skip the step together.
        as_several: let a single rank use the operations of several, for bitwise equality.
        meanwhile: called once, when the device has its work and the host would wait.

    Returns:
        The norm of the model's gradient before clipping, and whether the step was taken. Gradients are freed anyway.
    """
    for group in optimizer.param_groups:
        chosen = rate * group.get("rate_factor", 1.0)
        group["lr"] = group["lr"].fill_(chosen) if isinstance(group["lr"], Tensor) else chosen
    if not isinstance(optimizer, MasterAdamW):
        take_gradients(getattr(optimizer, "lowered", {}))
    else:
        optimizer.take_gradients()
        if optimizer.fuses and ranks.world == 1 and not as_several:
            norm, taken = optimizer.clipped_step(max_grad_norm, meanwhile)
            optimizer.zero_grad(set_to_none=True)
            return norm, taken
    model, value_head = list[nn.Parameter](), list[nn.Parameter]()
    for group in optimizer.param_groups:
        part = value_head if "rate_factor" in group else model
        part += [p for p in group["params"] if p.grad is not None]
    parts = [model, value_head] if value_head else [model]
    norms = [gradient_norm(part) for part in parts]
    finite = not ranks.any(not bool(torch.isfinite(torch.stack(norms)).all()))
    if finite:
        if max_grad_norm is not None:
            for part, norm in zip(parts, norms, strict=True):
                _clip(part, max_grad_norm, norm)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    meanwhile()
    return norms[0], finite


def gradient_norm(parameters: Sequence[nn.Parameter]) -> Float[Tensor, ""]:
    """The Euclidean norm of all gradients together; of shards over all ranks.

    Example:
        >>> weight = nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> float(gradient_norm([weight]))
        5.0
    """
    sharded = [p for p in parameters if is_sharded(p)]
    plain = [p.grad for p in parameters if not is_sharded(p) and p.grad is not None]
    norm = torch.nn.utils.get_total_norm(plain)
    if not sharded:
        return norm
    mine = torch.nn.utils.get_total_norm([local_part(p.grad) for p in sharded if p.grad is not None])
    return (norm.square().to(mine) + sum_over_shards(mine.square(), sharded[0])).sqrt()


def _clip(parameters: Sequence[nn.Parameter], max_norm: float, norm: Float[Tensor, ""]) -> None:
    """torch's clipping; local shards are multiplied by the same factor."""
    torch.nn.utils.clip_grads_with_norm_([p for p in parameters if not is_sharded(p)], max_norm, norm)
    mine = [local_part(p.grad) for p in parameters if is_sharded(p) and p.grad is not None]
    if mine:
        torch._foreach_mul_(mine, (max_norm / (norm + 1e-6)).clamp(max=1.0))

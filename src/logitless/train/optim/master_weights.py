"""Float32 master weights of a model that computes in bfloat16, and the AdamW that updates both.

Forward, backward and sampling read the model's bfloat16 parameters. The optimizer updates float32 master weights and
rounds them to the parameters. Gradients are float32: ``Tensor.grad_dtype`` makes autograd sum micro-batches in it.
Equals training in float32 with weights that are rounded before every use. Costs 4 bytes a weight, where float32
training under autocast costs 2 for the copy.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from logitless.errors import TrainingError
from logitless.installed import without_triton
from logitless.train.optim.fused_adamw import (
    chunks_of,
    clip_factor,
    fused_norm,
    fused_update,
    pieces_of,
    update_from_host,
)
from logitless.train.optim.locked_memory import pinned


def lower_to(dtype: torch.dtype, parameters: Iterable[nn.Parameter]) -> None:
    """Round trained float32 parameters to ``dtype`` in place; the float32 value is kept as ``parameter.master``.

    ``parameter.grad`` will be float32. Frozen parameters and those of another dtype are left alone.

    Example:
        >>> layer = nn.Linear(2, 2, bias=False)
        >>> lower_to(torch.bfloat16, layer.parameters())
        >>> layer.weight.dtype, master_weight(layer.weight).dtype
        (torch.bfloat16, torch.float32)
        >>> bool((master_weight(layer.weight).bfloat16() == layer.weight).all())
        True
    """
    for parameter in parameters:
        if parameter.requires_grad and parameter.dtype == torch.float32:
            parameter.master = nn.Parameter(parameter.detach())  # type: ignore[attr-defined]
            parameter.data = parameter.detach().to(dtype)
            parameter.grad_dtype = torch.float32


def master_weight(parameter: nn.Parameter) -> nn.Parameter:
    """What the optimizer updates: the float32 master weight of a lowered parameter, else the parameter itself."""
    return getattr(parameter, "master", parameter)


def restore_master_weights(parameters: Iterable[nn.Parameter]) -> torch.dtype | None:
    """Undo ``lower_to``: parameters are float32 again; returns the dtype that they had, None if none was lowered."""
    lowered = [p for p in parameters if master_weight(p) is not p]
    dtype = lowered[0].dtype if lowered else None
    for parameter in lowered:
        parameter.grad_dtype = None
        parameter.data = master_weight(parameter).detach()
        del parameter.master  # type: ignore[attr-defined]
    return dtype


def drop_master_weights(parameters: Iterable[nn.Parameter]) -> None:
    """Free the master weights of a model that is not trained here."""
    for parameter in parameters:
        if master_weight(parameter) is not parameter:
            del parameter.master  # type: ignore[attr-defined]


def round_master_weights(parameters: Iterable[nn.Parameter]) -> None:
    """Round every master weight into its parameter, for example after a checkpoint was loaded."""
    lowered = [p for p in parameters if master_weight(p) is not p]
    if lowered:
        torch._foreach_copy_([p.detach() for p in lowered], [master_weight(p).detach() for p in lowered])


class MasterAdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` over master weights; each step also rounds them to the parameters that the model reads.

    With Triton on CUDA one kernel updates master weight, state and parameter; elsewhere a rounding pass follows
    torch's update.

    Args:
        groups: as for ``torch.optim.AdamW``, with the model's parameters; lowered ones are replaced by their master
            weights.
        on_host: keep master weights and state in page-locked host memory, and copy them to the GPU for the update;
            bitwise the same. All parameters must be lowered ones on a GPU.

    Raises:
        UnavailableError: ``on_host``, and there is too little page-locked memory.
        TrainingError: of every method that updates or reads state, after an update failed in its middle.

    Example:
        >>> layer = nn.Linear(2, 2, bias=False)
        >>> lower_to(torch.bfloat16, layer.parameters())
        >>> optimizer = MasterAdamW([{"params": list(layer.parameters())}], lr=1e-4)
        >>> layer(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.take_gradients()
        >>> optimizer.step()
        >>> bool((master_weight(layer.weight).bfloat16() == layer.weight).all())
        True
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, on_host: bool = False, **options: Any) -> None:
        groups, self.lowered = with_master_weights(groups)
        self.on_host = on_host
        if on_host:
            for master, parameter in self.lowered.items():
                master.data = pinned(master, parameter.device)
        self._tables: dict[tuple[int, ...], Any] = {}
        self._is_amid_update = False
        super().__init__(groups, **options)

    def take_gradients(self) -> None:
        """Move the gradients of lowered parameters to their master weights; not to the host, where they stay away."""
        if not self.on_host:
            take_gradients(self.lowered)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also of parameters whose master weights are on the host."""
        super().zero_grad(set_to_none)
        if self.on_host:
            for parameter in self.lowered.values():
                parameter.grad = None

    def _gradients(self) -> dict[nn.Parameter, Tensor]:
        """The gradient of each master weight, and of each parameter without one, in the order of the groups."""
        held = [p for group in self.param_groups for p in group["params"]]
        found = [(p, self.lowered[p].grad if self.on_host else p.grad) for p in held]
        return {p: grad for p, grad in found if grad is not None}

    def check_whole(self) -> None:
        """Refuse to continue after an update that failed in its middle.

        Raises:
            TrainingError: some weights and states are those of the next step, and others are not.
        """
        if self._is_amid_update:
            raise TrainingError(
                needed="master weights and optimizer state of one step",
                given="those of an update that failed in its middle: some are of the step after it",
                remedy="Make the model and its optimizer anew, and go on from the last checkpoint.",
            )

    def state_dict(self) -> dict[str, Any]:
        """The state of ``torch.optim.AdamW``."""
        self.check_whole()
        return super().state_dict()

    @property
    def fuses(self) -> bool:
        """Whether our kernels can clip and update: all gradients belong to unsharded master weights on a GPU."""
        given = self._gradients()
        are_ours = all(p in self.lowered and g.is_cuda and type(g) is Tensor for p, g in given.items())
        return bool(given) and are_ours and not without_triton()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every master weight and parameter that has a gradient."""
        assert closure is None
        self.check_whole()  # before torch moves what has no master weight
        if self.on_host:
            if self._gradients():
                self.clipped_step(None)  # waits for the device, which writes to host memory
            return
        gradients = {master: master.grad for master in self.lowered if master.grad is not None}
        if not gradients or next(iter(gradients)).device.type != "cuda" or without_triton():
            super().step()
            round_master_weights(self.lowered.values())
            return
        for master in gradients:  # torch updates what has no master weight
            master.grad = None
        super().step()
        for master, gradient in gradients.items():
            master.grad = gradient
        self._fused(gradients, torch.ones(1, device=next(iter(gradients)).device))

    @torch.no_grad()
    def clipped_step(
        self, max_grad_norm: float | None, meanwhile: Callable[[], object] = lambda: None
    ) -> tuple[Float[Tensor, ""], bool]:
        """Clip and update if ``fuses``, in two passes over memory, without waiting in between.

        Args:
            meanwhile: called while the device works.

        Returns:
            The norm before clipping, and whether the step was taken: False if a gradient is not finite.
        """
        gradients = self._gradients()
        norm = fused_norm(self._table(chunks_of, list(gradients)), list(gradients.values()))
        self._fused(gradients, clip_factor(norm, max_grad_norm))
        meanwhile()
        taken = bool(torch.isfinite(norm))  # waits for the device, after all work was queued
        if not taken:
            for master in gradients:
                self.state[master]["step"] -= 1
                if not self.state[master]["step"]:
                    del self.state[master]
        return norm, taken

    def _fused(self, gradients: Mapping[nn.Parameter, Tensor], scale: Float[Tensor, "1"]) -> None:
        """Launch the kernel for each group and step counter; counters differ only if gradients were missing."""
        self.check_whole()
        self._is_amid_update = True
        for group in self.param_groups:
            masters = [master for master in group["params"] if master in gradients]
            if not masters:
                continue
            states = [self._state_of(master) for master in masters]
            counters = [state["step"] for state in states]
            torch._foreach_add_(counters, 1)
            by_step: dict[float, list[int]] = {}
            for place, step in enumerate(torch.stack(counters).tolist()):
                by_step.setdefault(step, []).append(place)
            for step, places in by_step.items():
                of_step = [masters[place] for place in places]
                update = update_from_host if self.on_host else fused_update
                update(
                    self._table(pieces_of if self.on_host else chunks_of, of_step),
                    of_step,
                    [gradients[master] for master in of_step],
                    [states[place]["exp_avg"] for place in places],
                    [states[place]["exp_avg_sq"] for place in places],
                    [self.lowered[master] for master in of_step],
                    scale=scale,
                    rate=group["lr"],
                    betas=group["betas"],
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    step=int(step),
                )
        self._is_amid_update = False

    def _state_of(self, master: nn.Parameter) -> dict[str, Any]:
        """AdamW's state; under ``on_host`` moved to page-locked memory if a checkpoint put it elsewhere."""
        state: dict[str, Any] = self.state[master]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
        if state["step"].device.type != "cpu":
            state["step"] = state["step"].cpu()
        if self.on_host:
            for name in ("exp_avg", "exp_avg_sq"):
                if not state[name].is_pinned():
                    state[name] = pinned(state[name], self.lowered[master].device)
        return state

    def _table(self, made_by: Callable[..., Any], masters: list[nn.Parameter]) -> Any:
        """The result of ``chunks_of`` or ``pieces_of``, cached for the same tensors."""
        key = id(made_by), *map(id, masters)
        if key not in self._tables:
            self._tables[key] = made_by(masters, self.lowered[masters[0]].device)
        return self._tables[key]


def with_master_weights(
    groups: Iterable[dict[str, Any]],
) -> tuple[list[dict[str, Any]], dict[nn.Parameter, nn.Parameter]]:
    """The groups with master weights in place of lowered parameters, and the parameter of each master weight."""
    given = [{**group, "params": list(group["params"])} for group in groups]
    lowered = {master_weight(p): p for group in given for p in group["params"] if master_weight(p) is not p}
    return [{**group, "params": [master_weight(p) for p in group["params"]]} for group in given], lowered


def take_gradients(lowered: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Move the gradients of lowered parameters to their master weights."""
    for master, parameter in lowered.items():
        master.grad, parameter.grad = parameter.grad, None

"""Float32 masters of weights that the model holds in bfloat16, and the AdamW that updates both.

Forward, backward and sampling read the model's bfloat16 parameters; the optimizer adds its small steps to float32
masters and rounds them to the parameters. Gradients arrive in float32: ``Tensor.grad_dtype`` makes autograd add up
micro-batches in it, and a product that has a float32 gradient hands it on unrounded.
Equal to training in float32 with weights that are rounded before every use. Gives up: 4 bytes a weight for the master
where float32 training under autocast has 2 for the copy.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from logitless.errors import TrainingError
from logitless.train.fused_adamw import (
    Piece,
    chunks_of,
    clip_factor,
    fused_update,
    gradient_norm,
    pieces_of,
    update_from_host,
)
from logitless.train.locked_memory import locked


def lower_to(dtype: torch.dtype, parameters: Iterable[nn.Parameter]) -> None:
    """Round trained float32 parameters to ``dtype`` in place; each keeps the value it had as ``parameter.master``.

    Afterwards ``parameter.grad`` is float32. Frozen parameters and those of another dtype than float32 are left alone.

    Args:
        dtype: bfloat16 (or float16).
        parameters: of a model.

    Example:
        >>> layer = nn.Linear(2, 2, bias=False)
        >>> lower_to(torch.bfloat16, layer.parameters())
        >>> layer.weight.dtype, master_of(layer.weight).dtype
        (torch.bfloat16, torch.float32)
        >>> bool((master_of(layer.weight).bfloat16() == layer.weight).all())
        True
    """
    for parameter in parameters:
        if parameter.requires_grad and parameter.dtype == torch.float32:
            parameter.master = nn.Parameter(parameter.detach())  # type: ignore[attr-defined]
            parameter.data = parameter.detach().to(dtype)
            parameter.grad_dtype = torch.float32


def master_of(parameter: nn.Parameter) -> nn.Parameter:
    """What the optimizer updates: the float32 master of a lowered parameter, else the parameter itself.

    Example:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> master_of(weight) is weight
        True
    """
    return getattr(parameter, "master", parameter)


def raise_to_masters(parameters: Iterable[nn.Parameter]) -> torch.dtype | None:
    """Undo ``lower_to``: each lowered parameter is its float32 master again; returns the dtype that it had.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> lower_to(torch.bfloat16, layer.parameters())
        >>> raise_to_masters(layer.parameters()), layer.weight.dtype
        (torch.bfloat16, torch.float32)
    """
    lowered = [p for p in parameters if master_of(p) is not p]
    dtype = lowered[0].dtype if lowered else None
    for parameter in lowered:
        parameter.grad_dtype = None
        parameter.data = master_of(parameter).detach()
        del parameter.master  # type: ignore[attr-defined]
    return dtype


def round_masters(parameters: Iterable[nn.Parameter]) -> None:
    """Write every master, rounded, into its parameter: for masters that were set from outside.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> lower_to(torch.bfloat16, layer.parameters())
        >>> _ = nn.init.ones_(master_of(layer.weight))
        >>> round_masters(layer.parameters())
        >>> layer.weight.item()
        1.0
    """
    lowered = [p for p in parameters if master_of(p) is not p]
    if lowered:
        torch._foreach_copy_([p.detach() for p in lowered], [master_of(p).detach() for p in lowered])


class MasterAdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` over masters: each step also writes the rounded parameters that the model computes with.

    On CUDA one kernel updates master, moments and parameter; elsewhere a rounding pass follows torch's own update.

    Args:
        groups: as for ``torch.optim.AdamW``, with the model's parameters; those that were lowered give place to their
            masters.
        on_host: masters and moments in page-locked memory of the host, and on the GPU for their update alone: the same
            numbers, for the time that they travel. All parameters must be lowered ones on a GPU.
        options: of ``torch.optim.AdamW``.

    Raises:
        UnavailableError: ``on_host``, and the host has not so much page-locked memory.
        TrainingError: by every method that updates or hands out, after kernels of ours failed amid an update.

    Example:
        >>> layer = nn.Linear(2, 2, bias=False)
        >>> lower_to(torch.bfloat16, layer.parameters())
        >>> optimizer = MasterAdamW([{"params": list(layer.parameters())}], lr=1e-4)
        >>> layer(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.take_gradients()
        >>> optimizer.step()
        >>> bool((master_of(layer.weight).bfloat16() == layer.weight).all())
        True
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, on_host: bool = False, **options: Any) -> None:
        groups, self.lowered = over_masters(groups)
        self.on_host = on_host
        if on_host:
            for master, parameter in self.lowered.items():
                master.data = locked(master, parameter.device)
        self._chunks: dict[tuple[int, ...], Tensor] = {}
        self._pieces: dict[tuple[int, ...], list[Piece]] = {}
        self._is_amid_update = False
        super().__init__(groups, **options)

    def take_gradients(self) -> None:
        """Move the gradients of lowered parameters to their masters; on the host there is no place for them."""
        if not self.on_host:
            take_gradients(self.lowered)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also of parameters whose masters are on the host."""
        super().zero_grad(set_to_none)
        if self.on_host:
            for parameter in self.lowered.values():
                parameter.grad = None

    def _gradients(self) -> dict[nn.Parameter, Tensor]:
        """Of masters and of parameters without one, in the order of the groups."""
        held = [p for group in self.param_groups for p in group["params"]]
        found = [(p, self.lowered[p].grad if self.on_host else p.grad) for p in held]
        return {p: grad for p, grad in found if grad is not None}

    def check_whole(self) -> None:
        """Refuse to go on from an update that began and did not end.

        Raises:
            TrainingError: some masters, moments and weights are those of the next step, and others are not.
        """
        if self._is_amid_update:
            raise TrainingError(
                needed="masters and moments of one step",
                given="those of an update that failed in its middle: some are of the step after it",
                remedy="Make the model and its optimizer anew, and go on from the last checkpoint.",
            )

    def state_dict(self) -> dict[str, Any]:
        """That of ``torch.optim.AdamW``."""
        self.check_whole()
        return super().state_dict()

    @property
    def fuses(self) -> bool:
        """Whether all gradients are those of whole masters on a GPU, so that kernels of ours clip and update."""
        given = self._gradients()
        return bool(given) and all(p in self.lowered and g.is_cuda and type(g) is Tensor for p, g in given.items())

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every master and parameter that has a gradient."""
        assert closure is None
        self.check_whole()  # before torch moves what has no master
        if self.on_host:
            if self._gradients():
                self.clipped_step(None)  # waits for the device, which writes what the host may read next
            return
        gradients = {master: master.grad for master in self.lowered if master.grad is not None}
        if not gradients or next(iter(gradients)).device.type != "cuda":
            super().step()
            round_masters(self.lowered.values())
            return
        for master in gradients:  # torch updates what has no master
            master.grad = None
        super().step()
        for master, gradient in gradients.items():
            master.grad = gradient
        self._fused(gradients, torch.ones(1, device=next(iter(gradients)).device))

    @torch.no_grad()
    def clipped_step(
        self, max_grad_norm: float | None, meanwhile: Callable[[], object] = lambda: None
    ) -> tuple[Float[Tensor, ""], bool]:
        """Clip and update where ``fuses`` holds, in two passes over memory and without waiting in between.

        Args:
            max_grad_norm: norm to clip at, or None.
            meanwhile: called while the device is at it.

        Returns:
            The norm before clipping, and whether the step was taken: not where a gradient is not finite.
        """
        gradients = self._gradients()
        norm = gradient_norm(self._chunks_of(list(gradients)), list(gradients.values()))
        self._fused(gradients, clip_factor(norm, max_grad_norm))
        meanwhile()
        taken = bool(torch.isfinite(norm))  # waits for the device, which has everything to do by now
        if not taken:
            for master in gradients:
                self.state[master]["step"] -= 1
                if not self.state[master]["step"]:
                    del self.state[master]
        return norm, taken

    def _fused(self, gradients: Mapping[nn.Parameter, Tensor], scale: Float[Tensor, "1"]) -> None:
        """The kernel, once a parameter group and step counter (counters differ only where gradients were missing)."""
        self.check_whole()
        self._is_amid_update = True
        for group in self.param_groups:
            given = [(master, gradients.get(master)) for master in group["params"]]
            updated = [(master, gradient) for master, gradient in given if gradient is not None]
            if not updated:
                continue
            masters = [master for master, _ in updated]
            states = [self._state_of(master) for master in masters]
            counters = [state["step"] for state in states]
            torch._foreach_add_(counters, 1)
            by_step: dict[float, list[int]] = {}
            for place, step in enumerate(torch.stack(counters).tolist()):
                by_step.setdefault(step, []).append(place)
            for step, places in by_step.items():
                of_step = [masters[place] for place in places]
                if self.on_host:
                    update = partial(update_from_host, self._pieces_of(of_step))
                else:
                    update = partial(fused_update, self._chunks_of(of_step))
                update(
                    of_step,
                    [updated[place][1] for place in places],
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
        """Counter and moments, on the host in page-locked memory also after they were restored."""
        state: dict[str, Any] = self.state[master]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
        if state["step"].device.type != "cpu":
            state["step"] = state["step"].cpu()
        if self.on_host:
            for name in ("exp_avg", "exp_avg_sq"):
                if not state[name].is_pinned():
                    state[name] = locked(state[name], self.lowered[master].device)
        return state

    def _chunks_of(self, masters: list[nn.Parameter]) -> Tensor:
        """``chunks_of``, made once for the same tensors."""
        key = tuple(map(id, masters))
        if key not in self._chunks:
            self._chunks[key] = chunks_of(masters, self.lowered[masters[0]].device)
        return self._chunks[key]

    def _pieces_of(self, masters: list[nn.Parameter]) -> list[Piece]:
        """``pieces_of``, made once for the same tensors."""
        key = tuple(map(id, masters))
        if key not in self._pieces:
            self._pieces[key] = pieces_of(masters, self.lowered[masters[0]].device)
        return self._pieces[key]


def over_masters(
    groups: Iterable[dict[str, Any]],
) -> tuple[list[dict[str, Any]], dict[nn.Parameter, nn.Parameter]]:
    """Groups of parameters with masters in the place of lowered ones, and the lowered one of each master."""
    given = [{**group, "params": list(group["params"])} for group in groups]
    lowered = {master_of(p): p for group in given for p in group["params"] if master_of(p) is not p}
    return [{**group, "params": [master_of(p) for p in group["params"]]} for group in given], lowered


def take_gradients(lowered: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Move the gradients of lowered parameters to their masters."""
    for master, parameter in lowered.items():
        master.grad, parameter.grad = parameter.grad, None

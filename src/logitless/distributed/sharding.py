"""A model whose weights are sharded over ranks by FSDP2, and whole while it samples.

``fully_shard`` cuts every parameter by rows. A unit (a decoder layer, say) is gathered before its forward and backward
and released after each; gradients are summed over ranks, never averaged. ``gather`` makes all weights whole until
``release``, because decoding cannot wait for other ranks at every token. FSDP2 is imported only by runs with shards,
since that takes seconds.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor."""
    return hasattr(tensor, "placements")


def local_part(tensor: Tensor) -> Tensor:
    """This rank's rows of a sharded tensor, sharing its memory; any other tensor as it is.

    Example:
        >>> x = torch.zeros(2)
        >>> local_part(x) is x
        True
    """
    return tensor.to_local().detach() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered on every rank (a collective); any other as it is."""
    return tensor.full_tensor().detach() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def is_spare_copy(tensor: Tensor) -> bool:
    """Whether a copy of lower number has this rank's rows too."""
    return is_sharded(tensor) and tensor.device_mesh.ndim > 1 and tensor.device_mesh.get_coordinate()[0] > 0  # type: ignore[attr-defined]


def start_and_shape(tensor: Tensor) -> tuple[list[int], list[int]]:
    """Offset of this rank's part in each dimension of the whole, and its shape.

    Example:
        >>> start_and_shape(torch.zeros(2, 3))
        ([0, 0], [2, 3])
    """
    if not is_sharded(tensor):
        return [0] * tensor.ndim, list(tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded: Any = tensor
    shape, start = compute_local_shape_and_global_offset(sharded.shape, sharded.device_mesh, sharded.placements)
    return list(start), list(shape)


def part_of(value: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor, sharded like another of its shape.

    Example:
        >>> part_of(torch.ones(2), torch.zeros(2))
        tensor([1., 1.])
    """
    start, shape = start_and_shape(like)
    return value[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]


def sharded_like(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor sharded like another of its shape, on that one's device."""
    part = part_of(value, like).to(like.device)
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    cut: Any = like
    return DTensor.from_local(
        part.contiguous(), cut.device_mesh, cut.placements, run_check=False, shape=cut.shape, stride=cut.stride()
    )


def shards_on(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor, or one whose shards wait on the host, on the device that uses it."""
    if not is_sharded(tensor) or tensor.device == device:
        return tensor
    from torch.distributed.tensor import DTensor

    cut: Any = tensor
    part = cut.to_local().to(device, non_blocking=True)
    return DTensor.from_local(
        part, cut.device_mesh, cut.placements, run_check=False, shape=cut.shape, stride=cut.stride()
    )


def sum_over_shards(part: Tensor, like: Tensor) -> Tensor:
    """All-reduce (sum) over the ranks of a sharded tensor, in place.

    Args:
        part: of this rank, such as the squares of its rows.
        like: the sharded tensor.
    """
    sharded: Any = like
    dist.all_reduce(part, group=sharded.device_mesh.get_group(sharded.device_mesh.ndim - 1))
    return part


class ShardedModel:
    """FSDP2 around the units of a model.

    Args:
        model: that the units are of.
        units: modules that are gathered as one, in the order of the forward; a module that holds other units comes
            after them and takes what they leave.
        mesh: of one dimension, or two: copies and shards.
        dtype: of gathered weights and products; None for their own. Shards and gradients keep the shards' dtype.
        on_host: shards wait in the host's memory; for what is not trained.
        made_same: called with the weights of a unit, still whole, and with all buffers, before they are cut; fills
            weights on ``meta`` and aligns buffers that are made otherwise than they are read.

    Attributes:
        parameters: the shards by name; the same objects while weights are whole.
        is_whole: whether all weights are here.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[nn.Module],
        mesh: "DeviceMesh",
        *,
        dtype: torch.dtype | None = None,
        on_host: bool = False,
        made_same: Callable[[Iterable[Tensor]], None] | None = None,
    ) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        reduced = None if dtype is None else torch.float32
        self._tied = _tied_from_outside(model, units)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced, cast_forward_inputs=False)
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if on_host else OffloadPolicy()
        self.dtype, self.on_host, self.units = dtype, on_host, list[Any]()
        if made_same is not None:
            made_same(model.buffers())
        for unit in units:
            _make_room(unit, mesh.device_type)
            own = [p for p in unit.parameters() if not is_sharded(p)]
            for parameter in own:
                parameter.data = parameter.data.to(mesh.device_type)
            if made_same is not None:
                made_same(own)
            wrapped: Any = fully_shard(
                unit, mesh=mesh, reshard_after_forward=True, mp_policy=policy, offload_policy=offload
            )
            wrapped.set_gradient_divide_factor(1.0)
            wrapped.set_force_sum_reduction_for_comms(True)
            if dtype is not None:
                wrapped.register_forward_pre_hook(_take_wide_gradients)
            self.units.append(wrapped)
        self._tie()
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.is_whole = False

    @property
    def whole_bytes(self) -> int:
        """Bytes of all weights while gathered."""
        return sum(p.numel() * (self.dtype or p.dtype).itemsize for p in dict.fromkeys(self.parameters.values()))

    def gather(self) -> None:
        """Gather every weight until ``release``; a collective."""
        if self.is_whole:
            return
        for unit in self.units:
            unit.set_reshard_after_forward(False, recurse=False)
            with torch.no_grad():
                unit.unshard()
        self._tie()
        self.is_whole = True

    def release(self) -> None:
        """Free what other ranks own."""
        if not self.is_whole:
            return
        for unit in self.units:
            unit.set_reshard_after_forward(True, recurse=False)
            unit.reshard()
        self._tie()
        self.is_whole = False

    def _tie(self) -> None:
        """Tie weights that a module outside of the units shares with one inside, shards or whole."""
        for module, name, owner, name_there in self._tied:
            setattr(module, name, getattr(owner, name_there))


def unsharded_names(model: nn.Module, units: Iterable[nn.Module]) -> list[str]:
    """Parameters that are in none of the units.

    Example:
        >>> model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, bias=False))
        >>> unsharded_names(model, [model[0]])
        ['1.weight']
    """
    held = {id(parameter) for unit in units for parameter in unit.parameters()}
    return [name for name, parameter in model.named_parameters() if id(parameter) not in held]


def _make_room(unit: nn.Module, device: str) -> None:
    """Allocate the weights of a unit that are on ``meta``; tied ones stay one."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in unit.modules():
        for name, weight in module._parameters.items():
            if weight is not None and weight.is_meta and not is_sharded(weight):
                if weight not in made:
                    made[weight] = nn.Parameter(torch.empty_like(weight, device=device), weight.requires_grad)
                module._parameters[name] = made[weight]


def _tied_from_outside(model: nn.Module, units: Sequence[nn.Module]) -> list[tuple[nn.Module, str, nn.Module, str]]:
    """(module, name, owner, owner's name) of parameters that a module outside of all units shares with one inside."""
    inside = {id(module): module for unit in units for module in unit.modules()}
    owners = {id(p): (module, name) for module in inside.values() for name, p in module._parameters.items()}
    return [
        (module, name, *owners[id(p)])
        for module in model.modules()
        if id(module) not in inside
        for name, p in module._parameters.items()
        if p is not None and id(p) in owners
    ]


def _take_wide_gradients(module: nn.Module, _: Any) -> None:
    """Take float32 gradients of rounded weights."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.grad_dtype = torch.float32

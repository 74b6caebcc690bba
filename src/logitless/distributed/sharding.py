"""A model whose weights are sharded over ranks by FSDP2, and unsharded while it samples.

``fully_shard`` splits every parameter by rows. A unit (such as a decoder layer) is gathered before its forward and
backward and resharded after each; gradients are summed over ranks, never averaged. Sampling calls ``gather`` for all
weights and then ``release``, because decoding cannot wait for other ranks at every token.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# torch.distributed.fsdp and torch.distributed.tensor take seconds to import: only functions that need them do

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor."""
    return hasattr(tensor, "placements")


def local_part(tensor: Tensor) -> Tensor:
    """This rank's rows of a sharded tensor, without a copy; any other tensor unchanged."""
    return tensor.to_local().detach() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered on every rank (a collective); any other unchanged."""
    return tensor.full_tensor().detach() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def is_spare_copy(tensor: Tensor) -> bool:
    """Whether a replica of a lower number holds the same rows."""
    return is_sharded(tensor) and tensor.device_mesh.ndim > 1 and tensor.device_mesh.get_coordinate()[0] > 0  # type: ignore[attr-defined]


def start_and_shape(tensor: Tensor) -> tuple[list[int], list[int]]:
    """Offset of this rank's part in each dimension of the whole tensor, and the part's shape."""
    if not is_sharded(tensor):
        return [0] * tensor.ndim, list(tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded: Any = tensor
    shape, start = compute_local_shape_and_global_offset(sharded.shape, sharded.device_mesh, sharded.placements)
    return list(start), list(shape)


def part_of(value: Tensor, like: Tensor) -> Tensor:
    """This rank's part of an unsharded tensor, if it were sharded like another of its shape."""
    start, shape = start_and_shape(like)
    return value[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]


def sharded_like(value: Tensor, like: Tensor) -> Tensor:
    """An unsharded tensor sharded like another of its shape, on that one's device."""
    part = part_of(value, like).to(like.device)
    return with_local_part(like, part.contiguous()) if is_sharded(like) else part


def shards_on(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor whose shards may be offloaded to the host, moved to ``device``."""
    if not is_sharded(tensor) or tensor.device == device:
        return tensor
    return with_local_part(tensor, tensor.to_local().to(device, non_blocking=True))  # type: ignore[attr-defined]


def with_local_part(like: Any, part: Tensor) -> Tensor:
    """A DTensor with the layout of ``like`` and other values: ``part`` on this rank."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def sum_over_shards(part: Tensor, like: Tensor) -> Tensor:
    """All-reduce (sum) over the ranks of a sharded tensor, in place.

    Args:
        part: this rank's, such as the sum of squares of its rows.
    """
    sharded: Any = like
    dist.all_reduce(part, group=sharded.device_mesh.get_group(sharded.device_mesh.ndim - 1))
    return part


class ShardedModel:
    """FSDP2 around the units of a model.

    Args:
        units: modules of it that are gathered at once, in the order of the forward pass; a module that contains other
            units comes after them and shards the parameters they leave.
        mesh: (shards), or (copies, shards).
        dtype: of gathered weights and products; None for their own. Shards and gradients keep the shards' dtype.
        on_host: offload the shards to the host; for weights that are not trained.
        made_same: broadcasts, in place, all buffers, and the weights of each unit before they are sharded; so ranks
            that built the model on ``meta`` get their values.

    Attributes:
        parameters: the shards by name; the same objects while weights are gathered.
        is_whole: whether all weights are gathered.
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
        self.mesh, self.dtype, self.on_host, self.units = mesh, dtype, on_host, list[Any]()
        if made_same is not None:
            made_same(model.buffers())
        for unit in units:
            _allocate(unit, mesh.device_type)
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
                wrapped.register_forward_pre_hook(_accumulate_in_float32)
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
        """Free the gathered weights; this rank keeps its shards."""
        if not self.is_whole:
            return
        for unit in self.units:
            unit.set_reshard_after_forward(True, recurse=False)
            unit.reshard()
        self._tie()
        self.is_whole = False

    def _tie(self) -> None:
        """Tie the weights that a module outside of the units shares with one inside, as FSDP2 replaces them."""
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


def _allocate(unit: nn.Module, device: str) -> None:
    """Allocate the weights of a unit that are on ``meta``; tied weights stay tied."""
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


def _accumulate_in_float32(module: nn.Module, _: Any) -> None:
    """Keep float32 gradients of 16-bit weights."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.grad_dtype = torch.float32

"""How the ranks of a run are arranged: copies of the weights, shards of a copy, parts of one sequence.

    rank = (replica * shard + shard_index) * sequence + part

    replicate 2, shard 2, sequence 2:   weights   [0 1 2 3] [4 5 6 7]        shards of one copy
                                        data      [0 2 4 6] [1 3 5 7]        different sequences
                                        sequence  [0 1] [2 3] [4 5] [6 7]    parts of the same sequences

Weights are sharded over ranks that share a sequence as well.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from logitless.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Auto = Literal["auto"]


@dataclass(frozen=True)
class Arrangement:
    """Numbers of ranks along each dimension.

    Args:
        replicate: copies of the weights.
        shard: ranks of one copy that hold different sequences.
        sequence: ranks that hold parts of the same sequences.

    Example:
        >>> Arrangement.of(8, replicate=2, shard="auto", sequence=2)
        Arrangement(replicate=2, shard=2, sequence=2)
    """

    replicate: int = 1
    shard: int = 1
    sequence: int = 1

    @classmethod
    def of(
        cls, world: int, *, replicate: int = 1, shard: int | Auto = "auto", sequence: int = 1, whole: bool = False
    ) -> "Arrangement":
        """The arrangement of ``world`` ranks.

        Args:
            replicate, shard, sequence: wanted numbers; ``shard="auto"`` is ``world / (replicate * sequence)``.
            whole: every rank holds all weights; ``shard="auto"`` then makes copies instead of shards.

        Raises:
            ConfigurationError: their product is not ``world``.
        """
        if shard == "auto":
            left, rest = divmod(world, replicate * sequence)
            if left and not rest:
                return cls(replicate * left, 1, sequence) if whole else cls(replicate, left, sequence)
        elif replicate * shard * sequence == world:
            return cls(replicate, shard, sequence)
        raise ConfigurationError(
            needed=f"parallel.replicate * shard * sequence = {world}, the number of processes",
            given=f"{replicate} * {shard} * {sequence}",
            remedy="Leave shard at auto, or start another number of processes (torchrun --nproc-per-node).",
        )

    @property
    def weights(self) -> int:
        """Ranks over which one copy of the weights is sharded."""
        return self.shard * self.sequence

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.replicate * self.weights

    @property
    def is_sharded(self) -> bool:
        """Whether a rank holds less than all weights."""
        return self.weights > 1

    @property
    def words(self) -> str:
        """A description for the log."""
        copies = "1 copy" if self.replicate == 1 else f"{self.replicate} copies"
        cut = f", {'each ' if self.replicate > 1 else ''}sharded over {self.weights}" if self.is_sharded else ""
        split = f"; every sequence split over {self.sequence}" if self.sequence > 1 else ""
        return f"{copies} of the weights{cut}{split}"

    def mesh(
        self, device: str, timeout: timedelta | None = None, group: dist.ProcessGroup | None = None
    ) -> "DeviceMesh":
        """The mesh for FSDP2: (replicate, weights), or weights alone with one copy. A collective.

        Args:
            device: ``"cpu"`` or ``"cuda"``.
            group: of these ranks, with one copy, where the process has others too; None: they are all.
        """
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        if group is not None:
            return DeviceMesh.from_group(group, device, mesh_dim_names=("weights",))
        if self.replicate == 1:  # the group of all ranks itself
            return init_device_mesh(device, (self.weights,), mesh_dim_names=("weights",))
        # One group at a time: init_device_mesh would split them off the group of all ranks, which crashes (SIGSEGV)
        # unless that is the first group of the process (torch 2.11 and 2.13), and it takes no timeout.
        ranks = torch.arange(self.world).view(self.replicate, self.weights)
        groups = [_own_group(ranks.T.tolist(), timeout), _own_group(ranks.tolist(), timeout)]
        return DeviceMesh.from_group(groups, device, ranks, mesh_dim_names=("replicate", "weights"))

    def groups(self, timeout: timedelta | None = None) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """This rank's ``data`` and ``sequence`` group, as of ``Ranks``. A collective of all ranks."""
        parts = torch.arange(self.world).view(-1, self.sequence)
        return _own_group(parts.T.tolist(), timeout), _own_group(parts.tolist(), timeout)


def _own_group(ranks: list[list[int]], timeout: timedelta | None) -> dist.ProcessGroup:
    """The one of these groups that this rank is in. A collective of all ranks."""
    group, _ = dist.new_subgroups_by_enumeration(ranks, timeout=timeout)  # type: ignore[no-untyped-call]
    assert group is not None
    return group

"""The packed rows that each rank trains on in an optimizer step."""

from collections.abc import Sequence

from logitless.data.packing import Packing, StepPlan
from logitless.distributed.shares import shares_by_cost
from logitless.types import PackedInputs


def rows_by_rank(
    step: StepPlan,
    groups: Sequence[Sequence[int]],
    inputs: PackedInputs,
    *,
    num_ranks: int,
    packing: Packing,
) -> list[tuple[tuple[int, ...], ...]]:
    """Packed rows of a step for each rank: whole groups, divided by cost.

    Every rank has equally many rows, so that all ranks of a sharded model call each collective. Some rows may be empty;
    they add nothing to the loss.

    Args:
        packing: the one that ``plan_epoch`` was given.

    Returns:
        ``[R][K]`` rows of sequence indices.

    Example:
        >>> import torch
        >>> ids = torch.zeros(12, dtype=torch.long)
        >>> inputs = PackedInputs(ids, ids, (3, 3, 3, 3), torch.arange(8), (2, 2, 2, 2))
        >>> step = StepPlan((0, 1, 2, 3), ((0, 1), (2, 3)))
        >>> rows_by_rank(step, [[0, 1], [2, 3]], inputs, num_ranks=2, packing=Packing(6, hidden_size=8))
        [((0, 1),), ((2, 3),)]
    """
    if num_ranks == 1:
        return [step.micro_batches]
    group_of = {s: g for g, members in enumerate(groups) for s in members}
    trained = {s for row in step.micro_batches for s in row}
    by_group: dict[int, list[int]] = {}
    for s in step.sequences:
        if s in trained:
            by_group.setdefault(group_of[s], []).append(s)
    members = list(by_group.values())
    costs = [packing.cost(each, inputs) for each in members]
    rows = [packing.rows([s for i in share for s in members[i]], inputs) for share in shares_by_cost(costs, num_ranks)]
    longest = max(len(each) for each in rows)
    return [each + ((),) * (longest - len(each)) for each in rows]

"""The packed rows that each rank trains on in an optimizer step: whole groups by cost, equally many rows a rank."""

from collections.abc import Sequence

from logitless.data.packing import StepPlan, cut_into_rows
from logitless.distributed.shares import sequence_cost, shares_by_cost
from logitless.types import PackedInputs


def rows_by_rank(
    step: StepPlan,
    groups: Sequence[Sequence[int]],
    inputs: PackedInputs,
    *,
    num_ranks: int,
    hidden_size: int,
    tokens_per_micro_batch: int,
) -> list[tuple[tuple[int, ...], ...]]:
    """Which sequences of a step each rank trains on, cut into packed rows; rows beyond a rank's own are empty.

    Equally many rows on every rank keep the collectives of a sharded model in step. An empty row adds nothing to the
    loss, whose weights belong to the whole step. One rank has the step's own micro-batches.

    Args:
        step: of ``plan_epoch``.
        groups: the sequence indices of each group of the block.
        inputs: the block's packed inputs.
        num_ranks: R.
        hidden_size: D, see ``sequence_cost``.
        tokens_per_micro_batch: the most tokens a row may have.

    Returns:
        ``[R][K]`` rows of sequence indices; every sequence with a scored token is in exactly one.

    Example:
        >>> import torch
        >>> ids = torch.zeros(12, dtype=torch.long)
        >>> inputs = PackedInputs(ids, ids, (3, 3, 3, 3), torch.arange(8), (2, 2, 2, 2))
        >>> step = StepPlan((0, 1, 2, 3), ((0, 1), (2, 3)))
        >>> rows_by_rank(step, [[0, 1], [2, 3]], inputs, num_ranks=2, hidden_size=8, tokens_per_micro_batch=6)
        [((0, 1),), ((2, 3),)]
    """
    group_of = {s: g for g, members in enumerate(groups) for s in members}
    whole: dict[int, list[int]] = {}
    for s in step.sequences:
        whole.setdefault(group_of[s], []).append(s)
    members = list(whole.values())
    costs = [
        sum((sequence_cost(inputs.lengths[s], hidden_size) for s in each if inputs.source_counts[s]), start=0.0)
        for each in members
    ]
    rows = [
        cut_into_rows([s for i in share for s in members[i]], inputs, tokens_per_micro_batch)
        for share in shares_by_cost(costs, num_ranks)
    ]
    longest = max(len(each) for each in rows)
    return [each + ((),) * (longest - len(each)) for each in rows]

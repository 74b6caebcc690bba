"""What a step did not have to compute, against reading every sequence in full."""

from dataclasses import replace

from logitless.data.packing import Packing, StepPlan
from logitless.train.record.metrics import Numbers
from logitless.types import PackedInputs


def saved_by_packing(step: StepPlan, inputs: PackedInputs, packing: Packing) -> Numbers:
    """Tokens and work that an optimizer step saved, in its numbers.

    Args:
        step: with the rows of all ranks.
        inputs: the block's.
        packing: that made the rows.

    Example:
        >>> import torch
        >>> ids = torch.zeros(12, dtype=torch.long)
        >>> inputs = PackedInputs(ids, ids, (4, 4, 4), torch.arange(3), (1, 1, 1), (((0, 3),),) * 3)
        >>> saved = saved_by_packing(StepPlan((0, 1, 2), ((0, 1),), dead=(2,)), inputs, Packing(8, True, 16))
        >>> saved["optimizer/read_tokens"], saved["saving/zero_advantage_tokens"], saved["saving/shared_tokens"]
        (5, 4, 3)
    """
    apart = replace(packing, share_prompts=False)
    live = [s for row in step.micro_batches for s in row]
    read = sum(packing.num_tokens(row, inputs) for row in step.micro_batches)
    whole = apart.cost([*live, *step.dead], inputs)
    return {
        "optimizer/read_tokens": read,
        "saving/zero_advantage_sequences": len(step.dead),
        "saving/zero_advantage_tokens": apart.num_tokens(step.dead, inputs),
        "saving/shared_tokens": apart.num_tokens(live, inputs) - read,
        "saving/work_fraction": 1 - sum(packing.cost(row, inputs) for row in step.micro_batches) / whole,
    }

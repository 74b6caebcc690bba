"""Bytes of a step of the fused head, allocation by allocation; tests of the head and of the plan read it too."""

import torch

from logitless.head import fused

VECTORS = 320
"""Bytes a row takes in all vectors of length N."""


def step_bytes(
    num_rows: int, width: int, vocabulary: int, *, memory_budget: int, shared: bool = False, shards: int = 1
) -> int:
    """Peak bytes of a training step on a rank, beyond inputs and returned gradients; bfloat16, no LoRA.

    A weight that is frozen, or whose gradient is added to an existing one, offers no scratch for logit gradients, which
    costs a block of them more (``docs/head.md``).

    Args:
        num_rows, width, vocabulary: N, D and V; V is the rank's own part where the vocabulary is ``shared``.
        memory_budget: bytes for kept exponentials.
        shared: whether a process group shares the vocabulary.
        shards: how many shards the weight is broadcast in (FSDP2); 1 for a whole weight.
    """
    from logitless.head import passes  # needs Triton
    from logitless.head.kernels import launch, variants

    gpu = variants.hopper(width, 132)

    def shares(rows: int, columns: int, *, whole: bool) -> int:
        return 4 * width * launch.Sharing.of(rows, width, columns, gpu.hidden, gpu, whole=whole).room

    most = -(-vocabulary // shards)
    plan = fused.MemoryPlan.of(num_rows, shards * (-(-most // 8) * 8), torch.bfloat16, memory_budget=memory_budget)
    recomputed = num_rows - plan.kept_rows
    total = plan.kept_bytes + VECTORS * num_rows
    if plan.kept_rows or shared:
        total += 2 * num_rows * width
    if shared:
        total += 4 * num_rows * width
    if shards > 1:
        total += 4 * plan.kept_rows * width + (12 if shards > 2 else 10) * most * width
    if recomputed:
        columns = passes.block_width(recomputed, width, most, variant=gpu)
        lent = shards == 1 and passes.scratch_columns(recomputed * columns, columns, vocabulary, vocabulary * width)
        total += 2 * recomputed * (passes.last_block_width(columns, gpu) if lent else columns)
        total += 4 * recomputed * width if columns < vocabulary else 0
        total += 4 * columns * width if plan.kept_rows else 0
        return total + shares(recomputed, columns, whole=columns >= vocabulary)
    return total + shares(plan.kept_rows, most, whole=shards == 1)

"""Groups to packed tokens, and packed tokens to optimizer steps: the only place where the shift happens.

A sequence is ``prompt + completion``; the hidden state at position i predicts token i + 1, so the backbone reads
everything but the last token, and the target at completion index j has its hidden row at ``len(prompt) - 1 + j``.
There is no padding anywhere: sequences lie end to end, and a sequence without a scored token is not read at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from logitless.errors import InputError
from logitless.types import Completion, PackedBatch, PackedInputs, Prompt


def pack(pairs: Sequence[tuple[Prompt, Completion]]) -> PackedBatch:
    """Lay prompt-completion pairs end to end, one sequence each, in the order given.

    Args:
        pairs: B prompts with a completion each; tokens with ``trained=False`` are read but get no row.

    Returns:
        The batch, on the CPU.

    Raises:
        InputError: a prompt without tokens (nothing would predict the first token).

    Example:
        >>> prompt = Prompt(id="a", text="ab", token_ids=(1, 2))
        >>> batch = pack([(prompt, Completion("a", token_ids=(3, 4), text="cd", finish_reason="stop"))])
        >>> batch.inputs.input_ids, batch.inputs.source, batch.target
        (tensor([1, 2, 3]), tensor([1, 2]), tensor([3, 4]))
    """
    input_ids: list[int] = []
    position_ids: list[int] = []
    source: list[int] = []
    target: list[int] = []
    turn: list[int] = []
    logp_sampler: list[float] = []
    lengths: list[int] = []
    counts: list[int] = []
    for prompt, completion in pairs:
        if not prompt.token_ids:
            raise InputError(
                needed="prompts of at least one token",
                given=f"prompt {prompt.id!r} without tokens",
                remedy="Drop empty prompts, or start them with the BOS token.",
            )
        trained = [j for j in range(completion.length) if completion.trained is None or completion.trained[j]]
        read = (prompt.token_ids + completion.token_ids)[:-1] if trained else ()
        first = len(input_ids) + len(prompt.token_ids) - 1
        source += [first + j for j in trained]
        input_ids += read
        position_ids += range(len(read))
        target += [completion.token_ids[j] for j in trained]
        turn += [0 if completion.turn is None else completion.turn[j] for j in trained]
        given = completion.logp_sampler
        logp_sampler += [float("nan") if given is None else given[j] for j in trained]
        lengths.append(len(read))
        counts.append(len(trained))
    return PackedBatch(
        inputs=PackedInputs(
            input_ids=torch.tensor(input_ids, dtype=torch.long),
            position_ids=torch.tensor(position_ids, dtype=torch.long),
            lengths=tuple(lengths),
            source=torch.tensor(source, dtype=torch.long),
            source_counts=tuple(counts),
        ),
        target=torch.tensor(target, dtype=torch.long),
        turn=torch.tensor(turn, dtype=torch.long),
        logp_sampler=torch.tensor(logp_sampler, dtype=torch.float32),
    )


def nothing_to_score() -> PackedBatch:
    """A row of one token and no target: what a rank reads when only others have sequences left, and its shards of the
    weights are needed.

    Example:
        >>> batch = nothing_to_score()
        >>> batch.inputs.lengths, batch.num_tokens
        ((1,), 0)
    """
    one, none = torch.zeros(1, dtype=torch.long), torch.zeros(0, dtype=torch.long)
    return PackedBatch(
        inputs=PackedInputs(input_ids=one, position_ids=one, lengths=(1,), source=none, source_counts=(0,)),
        target=none,
        turn=none,
        logp_sampler=torch.zeros(0),
    )


@dataclass(frozen=True)
class StepPlan:
    """Which sequences of a block one optimizer step trains on, and how they are cut for memory.

    Args:
        sequences: every sequence of the step's groups, those without a scored token included (they count in B).
        micro_batches: the sequences with scored tokens, in packed rows.

    Example:
        >>> StepPlan(sequences=(0, 1, 2), micro_batches=((0, 2),)).micro_batches
        ((0, 2),)
    """

    sequences: tuple[int, ...]
    micro_batches: tuple[tuple[int, ...], ...]


def plan_epoch(
    groups: Sequence[Sequence[int]],
    inputs: PackedInputs,
    *,
    tokens_per_step: int,
    tokens_per_micro_batch: int,
    seed: int,
) -> list[StepPlan]:
    """One pass over a block: whole groups in a seeded order, cut into steps, each cut into micro-batches.

    Args:
        groups: the sequence indices of each group.
        inputs: the block's packed inputs, for its lengths.
        tokens_per_step: scored tokens a step should have; a group goes to the step its middle token falls in.
        tokens_per_micro_batch: the most tokens the backbone reads at once, prompts included.
        seed: of the order of the groups.

    Returns:
        At least one step; every sequence is in exactly one, and every step has a scored token if the block has any.

    Raises:
        InputError: one sequence alone is longer than ``tokens_per_micro_batch``.

    Example:
        >>> ids = torch.zeros(12, dtype=torch.long)
        >>> inputs = PackedInputs(ids, ids, (3, 3, 3, 3), torch.arange(8), (2, 2, 2, 2))
        >>> steps = plan_epoch([[0, 1], [2, 3]], inputs, tokens_per_step=4, tokens_per_micro_batch=5, seed=0)
        >>> [len(step.micro_batches) for step in steps]
        [2, 2]
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(groups), generator=generator).tolist()
    sizes = [sum(inputs.source_counts[s] for s in groups[g]) for g in order]
    total = max(1, sum(sizes))
    num_steps = max(1, round(total / tokens_per_step))
    steps: list[list[int]] = [[] for _ in range(num_steps)]
    before = 0
    for g, size in zip(order, sizes, strict=True):
        middle = before + size / 2
        steps[min(int(num_steps * middle / total), num_steps - 1)].extend(groups[g])
        before += size
    filled = [step for step in steps if any(inputs.source_counts[s] for s in step)] or [[]]
    filled[0] += [s for step in steps if step not in filled for s in step]  # empty completions still count in B
    return [StepPlan(tuple(step), cut_into_rows(step, inputs, tokens_per_micro_batch)) for step in filled]


def cut_into_rows(
    sequences: Sequence[int], inputs: PackedInputs, tokens_per_micro_batch: int
) -> tuple[tuple[int, ...], ...]:
    """The sequences with scored tokens in packed rows, filled in order, each up to the limit."""
    rows: list[list[int]] = []
    used = tokens_per_micro_batch
    for s in sequences:
        if inputs.source_counts[s] == 0:
            continue
        length = inputs.lengths[s]
        if length > tokens_per_micro_batch:
            raise InputError(
                needed=f"sequences of at most tokens_per_micro_batch = {tokens_per_micro_batch} tokens",
                given=f"one of {length}",
                remedy="Raise train.tokens_per_micro_batch, or lower the prompt or completion limit.",
            )
        if used + length > tokens_per_micro_batch:
            rows.append([])
            used = 0
        rows[-1].append(s)
        used += length
    return tuple(tuple(row) for row in rows)

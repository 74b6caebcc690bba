"""Groups to packed tokens, and packed tokens to optimizer steps: the only place where the shift happens.

A sequence is ``prompt + completion``; the hidden state at position i predicts token i + 1, so the backbone reads
everything but the last token, and the target at completion index j has its hidden row at ``len(prompt) - 1 + j``.
There is no padding anywhere: sequences lie end to end, and a sequence without a scored token is not read at all.

Three savings are decided here, none of which changes a loss. Sequences of one prompt lie side by side, so that a pass
reads the prompt once (``share_prompts``). Rows are filled by cost, so that there are few and none is slow. Sequences
that can change no gradient (``StepPlan.dead``) are in no row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from logitless.distributed.shares import attention_cost, sequence_cost
from logitless.errors import InputError
from logitless.types import Completion, PackedBatch, PackedInputs, Prompt, SharedInputs

_Number = TypeVar("_Number", int, float)


def pack(pairs: Sequence[tuple[Prompt, Completion]], *, version: int | None = None) -> PackedBatch:
    """Lay prompt-completion pairs end to end, one sequence each, in the order given.

    Args:
        pairs: B prompts with a completion each; tokens with ``trained=False`` are read but get no row.
        version: of the policy that they are packed for, against which the age of each token is counted; None: without
            ages.

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
    lag: list[int] = []
    lengths: list[int] = []
    counts: list[int] = []
    prompts: dict[tuple[int, ...], int] = {}
    prompt_of: list[int] = []
    for prompt, completion in pairs:
        if not prompt.token_ids:
            raise InputError(
                needed="prompts of at least one token",
                given=f"prompt {prompt.id!r} without tokens",
                remedy="Drop empty prompts, or start them with the BOS token.",
            )
        trained: Sequence[int] = range(completion.length)
        if completion.trained is not None:
            trained = [j for j in trained if completion.trained[j]]
        read = (prompt.token_ids + completion.token_ids)[:-1] if trained else ()
        first = len(input_ids) + len(prompt.token_ids) - 1
        source += [first + j for j in trained] if completion.trained else range(first, first + len(trained))
        input_ids += read
        position_ids += range(len(read))
        target += _at(completion.token_ids, trained, 0)
        turn += _at(completion.turn, trained, 0)
        logp_sampler += _at(completion.logp_sampler, trained, float("nan"))
        lag += _lags(completion, trained, version)
        lengths.append(len(read))
        counts.append(len(trained))
        prompt_of.append(prompts.setdefault(prompt.token_ids, len(prompts)))
    return PackedBatch(
        inputs=PackedInputs(
            input_ids=_vector(input_ids, np.int64),
            position_ids=_vector(position_ids, np.int64),
            lengths=tuple(lengths),
            source=_vector(source, np.int64),
            source_counts=tuple(counts),
            prompt=tuple(prompt_of),
            prompt_lengths=tuple(len(prompt.token_ids) for prompt, _ in pairs),
        ),
        target=_vector(target, np.int64),
        turn=_vector(turn, np.int64),
        logp_sampler=_vector(logp_sampler, np.float32),
        lag=None if version is None else _vector(lag, np.int64),
    )


def _vector(values: Sequence[int] | Sequence[float], dtype: Any) -> Tensor:
    """Of many numbers: by numpy, five times as fast as torch goes through a list."""
    return torch.from_numpy(np.fromiter(values, dtype, len(values)))


def _at(values: Sequence[_Number] | None, places: Sequence[int], missing: _Number) -> Sequence[_Number]:
    """Those of these places, which are often all."""
    if values is None:
        return [missing] * len(places)
    return values if len(places) == len(values) else [values[j] for j in places]


def _lags(completion: Completion, tokens: Sequence[int], version: int | None) -> Sequence[int]:
    """Ages of the weights that drew these tokens."""
    drawn, each = completion.weights_version, completion.token_versions
    if version is None or (each is None and drawn is None):
        return [0] * len(tokens)
    if each is None and drawn is not None:
        return [version - drawn] * len(tokens)
    return [version - of for of in _at(each, tokens, 0)]


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


def share_prompts(inputs: PackedInputs) -> SharedInputs | PackedInputs:
    """The same sequences with each prompt once for the sequences that lie side by side and begin with it.

    Args:
        inputs: on the CPU.

    Returns:
        What a pass reads; ``inputs`` themselves where no two neighbours have a prompt in common.

    Example:
        >>> prompt = Prompt(id="a", text="ab", token_ids=(1, 2))
        >>> pairs = [(prompt, Completion("a", ids, "", "stop")) for ids in [(3, 4), (5, 6)]]
        >>> shared = share_prompts(pack(pairs).inputs)
        >>> shared.input_ids, shared.position_ids, shared.source, shared.groups
        (tensor([1, 2, 3, 5]), tensor([0, 1, 2, 2]), tensor([1, 2, 1, 3]), ((2, (1, 1)),))
    """
    if inputs.prompt is None or inputs.prompt_lengths is None:
        return inputs
    read = [s for s, length in enumerate(inputs.lengths) if length]
    if all(inputs.prompt[a] != inputs.prompt[b] for a, b in pairwise(read)):
        return inputs
    starts = [0, *accumulate(inputs.lengths)]
    groups: list[tuple[int, list[int]]] = []
    kept: list[Tensor] = []
    in_prompt, in_completion = [0] * len(inputs.lengths), [0] * len(inputs.lengths)  # new row less old row
    at, first, before = 0, 0, None
    for s in read:
        start, length, prompt = starts[s], inputs.lengths[s], inputs.prompt_lengths[s]
        if inputs.prompt[s] != before:
            before, first = inputs.prompt[s], at
            groups.append((prompt, []))
            kept.append(torch.arange(start, start + prompt))
            at += prompt
        kept.append(torch.arange(start + prompt, start + length))
        in_prompt[s], in_completion[s] = first - start, at - start - prompt
        groups[-1][1].append(length - prompt)
        at += length - prompt
    rows = torch.cat(kept)

    def of_tokens(values: Sequence[int]) -> Tensor:
        return torch.repeat_interleave(torch.tensor(values), torch.tensor(inputs.source_counts))

    ends = of_tokens([start + prompt for start, prompt in zip(starts[:-1], inputs.prompt_lengths, strict=True)])
    shift = torch.where(inputs.source < ends, of_tokens(in_prompt), of_tokens(in_completion))
    return SharedInputs(
        input_ids=inputs.input_ids[rows],
        position_ids=inputs.position_ids[rows],
        groups=tuple((prompt, tuple(completions)) for prompt, completions in groups),
        source=inputs.source + shift,
    )


@dataclass(frozen=True)
class StepPlan:
    """Which sequences of a block one optimizer step trains on, and how they are cut for memory.

    Args:
        sequences: every sequence of the step's groups, those without a scored token included (they count in B).
        micro_batches: the sequences with scored tokens, in packed rows.
        dead: those with scored tokens that are in no row, for they can change no gradient; they count in every weight.

    Example:
        >>> StepPlan(sequences=(0, 1, 2), micro_batches=((0, 2),)).micro_batches
        ((0, 2),)
    """

    sequences: tuple[int, ...]
    micro_batches: tuple[tuple[int, ...], ...]
    dead: tuple[int, ...] = ()


@dataclass(frozen=True)
class Packing:
    """How sequences become packed rows.

    Args:
        tokens_per_row: the most tokens that the backbone reads at once, prompts included.
        share_prompts: whether a pass reads a prompt once for its sequences in a row.
        hidden_size: D, by which attention is weighed against products (``sequence_cost``); None fills rows in the order
            that is given, each up to the limit, whatever they cost.

    Example:
        >>> ids = torch.zeros(14, dtype=torch.long)
        >>> inputs = PackedInputs(ids, ids, (6, 2, 2, 4), torch.arange(4), (1, 1, 1, 1))
        >>> Packing(8, share_prompts=False).rows([0, 1, 2, 3], inputs)
        ((0, 1), (2, 3))
        >>> Packing(8, share_prompts=False, hidden_size=1).rows([0, 1, 2, 3], inputs)  # 6 + 36 / 12 and so on
        ((0,), (1, 2, 3))
    """

    tokens_per_row: int
    share_prompts: bool = True
    hidden_size: int | None = None

    def rows(self, sequences: Sequence[int], inputs: PackedInputs) -> tuple[tuple[int, ...], ...]:
        """The sequences with scored tokens in packed rows; the same for the same arguments.

        Raises:
            InputError: one sequence alone is longer than a row.
        """
        pieces = self._pieces([s for s in sequences if inputs.source_counts[s]], inputs)
        if self.hidden_size is None:
            return self._in_order(pieces, inputs)
        sizes = [self.num_tokens(piece, inputs) for piece in pieces]
        costs = [self.cost(piece, inputs) for piece in pieces]
        fewest = -(-sum(sizes) // self.tokens_per_row)
        for count in range(fewest, len(pieces) + 1):
            if (placed := _placed(sizes, costs, count, self.tokens_per_row)) is not None:
                return tuple(tuple(s for i in row for s in pieces[i]) for row in placed if row)
        return ()

    def num_tokens(self, sequences: Sequence[int], inputs: PackedInputs) -> int:
        """Tokens that a pass over these sequences side by side reads."""
        return sum(tokens for tokens, _ in self._parts(sequences, inputs))

    def cost(self, sequences: Sequence[int], inputs: PackedInputs) -> float:
        """Work of such a pass, in tokens of a short sequence."""
        size = self.hidden_size or 0
        return float(sum(tokens + attention_cost(pairs, size) for tokens, pairs in self._parts(sequences, inputs)))

    def num_pairs(self, sequences: Sequence[int], inputs: PackedInputs) -> float:
        """Pairs of a token and one that it attends to, in such a pass."""
        return float(sum(pairs for _, pairs in self._parts(sequences, inputs)))

    def _parts(self, sequences: Sequence[int], inputs: PackedInputs) -> Iterator[tuple[int, float]]:
        """(tokens, pairs) of each prompt and completion, or of each sequence."""
        before: int | None = None
        for s in sequences:
            length, prompt = inputs.lengths[s], 0
            if self.share_prompts and inputs.prompt is not None and inputs.prompt_lengths is not None and length:
                prompt = inputs.prompt_lengths[s]
                if inputs.prompt[s] != before:
                    before = inputs.prompt[s]
                    yield prompt, prompt * prompt / 2
            own = length - prompt
            yield own, prompt * own + own * own / 2

    def _pieces(self, sequences: Sequence[int], inputs: PackedInputs) -> list[list[int]]:
        """What is placed as a whole: sequences of one prompt where they share it and fit into a row, else each alone.

        A group that is longer than a row is cut into the fewest parts of about equal cost.
        """
        for s in sequences:
            if inputs.lengths[s] > self.tokens_per_row:
                raise InputError(
                    needed=f"sequences of at most tokens_per_micro_batch = {self.tokens_per_row} tokens",
                    given=f"one of {inputs.lengths[s]}",
                    remedy="Raise train.tokens_per_micro_batch, or lower the prompt or completion limit.",
                )
        if not self.share_prompts or inputs.prompt is None:
            return [[s] for s in sequences]
        groups: dict[int, list[int]] = {}
        for s in sequences:
            groups.setdefault(inputs.prompt[s], []).append(s)
        return [piece for group in groups.values() for piece in self._cut(group, inputs)]

    def _cut(self, group: list[int], inputs: PackedInputs) -> list[list[int]]:
        assert inputs.prompt_lengths is not None
        prompt = inputs.prompt_lengths[group[0]]
        room = self.tokens_per_row - prompt
        sizes = [inputs.lengths[s] - prompt for s in group]
        if sum(sizes) <= room:
            return [group]
        costs = [sequence_cost(inputs.lengths[s], self.hidden_size or 0) for s in group]
        for count in range(2, len(group)):
            if (placed := _placed(sizes, costs, count, room)) is not None:
                return [[group[i] for i in part] for part in placed if part]
        return [[s] for s in group]

    def _in_order(self, pieces: Sequence[Sequence[int]], inputs: PackedInputs) -> tuple[tuple[int, ...], ...]:
        rows: list[list[int]] = []
        used = self.tokens_per_row
        for piece in pieces:
            size = self.num_tokens(piece, inputs)
            if used + size > self.tokens_per_row:
                rows.append([])
                used = 0
            rows[-1] += piece
            used += size
        return tuple(tuple(row) for row in rows)


def _placed(sizes: Sequence[int], costs: Sequence[float], count: int, room: int) -> list[list[int]] | None:
    """The pieces in ``count`` rows of about equal cost, each within ``room``; None where this finds no way.

    The costliest first, each into the cheapest row that has room for it (Graham 1969).
    """
    rows: list[list[int]] = [[] for _ in range(count)]
    used, load = [0] * count, [0.0] * count
    for piece in sorted(range(len(sizes)), key=lambda i: (-costs[i], i)):
        fitting = [r for r in range(count) if used[r] + sizes[piece] <= room]
        if not fitting:
            return None
        row = min(fitting, key=lambda r: (load[r], r))
        rows[row].append(piece)
        used[row] += sizes[piece]
        load[row] += costs[piece]
    return sorted(sorted(row) for row in rows)


def plan_epoch(
    groups: Sequence[Sequence[int]],
    inputs: PackedInputs,
    *,
    tokens_per_step: int,
    seed: int,
    tokens_per_micro_batch: int | None = None,
    packing: Packing | None = None,
    live: Sequence[bool] | None = None,
) -> list[StepPlan]:
    """One pass over a block: whole groups in a seeded order, cut into steps, each cut into micro-batches.

    Args:
        groups: the sequence indices of each group.
        inputs: the block's packed inputs, for its lengths.
        tokens_per_step: scored tokens a step should have, dead ones included; a group goes to the step its middle token
            falls in.
        seed: of the order of the groups.
        tokens_per_micro_batch: for rows in the order of the sequences, each prompt as often as it is there.
        packing: of rows, instead.
        live: one flag a sequence of the block: those that can change a gradient; None: all. A step keeps its cheapest
            sequence if none is live, so that there is a gradient, of zeros.

    Returns:
        At least one step; every sequence is in exactly one, and every step has a scored token if the block has any.

    Raises:
        InputError: one sequence alone is longer than a row.

    Example:
        >>> ids = torch.zeros(12, dtype=torch.long)
        >>> inputs = PackedInputs(ids, ids, (3, 3, 3, 3), torch.arange(8), (2, 2, 2, 2))
        >>> steps = plan_epoch([[0, 1], [2, 3]], inputs, tokens_per_step=4, tokens_per_micro_batch=5, seed=0)
        >>> [len(step.micro_batches) for step in steps]
        [2, 2]
    """
    if packing is None:
        if tokens_per_micro_batch is None:
            raise InputError(
                needed="the size of a row", given="neither packing nor tokens_per_micro_batch", remedy="Give one."
            )
        packing = Packing(tokens_per_micro_batch, share_prompts=False)
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
    return [_step_plan(step, inputs, packing, live) for step in filled]


def _step_plan(
    sequences: Sequence[int], inputs: PackedInputs, packing: Packing, live: Sequence[bool] | None
) -> StepPlan:
    scored = [s for s in sequences if inputs.source_counts[s]]
    read = [s for s in scored if live is None or live[s]]
    if scored and not read:
        read = [min(scored, key=lambda s: (inputs.lengths[s], s))]
    dead = tuple(s for s in scored if s not in set(read))
    return StepPlan(tuple(sequences), packing.rows(read, inputs), dead)

"""Groups to packed tokens, and packed tokens to optimizer steps: the only place where the shift happens.

The hidden state at position i predicts token i + 1: the target at completion index j has its hidden row at
``len(prompt) - 1 + j``, and the last token is not read. Sequences lie end to end without padding; those without a
scored token are left out.

Three savings are decided here, none of which changes a loss: shared prefixes are read once (``share_prompts``), rows
are filled by cost, and sequences that can change no gradient (``StepPlan.dead``) are in no row.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from logitless.distributed.shares import attention_cost
from logitless.errors import InputError
from logitless.types import Completion, PackedBatch, PackedInputs, Prompt, PromptGroup, SharedInputs

LEAST_SHARED = 16
"""Tokens that prompts, or completions of one, have to begin with alike to be read once: fewer are no piece of a row."""


def pack(pairs: Sequence[tuple[Prompt, Completion]], *, version: int | None = None) -> PackedBatch:
    """Lay prompt-completion pairs end to end, one sequence each, in the order given.

    Args:
        pairs: B prompts with a completion each; tokens with ``trained=False`` are read, not scored.
        version: of the policy's weights, for the age of each token; None: without ages.

    Returns:
        The batch, on the CPU.

    Raises:
        InputError: a prompt without tokens.

    Example:
        >>> prompt = Prompt(id="a", text="ab", token_ids=(1, 2))
        >>> batch = pack([(prompt, Completion("a", token_ids=(3, 4), text="cd", finish_reason="stop"))])
        >>> batch.inputs.input_ids, batch.inputs.source, batch.target
        (tensor([1, 2, 3]), tensor([1, 2]), tensor([3, 4]))
    """
    read: list[np.ndarray] = []
    target: list[np.ndarray] = []
    scored: list[np.ndarray] = []
    turn: list[np.ndarray] = []
    logp_sampler: list[np.ndarray] = []
    lag: list[np.ndarray] = []
    lengths: list[int] = []
    for prompt, completion in pairs:
        before, ids = len(prompt.token_ids), completion.token_ids
        if not before:
            raise InputError(
                needed="prompts of at least one token",
                given=f"prompt {prompt.id!r} without tokens",
                remedy="Drop empty prompts, or start them with the BOS token.",
            )
        trained = np.arange(len(ids)) if completion.trained is None else np.flatnonzero(completion.trained)
        if len(trained):
            read += prompt.token_ids, ids[:-1]
        lengths.append(before + len(ids) - 1 if len(trained) else 0)
        scored.append(trained + (before - 1))
        target.append(ids[trained])
        turn.append(_at(completion.turn, trained, 0, np.int64))
        logp_sampler.append(_at(completion.logp_sampler, trained, float("nan"), np.float32))
        if version is not None:
            lag.append(_lags(completion, trained, version))
    starts = list(accumulate(lengths, initial=0))[:-1]
    every = np.arange(max(lengths, default=0))
    return PackedBatch(
        inputs=PackedInputs(
            input_ids=_end_to_end(read, np.int64),
            position_ids=_end_to_end([every[:length] for length in lengths], np.int64),
            lengths=tuple(lengths),
            source=_end_to_end([start + of for start, of in zip(starts, scored, strict=True)], np.int64),
            source_counts=tuple(map(len, scored)),
            prefixes=_prefixes(pairs, lengths),
        ),
        target=_end_to_end(target, np.int64),
        turn=_end_to_end(turn, np.int64),
        logp_sampler=_end_to_end(logp_sampler, np.float32),
        lag=None if version is None else _end_to_end(lag, np.int64),
    )


def _end_to_end(parts: Sequence[np.ndarray], dtype: Any) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *parts]))


def _at(values: np.ndarray | None, places: np.ndarray, missing: float, dtype: Any) -> np.ndarray:
    """Those of these places."""
    return np.full(len(places), missing, dtype) if values is None else values[places]


def _lags(completion: Completion, tokens: np.ndarray, version: int) -> np.ndarray:
    """Ages of the weights that drew these tokens; 0 where nobody knows."""
    drawn = completion.weights_version
    return version - _at(completion.token_versions, tokens, version if drawn is None else drawn, np.int64)


def nothing_to_score() -> PackedBatch:
    """A row of one token and no target, for a rank without sequences that must take part in collectives."""
    one, none = torch.zeros(1, dtype=torch.long), torch.zeros(0, dtype=torch.long)
    return PackedBatch(
        inputs=PackedInputs(input_ids=one, position_ids=one, lengths=(1,), source=none, source_counts=(0,)),
        target=none,
        turn=none,
        logp_sampler=torch.zeros(0),
    )


def _prefixes(
    pairs: Sequence[tuple[Prompt, Completion]], lengths: Sequence[int]
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The shared prefixes of each sequence as (id, tokens): of several prompts, its prompt, of several completions."""
    found: list[list[tuple[int, int]]] = [[] for _ in pairs]
    num_named = 0

    def begin(sequences: Iterable[int], tokens: int) -> None:
        nonlocal num_named
        for s in sequences:
            found[s].append((num_named, tokens))
        num_named += 1

    of_prompt: dict[bytes, list[int]] = {}
    for s, (prompt, _) in enumerate(pairs):
        if lengths[s]:
            of_prompt.setdefault(_sortable(prompt.token_ids), []).append(s)
    prompts = sorted(of_prompt)
    for first, last, tokens in _alike(prompts):
        begin((s for prompt in prompts[first:last] for s in of_prompt[prompt]), tokens)
    for sequences in of_prompt.values():
        prompt, _ = pairs[sequences[0]]
        before = len(prompt.token_ids)
        begin(sequences, before)
        read = {s: _sortable(pairs[s][1].token_ids[: lengths[s] - before]) for s in sequences}
        order = sorted(sequences, key=read.__getitem__)
        for first, last, tokens in _alike([read[s] for s in order]):
            begin(order[first:last], before + tokens)
    return tuple(map(tuple, found))


_WIDTH = 8


def _sortable(ids: np.ndarray) -> bytes:
    """Tokens as bytes in the order of their numbers: highest byte first, ``_WIDTH`` a token."""
    return ids.astype(">i8").tobytes()


def _alike(texts: Sequence[bytes]) -> Iterator[tuple[int, int, int]]:
    """Runs of sorted texts with a shared prefix as (first, last, tokens), outer runs first.

    Each shares at least ``LEAST_SHARED`` tokens more than the run around it.
    """
    common = [_num_common(a, b) for a, b in pairwise(texts)]
    todo = [(0, len(texts), 0)]
    while todo:
        first, last, tokens = todo.pop()
        if last - first > 1:
            if (shortest := min(common[first : last - 1])) >= tokens + LEAST_SHARED:
                yield first, last, shortest
                tokens = shortest
            ends = [i + 1 for i in range(first, last - 1) if common[i] < tokens + LEAST_SHARED]
            todo += [(a, b, tokens) for a, b in pairwise([first, *ends, last])]


def _num_common(text: bytes, other: bytes) -> int:
    """Tokens that both begin with."""
    shorter = min(len(text), len(other))
    differ = np.frombuffer(text, ">i8", shorter // _WIDTH) != np.frombuffer(other, ">i8", shorter // _WIDTH)
    return int(differ.argmax()) if differ.any() else shorter // _WIDTH


def share_prompts(inputs: PackedInputs) -> SharedInputs | PackedInputs:
    """The same sequences with shared prefixes stored once.

    Args:
        inputs: on the CPU.

    Returns:
        ``inputs`` themselves where nothing is shared.

    Example:
        >>> prompt = Prompt(id="a", text="ab", token_ids=(1, 2))
        >>> pairs = [(prompt, Completion("a", ids, "", "stop")) for ids in [(3, 4), (5, 6)]]
        >>> shared = share_prompts(pack(pairs).inputs)
        >>> shared.input_ids, shared.position_ids, shared.source, shared.groups
        (tensor([1, 2, 3, 5]), tensor([0, 1, 2, 2]), tensor([1, 2, 1, 3]), (PromptGroup(prompt=2, completions=(1, 1)),))
    """
    prefixes = inputs.prefixes
    read = [s for s, length in enumerate(inputs.lengths) if length]
    if prefixes is None or max(Counter(name for s in read for name, _ in prefixes[s]).values(), default=1) == 1:
        return inputs
    # a tree of what they begin with, each branch named by its id; the end of sequence s is named ~s
    roots: list[int] = []
    going_on: dict[int, list[int]] = {}
    members: dict[int, list[int]] = {}
    tokens: dict[int, int] = {}
    for s in read:
        siblings = roots
        for name, tokens[name] in prefixes[s]:
            if name not in going_on:
                siblings.append(name)
            siblings = going_on.setdefault(name, [])
            members.setdefault(name, []).append(s)
        siblings.append(~s)
        tokens[~s], members[~s] = inputs.lengths[s], [s]
    starts = [0, *accumulate(inputs.lengths)]
    new_row = np.zeros(starts[-1], dtype=np.int64)
    old_rows: list[range] = []
    at = 0

    def lay(name: int, before: int) -> PromptGroup | int:
        """Lays a branch behind the ``before`` tokens that it goes on from, and what goes on from it behind it."""
        nonlocal at
        own = tokens[name] - before
        for s in members[name]:
            new_row[starts[s] + before : starts[s] + tokens[name]] = np.arange(at, at + own)
        first = starts[members[name][0]]
        old_rows.append(range(first + before, first + tokens[name]))
        at += own
        return own if name < 0 else PromptGroup(own, tuple(lay(each, tokens[name]) for each in going_on[name]))

    laid = [lay(name, 0) for name in roots]
    rows = torch.from_numpy(np.concatenate([np.arange(each.start, each.stop) for each in old_rows]))
    return SharedInputs(
        input_ids=inputs.input_ids[rows],
        position_ids=inputs.position_ids[rows],
        groups=tuple(PromptGroup(each) if isinstance(each, int) else each for each in laid),
        source=torch.from_numpy(new_row)[inputs.source],
    )


@dataclass(frozen=True)
class StepPlan:
    """The sequences of one optimizer step, and how they are cut for memory.

    Args:
        sequences: every sequence of the step's groups, those without a scored token included (they count in B).
        micro_batches: the sequences with scored tokens, in packed rows.
        dead: sequences in no row, because they can change no gradient; they count in every weight.

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
        tokens_per_row: the most tokens to read at once, prompts included, and to score at once.
        share_prompts: whether shared prefixes are read once a row.
        hidden_size: D, for the cost of attention (``attention_cost``); None fills rows in the given order, by length
            alone.

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
        """The sequences with scored tokens in packed rows; deterministic.

        Raises:
            InputError: one sequence alone is longer than a row.
        """
        pieces = self._pieces([s for s in sequences if inputs.source_counts[s]], inputs)
        if self.hidden_size is None:
            return self._in_order(pieces, inputs)
        sizes = [self._size(piece, inputs) for piece in pieces]
        costs = [self.cost(piece, inputs) for piece in pieces]
        placed = _in_fewest(sizes, costs, self.tokens_per_row)
        return tuple(tuple(s for i in row for s in pieces[i]) for row in placed)

    def num_tokens(self, sequences: Sequence[int], inputs: PackedInputs) -> int:
        """Tokens that a pass over these sequences side by side reads."""
        return sum(tokens for tokens, _ in self._parts(sequences, inputs))

    def _size(self, sequences: Sequence[int], inputs: PackedInputs, common: int = 0) -> int:
        """Of the room that ``common`` tokens of theirs leave in a row: what they read, or a part for what is scored."""
        scored = sum(inputs.source_counts[s] for s in sequences)
        part = -(-scored * (self.tokens_per_row - common) // self.tokens_per_row)
        return max(self.num_tokens(sequences, inputs) - common, part)

    def cost(self, sequences: Sequence[int], inputs: PackedInputs) -> float:
        """Work of such a pass, in tokens of a short sequence."""
        size = self.hidden_size or 0
        return float(sum(tokens + attention_cost(pairs, size) for tokens, pairs in self._parts(sequences, inputs)))

    def num_pairs(self, sequences: Sequence[int], inputs: PackedInputs) -> float:
        """Pairs of a token and one that it attends to, in such a pass."""
        return float(sum(pairs for _, pairs in self._parts(sequences, inputs)))

    def _parts(self, sequences: Sequence[int], inputs: PackedInputs) -> Iterator[tuple[int, float]]:
        """(tokens, pairs) of what sequences begin with, each once, and of what each goes on with."""
        seen: set[int] = set()
        for s in sequences:
            before = 0
            for name, tokens in self._prefixes(s, inputs):
                own = tokens - before
                if name not in seen:
                    seen.add(name)
                    yield own, before * own + own * own / 2
                before = tokens
            own = inputs.lengths[s] - before
            yield own, before * own + own * own / 2

    def _prefixes(self, sequence: int, inputs: PackedInputs) -> tuple[tuple[int, int], ...]:
        return inputs.prefixes[sequence] if self.share_prompts and inputs.prefixes is not None else ()

    def _pieces(self, sequences: Sequence[int], inputs: PackedInputs) -> list[list[int]]:
        """What is placed as a whole: the sequences that begin alike, where they share that and fit into a row."""
        for s in sequences:
            if inputs.lengths[s] > self.tokens_per_row:
                raise InputError(
                    needed=f"sequences of at most tokens_per_micro_batch = {self.tokens_per_row} tokens",
                    given=f"one of {inputs.lengths[s]}",
                    remedy="Raise train.tokens_per_micro_batch, or lower the prompt or completion limit.",
                )
        return [piece for branch in self._branches(sequences, 0, inputs) for piece in self._cut(branch, 1, inputs)]

    def _branches(self, sequences: Sequence[int], depth: int, inputs: PackedInputs) -> list[list[int]]:
        """The sequences by their prefix number ``depth``; whoever has none is alone."""
        found: dict[int, list[int]] = {}
        for s in sequences:
            prefixes = self._prefixes(s, inputs)
            found.setdefault(prefixes[depth][0] if len(prefixes) > depth else ~s, []).append(s)
        return list(found.values())

    def _cut(self, group: list[int], depth: int, inputs: PackedInputs) -> list[list[int]]:
        """Sequences with ``depth`` prefixes in common in the fewest parts of about equal cost that fit into a row."""
        if len(group) == 1 or self._size(group, inputs) <= self.tokens_per_row:
            return [group]
        common = self._prefixes(group[0], inputs)[depth - 1][1]
        branches = self._branches(group, depth, inputs)
        pieces = [piece for branch in branches for piece in self._cut(branch, depth + 1, inputs)]
        sizes = [self._size(piece, inputs, common) for piece in pieces]
        costs = [self.cost(piece, inputs) for piece in pieces]
        placed = _in_fewest(sizes, costs, self.tokens_per_row - common)
        return [sorted(s for i in part for s in pieces[i]) for part in placed]

    def _in_order(self, pieces: Sequence[Sequence[int]], inputs: PackedInputs) -> tuple[tuple[int, ...], ...]:
        rows: list[list[int]] = []
        used = self.tokens_per_row
        for piece in pieces:
            size = self._size(piece, inputs)
            if used + size > self.tokens_per_row:
                rows.append([])
                used = 0
            rows[-1] += piece
            used += size
        return tuple(tuple(row) for row in rows)


def _in_fewest(sizes: Sequence[int], costs: Sequence[float], room: int) -> list[list[int]]:
    """The pieces, each within ``room``, in about the fewest rows that have room for them."""
    most = len(sizes)
    fewest = max(-(-sum(sizes) // room) if room else most, sum(2 * size > room for size in sizes))
    found = (_placed(sizes, costs, count, room) for count in range(fewest, most))
    placed = next((each for each in found if each is not None), [[i] for i in range(most)])
    return [row for row in placed if row]


def _placed(sizes: Sequence[int], costs: Sequence[float], count: int, room: int) -> list[list[int]] | None:
    """The pieces in ``count`` rows of similar cost, each within ``room``; None if they do not fit.

    The costliest first, each into the cheapest row with room (Graham 1969).
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
    """One pass over a block: whole groups in a seeded order, cut into steps and micro-batches.

    Args:
        groups: the sequence indices of each group.
        inputs: the block's packed inputs, for its lengths.
        tokens_per_step: scored tokens a step should have; a group goes to the step its middle token falls in.
        seed: of the order of the groups.
        tokens_per_micro_batch: for rows in the order of the sequences, without sharing.
        packing: of rows, instead.
        live: one flag a sequence: whether it can change a gradient; None: all. A step without any keeps its cheapest
            sequence, for a gradient of zeros.

    Returns:
        At least one step; every sequence is in exactly one.

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
    alive = set(read)
    return StepPlan(tuple(sequences), packing.rows(read, inputs), tuple(s for s in scored if s not in alive))

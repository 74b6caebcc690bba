"""Prompt-completion pairs to packed tokens, and packed tokens to the micro-batches of optimizer steps.

The shift by one token happens here and nowhere else: the hidden state at position i predicts token i + 1. The target at
completion index j is therefore predicted at position ``len(prompt) - 1 + j``, and the last token is never an input.

Packed rows save work in three ways, none of which changes a loss: a shared prefix is stored once (``share_prompts``),
rows are filled by cost, and sequences without a gradient (``StepPlan.zero_advantage``) are in no row.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from logitless.distributed.shares import attention_cost, shares_by_cost
from logitless.errors import InputError
from logitless.types import Completion, PackedBatch, PackedInputs, Prompt, PromptGroup, SharedInputs

LEAST_SHARED = 16
"""Shortest beginning, in tokens, that is stored once for several prompts, or for several completions of one prompt."""


def pack(
    pairs: Sequence[tuple[Prompt, Completion]], *, version: int | None = None, observed: bool = False
) -> PackedBatch:
    """Pack prompt-completion pairs end to end, one sequence each, in the order given.

    Args:
        pairs: B prompts with a completion each. Tokens with ``trained=False`` are read and not scored; a sequence
            without a scored token has length 0.
        version: of the policy's weights, from which each token's ``lag`` is counted; None: no ``lag``.
        observed: whether the tokens that are not scored, but read, are targets of ``PackedBatch.observed``.

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
    tokens = _Tokens.of(pairs)
    trained, lengths = tokens.trained, tuple(tokens.lengths.tolist())
    read = [
        ids
        for (prompt, completion), length in zip(pairs, lengths, strict=True)
        if length
        for ids in (prompt.token_ids, completion.token_ids[:-1])
    ]
    inputs = PackedInputs(
        input_ids=torch.from_numpy(_concatenated(read, np.int64)),
        position_ids=torch.from_numpy(_counted(tokens.lengths)),
        lengths=lengths,
        **tokens.sources(trained),
        prefixes=_shared_prefixes(pairs, lengths),
    )
    batch = PackedBatch(
        inputs=inputs,
        target=torch.from_numpy(tokens.ids[trained]),
        turn=torch.from_numpy(tokens.values("turn", 0, np.int64)[trained]),
        logp_sampler=torch.from_numpy(tokens.values("logp_sampler", np.nan, np.float32)[trained]),
        lag=None if version is None else torch.from_numpy(tokens.lags(version)[trained]),
    )
    if not observed:
        return batch
    others = ~trained & (tokens.lengths > 0)[tokens.sequence]
    said, others_read = torch.from_numpy(tokens.ids[others]), replace(inputs, **tokens.sources(others))
    nothing = torch.full((len(said),), torch.nan)
    return replace(batch, observed=PackedBatch(others_read, said, torch.zeros_like(said), nothing))


@dataclass(frozen=True)
class _Tokens:
    """The N tokens of B completions, end to end.

    Args:
        completions: B.
        counts: [B] tokens of each.
        lengths: [B] tokens that the model reads, the prompt's included; 0 without a trained one.
        sequence: [N] the completion of each token.
        ids: [N].
        trained: [N] False for tokens of a tool or environment.
        predicted_at: [N] index of the packed token at which each is predicted.
    """

    completions: Sequence[Completion]
    counts: np.ndarray
    lengths: np.ndarray
    sequence: np.ndarray
    ids: np.ndarray
    trained: np.ndarray
    predicted_at: np.ndarray

    @classmethod
    def of(cls, pairs: Sequence[tuple[Prompt, Completion]]) -> "_Tokens":
        completions = [completion for _, completion in pairs]
        prompts = np.array([len(prompt.token_ids) for prompt, _ in pairs], np.int64)
        if not prompts.all():
            raise InputError(
                needed="prompts of at least one token",
                given=f"prompt {pairs[int(prompts.argmin())][0].id!r} without tokens",
                remedy="Drop empty prompts, or start them with the BOS token.",
            )
        counts = np.array([completion.length for completion in completions], np.int64)
        sequence = np.repeat(np.arange(len(pairs)), counts)
        trained = _end_to_end([completion.trained for completion in completions], counts, True, np.bool_)
        is_read = np.bincount(sequence[trained], minlength=len(pairs)) > 0
        lengths = np.where(is_read, prompts + counts - 1, 0)
        first = lengths.cumsum() - lengths + prompts - 1  # where each completion's first token is predicted
        ids = _concatenated([completion.token_ids for completion in completions], np.int64)
        return cls(completions, counts, lengths, sequence, ids, trained, first[sequence] + _counted(counts))

    def sources(self, of: np.ndarray) -> dict[str, Any]:
        """``source`` and ``source_counts`` of the tokens [N] that are True."""
        counts = np.bincount(self.sequence[of], minlength=len(self.counts))
        return {"source": torch.from_numpy(self.predicted_at[of]), "source_counts": tuple(counts.tolist())}

    def values(self, name: str, missing: float, dtype: Any) -> np.ndarray:
        """[N] field of ``Completion``; ``missing`` where it is None."""
        return _end_to_end([getattr(each, name) for each in self.completions], self.counts, missing, dtype)

    def lags(self, version: int) -> np.ndarray:
        """[N] optimizer steps from the weights that sampled each token to ``version``; 0 where unknown."""
        known = [version if each.weights_version is None else each.weights_version for each in self.completions]
        sampled_with = np.repeat(np.array(known, np.int64), self.counts)
        for completion, end in zip(self.completions, self.counts.cumsum(), strict=True):
            if completion.token_versions is not None:
                sampled_with[end - completion.length : end] = completion.token_versions
        return version - sampled_with


def _counted(counts: np.ndarray) -> np.ndarray:
    """0, 1, ... for each count, end to end.

    Example:
        >>> _counted(np.array([2, 0, 3])).tolist()
        [0, 1, 0, 1, 2]
    """
    return np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)


def _concatenated(parts: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts])


def _end_to_end(values: Sequence[np.ndarray | None], counts: np.ndarray, missing: float, dtype: Any) -> np.ndarray:
    """The values of all completions; ``missing`` for each token of those that have none."""
    if all(own is None for own in values):
        return np.full(counts.sum(), missing, dtype)
    filled = [np.full(n, missing, dtype) if own is None else own for own, n in zip(values, counts, strict=True)]
    return _concatenated(filled, dtype)


def nothing_to_score() -> PackedBatch:
    """A row of one token and no target, for a rank without sequences that must take part in collectives."""
    one, none = torch.zeros(1, dtype=torch.long), torch.zeros(0, dtype=torch.long)
    return PackedBatch(
        inputs=PackedInputs(input_ids=one, position_ids=one, lengths=(1,), source=none, source_counts=(0,)),
        target=none,
        turn=none,
        logp_sampler=torch.zeros(0),
    )


def _shared_prefixes(
    pairs: Sequence[tuple[Prompt, Completion]], lengths: Sequence[int]
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The prefixes of each sequence as (id, length), shortest first.

    They are beginnings that several prompts share, then the whole prompt, then beginnings that completions of it share.
    """
    prefixes: list[list[tuple[int, int]]] = [[] for _ in pairs]
    num_prefixes = 0

    def add_prefix(sequences: Iterable[int], length: int) -> None:
        nonlocal num_prefixes
        for s in sequences:
            prefixes[s].append((num_prefixes, length))
        num_prefixes += 1

    by_prompt: dict[bytes, list[int]] = {}
    for s, (prompt, _) in enumerate(pairs):
        if lengths[s]:
            by_prompt.setdefault(_sortable(prompt.token_ids), []).append(s)
    prompts = sorted(by_prompt)
    for first, last, length in _runs_with_common_prefix(prompts):
        add_prefix((s for prompt in prompts[first:last] for s in by_prompt[prompt]), length)
    for sequences in by_prompt.values():
        prompt_length = len(pairs[sequences[0]][0].token_ids)
        add_prefix(sequences, prompt_length)
        completions = {
            s: _sortable(pairs[s][1].token_ids[: lengths[s] - prompt_length])
            for s in sequences
            if lengths[s] >= prompt_length + LEAST_SHARED
        }
        order = sorted(completions, key=completions.__getitem__)
        for first, last, length in _runs_with_common_prefix([completions[s] for s in order]):
            add_prefix(order[first:last], prompt_length + length)
    return tuple(map(tuple, prefixes))


_BYTES_PER_TOKEN = 8


def _sortable(ids: np.ndarray) -> bytes:
    """Token ids as bytes that sort as the ids do: big-endian, ``_BYTES_PER_TOKEN`` a token."""
    return ids.astype(">i8").tobytes()


def _runs_with_common_prefix(texts: Sequence[bytes]) -> Iterator[tuple[int, int, int]]:
    """Nested runs ``texts[first:last]`` of sorted texts with a common prefix, as (first, last, prefix length).

    Outer runs come first. A run's prefix is at least ``LEAST_SHARED`` tokens longer than that of the run around it.
    """
    common = [_common_prefix_length(a, b) for a, b in pairwise(texts)]
    todo = [(0, len(texts), 0)]
    while todo:
        first, last, length = todo.pop()
        if last - first > 1:
            if (shortest := min(common[first : last - 1])) >= length + LEAST_SHARED:
                yield first, last, shortest
                length = shortest
            cuts = [i + 1 for i in range(first, last - 1) if common[i] < length + LEAST_SHARED]
            todo += [(a, b, length) for a, b in pairwise([first, *cuts, last])]


def _common_prefix_length(text: bytes, other: bytes) -> int:
    """In tokens."""
    shorter = min(len(text), len(other)) // _BYTES_PER_TOKEN
    differ = np.frombuffer(text, ">i8", shorter) != np.frombuffer(other, ">i8", shorter)
    return int(differ.argmax()) if differ.any() else shorter


@dataclass
class _Node:
    """A shared prefix, or a whole sequence, in a tree in which a child continues its parent.

    Args:
        length: tokens from the start of a sequence to the end of this node.
        sequences: those that begin with these tokens.
        children: empty for a whole sequence.
    """

    length: int
    sequences: list[int] = field(default_factory=list)
    children: list["_Node"] = field(default_factory=list)


def _prefix_tree(
    sequences: Sequence[int], inputs: PackedInputs, prefixes: Sequence[Sequence[tuple[int, int]]]
) -> _Node:
    root = _Node(length=0)
    nodes: dict[int, _Node] = {}
    for s in sequences:
        parent = root
        for prefix, length in prefixes[s]:
            if prefix not in nodes:
                nodes[prefix] = _Node(length)
                parent.children.append(nodes[prefix])
            parent = nodes[prefix]
            parent.sequences.append(s)
        parent.children.append(_Node(inputs.lengths[s], [s]))
    return root


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
    if prefixes is None or max(Counter(prefix for s in read for prefix, _ in prefixes[s]).values(), default=1) == 1:
        return inputs
    starts = [0, *accumulate(inputs.lengths)]
    new_index = np.zeros(starts[-1], dtype=np.int64)  # of each old token
    old_index: list[np.ndarray] = []  # of each new token
    num_new = 0

    def append(node: _Node, parent_length: int) -> PromptGroup | int:
        """Append the tokens by which a node is longer than its parent, then its children."""
        nonlocal num_new
        added = node.length - parent_length
        for s in node.sequences:
            new_index[starts[s] + parent_length : starts[s] + node.length] = np.arange(num_new, num_new + added)
        start = starts[node.sequences[0]]
        old_index.append(np.arange(start + parent_length, start + node.length))
        num_new += added
        if not node.children:
            return added
        return PromptGroup(added, tuple(append(child, node.length) for child in node.children))

    tree = _prefix_tree(read, inputs, prefixes)
    groups = PromptGroup(0, tuple(append(node, 0) for node in tree.children)).branches
    rows = torch.from_numpy(np.concatenate(old_index))
    return SharedInputs(
        input_ids=inputs.input_ids[rows],
        position_ids=inputs.position_ids[rows],
        groups=groups,
        source=torch.from_numpy(new_index)[inputs.source],
    )


@dataclass(frozen=True)
class StepPlan:
    """The sequences of one optimizer step, divided into packed rows.

    Args:
        sequences: every sequence of the step's groups, also those without a scored token (they count in B).
        micro_batches: packed rows of the sequences that are trained on.
        zero_advantage: scored sequences that cannot change a gradient: they are in no row, and count in every weight.

    Example:
        >>> StepPlan(sequences=(0, 1, 2), micro_batches=((0, 2),)).micro_batches
        ((0, 2),)
    """

    sequences: tuple[int, ...]
    micro_batches: tuple[tuple[int, ...], ...]
    zero_advantage: tuple[int, ...] = ()


@dataclass(frozen=True)
class Packing:
    """How sequences become packed rows.

    Args:
        tokens_per_row: the most tokens a row may read, prompts included, and the most it may score.
        share_prompts: whether a row reads shared prefixes once.
        hidden_size: D, for the cost of attention (``attention_cost``). None: rows are filled in the order given, by
            length alone.

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
        scored = [s for s in sequences if inputs.source_counts[s]]
        for s in scored:
            if inputs.lengths[s] > self.tokens_per_row:
                raise InputError(
                    needed=f"sequences of at most tokens_per_micro_batch = {self.tokens_per_row} tokens",
                    given=f"one of {inputs.lengths[s]}",
                    remedy="Raise train.tokens_per_micro_batch, or lower the prompt or completion limit.",
                )
        families = self._by_prefix(scored, 0, inputs)
        pieces = [piece for family in families for piece in self._pieces(family, 1, inputs)]
        sizes = [self._size(piece, inputs) for piece in pieces]
        if self.hidden_size is None:
            rows = _rows_in_order(sizes, self.tokens_per_row)
        else:
            rows = _fewest_rows(sizes, [self.cost(piece, inputs) for piece in pieces], self.tokens_per_row)
        return tuple(tuple(s for i in row for s in pieces[i]) for row in rows)

    def num_tokens(self, sequences: Sequence[int], inputs: PackedInputs) -> int:
        """Tokens that a row of these sequences reads."""
        return sum(tokens for tokens, _ in self._segments(sequences, inputs))

    def cost(self, sequences: Sequence[int], inputs: PackedInputs) -> float:
        """Work of a pass over a row of these sequences, in tokens of a short sequence."""
        size = self.hidden_size or 0
        return float(sum(tokens + attention_cost(pairs, size) for tokens, pairs in self._segments(sequences, inputs)))

    def _segments(self, sequences: Sequence[int], inputs: PackedInputs) -> Iterator[tuple[int, float]]:
        """(tokens, attended pairs) of each shared prefix, once, and of what is each sequence's own."""
        seen: set[int] = set()
        for s in sequences:
            before = 0
            for prefix, length in self._prefixes(s, inputs):
                tokens = length - before
                if prefix not in seen:
                    seen.add(prefix)
                    yield tokens, before * tokens + tokens * tokens / 2
                before = length
            tokens = inputs.lengths[s] - before
            yield tokens, before * tokens + tokens * tokens / 2

    def _prefixes(self, sequence: int, inputs: PackedInputs) -> tuple[tuple[int, int], ...]:
        return inputs.prefixes[sequence] if self.share_prompts and inputs.prefixes is not None else ()

    def _size(self, sequences: Sequence[int], inputs: PackedInputs, common: int = 0) -> int:
        """Tokens that sequences take of a row in which their first ``common`` tokens are already counted.

        More than they read where they score so much that the limit on scored tokens binds first.
        """
        scored = sum(inputs.source_counts[s] for s in sequences)
        share_of_scored = -(-scored * (self.tokens_per_row - common) // self.tokens_per_row)
        return max(self.num_tokens(sequences, inputs) - common, share_of_scored)

    def _by_prefix(self, sequences: Sequence[int], depth: int, inputs: PackedInputs) -> list[list[int]]:
        """The sequences grouped by prefix number ``depth``; a sequence with fewer prefixes is alone."""
        groups: dict[int, list[int]] = {}
        for s in sequences:
            prefixes = self._prefixes(s, inputs)
            key = prefixes[depth][0] if len(prefixes) > depth else ~s  # no prefix has a negative id
            groups.setdefault(key, []).append(s)
        return list(groups.values())

    def _pieces(self, family: list[int], depth: int, inputs: PackedInputs) -> list[list[int]]:
        """Sequences with ``depth`` prefixes in common, in the fewest pieces that fit into a row, of similar cost."""
        if len(family) == 1 or self._size(family, inputs) <= self.tokens_per_row:
            return [family]
        common = self._prefixes(family[0], inputs)[depth - 1][1]
        branches = self._by_prefix(family, depth, inputs)
        pieces = [piece for branch in branches for piece in self._pieces(branch, depth + 1, inputs)]
        sizes = [self._size(piece, inputs, common) for piece in pieces]
        costs = [self.cost(piece, inputs) for piece in pieces]
        rows = _fewest_rows(sizes, costs, self.tokens_per_row - common)
        return [sorted(s for i in row for s in pieces[i]) for row in rows]


def _rows_in_order(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of pieces in rows: each goes into the last row, or begins a new one where that is full."""
    rows: list[list[int]] = []
    used = capacity
    for i, size in enumerate(sizes):
        if used + size > capacity:
            rows.append([])
            used = 0
        rows[-1].append(i)
        used += size
    return rows


def _fewest_rows(sizes: Sequence[int], costs: Sequence[float], capacity: int) -> list[list[int]]:
    """Indices of pieces in about the fewest rows that hold them, of similar cost."""
    fewest = len(sizes)
    if capacity:
        # pieces over half a row need a row each
        fewest = max(-(-sum(sizes) // capacity), sum(2 * size > capacity for size in sizes))
    for count in range(fewest, len(sizes)):
        rows = _balanced_rows(sizes, costs, count, capacity)
        if rows is not None:
            return [row for row in rows if row]
    return [[i] for i in range(len(sizes))]


def _balanced_rows(sizes: Sequence[int], costs: Sequence[float], count: int, capacity: int) -> list[list[int]] | None:
    """Indices of pieces in ``count`` rows of similar cost; None if they do not fit.

    The costliest first, each into the cheapest row with space for it (Graham 1969).
    """
    rows: list[list[int]] = [[] for _ in range(count)]
    used, load = [0] * count, [0.0] * count
    for piece in sorted(range(len(sizes)), key=lambda i: (-costs[i], i)):
        fitting = [r for r in range(count) if used[r] + sizes[piece] <= capacity]
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
    packing: Packing,
    seed: int,
    nonzero_advantage: Sequence[bool] | None = None,
) -> list[StepPlan]:
    """One epoch over a block: whole groups in a seeded order, divided into steps and packed rows.

    Args:
        groups: the sequence indices of each group.
        inputs: the block's packed inputs, for its lengths.
        tokens_per_step: scored tokens a step should have; a group goes to the step its middle token falls in.
        nonzero_advantage: one flag a sequence: whether it can change a gradient; None: all can. A step in which none
            can still trains on its shortest sequence, for a gradient of zeros.

    Returns:
        At least one step; every sequence is in exactly one.

    Raises:
        InputError: one sequence alone is longer than a row.

    Example:
        >>> ids = torch.zeros(12, dtype=torch.long)
        >>> inputs = PackedInputs(ids, ids, (3, 3, 3, 3), torch.arange(8), (2, 2, 2, 2))
        >>> steps = plan_epoch([[0, 1], [2, 3]], inputs, tokens_per_step=4, packing=Packing(5), seed=0)
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
    return [_step_plan(step, inputs, packing, nonzero_advantage) for step in filled]


def _step_plan(
    sequences: Sequence[int], inputs: PackedInputs, packing: Packing, nonzero_advantage: Sequence[bool] | None
) -> StepPlan:
    scored = [s for s in sequences if inputs.source_counts[s]]
    trained = [s for s in scored if nonzero_advantage is None or nonzero_advantage[s]]
    if scored and not trained:
        trained = [min(scored, key=lambda s: (inputs.lengths[s], s))]
    kept = set(trained)
    return StepPlan(tuple(sequences), packing.rows(trained, inputs), tuple(s for s in scored if s not in kept))


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

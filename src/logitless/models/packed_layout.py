"""The sequences of a packed row, and their division into padded batches of similar length (buckets).

Plain torch attention and recurrent layers take a batch [sequences, longest, ...]. Buckets of similar length keep
padding low. Padding is on the right, where a causal layer's real tokens never attend to it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from logitless.errors import InputError
from logitless.models.attention import AttentionLayout
from logitless.models.repeated_rows import RepeatedRows

_MAX_PADDING = 1.25  # padded tokens a bucket may hold per real token


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length that form one padded batch.

    Args:
        num_sequences: sequences in the bucket.
        max_length: length that they are padded to.
        tokens: [n] index into T of the bucket's tokens; None if the bucket is the whole row, in order.
        slots: [n] index of each token in the flattened batch, ``num_sequences * max_length``; None without padding.
    """

    num_sequences: int
    max_length: int
    tokens: Int[Tensor, "n"] | None
    slots: Int[Tensor, "n"] | None

    def side_by_side(self, x: Float[Tensor, "T *rest"]) -> Float[Tensor, "S L *rest"]:
        """The bucket's sequences as a batch [num_sequences, max_length, ...], padded with zeros on the right."""
        if self.tokens is not None:
            x = x.index_select(0, self.tokens)
        if self.slots is not None:
            x = x.new_zeros(self.num_sequences * self.max_length, *x.shape[1:]).index_copy(0, self.slots, x)
        return x.reshape(self.num_sequences, self.max_length, *x.shape[1:])

    def end_to_end(self, batch: Float[Tensor, "S L *rest"]) -> Float[Tensor, "n *rest"]:
        """The inverse of ``side_by_side``: the batch's tokens in the bucket's order, without padding."""
        batch = batch.flatten(0, 1)
        return batch if self.slots is None else batch.index_select(0, self.slots)


@dataclass(frozen=True)
class PackedLayout:
    """The lengths of the sequences in a packed row; every attention layer gets it as a keyword argument.

    Args:
        lengths: of the B sequences, at least 1 each; on the host.
        device: of the model.

    Raises:
        InputError: a length below 1, or no sequence.

    Example:
        >>> layout = PackedLayout((3, 3, 100))
        >>> [(bucket.num_sequences, bucket.max_length) for bucket in layout.buckets]
        [(2, 3), (1, 100)]
    """

    lengths: tuple[int, ...]
    device: torch.device | str = "cpu"
    _cut: dict[int, "PackedLayout"] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise InputError(
                needed="at least one sequence and no empty one",
                given=f"lengths {self.lengths[:8]}",
                remedy="Drop sequences without tokens before packing.",
            )

    @cached_property
    def num_tokens(self) -> int:
        """T, tokens of the row."""
        return sum(self.lengths)

    @cached_property
    def max_length(self) -> int:
        """Length of the longest sequence."""
        return max(self.lengths)

    @cached_property
    def is_even(self) -> bool:
        """Whether all sequences have the same length."""
        return self.num_tokens == len(self.lengths) * self.max_length

    @cached_property
    def offsets(self) -> Int[Tensor, "O"]:
        """[B + 1] int32: cumulative lengths from 0 on (``cu_seqlens``)."""
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device=self.device)

    @cached_property
    def attention(self) -> AttentionLayout:
        """The same sequences for ``prefix_attention``."""
        return AttentionLayout.of_sequences(self.lengths, self.device)

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The sequences in buckets of similar length, of at most 1.25 tokens with padding per real token."""
        sizes = torch.tensor(self.lengths)
        starts = sizes.cumsum(0) - sizes
        groups = _groups_of_similar_length(self.lengths)
        in_order = len(groups) == 1
        buckets = []
        for group in groups:
            kept = sizes[group]
            longest = int(kept.max())
            within = torch.arange(int(kept.sum())) - torch.repeat_interleave(kept.cumsum(0) - kept, kept)
            tokens = torch.repeat_interleave(starts[group], kept) + within
            slots = torch.repeat_interleave(torch.arange(len(group)) * longest, kept) + within
            buckets.append(
                Bucket(
                    num_sequences=len(group),
                    max_length=longest,
                    tokens=None if in_order else tokens.to(self.device),
                    slots=None if len(tokens) == len(group) * longest else slots.to(self.device),
                )
            )
        return tuple(buckets)

    @cached_property
    def inverse(self) -> Int[Tensor, "T"] | None:
        """[T] index of each token in the concatenated buckets; None for the identity."""
        tokens = [bucket.tokens for bucket in self.buckets if bucket.tokens is not None]
        return torch.argsort(torch.cat(tokens)) if tokens else None

    def by_bucket(
        self, operation: Callable[..., Float[Tensor, "S L ..."]], *rows: Float[Tensor, "T ..."]
    ) -> Float[Tensor, "T ..."]:
        """Applies an operation on padded batches to packed rows.

        Args:
            operation: takes one batch [sequences, longest, ...] for each of ``rows``, and returns a batch [sequences,
                longest, ...]. It must be causal: a token's result does not depend on later tokens.
            rows: its inputs, packed.

        Returns:
            The result, packed.

        Example:
            >>> layout = PackedLayout((1, 3))
            >>> layout.by_bucket(lambda batch: batch.cumsum(1), torch.ones(4))
            tensor([1., 1., 2., 3.])
        """
        parts = [bucket.end_to_end(operation(*(bucket.side_by_side(row) for row in rows))) for bucket in self.buckets]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out if self.inverse is None else out.index_select(0, self.inverse)

    def cut(self, length: int) -> "PackedLayout":
        """The layout of the same row with each sequence divided into chunks of at most ``length`` tokens.

        Example:
            >>> PackedLayout((3, 7)).cut(3).lengths
            (3, 3, 3, 1)
        """
        if length >= self.max_length:
            return self
        if length not in self._cut:
            pieces = [min(length, whole - start) for whole in self.lengths for start in range(0, whole, length)]
            self._cut[length] = PackedLayout(tuple(pieces), self.device)
        return self._cut[length]


class WholeSequences(NamedTuple):
    """Maps between a row with shared prompts and the row with every prompt repeated."""

    layout: PackedLayout
    """The layout of the repeated row."""
    repeated: RepeatedRows
    """For each token of the repeated row, its index in the shared row."""
    kept: Int[Tensor, "T"]
    """[T] for each token of the shared row, the index of its first copy in the repeated row."""

    @classmethod
    def of(cls, layout: AttentionLayout) -> "WholeSequences":
        """The maps of a layout, cached in it for all layers and passes.

        Example:
            >>> from logitless.types import PromptGroup
            >>> whole = WholeSequences.of(AttentionLayout([PromptGroup(2, (1, 1))]))
            >>> whole.layout.lengths, whole.repeated.index.tolist(), whole.kept.tolist()
            ((3, 3), [0, 1, 2, 0, 1, 3], [0, 1, 2, 5])
        """

        def make() -> WholeSequences:
            whole, rows = layout.unshared()
            repeated = RepeatedRows.of(rows.cpu())  # contains every token, so first[t] is the first copy of token t
            lengths = tuple(prompt for prompt, _ in whole.groups)
            device = layout.device
            return cls(PackedLayout(lengths, device), repeated.to(device), repeated.first.to(device))

        found: WholeSequences = layout.kept("whole", make)
        return found


def _groups_of_similar_length(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of the sequences of each bucket, sorted by length; in the order of the row if one bucket suffices."""
    if len(lengths) * max(lengths) <= _MAX_PADDING * sum(lengths):
        return [list(range(len(lengths)))]
    groups: list[list[int]] = []
    real = 0
    for s in sorted(range(len(lengths)), key=lambda s: (lengths[s], s)):
        if groups and (len(groups[-1]) + 1) * lengths[s] <= _MAX_PADDING * (real + lengths[s]):
            groups[-1].append(s)
            real += lengths[s]
        else:
            groups.append([s])
            real = lengths[s]
    return groups

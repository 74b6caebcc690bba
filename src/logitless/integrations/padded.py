"""Conversion between padded tensors [B, T] of other libraries and packed ones [N] of logitless."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

from logitless.errors import InputError
from logitless.types import TokenBatch


@dataclass(frozen=True)
class Places:
    """Positions of packed tokens in the padded batch.

    Args:
        sequence, column: [N] row and column of each token.
        shape: B and T.

    Example:
        >>> import torch
        >>> _, places = from_padded(torch.tensor([[0, 1], [1, 1]]), torch.zeros(2), torch.ones(2, 2))
        >>> places.taken_from(torch.tensor([[0.0, 1.0], [2.0, 3.0]]))
        tensor([1., 2., 3.])
    """

    sequence: Int[Tensor, "N"]
    column: Int[Tensor, "N"]
    shape: tuple[int, int]

    def taken_from(self, values: Tensor) -> Tensor:
        """Packed values [N, ...] from padded ones [B, T, ...]."""
        return values[self.sequence, self.column]

    def scatter_back(self, values: Float[Tensor, "N"]) -> Float[Tensor, "B T"]:
        """Packed values in the padded shape, 0 at other positions.

        Gradient: through ``values``.

        Raises:
            InputError: the values are not one a token.

        Example:
            >>> import torch
            >>> _, places = from_padded(torch.tensor([[0, 1], [1, 1]]), torch.zeros(2), torch.ones(2, 2))
            >>> places.scatter_back(torch.tensor([5.0, 6.0, 7.0]))
            tensor([[0., 5.],
                    [6., 7.]])
        """
        if values.shape != self.sequence.shape:
            raise InputError(
                needed=f"one value for each of {len(self.sequence)} tokens",
                given=f"a tensor {list(values.shape)}",
                remedy="Give the results of this batch.",
            )
        return values.new_zeros(self.shape).index_put((self.sequence, self.column), values)


def from_padded(
    completion_mask: Bool[Tensor, "B T"] | Int[Tensor, "B T"],
    advantages: Float[Tensor, "B"] | Float[Tensor, "B T"],
    token_weight: Float[Tensor, "B T"] | Callable[[tuple[int, ...]], Float[Tensor, "N"]],
    *,
    tool_mask: Bool[Tensor, "B T"] | Int[Tensor, "B T"] | None = None,
    **vectors: Float[Tensor, "B T"] | Int[Tensor, "B T"] | None,
) -> tuple[TokenBatch, Places]:
    """The packed batch of padded tensors, and the positions of its tokens.

    Values at masked positions, NaN included, reach neither loss nor gradient. The masks are copied to the host.

    Args:
        completion_mask: [B, T] 1 on the tokens of the completion.
        advantages: [B], the same for each token of a completion, or [B, T].
        token_weight: [B, T], or a function from the B numbers of trained tokens to weights [N], such as
            ``lambda counts: SequenceMean()(counts, Totals.of(counts))``.
        tool_mask: [B, T] 1 on the policy's own tokens, 0 on tokens of a tool or environment.
        vectors: [B, T] further fields of ``TokenBatch`` by name, such as ``logp_old``; None leaves one out.

    Raises:
        InputError: a tensor of another shape than the mask's.

    Example:
        >>> import torch
        >>> mask = torch.tensor([[1, 1, 0], [0, 1, 0]])
        >>> old = torch.tensor([[-0.1, -0.2, 9.0], [9.0, -0.3, 9.0]])
        >>> batch, _ = from_padded(mask, torch.tensor([1.0, -1.0]), torch.ones(2, 3), logp_old=old)
        >>> batch.sequence, batch.advantage, batch.logp_old
        (tensor([0, 0, 1]), tensor([ 1.,  1., -1.]), tensor([-0.1000, -0.2000, -0.3000]))
    """
    given = {name: value for name, value in (vectors | {"tool_mask": tool_mask}).items() if value is not None}
    shape = tuple(completion_mask.shape)
    shapes = {name: tuple(value.shape) for name, value in given.items()}
    shapes["advantages"] = tuple(advantages.shape) + shape[advantages.ndim :]
    if isinstance(token_weight, Tensor):
        shapes["token_weight"] = tuple(token_weight.shape)
    wrong = {name: value for name, value in shapes.items() if value != shape}
    if wrong:
        raise InputError(
            needed=f"tensors of the shape of completion_mask, {shape}",
            given=", ".join(f"{name} of {value}" for name, value in wrong.items()),
            remedy="Give every tensor as [B, T]; advantages may be [B].",
        )
    mask = completion_mask.bool()
    if "tool_mask" in given:
        mask = mask & given.pop("tool_mask").bool()
    sequence, column = mask.nonzero(as_tuple=True)
    places = Places(sequence, column, (shape[0], shape[1]))
    if isinstance(token_weight, Tensor):
        weight = places.taken_from(token_weight)
    else:
        weight = token_weight(tuple(mask.sum(1).tolist())).to(mask.device)
    tokens: dict[str, Any] = {name: places.taken_from(value) for name, value in given.items()}
    batch = TokenBatch(
        sequence=sequence,
        num_sequences=shape[0],
        advantage=advantages[sequence] if advantages.ndim == 1 else places.taken_from(advantages),
        token_weight=weight,
        **tokens,
    )
    return batch, places

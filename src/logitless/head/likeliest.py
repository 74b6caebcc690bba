"""The likeliest tokens of each row, from the logits of a tile at a time."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from logitless.head.api import token_scores
from logitless.head.blockwise import HeadBlock, blocks, call_of, logits_of, product, rows_of, slices, tile
from logitless.head.contract import without_autocast
from logitless.types import LMHead


@torch.no_grad()
def likeliest_tokens(
    hidden: Float[Tensor, "N D"],
    head: LMHead,
    k: int,
    *,
    temperature: float = 1.0,
    memory_budget: int | None = None,
) -> tuple[Int[Tensor, "N k"], Float[Tensor, "N k"]]:
    """The k likeliest tokens of each row and their log-probs, likeliest first.

        logp[n, i] = logp[n, 0] + z[n, i] - z[n, 0]

    where z are logits and ``logp[n, 0]`` is of ``token_scores``. Which of several equal tokens is kept, is open.

    Args:
        hidden: [N, D], N at least 1.
        head: the weights.
        k: from 1 to V.
        temperature: divides the logits.
        memory_budget: bytes for tiles; None as in ``token_scores``.

    Returns:
        Token ids int64, and float32 nats (float64 for float64). Without gradient.

    Memory: ``memory_budget``, and 12 k bytes a row for each tile of columns.

    Example:
        >>> ids, logp = likeliest_tokens(torch.tensor([[1.0, 2.0]]), LMHead(weight=torch.eye(2)), 1)
        >>> ids, logp
        (tensor([[1]]), tensor([[-0.3133]]))
    """
    with without_autocast(hidden.device):
        call, outside = call_of(hidden, head, temperature, memory_budget, one_pass=False)
        whole = HeadBlock.of(head)
        rows = rows_of(hidden, whole, hidden.new_zeros(len(hidden), dtype=torch.int64), outside, call)
        size = tile(len(hidden), len(head.weight), call.wide, call.memory_budget)
        values, ids = hidden.new_empty(len(hidden), 0, dtype=call.wide), rows.target.new_empty(len(hidden), 0)
        for first, block in blocks(whole, size.columns, call):
            found = [
                logits_of(product(some, block, call), some, call).topk(min(k, len(block.weight)))
                for some in (rows.cut(each, 0) for each in slices(len(hidden), size.rows))
            ]
            values = torch.cat([values, torch.cat([each.values for each in found])], 1)
            ids = torch.cat([ids, torch.cat([each.indices for each in found]) + first], 1)
            values, best = values.topk(min(k, values.shape[1]))
            ids = ids.gather(1, best)
    top = token_scores(hidden, head, ids[:, 0], temperature=temperature).logp
    return ids, top[:, None] + (values - values[:, :1])

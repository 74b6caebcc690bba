"""Attention in plain torch with a softcap and attention sinks, which SDPA lacks."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor


def scored_attention(
    query: Float[Tensor, "B H L E"],
    key: Float[Tensor, "B K S E"],
    value: Float[Tensor, "B K S F"],
    mask: Bool[Tensor, "... L S"] | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sinks: Float[Tensor, "H"] | None = None,
) -> Float[Tensor, "B H L F"]:
    """Softmax attention with an optional softcap and optional attention sinks.

    ``out[t] = sum_s exp(z[t, s]) v[s] / (exp(sinks[h]) + sum_s exp(z[t, s]))``, ``z[t, s] = scaling * q[t] @ k[s]``
    (with a softcap ``softcap * tanh(z / softcap)``). Without sinks, the term ``exp(sinks[h])`` is 0.

    Memory: the scores, H L S numbers of at least 32 bits per sequence.

    Args:
        query, key, value: H query heads, K key heads with K dividing H.
        mask: [..., L, S], True where a query attends to a key; None: causal, with the last query at the last key.
        scaling: default ``E ** -0.5``.
        dropout: of the attention weights.
        softcap: bound of the absolute scores.
        sinks: for each head, a score that is part of every query's softmax and has no value.

    Example:
        >>> q = k = v = torch.ones(1, 1, 2, 4)
        >>> scored_attention(q, k, v, scaling=0.0, sinks=torch.zeros(1))[0, 0, :, 0]  # 1 of 2, then 2 of 3
        tensor([0.5000, 0.6667])
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    queries, keys = query.shape[2], key.shape[2]
    if mask is None:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = (query @ key.transpose(2, 3)).to(wide) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, torch.finfo(wide).min)  # not -inf: a fully masked query would become NaN
    if sinks is not None:
        of_sink = sinks.to(wide)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, of_sink], -1)
    weights = F.dropout(scores.softmax(-1)[..., :keys], dropout)
    return weights.to(value.dtype) @ value

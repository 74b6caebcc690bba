"""A packed row, its sequences alone, and the same in a cache of pages, as decoding would have left them."""

from functools import cached_property
from types import SimpleNamespace

import torch

from logitless.models.attention import AttentionLayout, prefix_attention
from logitless.models.kernels.window import first_seen
from logitless.models.row_invariant import paged_attention
from logitless.models.row_invariant.paged_attention import PAGE, Chunk, DecodeLayout, PagedCache, PrefillLayout


def draw(tokens, heads, key_heads, width, dtype=torch.float32, device="cpu", seed=0):
    """Query, key, value and a gradient of the output."""
    g = torch.Generator(device).manual_seed(seed)
    shapes = [(tokens, h, width) for h in (heads, key_heads, key_heads, heads)]
    return [torch.randn(s, device=device, generator=g).to(dtype) for s in shapes]


def paged(layout, key, value, seed=0):
    """The row's keys and values in pages at random places, the pages of every sequence of ``layout.unshared()``, and
    its groups: (sequences, pages that they share).

    Positions that no token has hold NaN.
    """
    segments = layout.segments
    pages, places, sources, groups, used = [], [], [], [], 0
    shared: dict[int, list[int]] = {}
    for prefix_row, prefix, row, length, _, is_prompt, *_ in zip(*(x.tolist() for x in segments), strict=True):
        if is_prompt:
            continue
        total = prefix + length
        rows = list(range(prefix_row, prefix_row + prefix)) + list(range(row, row + length))
        whole = prefix // PAGE
        if prefix:
            if prefix_row not in shared:
                shared[prefix_row] = list(range(used, used + whole))
                used += whole
                groups.append(([], whole))
            groups[-1][0].append(len(pages))
        first = shared[prefix_row][:] if prefix else []
        need = -(-total // PAGE) - len(first)
        pages.append(first + list(range(used, used + need)))
        used += need
        position = torch.arange(total)
        places.append(torch.tensor(pages[-1])[position // PAGE] * PAGE + position % PAGE)
        sources.append(torch.tensor(rows))
    order = torch.randperm(used, generator=torch.Generator().manual_seed(seed))
    cache = PagedCache(
        *(torch.full((used * PAGE, *x.shape[1:]), float("nan"), dtype=x.dtype, device=x.device) for x in (key, value))
    )
    place = torch.cat(places)
    slots = (order[place // PAGE] * PAGE + place % PAGE).to(key.device)
    source = torch.cat(sources).to(key.device)
    cache.write(key[source], value[source], slots)
    pages = [tuple(order[torch.tensor(each)].tolist()) for each in pages]
    return cache, pages, [(rows, count) for rows, count in groups if count]


def dense(query, key, value, layout, *, window=None, softcap=None):
    """Output and log-sum-exp of every row of ``layout`` in the inputs' dtype, one piece at a time, nothing shared."""
    repeats = query.shape[1] // key.shape[1]
    output = torch.zeros_like(query)
    log_sum_exp = torch.zeros(query.shape[:2], dtype=query.dtype, device=query.device)
    for piece in layout.pieces:
        row, length, prefix = piece.row, piece.length, len(piece.seen_rows)
        rows = torch.cat([piece.seen_rows, torch.arange(row, row + length)]).to(query.device)
        k, v = (x[rows].repeat_interleave(repeats, 1) for x in (key, value))
        z = torch.einsum("qhe,khe->hqk", query[row : row + length], k) * query.shape[2] ** -0.5
        if softcap is not None:
            z = softcap * torch.tanh(z / softcap)
        position = torch.arange(prefix + length, device=query.device)
        unseen = position[prefix:, None] < position
        unseen |= position < first_seen(position[prefix:], window)[:, None]
        z = z.masked_fill(unseen, -float("inf"))
        own = rows[prefix:]
        output = output.index_copy(0, own, torch.einsum("hqk,khe->qhe", z.softmax(-1).to(v.dtype), v))
        log_sum_exp = log_sum_exp.index_copy(0, own, z.logsumexp(-1).T)
    return output, log_sum_exp


def unlike(found, expected):
    """Elements of each tensor that differ in any bit."""
    return [int((a != b).sum()) for a, b in zip(found, expected, strict=True)]


class Case:
    """A packed row, its results, its copies unshared, and its cache; each ``unlike_`` of output and log-sum-exp."""

    def __init__(self, shape, groups, dtype=torch.bfloat16, device="cpu", **options):
        self.layout, self.device, self.options = AttentionLayout(groups, device), device, options
        self.query, self.key, self.value, self.grad = draw(self.layout.num_tokens, *shape, dtype, device)
        self.expected = self.packed()
        self.copies, self.rows = self.layout.unshared()
        self.lengths = self.copies.segments.length.tolist()
        self.own = self.rows.split(self.lengths)  # of each sequence

    def packed(self):
        return prefix_attention(self.query, self.key, self.value, self.layout, **self.options)

    @cached_property
    def paged(self):
        cache, pages, groups = paged(self.layout, self.key, self.value)
        return SimpleNamespace(cache=cache, pages=pages, groups=groups)

    def unlike_unshared(self):
        alone = (x[self.rows] for x in (self.query, self.key, self.value))
        return unlike(prefix_attention(*alone, self.copies, **self.options), [x[self.rows] for x in self.expected])

    def unlike_prefilled(self, size):
        chunks, rows = [], []
        for length, pages, row in zip(self.lengths, self.paged.pages, self.own, strict=True):
            for start in range(0, length, size):
                chunks.append(Chunk(start, min(size, length - start), pages))
                rows.append(row[start : start + size])
        row, layout = torch.cat(rows), PrefillLayout(chunks, self.device)
        found = paged_attention.prefill_attention(self.query[row], self.paged.cache, layout, **self.options)
        return unlike(found, [x[row] for x in self.expected])

    def unlike_decoded(self, ends, shared, beside=0):
        """Rows whose query is the last of ``ends`` tokens, and some rows without a query."""
        pages, positions = [*self.paged.pages, *([(0,)] * beside)], [*(end - 1 for end in ends), *([-1] * beside)]
        layout = DecodeLayout.of(pages, positions, self.paged.groups if shared else (), self.device)
        row = torch.stack([rows[end - 1] for rows, end in zip(self.own, ends, strict=True)])
        query = torch.cat([self.query[row], torch.full_like(self.query[:beside], float("nan"))])
        output, log_sum_exp = paged_attention.decode_attention(query, self.paged.cache, layout, **self.options)
        assert not output[len(row) :].any()
        return unlike((output[: len(row)], log_sum_exp[: len(row)]), [x[row] for x in self.expected])

    def unlike_last_decoded(self, steps, shared):
        """The last ``steps`` tokens of every sequence, all sequences at once, behind their groups' shared pages."""
        wrong = [0, 0]
        for back in range(steps):
            ends = [max(1, length - back) for length in self.lengths]
            fits = all(ends[row] > PAGE * count for rows, count in self.paged.groups for row in rows)
            wrong = [a + b for a, b in zip(wrong, self.unlike_decoded(ends, shared and fits), strict=True)]
        return wrong

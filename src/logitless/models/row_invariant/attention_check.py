"""Attention of a packed row, and of the same row decoded and prefilled, for ``self_check``."""

from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from logitless.models import attention
from logitless.models.kernels.window import Chunks
from logitless.models.row_invariant import paged_attention
from logitless.models.row_invariant.layers import AttentionForm


@dataclass(frozen=True)
class AttentionProblem:
    """A sequence of three splits, and other ways to compute its attention, which must equal the packed row's.

    Every position is decoded, positions after the first pages also with those pages shared, and the sequence is
    prefilled in chunks of odd sizes.

    Args:
        form: of attention.
        query, key, value: [T, heads, E].
        layout: of the packed row.
        cache: of the keys and values, in shuffled pages.
        prefill: the chunks.
        table: [T, pages] int32, the same pages for every row.
        position: [T] int32.
        shared: the first pages as shared by all rows after them.
    """

    form: AttentionForm
    query: Tensor
    key: Tensor
    value: Tensor
    layout: attention.AttentionLayout
    cache: paged_attention.PagedCache
    prefill: paged_attention.PrefillLayout
    table: Tensor
    position: Tensor
    shared: paged_attention.SharedPages

    @classmethod
    @torch.no_grad()
    def of(cls, form: AttentionForm, dtype: torch.dtype, device: torch.device) -> "AttentionProblem":
        """A problem with random keys."""
        heads, page = form.heads, paged_attention.PAGE
        length = 1100 if device.type == "cuda" else 70
        if isinstance(form.window, Chunks):  # of several here, which begin with a page
            form = replace(form, window=Chunks(min(form.window.length, max(1, length // 3 // page) * page)))
        generator = torch.Generator(device).manual_seed(heads.query)

        def normal(count: int) -> Tensor:
            return torch.randn(length, count, heads.width, device=device, generator=generator).to(dtype)

        query, key, value = normal(heads.query), normal(heads.key), normal(heads.key)
        count = -(-length // page)
        pages = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
        chunks, start = [], 0
        for size in cycle((1, 37, 64, 200, 129)):
            size = min(size, length - start)
            chunks.append(paged_attention.Chunk(start, size, tuple(pages)))
            start += size
            if start == length:
                break
        layout = attention.AttentionLayout.of_sequences([length], device)
        prefill = paged_attention.PrefillLayout(chunks, device)
        for each in (layout, prefill):
            attention.prepare_tables(each, form, dtype)
        cache = paged_attention.PagedCache.empty(count, heads.key, heads.width, dtype, device)
        cache.write(key, value, prefill.slots)
        num_shared = max(1, length * 5 // 8 // page)
        behind = length - num_shared * page  # rows that attend to all shared pages
        counts = torch.full((behind,), num_shared, dtype=torch.int32, device=device)
        return cls(
            form, query, key, value, layout, cache, prefill,
            torch.tensor(pages, dtype=torch.int32, device=device).expand(length, -1).contiguous(),
            torch.arange(length, dtype=torch.int32, device=device),
            paged_attention.SharedPages(
                torch.arange(behind, dtype=torch.int32, device=device)[None], counts[:1], counts
            ),
        )  # fmt: skip

    @torch.no_grad()
    def launched(self) -> None:
        """Launch every kernel of the check once."""
        self._attended(1)

    @torch.no_grad()
    def differences(self) -> dict[str, int]:
        """How many numbers differ from the packed row's, by way of computing and by result."""
        expected, found = self._attended(None)
        return {
            f"{how}, {what}": sum(int((got[i] != expected[i][rows]).sum()) for rows, got in parts)
            for how, parts in found.items()
            for i, what in enumerate(("output", "log-sum-exp"))
        }

    def _attended(self, num_few: int | None) -> tuple[Any, dict[str, list[tuple[slice, Any]]]]:
        """(output, log-sum-exp) of the packed row, and of its rows computed otherwise; a few at ``num_few`` places."""
        length, form = len(self.query), self.form
        options: dict[str, Any] = {"scale": form.scale, "window": form.window, "softcap": form.softcap}

        def decoded(rows: slice, shared: paged_attention.SharedPages | None = None) -> tuple[slice, Any]:
            # copies, as in a step: a view at another alignment would need another compilation
            layout = paged_attention.DecodeLayout(self.table[rows].clone(), self.position[rows].clone(), shared)
            step = paged_attention.decoding(self.query[rows].clone(), self.cache, layout, **options)
            for launch in step.launches:
                launch()
            return rows, (step.output, step.log_sum_exp)

        starts = range(length % 5, length, 25)[:num_few]
        behind = slice(length - len(self.shared.row_pages), length)
        expected = attention.prefix_attention(self.query, self.key, self.value, self.layout, **options)
        in_chunks = paged_attention.prefill_attention(self.query, self.cache, self.prefill, **options)
        return expected, {
            "prefilled in chunks": [(slice(0, length), in_chunks)],
            "decoded": [decoded(slice(0, length))],
            "few rows decoded": [decoded(slice(start, start + 5)) for start in starts],
            "decoded behind shared pages": [decoded(behind, self.shared)],
        }

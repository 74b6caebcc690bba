"""Decoding a step, and prefilling in chunks; bitwise identical to the packed forward pass.

The layers are the same as in training; keys and values go into pages, and attention reads them there. The launches of a
step depend on the number of rows only, so that it can be captured in a CUDA graph: everything else about the rows is
read from tensors on the GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from logitless.errors import UnavailableError
from logitless.models.kernels.rotary import HeadNorms, rotate
from logitless.models.kernels.sinks import with_sinks
from logitless.models.lm_head import backbone
from logitless.models.row_invariant.adapters import StackedRows
from logitless.models.row_invariant.delta_net import (
    DecodedStates,
    DeltaForm,
    DeltaSlots,
    DeltaWeights,
    prefilled,
    stepped,
)
from logitless.models.row_invariant.layers import AttentionForm, Installation, RopeTables
from logitless.models.row_invariant.paged_attention import (
    DecodeLayout,
    PagedCache,
    PrefillLayout,
    decode_attention,
    prefill_attention,
)


@dataclass(frozen=True)
class PagedRows:
    """Rows whose keys and values are in pages: one token of each sequence, or chunks of sequences.

    Args:
        caches: one a layer: pages, or slots of states.
        layout: of the step or of the chunks.
        slots: [T] the cache's row of each token; -1 for a row without a query.
        position: [T] in its sequence, at least 0.
        tables: cosines and sines by name, for all positions that the pages hold.
        states: the step's slots of gated delta nets.
        adapters: the rows' own; None for those of the modules.
    """

    caches: Sequence[PagedCache | DeltaSlots]
    layout: DecodeLayout | PrefillLayout
    slots: Int[Tensor, "T"]
    position: Int[Tensor, "T"]
    tables: RopeTables
    states: DecodedStates | None = None
    adapters: StackedRows | None = None

    def attend(
        self, index: int, form: AttentionForm, query: Tensor, key: Tensor, value: Tensor, norms: HeadNorms | None,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Write keys and values to the layer's pages, then attend to the pages."""
        cache, table = self.caches[index], self.tables.of(form.rope)
        assert isinstance(cache, PagedCache)
        turned, _, _ = rotate(
            query, key, value, form.heads, self.position, table.cos, table.sin, table.norms or norms,
            factor=table.factor, key_out=cache.key, value_out=cache.value, slot=self.slots,
        )  # fmt: skip
        options: dict[str, Any] = {"scale": form.scale, "window": form.window, "softcap": form.softcap}
        if isinstance(self.layout, DecodeLayout):
            out, log_sum_exp = decode_attention(turned, cache, self.layout, **options)
        else:
            out, log_sum_exp = prefill_attention(turned, cache, self.layout, **options)
        return out.flatten(1) if sinks is None else with_sinks(out, log_sum_exp, sinks)

    def continue_states(
        self, index: int, form: DeltaForm, weights: DeltaWeights, mixed: Tensor, b: Tensor, a: Tensor
    ) -> Tensor:
        """Convolution and rule, from the layer's slots, which are updated."""
        slots = self.caches[index]
        assert isinstance(slots, DeltaSlots)
        if isinstance(self.layout, PrefillLayout):
            return prefilled(slots, self.layout.states(form.taps), form, weights, mixed, b, a)
        assert self.states is not None
        return stepped(slots, self.states, form, weights, mixed, b, a)


@torch.no_grad()
def prefill(
    model: nn.Module, tokens: Int[Tensor, "T"], layout: PrefillLayout, caches: Sequence[PagedCache | DeltaSlots], *,
    num_layers: int | None = None, adapters: StackedRows | None = None,
) -> Float[Tensor, "T D"]:  # fmt: skip
    """Last hidden states of chunks of sequences; their keys and values are written to the sequences' pages.

    Equals: those rows of the packed forward pass of whole sequences, bit for bit, for any division into chunks.

    Args:
        model: with row-invariant layers.
        tokens: of the chunks, end to end.
        layout: of the chunks; keys and values before a chunk are in its pages already.
        caches: one a layer; written to.
        num_layers: run only the first few; None for all.
        adapters: of the tokens; None: those of the modules.

    Returns:
        [T, D] as the LM head reads them.
    """
    decoder, installation = _installation(model)
    tables = installation.reach(max(chunk.start + chunk.length for chunk in layout.chunks))
    rows = PagedRows(caches, layout, layout.slots, layout.positions, tables, adapters=adapters)
    return decoder(input_ids=tokens, rows=rows, num_layers=num_layers).last_hidden_state


def _installation(model: nn.Module) -> tuple[Any, Installation]:
    decoder: Any = backbone(model)
    if not hasattr(decoder, "row_invariant"):
        raise UnavailableError(
            needed="a model with row-invariant layers",
            given=type(decoder).__name__,
            remedy="Call install_row_invariant first, and read its report.",
        )
    return decoder, decoder.row_invariant

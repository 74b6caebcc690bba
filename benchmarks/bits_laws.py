"""Checks that sampling and training are bitwise identical, in every way that they compute a token.

Random prompts with several completions each. One packed pass is the reference; every other way must give each token
the same hidden state, log-prob and entropy, bit for bit. For comparison two ways of transformers' own layers are
measured in nats.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from bits_cases import LAWS, SECOND_GPU, STOCK, STOCK_PACKED
from logitless.head.api import token_scores
from logitless.models.attention import AttentionLayout
from logitless.models.kernels.rows import FEW_ROWS
from logitless.models.lm_head import backbone, backbone_hidden, causal_lm, lm_head
from logitless.models.lora import LoraOptions, add_lora
from logitless.models.row_invariant.decoding import PagedRows, prefill
from logitless.models.row_invariant.delta_net import CHUNK, DecodedStates, DeltaForm, DeltaSlots
from logitless.models.row_invariant.layers import install_row_invariant
from logitless.models.row_invariant.paged_attention import (
    PAGE,
    Chunk,
    DecodeLayout,
    PagedCache,
    PrefillLayout,
    SharedPages,
)
from logitless.models.row_invariant.self_check import self_check
from logitless.types import PackedInputs, PromptGroup

Caches = list[PagedCache | DeltaSlots]


def empty_caches(model: nn.Module, num_pages: int, num_sequences: int) -> Caches:
    """For each layer uninitialised pages, or a slot for each sequence."""
    decoder: Any = backbone(model)
    weight = decoder.norm.weight
    caches = Caches()
    for layer in decoder.layers:
        form = layer.row_invariant_form
        if isinstance(form, DeltaForm):
            caches.append(DeltaSlots.empty(num_sequences, form, weight.dtype, weight.device))
        else:
            heads = form.heads
            caches.append(PagedCache.empty(num_pages, heads.key, heads.width, weight.dtype, weight.device))
    return caches


@torch.no_grad()
def decode_step(model: nn.Module, tokens: Tensor, layout: DecodeLayout, caches: Caches, sequence: Tensor) -> Tensor:
    """Last hidden states of one token a row, whose key and value join the row's pages.

    Args:
        model: with row-invariant layers.
        tokens: [R] each row's newest token.
        layout: where it stands; a row without a query (position -1) writes nothing and gives anything.
        caches: one a layer, from ``empty_caches``; written.
        sequence: [R] number of each row's.

    Returns:
        [R, D] as the LM head reads them.
    """
    decoder: Any = backbone(model)
    tables = decoder.row_invariant.reach(layout.page_table.shape[1] * PAGE)
    slots = torch.where(layout.position >= 0, layout.slots, -1)
    states = None
    if any(isinstance(cache, DeltaSlots) for cache in caches):
        states = DecodedStates.of(sequence, layout.position)
    rows = PagedRows(caches, layout, slots, layout.position.clamp(min=0), tables, states)
    return decoder(input_ids=tokens, rows=rows).last_hidden_state


@dataclass(frozen=True)
class Scored:
    """By sequence: hidden states of all tokens, and log-probs and entropies of the completion's."""

    hidden: dict[int, Tensor]
    logp: dict[int, Tensor]
    entropy: dict[int, Tensor]


@dataclass(frozen=True)
class Sizes:
    """How much is compared: prompts, completions of each, lengths, and rows of a packed pass."""

    prompts: int = 128
    completions: int = 4
    shortest: int = 64
    longest: int = 192
    long_prompts: tuple[int, ...] = (500, 580, 700, 1030, 1100, 1290)
    packed: int = 16384
    small: int = 4096
    odd: int = 9000


class Laws:
    """Comparisons of one model.

    Args:
        model: a causal LM without row-invariant layers; they are installed and removed here.
        device: where it is.
        sizes: how much is compared.
    """

    def __init__(self, model: nn.Module, device: str, *, sizes: Sizes | None = None) -> None:
        self.model, self.device = model, device
        self.sizes = sizes or Sizes()
        self.differences: dict[str, list[float]] = {}
        generator = torch.Generator().manual_seed(11)
        sizes, vocabulary = self.sizes, causal_lm(model).config.vocab_size

        def draw(count: int) -> Tensor:
            return torch.randint(0, vocabulary, (count,), generator=generator)

        def length() -> int:
            return int(torch.randint(sizes.shortest, sizes.longest + 1, (1,), generator=generator))

        lengths = [length() for _ in range(sizes.prompts)]
        lengths[: len(sizes.long_prompts)] = sizes.long_prompts
        self.prompts = [draw(n) for n in lengths]
        self.completions = [draw(length()) for _ in range(sizes.prompts * sizes.completions)]
        self.sequences = [
            torch.cat([self.prompts[i // sizes.completions], completion])
            for i, completion in enumerate(self.completions)
        ]
        self.all = range(len(self.sequences))
        self.generator = generator

    def rows(self, comparisons: Iterable[str] = (*LAWS, STOCK, STOCK_PACKED)) -> Iterator[dict[str, Any]]:
        """Each comparison: tokens, how many of them differ in any bit, and for transformers' layers by how much."""
        wanted = list(comparisons)
        with torch.no_grad():
            if STOCK in wanted or STOCK_PACKED in wanted:
                yield from self._stock(wanted)
            installation = install_row_invariant(self.model)
            try:
                yield from self._exact(wanted)
            finally:
                installation.remove()
            lora = [name for name in wanted if name.startswith("LoRA")]
            if lora:
                yield from self._adapted(lora)

    def _exact(self, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
        sizes, everything = self.sizes, list(self.all)
        self.reference = self.packed(everything, sizes.packed)
        shuffled = torch.randperm(len(everything), generator=self.generator).tolist()
        odd = torch.randint(sizes.longest, sizes.small, (10_000,), generator=self.generator).tolist()
        ways: dict[str, Any] = {
            "packed again": lambda: self.packed(everything, sizes.packed),
            "packed in rows of 4096": lambda: self.packed(everything, sizes.small),
            "in reverse order": lambda: self.packed(everything[::-1], sizes.packed),
            "shuffled, in rows of 9000": lambda: self.packed(shuffled, sizes.odd),
            "micro-batches of any size": lambda: self.packed(shuffled, *odd),
            "alone": lambda: self.packed(everything[::8] if len(everything) > 64 else everything, 1),
            "prompts shared": self.shared,
            "recomputed": self.recomputed,
            "prefilled in chunks": self.prefilled,
            "decoded, rows joining and leaving": lambda: self.decoded(everything),
            "decoded, shared pages read once": self.decoded_shared,
        }
        for name, way in ways.items():
            if name in wanted:
                yield {"comparison": name, **compared(way(), self.reference)}

    def on_another_device(self, device: torch.device) -> Iterator[dict[str, Any]]:
        """The same tokens by a copy of the model on another device of the same kind, packed otherwise and decoded."""
        everything = list(self.all)
        with torch.no_grad():
            installation = install_row_invariant(self.model)
            reference = self.packed(everything, self.sizes.packed)
            installation.remove()
            there = copy.copy(self)
            there.model = copy.deepcopy(self.model).to(device)
            with torch.cuda.device(device if device.type == "cuda" else -1):  # "cuda" is this one inside
                install_row_invariant(there.model)
                if device.type == "cuda":
                    self_check(there.model)
                ways = (there.packed(everything, self.sizes.small), there.decoded(everything))
            for name, found in zip(SECOND_GPU, ways, strict=True):
                yield {"comparison": name, **compared(found, reference)}

    # --- packed ------------------------------------------------------------------------------------------------------

    def packed(self, order: Sequence[int], *limits: int) -> Scored:
        """Sequences in this order, in packed rows of at most so many tokens (a sequence is never cut)."""
        scored = Scored({}, {}, {})
        part: list[int] = []
        turns = cycle(limits)
        limit = next(turns)
        for i in order:
            if part and sum(len(self.sequences[j]) for j in part) + len(self.sequences[i]) > limit:
                self._pass(part, scored)
                part, limit = [], next(turns)
            part.append(i)
        self._pass(part, scored)
        return scored

    def _pass(self, part: Sequence[int], scored: Scored) -> None:
        inputs = self._inputs(part)
        self._keep(part, backbone_hidden(self.model, inputs), scored)

    def _inputs(self, part: Sequence[int]) -> PackedInputs:
        lengths = tuple(len(self.sequences[i]) for i in part)
        ids = torch.cat([self.sequences[i] for i in part])
        positions = torch.cat([torch.arange(n) for n in lengths])
        rows = torch.arange(len(ids))
        return PackedInputs(ids, positions, lengths, rows, lengths).to(self.device)

    def _keep(self, part: Sequence[int], hidden: Tensor, scored: Scored) -> None:
        """By sequence; log-probs and entropies from one call of the head for all of them."""
        pieces = hidden.detach().split([len(self.sequences[i]) for i in part])  # type: ignore[no-untyped-call]
        scored.hidden.update(zip(part, pieces, strict=True))
        rows = [h[len(h) - len(self.completions[i]) - 1 : -1] for i, h in zip(part, pieces, strict=True)]
        self._score(part, rows, scored)

    def _score(self, part: Sequence[int], hidden: Sequence[Tensor], scored: Scored) -> None:
        target = torch.cat([self.completions[i] for i in part]).to(self.device)
        logp, entropy = self._head(torch.cat(list(hidden)), target)
        sizes = [len(self.completions[i]) for i in part]
        scored.logp.update(zip(part, logp.split(sizes), strict=True))  # type: ignore[no-untyped-call]
        scored.entropy.update(zip(part, entropy.split(sizes), strict=True))  # type: ignore[no-untyped-call]

    def _head(self, hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        head = lm_head(self.model)
        if self.device == "cuda":
            scores = token_scores(hidden, head, target, backend="fused")
            return scores.logp, scores.entropy
        # On a CPU the fused head is interpreted, and others sum in the batch's order: float64 hides it.
        logp = (hidden.double() @ head.weight.double().T).log_softmax(-1)
        return logp.gather(1, target[:, None])[:, 0].float(), -(logp.exp() * logp).sum(-1).float()

    def shared(self) -> Scored:
        """Each prompt once, its completions behind it."""
        scored, count = Scored({}, {}, {}), self.sizes.completions
        groups: list[int] = []
        for p in [*range(len(self.prompts)), None]:
            size = sum(self._group_tokens(g) for g in groups)
            if groups and (p is None or size + self._group_tokens(p) > self.sizes.packed):
                ids = torch.cat([t for g in groups for t in (self.prompts[g], *self._group(g))]).to(self.device)
                layout = AttentionLayout(
                    [PromptGroup(len(self.prompts[g]), tuple(map(len, self._group(g)))) for g in groups], self.device
                )
                hidden = backbone(self.model)(
                    input_ids=ids[None], position_ids=layout.positions[None], packed_layout=layout
                ).last_hidden_state[0]
                rows = layout.unshared()[1]
                self._keep([i for g in groups for i in range(g * count, (g + 1) * count)], hidden[rows], scored)
                groups = []
            if p is not None:
                groups.append(p)
        return scored

    def _group(self, p: int) -> list[Tensor]:
        return self.completions[p * self.sizes.completions : (p + 1) * self.sizes.completions]

    def _group_tokens(self, p: int) -> int:
        return len(self.prompts[p]) + sum(map(len, self._group(p)))

    def recomputed(self) -> Scored:
        """With gradients, activations recomputed in the backward; gradients must be those without recomputation."""
        part = list(self.all)[: max(2, len(self.all) // 32)]
        inner: Any = causal_lm(self.model)
        inner.requires_grad_(True)
        inputs, found = self._inputs(part), []
        scored = Scored({}, {}, {})
        try:
            for recompute in (False, True):
                if recompute:
                    inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
                    inner.train()
                with torch.enable_grad():
                    hidden = backbone_hidden(self.model, inputs)
                    hidden.float().square().sum().backward()  # type: ignore[no-untyped-call]
                found.append([p.grad for p in inner.parameters() if p.grad is not None])
                inner.zero_grad(set_to_none=True)
                if recompute:
                    self._keep(part, hidden, scored)
        finally:
            inner.gradient_checkpointing_disable()
            inner.eval()
            inner.requires_grad_(False)
        if not all(torch.equal(a, b) for a, b in zip(*found, strict=True)):
            scored.logp.update((i, torch.full_like(x, float("nan"))) for i, x in scored.logp.items())
        return scored

    # --- prefilled and decoded ---------------------------------------------------------------------------------------

    def _pages(self, chosen: Sequence[int]) -> tuple[list[list[int]], int]:
        """Pages of each sequence in a random order, and how many there are; page 0 is nobody's."""
        needed = [-(-len(self.sequences[i]) // PAGE) for i in chosen]
        order = (1 + torch.randperm(sum(needed), generator=torch.Generator().manual_seed(3))).tolist()
        pages, at = [], 0
        for count in needed:
            pages.append(order[at : at + count])
            at += count
        return pages, at + 1

    def _prefill(self, chosen: Sequence[int], lengths: Sequence[int], pages: Any, caches: Any) -> dict[int, Tensor]:
        """The first tokens of each sequence into its pages, in chunks of random sizes; hidden states by sequence."""
        sizes, generator = self.sizes, torch.Generator().manual_seed(5)
        done = dict.fromkeys(chosen, 0)
        found: dict[int, list[Tensor]] = {i: [] for i in chosen}
        where = dict(zip(chosen, pages, strict=True))
        total = dict(zip(chosen, lengths, strict=True))
        number = {i: k for k, i in enumerate(chosen)}
        with_states = any(isinstance(cache, DeltaSlots) for cache in caches)
        waiting = list(chosen)
        while waiting:
            part, chunks, tokens = [], [], 0
            for i in waiting:
                size = min(int(torch.randint(1, 2 * sizes.longest, (1,), generator=generator)), total[i] - done[i])
                if with_states and size < total[i] - done[i]:  # their chunks start at positions of the sequence
                    size = min(-(-size // CHUNK) * CHUNK, total[i] - done[i])
                if tokens + size > sizes.packed:
                    break
                part.append(i)
                chunks.append(Chunk(done[i], size, tuple(where[i]), number[i]))
                tokens += size
            ids = torch.cat(
                [self.sequences[i][c.start : c.start + c.length] for i, c in zip(part, chunks, strict=True)]
            )
            hidden = prefill(self.model, ids.to(self.device), PrefillLayout(chunks, self.device), caches)
            for i, piece in zip(part, hidden.split([c.length for c in chunks]), strict=True):  # type: ignore[no-untyped-call]
                found[i].append(piece)
                done[i] += len(piece)
            waiting = [i for i in waiting if done[i] < total[i]]
            waiting = waiting[len(waiting) // 2 :] + waiting[: len(waiting) // 2]
        return {i: torch.cat(pieces) for i, pieces in found.items()}

    def prefilled(self) -> Scored:
        """Whole sequences, chunk by chunk."""
        chosen = list(self.all)[::2] if len(self.all) > 64 else list(self.all)
        pages, num_pages = self._pages(chosen)
        caches = empty_caches(self.model, num_pages, len(chosen))
        hidden = self._prefill(chosen, [len(self.sequences[i]) for i in chosen], pages, caches)
        scored = Scored({}, {}, {})
        self._keep(chosen, torch.cat([hidden[i] for i in chosen]), scored)
        return scored

    def decoded(self, chosen: Sequence[int]) -> Scored:
        """Prompts prefilled, then token by token: rows join and leave, and change places and number."""
        pages, num_pages = self._pages(chosen)
        caches = empty_caches(self.model, num_pages, len(chosen))
        prompts = [len(self.sequences[i]) - len(self.completions[i]) for i in chosen]
        first = self._prefill(chosen, prompts, pages, caches)
        steps = Steps(self, chosen, pages, caches)
        counts = FEW_ROWS if self.device == "cuda" else (1, 2, 4)
        generator = torch.Generator().manual_seed(7)
        for rows in cycle(counts[::-1]):
            unfinished = steps.unfinished()
            if not unfinished:
                break
            if len(unfinished) <= rows // 2 and rows > counts[0]:
                continue
            order = torch.randperm(len(unfinished), generator=generator)[: rows - rows // 40]
            steps.run([unfinished[k] for k in order.tolist()], rows, 24 if rows >= 64 else 3)
        return self._after_prompts(chosen, first, steps)

    def decoded_shared(self) -> Scored:
        """All completions at once; what a group shares of its pages is read once for its rows."""
        chosen, count = list(self.all), self.sizes.completions
        pages, num_pages = self._pages(chosen)
        prompts = [len(self.prompts[i // count]) for i in chosen]
        for i in chosen:
            whole = prompts[i] // PAGE
            pages[i][:whole] = pages[i - i % count][:whole]
        caches = empty_caches(self.model, num_pages, len(chosen))
        first = self._prefill(chosen, prompts, pages, caches)
        shared = SharedPages(
            torch.tensor(chosen, dtype=torch.int32, device=self.device).view(-1, count),
            torch.tensor(prompts[::count], dtype=torch.int32, device=self.device) // PAGE,
            torch.tensor(prompts, dtype=torch.int32, device=self.device) // PAGE,
        )
        steps = Steps(self, chosen, pages, caches, shared)
        steps.run(list(range(len(chosen))), len(chosen), max(map(len, self.completions)))
        return self._after_prompts(chosen, first, steps)

    def _after_prompts(self, chosen: Sequence[int], first: dict[int, Tensor], steps: "Steps") -> Scored:
        scored = Scored({}, {}, {})
        for k, i in enumerate(chosen):
            scored.hidden[i] = torch.cat([first[i], steps.hidden[k, : len(self.completions[i])]])
        for start in range(0, len(chosen), 3):  # the head on few rows, too
            part = chosen[start : start + 3]
            rows = [scored.hidden[i][len(self.sequences[i]) - len(self.completions[i]) - 1 : -1] for i in part]
            self._score(part, rows, scored)
        return scored

    # --- LoRA and transformers' own layers ---------------------------------------------------------------------------

    def _adapted(self, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
        base, sizes = self.model, self.sizes
        chosen = list(self.all)[:64]
        self.model = add_lora(base, LoraOptions(rank=16 if self.device == "cuda" else 4))
        generator = torch.Generator().manual_seed(4)
        for name, parameter in self.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
        installation = install_row_invariant(self.model)
        try:
            reference = self.packed(chosen, sizes.packed)
            if "LoRA, packed in rows of 4096" in wanted:
                row = compared(self.packed(chosen[::-1], sizes.small), reference)
                yield {"comparison": "LoRA, packed in rows of 4096", **row}
            if "LoRA, decoded" in wanted:
                yield {"comparison": "LoRA, decoded", **compared(self.decoded(chosen), reference)}
        finally:
            installation.remove()
            self.model.unload()  # type: ignore[operator]
            self.model = base
            base.requires_grad_(False)

    def _stock(self, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
        everything, sizes = list(self.all), self.sizes
        packed = self.packed(everything, sizes.packed)
        if STOCK_PACKED in wanted:
            other = self.packed(everything, sizes.small)
            yield {"comparison": STOCK_PACKED, "exact": False} | self._in_nats(other, packed, STOCK_PACKED)
        if STOCK in wanted:
            chosen = everything[:: max(1, len(everything) // 32)]
            other = self._decoded_by_transformers(chosen)
            yield {"comparison": STOCK, "exact": False} | self._in_nats(other, packed, STOCK)

    def _in_nats(self, found: Scored, reference: Scored, name: str) -> dict[str, Any]:
        a = torch.cat([found.logp[i] for i in found.logp])
        b = torch.cat([reference.logp[i][: len(found.logp[i])] for i in found.logp])
        difference = (a - b).abs().double()
        at = torch.linspace(0, 1, 201, dtype=torch.float64, device=difference.device)
        self.differences[name] = [round(x, 7) for x in torch.quantile(difference[:1_000_000], at).tolist()]
        return {
            "tokens": len(a),
            "differ": int((difference > 0).sum()),
            "mean_nats": difference.mean().item(),
            "max_nats": difference.max().item(),
        }

    def _decoded_by_transformers(self, chosen: Sequence[int]) -> Scored:
        """Left-padded prompts and a cache, a token at a time, by log-softmax of the model's logits."""
        inner: Any = causal_lm(self.model)
        steps = min(64, min(len(self.completions[i]) for i in chosen))
        prompts = [self.sequences[i][: -len(self.completions[i])] for i in chosen]
        longest = max(map(len, prompts))
        ids = torch.zeros(len(chosen), longest, dtype=torch.long)
        mask = torch.zeros(len(chosen), longest + steps, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = 1
        ids, mask = ids.to(self.device), mask.to(self.device)
        following = torch.stack([self.completions[i][:steps] for i in chosen]).to(self.device)
        position = (mask.cumsum(1) - 1).clamp(min=0)
        before, inner.config._attn_implementation = inner.config._attn_implementation, "sdpa"
        try:
            out = inner(
                input_ids=ids, attention_mask=mask[:, :longest], position_ids=position[:, :longest], use_cache=True,
                logits_to_keep=1,
            )  # fmt: skip
            columns = []
            for t in range(steps):
                logp = out.logits[:, -1].float().log_softmax(-1)
                columns.append(logp.gather(1, following[:, t : t + 1])[:, 0])
                if t + 1 < steps:
                    reach = longest + t + 1
                    out = inner(
                        input_ids=following[:, t : t + 1], attention_mask=mask[:, :reach],
                        position_ids=position[:, reach - 1 : reach], past_key_values=out.past_key_values,
                        use_cache=True,
                    )  # fmt: skip
        finally:
            inner.config._attn_implementation = before
        return Scored({}, dict(zip(chosen, torch.stack(columns, 1), strict=True)), {})


class Steps:
    """Decoding of known tokens in static buffers, a CUDA graph for each number of rows."""

    def __init__(
        self, laws: Laws, chosen: Sequence[int], pages: Sequence[Sequence[int]], caches: Any,
        shared: SharedPages | None = None,
    ) -> None:  # fmt: skip
        self.model, self.caches, self.shared, device = laws.model, caches, shared, laws.device
        lengths = [len(laws.sequences[i]) for i in chosen]
        prompts = [n - len(laws.completions[i]) for n, i in zip(lengths, chosen, strict=True)]
        self.tokens = torch.zeros(len(chosen), max(lengths) + 1, dtype=torch.long)
        self.table = torch.zeros(len(chosen), max(map(len, pages)), dtype=torch.int32)
        for k, i in enumerate(chosen):
            self.tokens[k, : lengths[k]] = laws.sequences[i]
            self.table[k, : len(pages[k])] = torch.tensor(pages[k], dtype=torch.int32)
        self.tokens, self.table = self.tokens.to(device), self.table.to(device)
        self.length = torch.tensor(lengths, device=device)
        self.start = torch.tensor(prompts, device=device)
        self.position = self.start.clone()
        width = max(n - p for n, p in zip(lengths, prompts, strict=True))
        decoder: Any = backbone(laws.model)
        weight = decoder.norm.weight
        self.hidden = torch.zeros(len(chosen), width + 1, len(weight), dtype=weight.dtype, device=device)
        self.graphs: dict[int, Any] = {}
        self.device = device

    def unfinished(self) -> list[int]:
        """Numbers of rows that have tokens left."""
        return (self.position < self.length).nonzero()[:, 0].tolist()

    def run(self, members: Sequence[int], rows: int, steps: int) -> None:
        """So many steps of these rows, in their order, the others of ``rows`` empty."""
        tokens, sequence, layout, out, replay = self._step(rows)
        number = torch.tensor(members, device=self.device)
        k = len(members)
        layout.page_table.zero_()
        layout.page_table[:k] = self.table[number]
        layout.position.fill_(-1)
        tokens.zero_()
        sequence[:k] = number
        for _ in range(steps):
            at = self.position[number]
            alive = at < self.length[number]
            tokens[:k] = self.tokens[number, at.clamp(max=self.tokens.shape[1] - 1)]
            layout.position[:k] = torch.where(alive, at, -1).int()
            replay()
            column = torch.where(alive, at - self.start[number], self.hidden.shape[1] - 1)
            self.hidden[number, column] = out[0][:k]
            self.position[number] = torch.where(alive, at + 1, at)

    def _step(self, rows: int) -> Any:
        if rows not in self.graphs:
            tokens, sequence = (torch.zeros(rows, dtype=torch.long, device=self.device) for _ in range(2))
            table = torch.zeros(rows, self.table.shape[1], dtype=torch.int32, device=self.device)
            layout = DecodeLayout(table, torch.full((rows,), -1, dtype=torch.int32, device=self.device), self.shared)
            out: list[Tensor] = []

            def step() -> None:
                out[:] = [decode_step(self.model, tokens, layout, self.caches, sequence)]

            replay: Any = step
            if self.device == "cuda":
                stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    step()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    step()
                replay = graph.replay
            self.graphs[rows] = tokens, sequence, layout, out, replay
        return self.graphs[rows]


def compared(found: Scored, reference: Scored) -> dict[str, int]:
    """Tokens, and how many have another bit in their hidden state, or where it is scored in log-prob or entropy."""
    tokens = differ = 0
    for i, hidden in found.hidden.items():
        there = reference.hidden[i].device
        other = _bits_differ(hidden.to(there), reference.hidden[i]).any(-1)
        if i in found.logp:
            scored = _bits_differ(found.logp[i].to(there), reference.logp[i]) | _bits_differ(
                found.entropy[i].to(there), reference.entropy[i]
            )
            other[-len(scored) - 1 : -1] |= scored
        tokens += len(hidden)
        differ += int(other.sum())
    return {"tokens": tokens, "differ": differ}


def _bits_differ(a: Tensor, b: Tensor) -> Tensor:
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.contiguous().view(kind) != b.contiguous().view(kind)

"""``--explain``: what a batch of a recipe costs to train on, and what each saving takes off it.

The prompts are the recipe's own. Completions are not drawn, for that would need the weights: their lengths are uniform
between 1 and ``rollout.sampling.max_new_tokens``. Operations are counted, not measured: two a weight and token for
products, four a width of a query head for each pair of tokens in attention, and backward twice the forward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from logitless.data.packing import Packing, StepPlan, pack, plan_epoch
from logitless.models.lm_head import AttentionHeads, causal_lm, lm_head, why_unshared
from logitless.models.router import router_loss_coefficient
from logitless.objective.algorithm import Algorithm
from logitless.seeds import derived_seed
from logitless.train.assembly.stages import Inputs, load, read
from logitless.train.recipe.config import Recipe
from logitless.types import Completion, PackedBatch, Prompt


@dataclass(frozen=True)
class Operations:
    """Floating-point operations of a forward pass.

    Args:
        per_token: of the decoder's products.
        per_pair: of attention, over all layers.
        per_scored: of the head, for a token that is scored.
        backward: of a backward pass, as a multiple of the forward pass's products; attention's is always 2.
        recomputed: forward passes of the decoder that the backward repeats.

    Example:
        >>> Operations(10.0, 1.0, 100.0).forward(tokens=3, pairs=4.5, scored=2)
        234.5
    """

    per_token: float
    per_pair: float
    per_scored: float
    backward: float = 2.0
    recomputed: int = 0

    @classmethod
    def of(cls, model: nn.Module) -> "Operations":
        """Those of a causal LM, which may be on the meta device."""
        inner: Any = causal_lm(model)
        config = inner.config.get_text_config()
        weight = lm_head(model).weight
        embedding = inner.get_input_embeddings().weight
        products = sum(p.numel() for p in inner.parameters() if p.ndim >= 2 and p is not weight and p is not embedding)
        heads = AttentionHeads.of(config)
        trains_all = all(p.requires_grad for p in inner.parameters())
        recomputes = any(getattr(module, "gradient_checkpointing", False) for module in inner.modules())
        return cls(
            per_token=2.0 * products,
            per_pair=4.0 * config.num_hidden_layers * heads.query * heads.width,
            per_scored=2.0 * weight.numel(),
            backward=2.0 if trains_all else 1.0,  # frozen weights get no gradient
            recomputed=int(recomputes),
        )

    def forward(self, tokens: int, pairs: float, scored: int) -> float:
        """Of a pass without gradient."""
        return self.per_token * tokens + self.per_pair * pairs + self.per_scored * scored

    def step(self, tokens: int, pairs: float, scored: int) -> float:
        """Of forward and backward."""
        products = (1 + self.recomputed + self.backward) * self.per_token * tokens
        return (
            products
            + (1 + self.recomputed + 2) * self.per_pair * pairs
            + (1 + self.backward) * self.per_scored * scored
        )


@dataclass(frozen=True)
class _Way:
    """One way to train on the batch: rows, tokens that are read, tokens that are scored, operations."""

    rows: int
    read: int
    scored: int
    operations: float


def explain(recipe: Recipe) -> str:
    """Rows, tokens and operations of a batch's passes, before any saving and after each.

    Raises:
        LogitlessError: what loading the recipe's data or its model's config raises.
    """
    inputs = read(recipe)
    prompts = inputs.data.train[: recipe.rollout.prompts_per_block]
    model = load(inputs, device=torch.device("meta")).model
    batch, groups = _batch(prompts, recipe)
    lines = [
        f"a block of {recipe.name}: {len(prompts)} prompts of {_mean([len(p.token_ids) for p in prompts]):.0f} tokens, "
        f"{recipe.rollout.completions_per_prompt} completions each of 1 to {recipe.rollout.sampling.max_new_tokens} "
        f"tokens, uniform: {batch.num_tokens:,} scored tokens"
    ]
    for dead in (0, 2):
        live = [not dead or g % dead == 0 for g, members in enumerate(groups) for _ in members]
        lines += ["", f"{'every group has a signal' if all(live) else 'every second group has none'}:"]
        lines += _table(inputs, model, batch, groups, live)
    return "\n".join(lines)


def _batch(prompts: Sequence[Prompt], recipe: Recipe) -> tuple[PackedBatch, list[range]]:
    generator = torch.Generator().manual_seed(derived_seed(recipe.seed, "explain"))
    size, longest = recipe.rollout.completions_per_prompt, recipe.rollout.sampling.max_new_tokens
    lengths = torch.randint(1, longest + 1, (len(prompts) * size,), generator=generator).tolist()
    pairs = [
        (prompt, Completion(prompt.id, np.zeros(lengths[p * size + c], np.int64), "", "stop"))
        for p, prompt in enumerate(prompts)
        for c in range(size)
    ]
    return pack(pairs), [range(p * size, (p + 1) * size) for p in range(len(prompts))]


def _table(
    inputs: Inputs, model: nn.Module, batch: PackedBatch, groups: Sequence[range], live: Sequence[bool]
) -> list[str]:
    recipe, algorithm = inputs.recipe, inputs.algorithm
    train, operations = recipe.train, Operations.of(model)
    width = lm_head(model).weight.shape[1]
    unshared = why_unshared(model)
    packing, alive = Packing(train.tokens_per_micro_batch, share_prompts=False), [True] * len(live)

    def plan() -> list[StepPlan]:
        return plan_epoch(
            groups, batch.inputs, tokens_per_step=train.tokens_per_step, packing=packing, live=alive, seed=recipe.seed
        )

    def way(steps: Sequence[StepPlan], *, backward: bool) -> _Way:
        rows = [row for step in steps for row in step.micro_batches]
        read = sum(packing.num_tokens(row, batch.inputs) for row in rows)
        pairs = float(sum(packing.num_pairs(row, batch.inputs) for row in rows))
        scored = sum(batch.inputs.source_counts[s] for row in rows for s in row)
        count = operations.step if backward else operations.forward
        return _Way(len(rows), read, scored, count(read, pairs, scored))

    found = [("training, every sequence in full", way(plan(), backward=True), "")]

    def saving(name: str, key: str, on: bool, against: str = "") -> None:
        why = f"train.{key}: false" if not on else against
        found.append((f"  {name}", way(plan(), backward=True), why))

    silent = "" if algorithm.silent_without_advantage else "not under this algorithm"
    silent = "model.router.loss" if router_loss_coefficient(model, recipe.model.router.loss) else silent
    if train.skip_zero_advantage and not silent:
        alive = list(live)
    saving("without zero-advantage sequences", "skip_zero_advantage", train.skip_zero_advantage, silent)
    if train.share_prompts and unshared is None:
        packing = replace(packing, share_prompts=True)
    saving("with each prompt once", "share_prompts", train.share_prompts, unshared or "")
    if train.pack_by_cost:
        packing = replace(packing, hidden_size=width)
    saving("in rows by cost", "pack_by_cost", train.pack_by_cost)
    steps = plan()

    packing, alive = Packing(train.tokens_per_micro_batch, share_prompts=False), [True] * len(live)
    found.append(("scoring by the policy, every sequence in full", way(plan(), backward=False), ""))
    left = _scored_by_the_policy(recipe, algorithm, steps)
    if train.share_prompts and unshared is None:
        packing = replace(packing, share_prompts=True, hidden_size=width if train.pack_by_cost else None)
    reason = {"engine": "the engine says it", "training": "the training step says the rest", "pass": ""}[left]
    rows = {
        "engine": [],
        "training": [StepPlan((), packing.rows([s for step in steps for s in step.dead], batch.inputs))],
        "pass": plan(),
    }[left]
    found.append(("  as it is done", way(rows, backward=False), reason))
    return _lines(found)


def _scored_by_the_policy(recipe: Recipe, algorithm: Algorithm, steps: Sequence[StepPlan]) -> str:
    """Who says ``logp_old``: the engine, the training step (of what it reads), or a pass of the policy."""
    if recipe.rollout.engine.bitwise and algorithm.value_loss is None:
        return "engine"
    reads = algorithm.kl_in_reward or algorithm.value_loss is not None or algorithm.objective.reads_scoring_pass
    once = recipe.train.epochs_per_block == len(steps) == 1
    lora = recipe.model.lora
    drops_out = lora is not None and lora.dropout > 0
    return "training" if recipe.train.reuse_logp and once and not reads and not drops_out else "pass"


def _lines(found: Sequence[tuple[str, _Way, str]]) -> list[str]:
    lines = [f"  {'':46s}{'rows':>6s}{'tokens read':>14s}{'scored':>12s}{'TFLOP':>12s}"]
    before: _Way | None = None
    for name, way, why in found:
        text = f"  {name:46s}{way.rows:6d}{way.read:14,d}{way.scored:12,d}{way.operations / 1e12:12.4g}"
        if name.startswith(" ") and before is not None and before.operations:
            text += f"  -{max(0.0, 1 - way.operations / before.operations):.0%}"
        lines.append(text + (f"  ({why})" if why else ""))
        before = way
    return lines


def _mean(numbers: Sequence[int]) -> float:
    return sum(numbers) / max(1, len(numbers))

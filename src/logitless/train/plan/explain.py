"""``--explain``: what a block of a recipe costs to train on, and what each saving takes off.

Prompts are the recipe's. Completions are not sampled, which would need the weights; their lengths are uniform between 1
and ``rollout.sampling.max_new_tokens``. Operations are counted, not measured: products cost two for each weight and
token, attention four for each pair of tokens and each number of a query, and backward twice as much as forward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from logitless.data.packing import Packing, StepPlan, pack, plan_epoch
from logitless.models.lm_head import AttentionHeads, causal_lm, lm_head, why_unshared
from logitless.models.router import router_loss_coefficient
from logitless.seeds import derived_seed
from logitless.train.assembly.stages import Inputs, load, read
from logitless.train.learn.learner import scores_in_training
from logitless.train.recipe.config import Recipe
from logitless.types import Completion, PackedBatch, Prompt


@dataclass(frozen=True)
class Operations:
    """Floating-point operations of a forward pass.

    Args:
        per_token: of the decoder's products, for a token.
        per_pair: of attention in all layers, for a pair of tokens.
        per_scored: of the head, for a scored token.
        backward: factor of the backward pass for products; that of attention is always 2.
        recomputed: forward passes of the decoder that the backward pass repeats.

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
        """Operations of a causal LM, which may be on the meta device."""
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
        """Operations of a pass without gradient."""
        return self.per_token * tokens + self.per_pair * pairs + self.per_scored * scored

    def step(self, tokens: int, pairs: float, scored: int) -> float:
        """Operations of forward and backward."""
        products = (1 + self.recomputed + self.backward) * self.per_token * tokens
        return (
            products
            + (1 + self.recomputed + 2) * self.per_pair * pairs
            + (1 + self.backward) * self.per_scored * scored
        )


@dataclass(frozen=True)
class _Cost:
    """The cost of a pass over the block: packed rows, tokens read, tokens scored, operations."""

    rows: int
    read: int
    scored: int
    operations: float


def explain(recipe: Recipe) -> str:
    """A table of rows, tokens and operations of a block's passes, before any saving and after each.

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
    everyone = [True] * batch.num_sequences
    every_second = [g % 2 == 0 for g, members in enumerate(groups) for _ in members]
    for heading, live in (("every group has a signal", everyone), ("every second group has none", every_second)):
        lines += ["", f"{heading}:", *_table(inputs, model, batch, groups, live)]
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
    """A line for each pass: unsaved, and after each saving of ``train``; ``live`` flags nonzero-advantage sequences."""
    recipe, algorithm, train = inputs.recipe, inputs.algorithm, inputs.recipe.train
    operations = Operations.of(model)
    unshared = why_unshared(model)
    not_silent = "" if algorithm.silent_without_advantage else "not under this algorithm"
    if router_loss_coefficient(model, recipe.model.router.loss):  # every token has a gradient
        not_silent = "not with model.router.loss"
    everyone = [True] * len(live)
    kept = live if train.skip_zero_advantage and not not_silent else everyone
    full = Packing(train.tokens_per_micro_batch, share_prompts=False)
    shared = replace(full, share_prompts=train.share_prompts and unshared is None)
    packed = replace(shared, hidden_size=lm_head(model).weight.shape[1]) if train.pack_by_cost else shared

    def plan(packing: Packing, flags: Sequence[bool]) -> list[StepPlan]:
        return plan_epoch(
            groups, batch.inputs, tokens_per_step=train.tokens_per_step, packing=packing, live=flags, seed=recipe.seed
        )

    def cost(packing: Packing, steps: Sequence[StepPlan], count: Callable[[int, float, int], float]) -> _Cost:
        rows = [row for step in steps for row in step.micro_batches]
        read = sum(packing.num_tokens(row, batch.inputs) for row in rows)
        pairs = float(sum(packing.num_pairs(row, batch.inputs) for row in rows))
        scored = sum(batch.inputs.source_counts[s] for row in rows for s in row)
        return _Cost(len(rows), read, scored, count(read, pairs, scored))

    def off(key: str) -> str:
        return "" if getattr(train, key) else f"train.{key}: false"

    passes = [
        ("training, every sequence in full", full, everyone, ""),
        ("  without zero-advantage sequences", full, kept, off("skip_zero_advantage") or not_silent),
        ("  with each prompt once", shared, kept, off("share_prompts") or unshared or ""),
        ("  in rows by cost", packed, kept, off("pack_by_cost")),
    ]
    found = [(name, cost(packing, plan(packing, flags), operations.step), why) for name, packing, flags, why in passes]

    steps = plan(packed, kept)
    scoring = packed if shared.share_prompts else full
    if recipe.rollout.engine.bitwise and algorithm.value_loss is None:
        scored, why = list[StepPlan](), "the engine says it"
    elif scores_in_training(recipe, algorithm, len(steps)):
        left_out = [s for step in steps for s in step.dead]
        scored, why = [StepPlan((), scoring.rows(left_out, batch.inputs))], "the training step says the rest"
    else:
        scored, why = plan(scoring, everyone), ""
    in_full = cost(full, plan(full, everyone), operations.forward)
    found.append(("scoring by the policy, every sequence in full", in_full, ""))
    found.append(("  as it is done", cost(scoring, scored, operations.forward), why))
    return _lines(found)


def _lines(found: Sequence[tuple[str, _Cost, str]]) -> list[str]:
    """The table as text; an indented line shows what it saves against the line before."""
    lines = [f"  {'':46s}{'rows':>6s}{'tokens read':>14s}{'scored':>12s}{'TFLOP':>12s}"]
    before: _Cost | None = None
    for name, cost, why in found:
        text = f"  {name:46s}{cost.rows:6d}{cost.read:14,d}{cost.scored:12,d}{cost.operations / 1e12:12.4g}"
        if name.startswith(" ") and before is not None and before.operations:
            text += f"  -{max(0.0, 1 - cost.operations / before.operations):.0%}"
        lines.append(text + (f"  ({why})" if why else ""))
        before = cost
    return lines


def _mean(numbers: Sequence[int]) -> float:
    return sum(numbers) / max(1, len(numbers))

"""Settings of a recipe that are valid and often a mistake, each with its reason and a source.

A recipe that is invalid never gets here: ``load_recipe`` refuses it. What a recipe cannot get wrong, because there is
no such setting, is in ``IMPOSSIBLE``. Whoever knows better keeps the setting: an audit refuses nothing.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from logitless.doctor.finding import Finding
from logitless.objective.advantage import BatchStandardized, Gdpo
from logitless.objective.algorithm import Algorithm
from logitless.objective.kl_control import FixedKL, LinearKL, ProportionalKL, ZieglerKL
from logitless.objective.weighting import MicroBatchTokenMean
from logitless.rewards.instruction_reward import InstructionReward
from logitless.rollout.recorded import read_completions
from logitless.train.config import Recipe, RecordedEngineSection
from logitless.train.setup import Data, algorithm_of

IMPOSSIBLE = {
    "prompt tokens in the loss": "only sampled tokens have a row (docs/dataflow.md, packing); a recorded completion "
    "that repeats its prompt is found below",
    "bfloat16 master weights": "trained weights are float32, or bfloat16 with float32 masters that the optimizer steps",
    "a KL target without control": "`target` is a key of adaptive controllers alone; one that cannot move is found "
    "below",
    "a mean inside the loss": "normalisation is a weight a token, made once a step",
    "top-p under a sampler correction": "refused when the recipe is read",
    "held-out texts in training": "prompts whose text is held out are left out of training and counted; texts that "
    "differ in spelling alone are found below",
}
"""Known mistakes that a recipe cannot make, and why not."""

FULL_RATE, LORA_RATE = (1e-7, 1e-5), (5e-6, 5e-4)
"""Learning rates in use for RL of pretrained weights, lowest and highest."""

BLOCK_TOKENS = (50_000, 200_000)
"""Sampled tokens a block that published runs have; twice as far away is called far."""

MAX_EPOCHS, MIN_GROUP = 4, 4


@dataclass(frozen=True)
class Audited:
    """What the rules read.

    Args:
        recipe: checked.
        algorithm: of the recipe.
        data: its prompts; None where they cannot be had here, and rules that read them say nothing.
    """

    recipe: Recipe
    algorithm: Algorithm
    data: Data | None

    @property
    def pretrained(self) -> bool:
        """Whether practice with pretrained models applies: not to toys that begin with random weights."""
        return not self.recipe.model.random_weights


def audit_recipe(recipe: Recipe, data: Data | None = None) -> list[Finding]:
    """Everything that the rules find, in the order of ``RULES``.

    Args:
        recipe: checked.
        data: as ``data_of`` loads it; without it prompts are not looked at.

    Example:
        >>> from logitless.train.recipe import parse_recipe
        >>> recipe = parse_recipe({
        ...     "name": "toy", "model": {"source": "some/model"},
        ...     "data": {"train": {"name": "file", "path": "a.jsonl"}},
        ...     "rollout": {"sampling": {"max_new_tokens": 512}, "prompts_per_block": 64, "completions_per_prompt": 2},
        ...     "rewards": [{"name": "format"}], "train": {"epochs_per_block": 8}})
        >>> [finding.rule for finding in audit_recipe(recipe)]
        ['epochs', 'group size', 'nothing held out']
    """
    audited = Audited(recipe, algorithm_of(recipe), data)
    return [finding for rule in RULES for finding in rule(audited)]


def _across_groups(audited: Audited) -> Iterator[Finding]:
    advantage = audited.algorithm.advantage
    if isinstance(advantage, BatchStandardized | Gdpo):
        yield Finding(
            "normalisation across groups",
            "algorithm.advantage",
            f"{advantage.name} divides by a standard deviation over all groups of a block",
            "The gradient of one prompt then depends on which other prompts were drawn with it, and easy and hard "
            "prompts are scaled alike.",
            "Use group_standardized or group_centered, unless the paper that you follow does this on purpose.",
            "GRPO normalises in the group: arXiv:2402.03300, sec. 4.1; over the batch on purpose: arXiv:2508.08221",
        )
    if isinstance(audited.algorithm.weighting, MicroBatchTokenMean):
        yield Finding(
            "normalisation by micro-batch",
            "algorithm.weighting",
            "micro_batch_token_mean",
            "A token's weight depends on the micro-batch that it lies in, so that train.tokens_per_micro_batch, which "
            "should change memory alone, changes the loss.",
            "Use token_mean.",
            "docs/objectives.md; TRL's loss_type bnpo",
        )


def _repeated_prompts(audited: Audited) -> Iterator[Finding]:
    engine, data = audited.recipe.rollout.engine, audited.data
    if not isinstance(engine, RecordedEngineSection) or data is None or Path(engine.path).is_dir():
        return
    prompts = {prompt.id: tuple(prompt.token_ids) for prompt in data.train}
    completions = [c for c in read_completions(engine.path) if prompts.get(c.prompt_id)]
    repeated = [c for c in completions if tuple(c.token_ids[: len(prompts[c.prompt_id])]) == prompts[c.prompt_id]]
    if repeated:
        yield Finding(
            "prompt tokens in the loss",
            "rollout.engine.path",
            f"{len(repeated)} of {len(completions)} recorded completions begin with the tokens of their prompt",
            "They were not sampled, and training on them raises the probability of the question.",
            "Record the completions' own tokens.",
            "Williams 1992 (REINFORCE): the gradient is of what the policy drew",
        )


def _filtered_sampling(audited: Audited) -> Iterator[Finding]:
    sampling = audited.recipe.rollout.sampling
    filters = {
        "top_p": sampling.top_p < 1,
        "top_k": bool(sampling.top_k),
        "min_p": sampling.min_p > 0,
    } | dict.fromkeys(sampling.penalties, True)
    if not any(filters.values()):
        return
    said = ", ".join(f"{name}={getattr(sampling, name)}" for name, on in filters.items() if on)
    yield Finding(
        "filtered sampling",
        "rollout.sampling",
        said,
        "Tokens are drawn from a narrower distribution than the one that the loss is of: the policy is trained on "
        "samples of another one, its entropy falls faster, and a sampler correction cannot repair it, since what was "
        "cut has no samples.",
        "Train on temperature alone, and filter in evaluation.",
        "arXiv:2512.02556, sec. 3.1, where the sampler's mask is kept for the loss; docs/objectives.md",
    )


def _overlap(audited: Audited) -> Iterator[Finding]:
    data = audited.data
    if data is None or not data.all_held_out:
        return
    spelt = {_plain(prompt.text) for prompt in data.train}
    again = [prompt for prompt in data.all_held_out if _plain(prompt.text) in spelt]
    if again:
        yield Finding(
            "evaluation on training prompts",
            "data.held_out",
            f"{len(again)} of {len(data.all_held_out)} held-out prompts differ from one that is trained on in case, "
            "blanks or punctuation alone",
            "Their accuracy says what was memorised.",
            "Leave them out of one of the two.",
            "arXiv:2405.00332 (GSM1k): accuracy on seen problems overstates",
        )
    columns = [reward.ids_column for reward in audited.recipe.rewards if isinstance(reward, InstructionReward)]
    trained, held = (_ids(prompts, columns) for prompts in (data.train, data.all_held_out))
    if trained & held:
        yield Finding(
            "reward and evaluation overlap",
            "rewards",
            f"{len(trained & held)} of {len(held)} instruction ids of the held-out prompts are rewarded in training",
            "Accuracy then says how well these checks are met, and nothing of instructions that were not trained.",
            "Hold whole ids out, or train on IFTrain's ids and evaluate on IFBench's.",
            "arXiv:2507.02833 (IFBench): models overfit to the checks that they are trained on",
        )


def _ids(prompts: Sequence[Any], columns: Sequence[str]) -> set[str]:
    return {each for p in prompts for name in columns for each in (p.columns.get(name) or ()) if isinstance(each, str)}


def _plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))


def _idle_reference(audited: Audited) -> Iterator[Finding]:
    kl = audited.recipe.kl
    if kl is not None and isinstance(kl.control, FixedKL) and kl.control.beta == 0:
        yield Finding(
            "reference without effect",
            "kl.control.beta",
            "0",
            "The reference is loaded and every block is scored a second time, for a term of 0.",
            "Remove the section kl; the metrics of drift from the old policy stay.",
            "docs/dataflow.md, scoring",
        )


def _stuck_target(audited: Audited) -> Iterator[Finding]:
    control = audited.algorithm.kl_control
    if not isinstance(control, ProportionalKL | LinearKL | ZieglerKL):
        return
    if control.beta_min == control.beta_max:
        yield Finding(
            "KL target without control",
            "kl.control",
            f"{control.name} with target {control.target:g}, and a coefficient that cannot move",
            "The target is written down and never sought.",
            "Set beta_min below beta_max, or use control: {name: fixed}.",
            "arXiv:1909.08593, sec. 2.2: the coefficient moves until the KL meets the target",
        )


def _learning_rate(audited: Audited) -> Iterator[Finding]:
    if not audited.pretrained:
        return
    recipe = audited.recipe
    rate, lora = recipe.train.optimizer.learning_rate, recipe.model.lora is not None
    low, high = LORA_RATE if lora else FULL_RATE
    if not low <= rate <= high:
        kind = "LoRA" if lora else "full fine-tuning"
        yield Finding(
            "learning rate",
            "train.optimizer.learning_rate",
            f"{rate:g}, far {'below' if rate < low else 'above'} practice for {kind}, {low:g} to {high:g}",
            "Too low a rate learns nothing in the budget; too high a one breaks the policy within a few steps, "
            "which clip fractions and KL show first.",
            f"Begin with {'1e-5 to 1e-4' if lora else '1e-6'}.",
            "1e-6 for full: arXiv:2402.03300, arXiv:2503.14476; ten times as much for LoRA: Schulman et al. 2025, "
            "LoRA Without Regret",
        )


def _epochs(audited: Audited) -> Iterator[Finding]:
    epochs = audited.recipe.train.epochs_per_block
    if epochs > MAX_EPOCHS:
        yield Finding(
            "epochs",
            "train.epochs_per_block",
            str(epochs),
            "After a few passes the policy is far from the one that sampled, most ratios are clipped, and what is left "
            "of the gradient is that of the outliers.",
            "Use 1 to 4, and more prompts a block instead.",
            "1 in arXiv:2402.03300, at most 4 in arXiv:2403.17031",
        )


def _block_tokens(audited: Audited) -> Iterator[Finding]:
    if not audited.pretrained:
        return
    rollout = audited.recipe.rollout
    tokens = rollout.prompts_per_block * rollout.completions_per_prompt * rollout.longest_completion
    low, high = BLOCK_TOKENS
    if tokens < low / 2 or tokens > 8 * high:  # completions rarely reach their limit
        few = tokens < low / 2
        yield Finding(
            "block size",
            "rollout",
            f"at most {tokens:,} sampled tokens a block",
            "So few give a gradient that is mostly noise, and more time in starting rounds than in them."
            if few
            else "So many are drawn from a policy that is stale by the last step on them, and one round takes long.",
            f"Aim at {low:,} to {high:,} sampled tokens: change prompts_per_block, completions_per_prompt or "
            "max_new_tokens.",
            "1,024 completions of at most 1,024 tokens in arXiv:2402.03300, sec. 4.2",
        )


def _group_size(audited: Audited) -> Iterator[Finding]:
    size = audited.recipe.rollout.completions_per_prompt
    advantage = audited.algorithm.advantage
    if advantage is not None and advantage.compares_group and size < MIN_GROUP:
        yield Finding(
            "group size",
            "rollout.completions_per_prompt",
            str(size),
            "The mean of so few rewards is a noisy baseline, and most groups have equal rewards and no signal.",
            "Use 8 to 16, with fewer prompts a block if time is short.",
            "64 in arXiv:2402.03300, 16 in arXiv:2503.14476",
        )


def _nothing_held_out(audited: Audited) -> Iterator[Finding]:
    recipe = audited.recipe
    if recipe.data.held_out is None and not recipe.evaluation.sets and audited.pretrained:
        yield Finding(
            "nothing held out",
            "data.held_out",
            "none",
            "The only measure of the run is its reward on the prompts that it trains on.",
            "Hold out a few hundred prompts.",
            "arXiv:2405.00332 (GSM1k)",
        )


Rule = Callable[[Audited], Iterator[Finding]]

RULES: tuple[Rule, ...] = (
    _across_groups,
    _repeated_prompts,
    _filtered_sampling,
    _overlap,
    _idle_reference,
    _stuck_target,
    _learning_rate,
    _epochs,
    _block_tokens,
    _group_size,
    _nothing_held_out,
)

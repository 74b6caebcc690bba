"""Settings of a recipe that are valid but often a mistake, each with its reason and a source.

An audit refuses nothing: a setting that is meant can stay. Invalid recipes are refused by ``load_recipe``.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import get_args

from logitless.doctor.finding import Finding, Places, rule
from logitless.objective.advantage import BatchStandardized, Gdpo
from logitless.objective.algorithm import Algorithm
from logitless.objective.kl_control import FixedKL, LinearKL, ProportionalKL, ZieglerKL
from logitless.objective.surrogate.clip import Clip
from logitless.objective.weighting import MicroBatchTokenMean
from logitless.rollout.recorded import read_completions
from logitless.train.assembly.algorithm import algorithm_of
from logitless.train.assembly.data import Data, instruction_ids
from logitless.train.recipe.config import Recipe
from logitless.types import VerdictStatus

FULL_RATE, LORA_RATE = (1e-7, 1e-5), (5e-6, 5e-4)
"""Learning rates in use for RL of pretrained weights, lowest and highest."""

BLOCK_TOKENS = (50_000, 200_000)
"""Sampled tokens a block in published runs."""

SHARED_CLIP = 0.05
"""Distance from 1 that clips of a sequence's or a turn's ratio have nowhere in published runs."""

MAX_EPOCHS, MIN_GROUP = 4, 4

FAILED = ("error", "timeout")


@dataclass(frozen=True)
class Audited:
    """Input of the rules.

    Args:
        data: its prompts; None if they are not available here; rules about them then find nothing.
    """

    recipe: Recipe
    algorithm: Algorithm
    data: Data | None

    @property
    def pretrained(self) -> bool:
        """Whether the model is pretrained; recommendations for such models do not apply to random weights."""
        return not self.recipe.model.random_weights


def audit_recipe(recipe: Recipe, data: Data | None = None) -> list[Finding]:
    """Everything that the rules find, in the order of ``RULES``.

    Args:
        data: as ``data_of`` loads it; None: prompts are not checked.

    Example:
        >>> from logitless.train.recipe.loading import parse_recipe
        >>> recipe = parse_recipe({
        ...     "name": "toy", "model": {"source": "some/model"},
        ...     "data": {"train": {"name": "file", "path": "a.jsonl"}},
        ...     "rollout": {"sampling": {"max_new_tokens": 512}, "prompts_per_block": 64, "completions_per_prompt": 2},
        ...     "rewards": [{"name": "format"}], "train": {"epochs_per_block": 8}})
        >>> [finding.rule for finding in audit_recipe(recipe)]
        ['epochs', 'group size', 'nothing held out']
    """
    audited = Audited(recipe, algorithm_of(recipe), data)
    return [finding for look in RULES for finding in look(audited)]


@dataclass(frozen=True)
class Scored:
    """Verdicts of a run, or of a measured batch.

    Args:
        where: what the completions belong to, in words.
        first_failures: by reward, its first error or time-out, in a line.
        has_signal: whether rewards gave a completion an advantage.
    """

    where: str
    verdicts: Mapping[str, Mapping[str, int]]
    first_failures: Mapping[str, str]
    has_signal: bool = True


def audit_scored(scored: Scored) -> list[Finding]:
    """What rewards failed at, or did not tell apart."""
    return [*_failed_scoring(scored), *_without_signal(scored)]


@rule("failed scoring")
def _failed_scoring(scored: Scored) -> Places:
    """Rewards that failed, or gave no score at all.

    Reason: A completion without a score is not trained on, and does not count as correct where it is held out.
    Remedy: Repair the reward before the run.
    Source: docs/own_reward.md
    """
    for name, counts in scored.verdicts.items():
        total, failed = (sum(counts.get(each, 0) for each in of) for of in (get_args(VerdictStatus), FAILED))
        first = f", the first by {scored.first_failures[name]}" if name in scored.first_failures else ""
        if failed:
            yield "rewards", f"{name} failed at {failed:,} of {total:,} completions of {scored.where}{first}"
        elif total and counts.get("missing", 0) == total:
            yield "rewards", f"{name} scored none of {total:,} completions of {scored.where}: all missing"


@rule("no signal")
def _without_signal(scored: Scored) -> Places:
    """Rewards that gave no completion an advantage.

    Reason: Nothing is learned from rewards while they do not tell completions apart; a hard task may begin so.
    Remedy: Mend a reward that scores all alike (a function gets one completion a call), or choose a task that the
        policy solves at times.
    Source: docs/own_reward.md
    """
    if not scored.has_signal:
        yield "rewards", f"no completion of {scored.where} has an advantage"


@rule("normalisation across groups")
def _across_groups(audited: Audited) -> Places:
    """An advantage over all groups of a block.

    Reason: The gradient of one prompt then depends on the other prompts of its block, and easy and hard prompts are
        scaled alike.
    Remedy: Use group_standardized or group_centered, unless the paper that you follow does this on purpose.
    Source: GRPO normalises in the group: arXiv:2402.03300, sec. 4.1; over the batch on purpose: arXiv:2508.08221
    """
    advantage = audited.algorithm.advantage
    if isinstance(advantage, BatchStandardized | Gdpo):
        yield "algorithm.advantage", f"{advantage.name} divides by a standard deviation over all groups of a block"


@rule("normalisation by micro-batch")
def _across_micro_batches(audited: Audited) -> Places:
    """A weighting over each micro-batch.

    Reason: A token's weight depends on its micro-batch, so that train.tokens_per_micro_batch, which should change
        memory alone, changes the loss.
    Remedy: Use token_mean.
    Source: docs/objectives.md; TRL's loss_type bnpo
    """
    if isinstance(audited.algorithm.weighting, MicroBatchTokenMean):
        yield "algorithm.weighting", "micro_batch_token_mean"


@rule("clip range of a shared ratio")
def _wide_clip(audited: Audited) -> Places:
    """A token's clip range, 0.8 to 1.2, for the ratio of a sequence or a turn.

    Reason: The ratio is a mean over many tokens and stays close to 1, so that such a range clips nothing.
    Remedy: Use epsilon_low 3e-4 and epsilon_high 4e-4, or leave parameters out.
    Source: GSPO: arXiv:2507.18071, sec. 5.1
    """
    surrogate, ratio = audited.algorithm.objective.surrogate, audited.algorithm.objective.ratio
    if not isinstance(surrogate, Clip) or ratio.averages == "token":
        return
    if min(1 - surrogate.ratio_min, surrogate.ratio_max - 1) > SHARED_CLIP:
        yield "algorithm", f"{surrogate.ratio_min:g} to {surrogate.ratio_max:g} for the ratio of a {ratio.averages}"


@rule("prompt tokens in the loss")
def _repeated_prompts(audited: Audited) -> Places:
    """Prompt tokens in the loss.

    Reason: They were not sampled, and training on them raises the probability of the question.
    Remedy: Record the completions' own tokens.
    Source: Williams 1992 (REINFORCE): the gradient is of what the policy sampled
    """
    engine, data = audited.recipe.rollout.engine, audited.data
    if engine.recorded_file is None or data is None:
        return
    prompts = {prompt.id: prompt.token_ids.tobytes() for prompt in data.train if len(prompt.token_ids)}
    completions = [c for c in read_completions(engine.recorded_file) if c.prompt_id in prompts]
    repeated = [c for c in completions if c.token_ids.tobytes().startswith(prompts[c.prompt_id])]
    if repeated:
        yield (
            "rollout.engine.path",
            f"{len(repeated)} of {len(completions)} recorded completions begin with the tokens of their prompt",
        )


@rule("filtered sampling")
def _filtered_sampling(audited: Audited) -> Places:
    """Filtered sampling.

    Reason: Tokens are sampled from a narrower distribution than the policy's own: its entropy falls faster, and a
        sampler correction cannot repair it, because filtered tokens are never sampled.
    Remedy: Train on temperature alone, and filter in evaluation.
    Source: arXiv:2512.02556, sec. 3.1, where the sampler's mask is kept for the loss; docs/objectives.md
    """
    sampling = audited.recipe.rollout.sampling
    filters = {
        "top_p": sampling.top_p < 1,
        "top_k": bool(sampling.top_k),
        "min_p": sampling.min_p > 0,
    } | dict.fromkeys(sampling.penalties, True)
    if not any(filters.values()):
        return
    said = ", ".join(f"{name}={getattr(sampling, name)}" for name, on in filters.items() if on)
    yield "rollout.sampling", said


@rule("evaluation on training prompts")
def _same_prompts(audited: Audited) -> Places:
    """Held-out prompts that differ from training's in spelling alone.

    Reason: Their accuracy measures what was memorised.
    Remedy: Leave them out of one of the two.
    Source: arXiv:2405.00332 (GSM1k): accuracy on seen problems overstates
    """
    data = audited.data
    if data is None or not data.all_held_out:
        return
    spelt = {_plain(prompt.text) for prompt in data.train}
    again = [prompt for prompt in data.all_held_out if _plain(prompt.text) in spelt]
    if again:
        said = f"{len(again)} of {len(data.all_held_out)} held-out prompts differ from one that is trained on in case, "
        yield "data.held_out", f"{said}blanks or punctuation alone"


@rule("reward and evaluation overlap")
def _same_instructions(audited: Audited) -> Places:
    """Instruction ids that are both rewarded and held out.

    Reason: Accuracy then measures these checks, and not instructions that were not trained.
    Remedy: Hold whole ids out, or train on IFTrain's ids and evaluate on IFBench's.
    Source: arXiv:2507.02833 (IFBench): models overfit to the checks that they are trained on
    """
    data = audited.data
    if data is None or not data.all_held_out:
        return
    trained, held = (instruction_ids(audited.recipe, prompts) for prompts in (data.train, data.all_held_out))
    if both := trained & held:
        yield "rewards", f"{len(both)} of {len(held)} instruction ids of the held-out prompts are rewarded in training"


def _plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))


@rule("reference without effect")
def _idle_reference(audited: Audited) -> Places:
    """Reference without effect.

    Reason: The reference is loaded and every block is scored a second time, for a term of 0.
    Remedy: Remove the section kl; the metrics of drift from the old policy stay.
    Source: docs/dataflow.md, scoring
    """
    kl = audited.recipe.kl
    if kl is not None and isinstance(kl.control, FixedKL) and kl.control.beta == 0:
        yield "kl.control.beta", "0"


@rule("KL target without control")
def _stuck_target(audited: Audited) -> Places:
    """KL target without control.

    Reason: The target has no effect.
    Remedy: Set beta_min below beta_max, or use control: {name: fixed}.
    Source: arXiv:1909.08593, sec. 2.2: the coefficient moves until the KL meets the target
    """
    control = audited.algorithm.kl_control
    if not isinstance(control, ProportionalKL | LinearKL | ZieglerKL):
        return
    if control.beta_min == control.beta_max:
        yield "kl.control", f"{control.name} with target {control.target:g}, and a coefficient that cannot move"


@rule("learning rate")
def _learning_rate(audited: Audited) -> Places:
    """One far from practice with pretrained models.

    Reason: Too low a rate learns nothing in the budget; too high a one breaks the policy within a few steps, which clip
        fractions and KL show first.
    Remedy: Begin with 1e-6, with LoRA with 1e-5 to 1e-4.
    Source: 1e-6 for full: arXiv:2402.03300, arXiv:2503.14476; ten times as much for LoRA: Schulman et al. 2025, LoRA
        Without Regret
    """
    recipe = audited.recipe
    rate, lora = recipe.train.optimizer.learning_rate, recipe.model.lora is not None
    low, high = LORA_RATE if lora else FULL_RATE
    if audited.pretrained and not low <= rate <= high:
        kind = "LoRA" if lora else "full fine-tuning"
        far = f"{rate:g}, far {'below' if rate < low else 'above'} practice for {kind}, {low:g} to {high:g}"
        yield "train.optimizer.learning_rate", far


@rule("epochs")
def _epochs(audited: Audited) -> Places:
    """Epochs.

    Reason: After a few passes the policy is far from the one that sampled, most ratios are clipped, and the gradient
        that remains comes from outliers.
    Remedy: Use 1 to 4, and more prompts a block instead.
    Source: 1 in arXiv:2402.03300, at most 4 in arXiv:2403.17031
    """
    epochs = audited.recipe.train.epochs_per_block
    if epochs > MAX_EPOCHS:
        yield "train.epochs_per_block", str(epochs)


@rule("block size")
def _block_tokens(audited: Audited) -> Places:
    """Far fewer or more sampled tokens a block than published runs have.

    Reason: Too few give a gradient that is mostly noise, and much time goes into starting rounds; too many come from a
        policy that is stale by the last step on them, and one block takes long.
    Remedy: Aim at 50,000 to 200,000 sampled tokens: change prompts_per_block, completions_per_prompt or max_new_tokens.
    Source: 1,024 completions of at most 1,024 tokens in arXiv:2402.03300, sec. 4.2
    """
    rollout = audited.recipe.rollout
    tokens = rollout.prompts_per_block * rollout.completions_per_prompt * rollout.longest_completion
    low, high = BLOCK_TOKENS
    if audited.pretrained and (tokens < low / 2 or tokens > 8 * high):  # completions rarely reach their limit
        yield "rollout", f"at most {tokens:,} sampled tokens a block"


@rule("group size")
def _group_size(audited: Audited) -> Places:
    """Group size.

    Reason: The mean of so few rewards is a noisy baseline, and most groups have equal rewards and no signal.
    Remedy: Use 8 to 16, with fewer prompts a block if time is short.
    Source: 64 in arXiv:2402.03300, 16 in arXiv:2503.14476
    """
    size = audited.recipe.rollout.completions_per_prompt
    advantage = audited.algorithm.advantage
    if advantage is not None and advantage.compares_group and size < MIN_GROUP:
        yield "rollout.completions_per_prompt", str(size)


@rule("nothing held out")
def _nothing_held_out(audited: Audited) -> Places:
    """Nothing held out.

    Reason: The only measure of the run is its reward on the prompts that it trains on.
    Remedy: Hold out a few hundred prompts.
    Source: arXiv:2405.00332 (GSM1k)
    """
    recipe = audited.recipe
    if recipe.data.held_out is None and not recipe.evaluation.sets and audited.pretrained:
        yield "data.held_out", "none"


RULES: tuple[Callable[[Audited], list[Finding]], ...] = (
    _across_groups,
    _across_micro_batches,
    _wide_clip,
    _repeated_prompts,
    _filtered_sampling,
    _same_prompts,
    _same_instructions,
    _idle_reference,
    _stuck_target,
    _learning_rate,
    _epochs,
    _block_tokens,
    _group_size,
    _nothing_held_out,
)

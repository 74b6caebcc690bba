"""Forecast of a recipe's time and memory on this machine, from measured batches.

The parts of a run sample, score and train on a batch: once or twice to warm up, and then three to five times, timed.
The median of each phase counts, so that a single slow batch decides nothing.

A batch holds one round of decoding (``rollout.max_rows`` completions) or one optimizer step, whichever is more, and at
most a block. The time of a block is the batch's, multiplied by the number of completions; decoding has its own factor
(``times_as_long``). What the forecast does not know: completions that grow longer in training, zero-signal groups
(they are trained on here), the warm start, evaluation and checkpoints. Nothing is written outside a temporary folder.
One process measures, also for a recipe of several.
"""

import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import torch

from logitless.errors import UnavailableError
from logitless.rewards.statistics import reward_statistics
from logitless.seeds import derived_seed
from logitless.train.assembly.engines import open_engines
from logitless.train.assembly.process import device_of, set_process
from logitless.train.assembly.stages import Parts, assemble, load, read
from logitless.train.collect.failures import Failures, first_failures
from logitless.train.long_lived import startup_objects_frozen
from logitless.train.loop import next_block
from logitless.train.plan.run_plan import Plan
from logitless.train.recipe.config import Recipe
from logitless.train.record.journal import Journal
from logitless.train.record.live_view import LiveView, duration
from logitless.train.record.memory import peak_memory, shortage_in_words, size_text
from logitless.train.record.run_folder import create_run_folder
from logitless.types import Group, VerdictStatus

ENOUGH = ((3, 30.0), (5, 5.0))
"""(batches, seconds): that many batches are measured unless that much time has passed, at least three if possible."""

PHASES = ("weights", "rollout", "scoring", "training")
"""Of a block."""


@dataclass(frozen=True)
class Forecast:
    """Time and memory of a block, from measured batches.

    Args:
        planned_bytes: of the plan, worst case.
        seconds: of one block, by phase.
        share: of a block's completions in a batch.
        also_held: what else ``peak_bytes`` counts, in words.
        batches: seconds of each measured batch, by phase; ``seconds`` are their medians, scaled to a block.
        verdicts: counts by reward and status, of the last measured batch.
        failures: messages about rewards that failed in the measured batches, with their first tracebacks.
        first_failures: of the last measured batch, by reward, in a line.
        has_signal: whether rewards gave a completion of a batch an advantage; True where they are not learned from.

    Example:
        >>> forecast = Forecast(10, 9, {"rollout": 2.0, "training": 1.0}, 100, 32, 320, 1.0)
        >>> forecast.block_seconds, forecast.mean_length
        (3.0, 10.0)
        >>> print(str(forecast).splitlines()[1])
        a block            3.00 s (rollout 2.00 s, training 1.00 s)
    """

    planned_bytes: int
    peak_bytes: int
    seconds: Mapping[str, float]
    blocks: int
    completions: int
    tokens: int
    share: float
    also_held: str = ""
    batches: Sequence[Mapping[str, float]] = ()
    verdicts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    failures: Sequence[str] = ()
    first_failures: Mapping[str, str] = field(default_factory=dict)
    has_signal: bool = True

    @property
    def block_seconds(self) -> float:
        """All phases of one block; evaluation and checkpoints are not among them."""
        return math.fsum(self.seconds.values())

    @property
    def mean_length(self) -> float:
        """Tokens of a completion."""
        return self.tokens / self.completions

    def __str__(self) -> str:
        digits, factor, unit = (2, 1, "s") if self.block_seconds >= 1 else (1, 1000, "ms")
        whole, *phases = (
            f"{factor * value:.{digits}f} {unit}" for value in (self.block_seconds, *self.seconds.values())
        )
        by_phase = ", ".join(map(" ".join, zip(self.seconds, phases, strict=True)))
        return "\n".join(
            [
                f"{'measured':18s} {self.completions} completions of {self.mean_length:.0f} tokens, "
                f"{self.share:.0%} of a block",
                f"{'a block':18s} {whole} ({by_phase})",
                f"{'the run':18s} {duration(self.blocks * self.block_seconds)} in {self.blocks} blocks, evaluation "
                "and checkpoints not counted",
                f"{'memory':18s} {size_text(self.peak_bytes)} held{self.also_held}; planned "
                f"{size_text(self.planned_bytes)} at the greatest lengths",
            ]
        )


def forecast_of(recipe: Recipe, plan: Plan) -> Forecast:
    """Measure batches of a recipe.

    Raises:
        LogitlessError: what a start would raise.
        UnavailableError: the batch does not fit into the GPU after all.
    """
    device = device_of(recipe.model)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with tempfile.TemporaryDirectory() as folder:
        try:
            batches, groups, failures, rounds, has_signal = _measured(recipe, Path(folder))
        except torch.OutOfMemoryError as error:
            raise UnavailableError(
                needed=f"memory for a batch of this recipe on {device}",
                given=shortage_in_words(error),
                remedy="Lower what the plan shows to be large.",
            ) from error
    rollout = recipe.rollout
    rows = rollout.prompts_per_block * rollout.completions_per_prompt
    times = {"weights": 1.0, "rollout": rounds}
    seconds = {phase: statistics.median(each[phase] for each in batches) for phase in batches[0]}
    lengths = lengths_of(groups)
    completions, statuses = len(lengths), get_args(VerdictStatus)
    statistics_of = reward_statistics([verdicts for group in groups for verdicts in group.verdicts])
    return Forecast(
        planned_bytes=plan.total_bytes,
        peak_bytes=peak_memory(device),
        seconds={phase: value * times.get(phase, rows / completions) for phase, value in seconds.items()},
        blocks=recipe.train.blocks,
        completions=completions,
        tokens=sum(lengths),
        share=completions / rows,
        also_held="" if device.type == "cuda" else " by the whole process, torch's own included",
        batches=batches,
        verdicts={name: {status: found[status] for status in statuses} for name, found in statistics_of.items()},
        failures=failures,
        first_failures=first_failures(groups),
        has_signal=has_signal,
    )


def lengths_of(groups: Sequence[Group]) -> list[int]:
    """The sampled tokens of each completion."""
    return [completion.length for group in groups for completion in group.completions]


def batch_of(recipe: Recipe, prompts: int | None = None, tokens: int = 0) -> Recipe:
    """The recipe with the measured batch as its block; every group is trained on.

    Args:
        prompts: of a batch sampled before; None: one round of decoding.
        tokens: sampled for that batch; they give the number of steps a block.
    """
    rollout, train = recipe.rollout, recipe.train
    whole = rollout.prompts_per_block
    if prompts is None:
        wanted, itself = math.ceil(rollout.max_rows / rollout.completions_per_prompt), train.reuse_logp
    else:
        steps = max(1, round(tokens * whole / prompts / train.tokens_per_step))
        wanted, itself = max(prompts, math.ceil(whole / steps)), train.reuse_logp and steps == 1
    changed = rollout.model_copy(update={"prompts_per_block": min(whole, wanted), "zero_signal": "keep"})
    return recipe.model_copy(update={"rollout": changed, "train": train.model_copy(update={"reuse_logp": itself})})


def times_as_long(lengths: Sequence[int], whole: int, *, max_rows: int, refills: bool) -> float:
    """Decoding steps of a block over those of a batch, from the lengths of the batch's completions.

    Of n completions at most R are decoded at once; their mean length is m, the greatest l. An engine that waits for a
    whole round takes ``ceil(n / R) l`` steps. One that replaces each finished sequence by the next completion takes
    ``l + (n / R - 1) m``.

    Args:
        max_rows: R.
        refills: whether finished sequences are replaced.

    Example:
        >>> times_as_long([8, 2], 8, max_rows=2, refills=False), times_as_long([8, 2], 8, max_rows=2, refills=True)
        (4.0, 2.875)
    """
    if not refills:
        return math.ceil(whole / max_rows) / math.ceil(len(lengths) / max_rows)
    longest, mean = max(lengths), statistics.fmean(lengths)
    one, block = (longest + max(0.0, n / max_rows - 1) * mean for n in (len(lengths), whole))
    return block / one


def _measured(recipe: Recipe, folder: Path) -> tuple[list[dict[str, float]], Sequence[Group], list[str], float, bool]:
    """Seconds by phase of each timed batch; scored groups of the last; messages about failed rewards; the factor
    ``times_as_long`` from a batch to a block; and whether a batch had a signal."""
    set_process(recipe.model, seed=derived_seed(recipe.seed, "process"))
    inputs = read(recipe)
    loaded = load(inputs)
    recipe = loaded.recipe
    batch = batch_of(recipe)
    engines = open_engines(loaded.recipe, loaded.model, inputs.tokenizer)
    with ExitStack() as stack:
        stack.callback(engines.close)
        parts = assemble(inputs, loaded, engines).under(batch)
        stack.enter_context(startup_objects_frozen())
        run_folder, failures = create_run_folder(folder, "forecast"), Failures(inputs.rewards)
        view, signals = LiveView(2, title="forecast", silent=True), list[bool]()

        def block(parts: Parts) -> tuple[Sequence[Group], dict[str, float]]:
            journal = Journal(run_folder, view, (), parts.learner.policy.device)
            groups = _block(parts, journal)
            signals.append(not journal.no_signal)
            return groups, journal.clock.seconds()

        groups, _ = block(parts)
        sampled = [groups]
        larger = batch_of(recipe, batch.rollout.prompts_per_block, sum(lengths_of(groups)))
        if larger != batch:  # warm up its kernels and buffers too
            parts = parts.under(larger)
            block(parts)
        batches = list[dict[str, float]]()
        spent = 0.0
        while not batches or any(len(batches) < most and spent < limit for most, limit in ENOUGH):
            groups, seconds = block(parts)
            sampled.append(groups)
            batches.append({phase: value for phase, value in seconds.items() if phase in PHASES})
            spent += math.fsum(seconds.values())
        whole = recipe.rollout.prompts_per_block * recipe.rollout.completions_per_prompt
        refills = not recipe.rollout.engine.decodes_in_rounds
        rounds = times_as_long(lengths_of(groups), whole, max_rows=recipe.rollout.max_rows, refills=refills)
        # The last first: its counts are those of the verdicts beside them.
        said = [message for each in reversed(sampled) for message in failures.new(each)]
        return batches, groups, said, rounds, any(signals)


def _block(parts: Parts, journal: Journal) -> Sequence[Group]:
    """Sample a block and train on it; its scored groups."""
    learner = parts.learner
    with journal.phase("weights"):
        parts.engines.load_all(learner.weights(), learner.version)
    judged, block, _ = next_block(parts.collector, learner, journal)
    if block is None:
        raise UnavailableError(
            needed="a sampled token to measure with",
            given="completions without one",
            remedy="Check the stop strings and token ids of rollout.sampling.",
        )
    learner.begin(block)
    while learner.in_training:
        with journal.phase("training"):
            learner.step()
    return judged.sampled

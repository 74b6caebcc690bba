"""Run a recipe: start it, or continue it from a checkpoint."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn
from transformers import PreTrainedTokenizerBase

from logitless.distributed.arrangement import Arrangement
from logitless.distributed.failing import failing_together
from logitless.distributed.ranks import Ranks
from logitless.errors import LogitlessError
from logitless.head.contract import on_device
from logitless.models.value_head import save_value_head
from logitless.rollout.sampling_ranks import sample_for
from logitless.seeds import derived_seed
from logitless.train.assembly.algorithm import algorithm_of, value_head_of
from logitless.train.assembly.checks import check_before_start
from logitless.train.assembly.data import left_out_in_words
from logitless.train.assembly.engines import (
    Engines,
    engines_on,
    open_engines,
    repeating_engine,
    sampling_engine,
    sharing,
)
from logitless.train.assembly.model import after_warm_start
from logitless.train.assembly.policies import policy_of
from logitless.train.assembly.process import device_of, effects, set_process
from logitless.train.assembly.stages import Inputs, Loaded, assemble, described, load, read
from logitless.train.beginning import Beginning, Resume, beginning, check_beginning, run_folder
from logitless.train.callbacks import Callback, Callbacks
from logitless.train.collect.replay import LastWholeBlock, check_in_flight, check_same_end, last_whole, repeated_on
from logitless.train.interrupt import Interrupt
from logitless.train.learn.warm_start import warm_start
from logitless.train.long_lived import startup_objects_frozen
from logitless.train.loop import Loop
from logitless.train.optim.master_weights import drop_master_weights
from logitless.train.plan.placement import resolve_placement
from logitless.train.plan.run_plan import check_disk, disk
from logitless.train.recipe.config import Recipe
from logitless.train.recipe.model import ModelSection
from logitless.train.recipe.parallel import ParallelSection
from logitless.train.record.journal import Journal
from logitless.train.record.live_view import LiveView
from logitless.train.record.result import RunResult, exported_in_words
from logitless.train.record.run_folder import RunFolder
from logitless.train.record.wall_clock import UNNAMED, WallClock, compilations_counted
from logitless.train.record.writers import check_writers, open_writers
from logitless.train.report.page import write_report
from logitless.train.store.atomic import write_folder_atomically
from logitless.train.store.checkpoint import read_checkpoint
from logitless.train.store.training_state import restore_parameters

logger = logging.getLogger("logitless")

OpenEngines: TypeAlias = Callable[[Recipe, nn.Module, PreTrainedTokenizerBase], Engines]


def run_recipe(
    recipe: Recipe,
    *,
    numbered: bool = False,
    resume: Resume = False,
    fork: str | None = None,
    replay: Path | None = None,
    open_engines: OpenEngines = open_engines,
    callbacks: Sequence[Callback] = (),
    ranks: Ranks = Ranks.alone(),
    clock: WallClock | None = None,
) -> RunResult:
    """Run a recipe, or continue it.

    Args:
        numbered, resume, fork, replay, callbacks, clock: of ``logitless.train``.
        open_engines: makes the engines from resolved recipe, model and tokenizer; for engines that no recipe names.
        ranks: that train together. All call this with the same recipe; only the first writes.

    Raises:
        LogitlessError: recipe, data, model or machine do not allow the run, or it cannot go on.
    """
    clock = clock or WallClock()
    clock.outside("start")
    algorithm = algorithm_of(recipe)
    ended = check_beginning(recipe, algorithm, ranks, resume=resume, fork=fork, numbered=numbered)
    if ended is not None:
        Callbacks(callbacks, is_first=ranks.is_first).end(ended)
        return ended
    last = None
    if replay is not None:
        recipe = repeated_on(ranks.world, RunFolder(replay), recipe)
        last = last_whole(RunFolder(replay))
    elif recipe.rollout.in_flight is not None:
        check_in_flight(recipe)
    set_process(recipe.model, seed=derived_seed(recipe.seed, "process"))
    clock.outside("data")
    inputs = read(recipe, ranks, algorithm=algorithm)
    everyone, repeats = ranks, replay is not None and recipe.rollout.in_flight is not None
    division = Division.of(everyone, inputs.recipe.parallel)
    if division.training is None:
        sample_only(inputs, division, open_engines, clock, repeats=repeats)
        return RunResult.of_json(everyone.broadcast_object(None))
    inputs, placement = resolve_placement(inputs, division.training)
    ranks = division.training.arranged(inputs.arrangement)
    check_writers(recipe.writers)
    clock.outside("start")
    with ExitStack() as stack:
        stack.enter_context(_on_its_device(recipe.model, clock))
        begun = stack.enter_context(beginning(recipe, algorithm, ranks, resume=resume, fork=fork))
        with clock.phase("model"):
            loaded = load(inputs, ranks, weights=begun.warm_start)
        _check(inputs, loaded, ranks)
        folder, recipe = stack.enter_context(run_folder(begun, recipe, ranks, numbered=numbered))
        services = stack.enter_context(ExitStack())  # closed before a failed start's folder is removed
        with clock.phase("engine"):
            engines = open_engines(loaded.recipe, loaded.model, inputs.tokenizer)
            engines = engines_on(ranks, engines, loaded.recipe, division.exchange, repeats=repeats)
        services.callback(engines.close)
        begun.record(folder, recipe, inputs, ranks)
        journal = _journal(recipe, folder, begun, ranks, clock, stack, services)
        loaded = _warm_started(inputs, loaded, journal, ranks)
        parts = assemble(inputs, loaded, engines, ranks, folder=folder.path, replayed=replay)
        del loaded  # of a sharded model, whole weights must not stay in memory
        services.callback(parts.collector.close)
        journal.message(*left_out_in_words(inputs.data.counts), *placement)
        journal.message(*described(parts, ranks))
        called = callbacks if last is None else (*callbacks, last)
        loop = Loop(parts, journal, Callbacks(called, is_first=ranks.is_first))
        begun.restore(loop, recipe)
        loop.callbacks.start(folder.path, recipe)
        clock.outside(UNNAMED)
        result = _run(loop)
        _end(loop, result, inputs.tokenizer, services)
        if replay is not None and (result.complete or result.callback == LastWholeBlock.__name__):
            _check_repeated(loop, replay, last)
        if inputs.recipe.parallel.num_sampling:
            everyone.broadcast_object(result.as_json())
    loop.callbacks.end(result)
    return result


@dataclass(frozen=True)
class Division:
    """Which ranks of a run train, and which only sample: the last ones.

    Args:
        training: the ranks that train; None on one that only samples.
        exchange: the first of them with those that only sample; None on all others.
        shared: the ranks that share one copy of the sampling weights with this one; None: it has all, or trains.
    """

    training: Ranks | None
    exchange: Ranks | None = None
    shared: Ranks | None = None

    @classmethod
    def of(cls, ranks: Ranks, parallel: ParallelSection) -> "Division":
        """Of all ranks of a run, with a number for ``parallel.sampling``. A collective."""
        if not parallel.num_sampling:
            return cls(ranks)
        first, shards = ranks.world - parallel.num_sampling, parallel.shards_of_sampling
        sampling = range(first, ranks.world)
        training, exchange = ranks.subset(range(first)), ranks.subset([0, *sampling])
        return cls(training, exchange, sharing(ranks, sampling, shards) if shards > 1 else None)


def sample_only(
    inputs: Inputs, division: Division, open_engines: OpenEngines, clock: WallClock, *, repeats: bool = False
) -> None:
    """Sample until the run ends, on a rank that does nothing else. Signals are left to the ranks that train.

    Args:
        repeats: whether the run repeats one with in-flight updates.
    """
    rollout, exchange = inputs.recipe.rollout, division.exchange
    assert exchange is not None
    with _on_its_device(inputs.recipe.model, clock), ExitStack() as stack:
        if division.shared is not None:
            sharded = sampling_engine(inputs.recipe, inputs.tokenizer, division.shared)
            stack.callback(sharded.close)
            with Interrupt(logger.debug).heard():
                sample_for(exchange, sharded, sharded.copy)
            return
        loaded = load(replace(inputs, arrangement=Arrangement()))
        drop_master_weights(loaded.model.parameters())
        engines = open_engines(loaded.recipe, loaded.model, inputs.tokenizer)
        stack.callback(engines.close)
        engine = repeating_engine(engines.training, rollout) if repeats else engines.training
        with Interrupt(logger.debug).heard():
            sample_for(exchange, engine, loaded.model, in_flight=rollout.in_flight)


@contextmanager
def _on_its_device(section: ModelSection, clock: WallClock) -> Iterator[None]:
    """Inside, the model's device is the current one, and the clock counts compilations."""
    with on_device(device_of(section)), compilations_counted(clock):
        yield


def _check(inputs: Inputs, loaded: Loaded, ranks: Ranks) -> None:
    """Refuse data or a model that do not fit the recipe, and a run that the disk has no room for."""
    recipe, model = inputs.recipe, loaded.model
    check_before_start(recipe, inputs.data, model, inputs.tokenizer)
    with failing_together(ranks, "room on the disk"):
        if ranks.is_first:
            parts = disk(recipe, model, value_head_of(recipe, inputs.algorithm, model))
            check_disk(recipe, parts, Path(recipe.output) / recipe.name)


def _journal(
    recipe: Recipe,
    folder: RunFolder,
    begun: Beginning,
    ranks: Ranks,
    clock: WallClock,
    stack: ExitStack,
    services: ExitStack,
) -> Journal:
    """The journal, with the live view and the recipe's writers on the first rank.

    Args:
        stack: closes the view.
        services: closes the writers.
    """
    done, blocks = begun.progress, recipe.train.blocks
    sections, config = recipe.writers if ranks.is_first else (), recipe.model_dump(mode="json")
    view = LiveView(
        blocks,
        first_block=done["block"],
        title=recipe.name,
        silent=not ranks.is_first,
        shows_loss=recipe.imitates,
    )
    stack.enter_context(view)
    writers = open_writers(sections, folder=folder, config=config, first_step=done["step"])
    journal = Journal(folder, view, writers, device_of(recipe.model), ranks, clock)
    services.callback(journal.close_writers)
    return journal


def _warm_started(inputs: Inputs, loaded: Loaded, journal: Journal, ranks: Ranks) -> Loaded:
    """Do the recipe's warm start, save its result in the run's folder, and return the model with it.

    A resumed run was loaded with the result; nothing is done.
    """
    recipe, model, left = loaded.recipe, loaded.model, journal.folder.warm_start
    journal.message(*effects(recipe.model, device_of(recipe.model), model, layers=loaded.chosen.layers_line))
    if recipe.warm_start is None or not ranks.broadcast_object(not left.exists()):
        return loaded
    with journal.phase("warm start"):
        prompts, tokenizer, seed = inputs.data.warm_start, inputs.tokenizer, recipe.seed
        policy = policy_of(recipe, model)
        warm_start(policy, prompts, tokenizer, recipe.warm_start, recipe.train, seed=seed, tell=journal.message)
        if ranks.is_first:
            write_folder_atomically(left, lambda path: policy.save(path, tokenizer))
        ranks.barrier()
        return replace(loaded, model=after_warm_start(recipe.model, model, seed=seed))


def _run(loop: Loop) -> RunResult:
    """Run the loop; an error that ends it is in the summary."""
    journal = loop.journal
    try:
        with startup_objects_frozen():
            return loop.run()
    except LogitlessError as error:
        if loop.ranks.is_first:
            with suppress(OSError):  # a full disk may be the error
                summary = {**_end_of(loop, "error"), "error": str(error), **journal.summary}
                journal.folder.write_summary({**summary, "seconds": journal.clock.seconds()})
        raise


def _check_repeated(loop: Loop, replay: Path, last: LastWholeBlock | None) -> None:
    """Refuse a run that does not end as the one that it repeats, or as its last whole block. A collective."""
    with failing_together(loop.ranks, "the run that is repeated"):
        if loop.ranks.is_first:
            check_same_end(loop.journal.folder, RunFolder(replay), last)
    up_to = "" if last is None else f" up to block {last.block}, its last whole one"
    loop.journal.message(f"every token, metric and checkpoint is that of {replay}{up_to}, bit for bit")


def _end(loop: Loop, result: RunResult, tokenizer: PreTrainedTokenizerBase, services: ExitStack) -> None:
    """Export the weights of a complete run, close engines and writers, and write summary and report."""
    journal, ranks = loop.journal, loop.ranks
    summary = _end_of(loop, result.ended_by)
    if result.complete:
        with journal.phase("export"):
            summary["exported"] = _restore_best(loop)
            _export(loop, tokenizer)
        journal.message(exported_in_words(summary["exported"]))
    with journal.phase("closing"):
        services.close()
    journal.write_summary(summary)
    with journal.phase("report"):
        if ranks.is_first:
            write_report(journal.folder.path)
    journal.write_summary(summary)  # again: the report's seconds are known now


def _end_of(loop: Loop, ended_by: str) -> dict[str, Any]:
    """The beginning of a run's summary: what ended it, and how far it came."""
    progress = loop.learner.progress
    counts = {"blocks": progress.block, "steps": progress.step, "skipped_steps": progress.skipped}
    return {"name": loop.journal.folder.path.name, "ended_by": ended_by, **counts}


def _export(loop: Loop, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the trained weights in Hugging Face format, and a value head beside them. A collective."""
    policy, folder = loop.learner.policy, loop.journal.folder
    state = policy.whole_state(keep=loop.ranks.is_first)
    if loop.ranks.is_first:
        write_folder_atomically(folder.model, lambda path: policy.save(path, tokenizer, state))
        if policy.value_head is not None:
            save_value_head(policy.value_head, folder.value_head)


def _restore_best(loop: Loop) -> dict[str, Any]:
    """Load the weights of the best evaluation into the policy, if its checkpoint was kept. A collective.

    Returns:
        ``exported`` of the run's summary: which weights the policy has.
    """
    progress, best, path = loop.learner.progress, loop.best, loop.best_checkpoint
    if best is None or path is None:
        return {"which": "last", "block": progress.block, "step": progress.step}
    with failing_together(loop.ranks, "the checkpoint of the best evaluation"):
        policy = loop.learner.policy
        policy.release()  # back to shards, which checkpoints are read into
        restore_parameters(policy.held(), read_checkpoint(path).tensors)
        policy.round_master_weights()
    place = {"which": "best", "block": best.block, "step": best.step}
    return {**place, "metric": best.section.metric, "value": best.value}

"""Where a run begins: as a new run, from its own latest checkpoint (resumed), or as a fork of another run."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from logitless.distributed.failing import failing_together
from logitless.distributed.ranks import Ranks
from logitless.errors import ConfigurationError, LogitlessError
from logitless.objective.algorithm import Algorithm
from logitless.train.assembly.process import device_of
from logitless.train.assembly.stages import Inputs
from logitless.train.fork import Parent, carried, check_fork, parent_of
from logitless.train.loop import Loop
from logitless.train.recipe.changes import Change, as_json, check_resumed, in_words
from logitless.train.recipe.config import Recipe
from logitless.train.recipe.loading import dump_recipe, load_recipe
from logitless.train.record.provenance import digests_of_code, parent_in, record_start, warn_of_changed_code
from logitless.train.record.result import RunResult
from logitless.train.record.run_folder import RunFolder, create_run_folder, is_taken, taken
from logitless.train.store.checkpoint import (
    Checkpoint,
    checkpoints,
    clear_remains,
    damaged,
    folder_name,
    load_checkpoint,
)
from logitless.train.store.run_lock import locked

logger = logging.getLogger("logitless")

Resume: TypeAlias = bool | Literal["auto"]

_FOLDER = "the run's folder, which the first rank opens,"


@dataclass(frozen=True)
class Beginning:
    """Where a run begins.

    Args:
        folder: of a resumed run, locked by this process; None for a new run, whose folder does not exist yet.
        checkpoint: to start from; None for the recipe's weights.
        changed: keys of a resumed run that differ from the recipe it was started with.
        parent: of a fork; None for any other run.
    """

    folder: RunFolder | None
    checkpoint: Checkpoint | None = None
    changed: Sequence[Change] = ()
    parent: Parent | None = None

    @property
    def progress(self) -> dict[str, int]:
        """Blocks and steps done.

        Raises:
            CheckpointError: the checkpoint does not say.
        """
        if self.checkpoint is None:
            return {"block": 0, "step": 0}
        try:
            return {name: int(self.checkpoint.state["progress"][name]) for name in ("block", "step")}
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(self.checkpoint.folder, error) from error

    @property
    def warm_start(self) -> Path | None:
        """Folder with the result of the warm start that came before the checkpoint; None where there was none."""
        if self.checkpoint is None:
            return None
        run = self.folder if self.parent is None else self.parent.folder
        assert run is not None
        return run.warm_start if run.warm_start.exists() else None

    def record(self, folder: RunFolder, recipe: Recipe, inputs: Inputs, ranks: Ranks) -> None:
        """Write provenance and configuration of this start to the run's folder, and warn of code that has changed.

        Args:
            folder: of the run, locked by this process.
            recipe: unresolved, with the folder's name.
        """
        if not ranks.is_first:
            return
        code = digests_of_code(recipe)
        if self.checkpoint is not None:
            warn_of_changed_code(folder if self.parent is None else self.parent.folder, code)
        if self.checkpoint is None or self.parent is not None:
            folder.clear()
        record_start(
            folder,
            inputs.digests,
            device_of(recipe.model),
            code=code,
            step=self.progress["step"],
            changed=as_json(self.changed),
            parent=None if self.parent is None else self.parent.as_json(recipe),
        )
        folder.write_config(dump_recipe(recipe))
        if self.parent is not None:
            self.parent.copy_warm_start(folder)

    def restore(self, loop: Loop, recipe: Recipe) -> None:
        """Load the checkpoint into a new loop, and tell the user what has changed since it was written.

        Args:
            recipe: unresolved.
        """
        saved, lines = self.checkpoint, in_words(self.changed)
        if self.parent is not None:
            saved, of_fork = carried(self.parent, recipe, loop.parts.inputs.digests, loop.learner, loop.collector)
            lines = [*lines, *of_fork]
        loop.journal.message(*lines)
        if saved is not None:
            resized = any(change.key == "train.tokens_per_micro_batch" for change in self.changed)
            loop.restore(saved, resized=loop.ranks.broadcast_object(resized))
        elif self.folder is not None:
            loop.journal.message("no checkpoint yet: from the beginning")


@contextmanager
def beginning(
    recipe: Recipe, algorithm: Algorithm, ranks: Ranks, *, resume: Resume, fork: str | None
) -> Iterator[Beginning]:
    """Find where a run begins. A collective; inside, a resumed run is locked.

    Args:
        resume, fork: of ``run_recipe``.

    Raises:
        ConfigurationError: there is nothing to start from, the recipe does not fit it, or no block is left to train on.
        CheckpointError: the checkpoint cannot be read.
    """
    path = Path(recipe.output) / recipe.name
    if resume == "auto":
        resume = bool(ranks.broadcast_object(_is_begun(RunFolder(path), fork)))
    with ExitStack() as stack:
        if resume:
            found = _resumed(path, recipe, algorithm, ranks, stack)
        elif fork is not None:
            found = _forked(fork, recipe, algorithm, ranks)
        else:
            found = Beginning(None)
        _check_blocks_left(recipe, found)
        yield found


@contextmanager
def run_folder(begun: Beginning, recipe: Recipe, ranks: Ranks, *, numbered: bool) -> Iterator[tuple[RunFolder, Recipe]]:
    """The run's locked folder, and the recipe with its name. A collective.

    A new folder is removed if the start fails.
    """
    if begun.folder is not None:
        yield begun.folder, recipe
        return
    with failing_together(ranks, _FOLDER):
        made = create_run_folder(Path(recipe.output), recipe.name, unique=numbered) if ranks.is_first else None
    folder = RunFolder(Path(ranks.broadcast_object(None if made is None else str(made.path))))
    with ExitStack() as stack:
        if ranks.is_first:
            stack.enter_context(locked(folder.path))
            stack.push(folder.remove_after_failed_start)
        yield folder, recipe.model_copy(update={"name": folder.path.name})


def check_beginning(
    recipe: Recipe, algorithm: Algorithm, ranks: Ranks, *, resume: Resume, fork: str | None, numbered: bool
) -> RunResult | None:
    """Check where a run is to begin, before anything is loaded or locked. A collective.

    Returns:
        How the run ended, if it is to be resumed and is complete already; else None.

    Raises:
        ConfigurationError: the name is taken, there is no run to resume or fork, or the recipe does not fit it.
        CheckpointError: the checkpoint that is forked cannot be read.
    """
    _check_choice(numbered, resume, fork)
    folder, done = RunFolder(Path(recipe.output) / recipe.name), None
    with failing_together(ranks, _FOLDER):
        if ranks.is_first:
            if resume is True or (resume == "auto" and _is_begun(folder, fork)):
                done = _ended(folder, recipe, _changed(folder, recipe, algorithm))
            else:
                if fork is not None:
                    check_fork(parent_of(fork), recipe, algorithm)
                if not numbered and is_taken(folder):
                    raise taken(folder, forks=fork is not None)
    told = ranks.broadcast_object(None if done is None else done.as_json())
    return None if told is None else RunResult.of_json(told)


def _ended(folder: RunFolder, recipe: Recipe, changed: Sequence[Change]) -> RunResult | None:
    """How a complete run ended; None for one that has blocks left, or whose last files are not written or damaged."""
    if not (folder.report.is_file() and folder.model.is_dir()):
        return None
    summary, saved = folder.read_summary(), checkpoints(folder.checkpoints)
    block, ended_by = summary.get("blocks"), summary.get("ended_by")
    if block is None or not saved or saved[-1].name != folder_name(block, summary["steps"]):
        return None
    more = f"train.blocks above {block}"
    if ended_by == "early_stopping" and not changed:
        more = "another evaluation.stop, or none"
    elif ended_by != "blocks" or block != recipe.train.blocks:
        return None
    logger.info("%s is complete, after block %d of %d", folder.path, block, recipe.train.blocks)
    logger.info("nothing is left to do; to train on, set %s and resume again", more)
    return RunResult(folder, ended_by)


def _check_choice(numbered: bool, resume: Resume, fork: str | None) -> None:
    """Refuse options that contradict each other."""
    if resume not in (False, True, "auto"):
        raise ConfigurationError(
            needed="resume of True, False or 'auto'", given=repr(resume), remedy="'auto' resumes a run if there is one."
        )
    if numbered and resume:
        given = "numbered: a new name where this one is taken, beside resume: the run of this name"
    elif fork is not None and resume is True:
        given = "fork: a new run, beside resume: one that is there"
    else:
        return
    raise ConfigurationError(
        needed="one way to begin",
        given=given,
        remedy="Leave one of them out. A fork goes on by --resume alone; --resume-or-start beside --fork forks "
        "where there is no run yet.",
    )


def _resumed(path: Path, recipe: Recipe, algorithm: Algorithm, ranks: Ranks, stack: ExitStack) -> Beginning:
    """A resumed run; the stack holds its lock."""
    changed: list[Change] = []
    folder = RunFolder(path)
    with failing_together(ranks, _FOLDER):
        if ranks.is_first:
            _check_is_begun(folder)
            stack.enter_context(locked(path))
            changed = _changed(folder, recipe, algorithm)
            clear_remains(folder.checkpoints)
    if ranks.broadcast_object(not folder.is_failed_start() or bool(checkpoints(folder.checkpoints))):
        return Beginning(folder, load_checkpoint(folder.checkpoints), changed)
    with failing_together(ranks, _FOLDER):
        if ranks.is_first:
            _check_no_fork(folder)
    return Beginning(folder, None, changed)


def _changed(folder: RunFolder, recipe: Recipe, algorithm: Algorithm) -> list[Change]:
    """Keys that differ from the recipe that a run was started with; refuses those that a resumed run cannot change."""

    def can_fork() -> bool:
        try:
            check_fork(parent_of(str(folder.path)), recipe, algorithm)
        except LogitlessError:
            return False
        return True

    _check_is_begun(folder)
    return check_resumed(load_recipe(folder.config), recipe, algorithm, can_fork=can_fork)


def _check_is_begun(folder: RunFolder) -> None:
    """Refuse to resume a run that was never started."""
    if not folder.config.is_file():
        raise ConfigurationError(
            needed=f"a run to resume at {folder.path.absolute()}",
            given="a folder without a run" if folder.path.is_dir() else "none",
            remedy="Leave out --resume to start it (--resume-or-start does either), or set name and output to a run's.",
        )


def _forked(fork: str, recipe: Recipe, algorithm: Algorithm, ranks: Ranks) -> Beginning:
    """A new run from a checkpoint of another one."""
    with failing_together(ranks, "the run that is forked"):
        parent = parent_of(fork)
        check_fork(parent, recipe, algorithm)
    named = {"checkpoint that is forked": str(parent.checkpoint.folder)}
    ranks.check_same(named, remedy="Name the checkpoint: the run that is forked has written another one.")
    return Beginning(None, parent.checkpoint, parent=parent)


def _is_begun(folder: RunFolder, fork: str | None) -> bool:
    """Whether there is a run to resume. A fork without a checkpoint of its own is started again."""
    return folder.config.exists() and (fork is None or bool(checkpoints(folder.checkpoints)))


def _check_blocks_left(recipe: Recipe, found: Beginning) -> None:
    """Refuse a run whose checkpoint is beyond ``train.blocks``, and a fork that has no block left."""
    done, is_fork = found.progress["block"], found.parent is not None
    least = done + is_fork
    if recipe.train.blocks < least:
        raise ConfigurationError(
            needed=f"train.blocks of at least {least}: those of a checkpoint count",
            given=f"{recipe.train.blocks}, and the checkpoint is from after block {done}",
            remedy="Raise train.blocks" + (", or fork an earlier checkpoint." if is_fork else "."),
        )


def _check_no_fork(folder: RunFolder) -> None:
    """Refuse to resume a fork without a checkpoint: it would start from the recipe's weights, not its parent's."""
    parent = parent_in(folder)
    if parent is not None:
        named = f"{parent['run']}:{parent['checkpoint']}"
        raise ConfigurationError(
            needed=f"a checkpoint of the fork in {folder.path}",
            given="none: it was stopped while it started",
            remedy=f"Start it again, without --resume: --fork {named}",
        )

"""The state of a run as a whole: what its parts hold, into one checkpoint and out of it again."""

from collections.abc import Iterable, Mapping
from typing import Any

from logitless.train.collect.collector import Collector
from logitless.train.learn.learner import Learner
from logitless.train.record.journal import Journal
from logitless.train.store import checkpoint as checkpoints
from logitless.train.store.shared_checkpoint import SharedSaver


def save_run(
    saver: checkpoints.BackgroundSaver | SharedSaver,
    collector: Collector,
    learner: Learner,
    journal: Journal,
    of_loop: Mapping[str, Any],
    best: str | None = None,
) -> None:
    """Begin to write a checkpoint of everything; ``saver.wait`` comes before the next optimizer step.

    Args:
        saver: of the run.
        collector, learner, journal: parts of the run.
        of_loop: what the loop itself has to remember, as JSON.
        best: name of a checkpoint that stays, however many come after it.
    """
    saver.save(
        block=learner.progress.block,
        step=learner.progress.step,
        tensors=learner.tensors() | checkpoints.random_tensors(),
        state={
            **learner.state_dict(),
            "collector": collector.state_dict(),
            "journal": journal.state_dict(),
            "loop": dict(of_loop),
            "random": checkpoints.random_state(),
        },
        best=best,
    )


def halvings(records: Iterable[Mapping[str, Any]]) -> list[int]:
    """Steps at which a run halved its micro-batches, those after its checkpoint included, for it to repeat them.

    A count that falls is that of a run that went on with other micro-batches: what it had halved before is over.

    Args:
        records: of ``metrics.jsonl``, before what comes after the checkpoint is removed.

    Example:
        >>> halvings([{"step": 1, "optimizer/halvings": 0}, {"step": 2, "optimizer/halvings": 2}, {"step": 3}])
        [1, 1]
        >>> halvings([{"step": 2, "optimizer/halvings": 2}, {"step": 3, "optimizer/halvings": 0}])
        []
    """
    found: list[int] = []
    for record in records:
        if "optimizer/halvings" in record:
            count = int(record["optimizer/halvings"])
            found = [] if count < len(found) else found + [record["step"] - 1] * (count - len(found))
    return found


def restore_run(
    collector: Collector, learner: Learner, journal: Journal, saved: checkpoints.Checkpoint
) -> Mapping[str, Any]:
    """Put everything back; the metrics, whose later lines are removed, come last.

    Args:
        collector, learner, journal: parts of the run.
        saved: of ``save_run``.

    Returns:
        What the loop had to remember.

    Raises:
        CheckpointError: the checkpoint is damaged or of another model; nothing on the disk was changed.
    """
    try:
        of_loop = dict(saved.state["loop"])
        learner.load_state(saved.tensors, saved.state)
        learner.progress.halvings = halvings(journal.folder.read_metrics())
        collector.load_state_dict(saved.state["collector"])
        checkpoints.restore_random(saved.tensors, saved.state["random"])
        journal.load_state_dict(saved.state["journal"])
    except (KeyError, TypeError, AttributeError) as error:
        raise checkpoints.damaged(saved.folder, error) from error
    return of_loop

"""The state of a whole run, from its parts into one checkpoint and back."""

from collections.abc import Iterable, Mapping
from typing import Any

from logitless.train.collect.collector import Collector
from logitless.train.learn.learner import Learner
from logitless.train.record.journal import Journal
from logitless.train.store.checkpoint import (
    BackgroundSaver,
    Checkpoint,
    damaged,
    random_state,
    random_tensors,
    restore_random,
)


def save_run(
    saver: BackgroundSaver,
    collector: Collector,
    learner: Learner,
    journal: Journal,
    of_loop: Mapping[str, Any],
    best: str | None,
) -> None:
    """Begin to write a checkpoint of everything; the caller calls ``saver.wait`` before the next optimizer step.

    Args:
        collector, learner, journal: parts of the run.
        of_loop: state of the loop itself, as JSON.
        best: name of a checkpoint that is kept, however many come after it.
    """
    done, in_training = learner.progress.block, learner.in_training
    saver.save(
        block=done,
        step=learner.progress.step,
        tensors=learner.tensors() | random_tensors(),
        state={
            **learner.state_dict(),
            "collector": collector.state_dict(),
            "journal": journal.state_dict(),
            "loop": dict(of_loop),
            "random": random_state(),
        },
        best=best,
        settle=lambda: collector.settle(done, in_training=in_training),
    )


def halvings(before: Iterable[int], records: Iterable[Mapping[str, Any]]) -> list[int]:
    """Steps at which a run halved its micro-batches, for a resumed run to halve them at the same steps.

    Where the count falls, the run was resumed with another micro-batch size, and earlier halvings do not count.

    Args:
        before: those of the checkpoint.
        records: lines of ``metrics.jsonl`` after the checkpoint.

    Example:
        >>> halvings([1], [{"step": 2, "optimizer/halvings": 1}, {"step": 3, "optimizer/halvings": 3}, {"step": 3}])
        [1, 2, 2]
        >>> halvings([1], [{"step": 3, "optimizer/halvings": 0}])
        []
    """
    found = list(before)
    for record in records:
        if "optimizer/halvings" in record:
            count = int(record["optimizer/halvings"])
            found = [] if count < len(found) else found + [record["step"] - 1] * (count - len(found))
    return found


def restore_run(
    collector: Collector, learner: Learner, journal: Journal, saved: Checkpoint, *, resized: bool
) -> Mapping[str, Any]:
    """Put everything back. Lines of metrics after the checkpoint are removed.

    Args:
        collector, learner, journal: parts of the run.
        saved: of ``save_run``.
        resized: micro-batches have another size than before, so that no halving is repeated.

    Returns:
        The state of the loop.

    Raises:
        CheckpointError: the checkpoint is damaged or of another model; nothing on the disk was changed.
    """
    try:
        of_loop, progress = dict(saved.state["loop"]), saved.state["progress"]
        later = (record for record in journal.folder.read_metrics() if record["step"] > progress["step"])
        halved = [] if resized else halvings(progress.get("halvings", ()), later)
        learner.load_state(saved.tensors, {**saved.state, "progress": {**progress, "halvings": halved}})
        collector.load_state_dict(saved.state["collector"])
        restore_random(saved.tensors, saved.state["random"])
        journal.load_state_dict(saved.state["journal"])  # last: it changes metrics.jsonl
    except (KeyError, TypeError, AttributeError) as error:
        raise damaged(saved.folder, error) from error
    return of_loop

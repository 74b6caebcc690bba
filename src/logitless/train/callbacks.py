"""What a run tells code of yours while it goes on, and how that code ends it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from logitless.train.recipe.config import Recipe
    from logitless.train.record.result import RunResult


class Callback:
    """Extend it and write the methods that you need; ``logitless.train(recipe, callbacks=[Yours()])`` calls them.

    Under several ranks the first one alone calls them. ``on_block``, ``on_evaluation`` and ``on_checkpoint`` may return
    True, which stops the run as a signal does: after the step under way and with a checkpoint to go on from. An
    exception ends the run as any other error.

    Example:
        >>> class Until(Callback):
        ...     def on_evaluation(self, metrics):
        ...         return metrics["evaluation/accuracy"] > 0.9
        >>> Until().on_evaluation({"evaluation/accuracy": 0.95})
        True
    """

    def on_start(self, folder: Path, recipe: "Recipe") -> None:
        """The run is about to train.

        Args:
            folder: of the run.
            recipe: resolved.
        """

    def on_block(self, metrics: Mapping[str, Any]) -> bool | None:
        """A block was trained on and its weights are with the engines.

        Args:
            metrics: of its steps, the last value of each (docs/metrics.md); with those of an evaluation that was due.
        """

    def on_evaluation(self, metrics: Mapping[str, Any]) -> bool | None:
        """Held-out prompts were evaluated, also before the first block.

        Args:
            metrics: of the sets that were due, with ``step`` and ``block``.
        """

    def on_checkpoint(self, path: Path) -> bool | None:
        """A checkpoint is in its place. It may be removed once later ones are there (``checkpoint.keep``).

        Args:
            path: its folder.
        """

    def on_end(self, result: "RunResult") -> None:
        """The run has ended, and not with an error; its summary and its report are written.

        Args:
            result: what ``logitless.train`` returns.
        """


class Callbacks:
    """Every callback of a run; they are called on the first rank and nowhere else.

    Args:
        each: in the order in which they are called.
        is_first: whether this is the first rank.

    Attributes:
        stopped_by: name of the class of the first one that asked for a stop; None where none has.

    Example:
        >>> class Once(Callback):
        ...     def on_block(self, metrics):
        ...         return metrics["block"] == 2
        >>> callbacks = Callbacks([Once()])
        >>> for block in (1, 2):
        ...     callbacks.block({"block": block})
        >>> callbacks.stopped_by
        'Once'
    """

    def __init__(self, each: Sequence[Callback] = (), *, is_first: bool = True) -> None:
        self._each = tuple(each) if is_first else ()
        self.stopped_by: str | None = None

    def start(self, folder: Path, recipe: "Recipe") -> None:
        """Call ``on_start``."""
        for callback in self._each:
            callback.on_start(folder, recipe)

    def block(self, metrics: Mapping[str, Any]) -> None:
        """Call ``on_block``."""
        for callback in self._each:
            self._note(callback, callback.on_block(dict(metrics)))

    def evaluation(self, metrics: Mapping[str, Any]) -> None:
        """Call ``on_evaluation``."""
        for callback in self._each:
            self._note(callback, callback.on_evaluation(dict(metrics)))

    def checkpoint(self, path: Path) -> None:
        """Call ``on_checkpoint``."""
        for callback in self._each:
            self._note(callback, callback.on_checkpoint(path))

    def end(self, result: "RunResult") -> None:
        """Call ``on_end``."""
        for callback in self._each:
            callback.on_end(result)

    def _note(self, callback: Callback, stop: bool | None) -> None:
        if stop and self.stopped_by is None:
            self.stopped_by = type(callback).__name__

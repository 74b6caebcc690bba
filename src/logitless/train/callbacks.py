"""Callbacks: code of yours that a run calls as it goes on, and that may stop it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from logitless.errors import ConfigurationError

if TYPE_CHECKING:
    from logitless.train.recipe.config import Recipe
    from logitless.train.record.result import RunResult


class Callback:
    """Base class: override the methods that you need, and pass it to ``logitless.train(recipe, callbacks=[Yours()])``.

    Of several ranks only the first calls them. ``on_block``, ``on_evaluation`` and ``on_checkpoint`` may return True to
    stop the run: after the current step, with a checkpoint to resume from. An exception ends the run with an error.

    Example:
        >>> class Until(Callback):
        ...     def on_evaluation(self, metrics):
        ...         return metrics["evaluation/accuracy"] > 0.9
        >>> Until().on_evaluation({"evaluation/accuracy": 0.95})
        True
    """

    def on_start(self, path: Path, recipe: "Recipe") -> None:
        """The run is about to train.

        Args:
            path: the run's folder.
            recipe: resolved.
        """

    def on_block(self, metrics: Mapping[str, Any]) -> bool | None:
        """A block was trained on, and the engines have the new weights.

        Args:
            metrics: last value of each metric of the block (docs/metrics.md), an evaluation that was due included.
        """

    def on_evaluation(self, metrics: Mapping[str, Any]) -> bool | None:
        """Held-out prompts were evaluated; the first time before any training.

        Args:
            metrics: of the sets that were due, with ``step`` and ``block``.
        """

    def on_checkpoint(self, path: Path) -> bool | None:
        """A checkpoint was written. It is removed when there are enough later ones (``checkpoint.keep``).

        Args:
            path: its folder.
        """

    def on_end(self, result: "RunResult") -> None:
        """The run has ended without an error; its summary and its report are written.

        Args:
            result: what ``logitless.train`` returns.
        """


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Refuse anything but a sequence of callbacks.

    Raises:
        ConfigurationError: it is not, or has something else in it, such as the class of a callback.

    Example:
        >>> check_callbacks([Callback])
        Traceback (most recent call last):
        logitless.errors.ConfigurationError: needed callbacks as a list of instances of logitless.Callback; given ...
    """
    if not isinstance(callbacks, Sequence) or not all(isinstance(each, Callback) for each in callbacks):
        raise ConfigurationError(
            needed="callbacks as a list of instances of logitless.Callback",
            given=repr(callbacks),
            remedy="Derive a class from logitless.Callback, and pass callbacks=[Yours()].",
        )


class Callbacks:
    """The callbacks of a run; only the first rank calls them.

    Attributes:
        stopped_by: class name of the first callback that asked for a stop; None if none did.

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
        self._ask(lambda callback: callback.on_block(dict(metrics)))

    def evaluation(self, metrics: Mapping[str, Any]) -> None:
        """Call ``on_evaluation``."""
        self._ask(lambda callback: callback.on_evaluation(dict(metrics)))

    def checkpoint(self, path: Path) -> None:
        """Call ``on_checkpoint``."""
        self._ask(lambda callback: callback.on_checkpoint(path))

    def end(self, result: "RunResult") -> None:
        """Call ``on_end``."""
        for callback in self._each:
            callback.on_end(result)

    def _ask(self, ask: Callable[[Callback], bool | None]) -> None:
        for callback in self._each:
            if ask(callback) and self.stopped_by is None:
                self.stopped_by = type(callback).__name__

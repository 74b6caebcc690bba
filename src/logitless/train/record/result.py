"""The result of a run: whether it is complete, what ended it, and its last metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Any, Literal

from logitless.train.record.run_folder import RunFolder


@dataclass(frozen=True)
class RunResult:
    """The end of a run that did not end with an error; the same on every rank.

    Args:
        ended_by: ``blocks``: trained to the last block; ``early_stopping``: no better evaluation came
            (``evaluation.stop``); ``unscored``: no completion was ever scored, which is a failure; ``signal`` or
            ``callback``: stopped by one of these.
        signal: that stopped it; None for any other end.
        callback: class name of the callback that stopped it; None for any other end.

    Example:
        >>> from pathlib import Path
        >>> result = RunResult(RunFolder(Path("runs/toy")), "signal", Signals.SIGTERM)
        >>> result.complete, result.exit_status, RunResult.of_json(result.as_json()) == result
        (False, 143, True)
    """

    folder: RunFolder
    ended_by: Literal["blocks", "early_stopping", "unscored", "signal", "callback"]
    signal: Signals | None = None
    callback: str | None = None

    def as_json(self) -> list[Any]:
        """For ``of_json`` on another rank."""
        return [str(self.folder.path), self.ended_by, self.signal, self.callback]

    @classmethod
    def of_json(cls, fields: Sequence[Any]) -> "RunResult":
        """The result of ``as_json``."""
        path, ended_by, number, callback = fields
        return cls(RunFolder(Path(path)), ended_by, None if number is None else Signals(number), callback)

    @property
    def complete(self) -> bool:
        """Whether training is finished and ``model/`` is written; otherwise the run can be resumed."""
        return self.ended_by in COMPLETE

    @property
    def exit_status(self) -> int:
        """Exit status for a process: 0; 1 if nothing was scored; 128 plus the number of a signal, as shells do."""
        return int(self.ended_by == "unscored") if self.signal is None else 128 + self.signal

    @property
    def metrics(self) -> Mapping[str, Any]:
        """The last value of every metric (docs/metrics.md), read from the run's folder."""
        return {name: value for record in self.folder.read_metrics() for name, value in record.items()}

    @property
    def words(self) -> str:
        """What ended it, for people."""
        if self.signal is not None:
            return f"stopped by {self.signal.name} and saved"
        if self.callback is not None:
            return f"stopped by {self.callback} and saved"
        return ENDS[self.ended_by]


COMPLETE = ("blocks", "early_stopping")
"""``ended_by`` of a run that is."""

ENDS = {
    "blocks": "finished",
    "early_stopping": "finished by early stopping",
    "unscored": "failed, for no completion was scored",
    "error": "failed",
    "signal": "stopped by a signal",
    "callback": "stopped by a callback",
}
"""``ended_by`` in words."""


def exported_in_words(exported: Mapping[str, Any]) -> str:
    """Which weights are in ``model/`` of a finished run.

    Args:
        exported: entry of ``summary.json``.

    Example:
        >>> exported_in_words({"which": "last", "block": 3, "step": 12})
        'model/ has the last weights, after block 3 (step 12)'
    """
    place = f"after block {exported['block']} (step {exported['step']})"
    if exported["which"] == "last":
        return f"model/ has the last weights, {place}"
    return f"model/ has the weights of the best {exported['metric']}, {exported['value']:.4g}, {place}"

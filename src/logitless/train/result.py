"""What came of a run: whether it is complete, and what stopped it where it is not."""

from dataclasses import dataclass
from signal import Signals

from logitless.train.run_folder import RunFolder


@dataclass(frozen=True)
class RunResult:
    """The end of a run that no error ended; the same on every rank.

    Args:
        folder: of the run.
        complete: whether it was trained to its end and ``model/`` is written. Otherwise a checkpoint holds everything,
            from which it can be resumed.
        stopped_by: the signal that stopped it; None where it is complete.

    Example:
        >>> from pathlib import Path
        >>> RunResult(RunFolder(Path("runs/toy")), complete=False, stopped_by=Signals.SIGTERM).exit_status
        143
    """

    folder: RunFolder
    complete: bool
    stopped_by: Signals | None = None

    @property
    def exit_status(self) -> int:
        """Of a process that did nothing else: 0, or 128 plus the signal's number, as shells have it for a process that
        a signal ended."""
        return 0 if self.stopped_by is None else 128 + self.stopped_by

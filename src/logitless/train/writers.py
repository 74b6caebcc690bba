"""Where metrics go besides the run folder: TensorBoard, Weights & Biases, trackio.

A writer only forwards: it gets the records that ``metrics.jsonl`` gets, after they are on disk.
"""

import importlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol, runtime_checkable

from logitless.errors import UnavailableError
from logitless.train.metrics import Record

WriterName = Literal["tensorboard", "wandb", "trackio"]


@runtime_checkable
class Writer(Protocol):
    """Takes the record of each step until it is closed."""

    def write(self, record: Record) -> None:
        """Forward one record; it has a ``step``."""

    def close(self) -> None:
        """Deliver what is still on its way."""


class TensorBoardWriter:
    """Scalars in event files under ``folder``, read by ``tensorboard --logdir runs``.

    Args:
        folder: of the event files.
        first_step: steps done before a resume; TensorBoard then hides what an interrupted run wrote after it.

    Example:
        >>> import tempfile
        >>> writer = TensorBoardWriter(Path(tempfile.mkdtemp()))
        >>> writer.write({"step": 1, "reward/mean": 0.5})
        >>> writer.close()
    """

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._events = SummaryWriter(str(folder), purge_step=first_step + 1 if first_step else None)

    def write(self, record: Record) -> None:
        """Add one scalar a metric; null and non-finite numbers have no point."""
        for name, value in _numbers(record).items():
            self._events.add_scalar(name, value, int(record["step"] or 0))

    def close(self) -> None:
        """Flush and close the event file."""
        self._events.close()


class ServiceWriter:
    """Scalars to Weights & Biases or trackio, which share one interface.

    Args:
        service: which of the two.
        run_name: name of the run there.
        config: the resolved recipe as plain values.
        folder: the run folder; Weights & Biases keeps its local files in it.

    Raises:
        UnavailableError: the package is not installed.
    """

    def __init__(
        self, service: Literal["wandb", "trackio"], *, run_name: str, config: Mapping[str, Any], folder: Path
    ) -> None:
        module = _imported(service)
        place = {"dir": str(folder)} if service == "wandb" else {}
        self._module = module
        module.init(project="logitless", name=run_name, config=dict(config), **place)

    def write(self, record: Record) -> None:
        """Log one record at its step."""
        self._module.log(_numbers(record), step=int(record["step"] or 0))

    def close(self) -> None:
        """Finish the run there."""
        self._module.finish()


def open_writers(
    names: Sequence[WriterName], *, folder: Path, run_name: str, config: Mapping[str, Any], first_step: int = 0
) -> tuple[Writer, ...]:
    """The writers of a recipe, in its order.

    Args:
        names: ``tensorboard``, ``wandb``, ``trackio``.
        folder: the run folder; event files go to its ``tensorboard``.
        run_name: name of the run.
        config: the resolved recipe as plain values.
        first_step: steps done before a resume.

    Raises:
        UnavailableError: a named package is not installed; nothing was started.

    Example:
        >>> import tempfile
        >>> (writer,) = open_writers(["tensorboard"], folder=Path(tempfile.mkdtemp()), run_name="toy", config={})
        >>> writer.close()
    """
    check_writers(names)
    return tuple(
        TensorBoardWriter(folder / "tensorboard", first_step)
        if name == "tensorboard"
        else ServiceWriter(name, run_name=run_name, config=config, folder=folder)
        for name in names
    )


def check_writers(names: Sequence[WriterName]) -> None:
    """Refuse writers whose package is absent.

    Raises:
        UnavailableError: a named package is not installed.

    Example:
        >>> check_writers(["tensorboard"])
    """
    for name in names:
        if name != "tensorboard":
            _imported(name)


def _imported(package: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UnavailableError(
            needed=f"the package {package}, named in `writers`",
            given="an environment without it",
            remedy=f"Run pip install {package}, or leave it out of `writers`.",
        ) from error


def _numbers(record: Record) -> dict[str, float | int]:
    """The metrics that are finite, without the step itself."""
    return {n: v for n, v in record.items() if n != "step" and v is not None and math.isfinite(v)}

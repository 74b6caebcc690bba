"""Writers of metrics to TensorBoard, Weights & Biases, trackio and MLflow.

A writer gets the records of ``metrics.jsonl``, after they are on disk.
"""

import importlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from logitless.errors import UnavailableError
from logitless.train.recipe.writers import MlflowSection, TrackioSection, WandbSection, WriterSection
from logitless.train.record.metrics import Record
from logitless.train.record.run_folder import RunFolder
from logitless.train.store.atomic import write_atomically

_DISTRIBUTIONS = {"mlflow": "'logitless[mlflow]'"}

_REMEDIES = {
    "wandb": "Run `wandb login` or set WANDB_API_KEY, write `mode: offline`, or leave it out of `writers`.",
    "trackio": "Check `space_id` and the hub's login, or leave it out of `writers`.",
    "mlflow": "Name a server that runs in `tracking_uri` (or MLFLOW_TRACKING_URI); a database (`sqlite:///...`) needs "
    "the whole package: pip install mlflow.",
}


@runtime_checkable
class Writer(Protocol):
    """Sends the metrics of each step somewhere."""

    def write(self, record: Record) -> None:
        """Send a record; it has a ``step``."""

    def close(self) -> None:
        """Send what is still buffered."""


class TensorBoardWriter:
    """Scalars in event files under ``folder``, read by ``tensorboard --logdir runs``.

    Args:
        first_step: steps done before a resume; TensorBoard hides what an interrupted run wrote for later steps.
    """

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        self._folder, self._first_step = folder, first_step
        self._waiting: list[Record] = []

    def write(self, record: Record) -> None:
        """Add a scalar for each metric that is finite, to the event file once a step is done."""
        self._waiting.append(record)
        if (record["step"] or 0) > self._first_step:  # importing TensorBoard would delay the first step
            self._add()

    def close(self) -> None:
        """Flush and close the event file."""
        self._add()
        self._events.close()

    @cached_property
    def _events(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self._folder), purge_step=self._first_step + 1 if self._first_step else None)

    def _add(self) -> None:
        for record in self._waiting:
            for name, value in _numbers(record).items():
                self._events.add_scalar(name, value, int(record["step"] or 0))
        self._waiting.clear()


class ServiceWriter:
    """Scalars to Weights & Biases or trackio, which share one interface.

    Args:
        folder: the run folder; Weights & Biases keeps its local files in it.
        run_id: of the run at the service, for a resume; None for a new one.

    Attributes:
        run_id: for a later resume: the id at Weights & Biases, the name at trackio.

    Raises:
        UnavailableError: the package is not installed, or its service does not begin the run.
    """

    def __init__(
        self,
        section: WandbSection | TrackioSection,
        *,
        run_name: str,
        config: Mapping[str, Any],
        folder: Path,
        run_id: str | None = None,
    ) -> None:
        self._module = _imported(section.name)
        options = section.model_dump(mode="json", exclude={"name", "run_name", "run_id"}, exclude_none=True)
        options |= section.begin(run_name, run_id, folder)
        with _beginning(section.name):
            run = self._module.init(config=dict(config), **options)
        self.run_id: str = getattr(run, section.identified_by)

    def write(self, record: Record) -> None:
        """Log one record at its step."""
        self._module.log(_numbers(record), step=int(record["step"] or 0))

    def close(self) -> None:
        """Finish the run there."""
        self._module.finish()


class MlflowWriter:
    """Scalars to MLflow, and the recipe as parameters and as a file.

    Args:
        run_id: of the run at MLflow, for a resume; None for a new one.

    Attributes:
        run_id: for a later resume.

    Raises:
        UnavailableError: the package is not installed, or no run can begin at the tracking URI.
    """

    def __init__(
        self, section: MlflowSection, *, run_name: str, config: Mapping[str, Any], run_id: str | None = None
    ) -> None:
        self._module = module = _imported("mlflow")
        known = section.run_id or run_id
        with _beginning("mlflow"), _few_retries(), ExitStack() as failed:
            if section.tracking_uri is not None:
                module.set_tracking_uri(section.tracking_uri)
            if known is None:
                module.set_experiment(section.experiment)
            failed.callback(module.end_run, "FAILED")
            run = module.start_run(run_id=known, run_name=section.run_name or run_name, tags=section.tags or None)
            if known is None:  # MLflow does not allow to change parameters
                parameters = list(_flat(config))
                for at in range(0, len(parameters), 100):  # MLflow's limit for one call
                    module.log_params(dict(parameters[at : at + 100]))
            module.log_dict(dict(config), "recipe.json")
            failed.pop_all()
        self.run_id: str = run.info.run_id

    def write(self, record: Record) -> None:
        """Log one record at its step; characters that MLflow refuses in names become `_`."""
        numbers = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in _numbers(record).items()}
        self._module.log_metrics(numbers, step=int(record["step"] or 0))

    def close(self) -> None:
        """Finish the run there."""
        self._module.end_run()


def open_writers(
    sections: Sequence[WriterSection], *, folder: RunFolder, config: Mapping[str, Any], first_step: int
) -> tuple[Writer, ...]:
    """Open the writers of a recipe, in its order. Ids of runs at services are kept in the run folder for a resume.

    Raises:
        UnavailableError: a named package is not installed (nothing was started), or a service does not begin a run.
    """
    check_writers(sections)
    kept: dict[str, str] = json.loads(folder.writers.read_text()) if folder.writers.exists() else {}
    writers: list[Writer] = []
    for section in sections:
        options: dict[str, Any] = {"run_name": folder.path.name, "config": config, "run_id": kept.get(section.name)}
        if section.name == "tensorboard":
            writers.append(TensorBoardWriter(folder.tensorboard, first_step))
            continue
        if section.name == "mlflow":
            service: MlflowWriter | ServiceWriter = MlflowWriter(section, **options)
        else:
            service = ServiceWriter(section, folder=folder.path, **options)
        kept[section.name] = service.run_id
        write_atomically(folder.writers, json.dumps(kept).encode())
        writers.append(service)
    return tuple(writers)


def check_writers(sections: Sequence[WriterSection]) -> None:
    """Refuse writers whose package is absent.

    Raises:
        UnavailableError: a named package is not installed.
    """
    for section in sections:
        if section.name != "tensorboard":
            _imported(section.name)


def _flat(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Path and value of each entry of nested mappings, as texts within MLflow's limit of length."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", str(value)[:250]


def _imported(package: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UnavailableError(
            needed=f"the package {package}, named in `writers`",
            given="an environment without it",
            remedy=f"Run pip install {_DISTRIBUTIONS.get(package, package)}, or leave it out of `writers`.",
        ) from error


@contextmanager
def _beginning(service: str) -> Iterator[None]:
    """What a service says when it does not begin a run, as an error that says what to do."""
    try:
        yield
    except Exception as error:
        raise UnavailableError(
            needed=f"a run at {service}, named in `writers`",
            given=f"{type(error).__name__}: {error}",
            remedy=_REMEDIES[service],
        ) from error


@contextmanager
def _few_retries() -> Iterator[None]:
    """Inside, MLflow says within seconds that a server cannot be reached; its own seven retries take minutes."""
    name = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
    if name in os.environ:
        yield
        return
    os.environ[name] = "2"
    try:
        yield
    finally:
        del os.environ[name]


def _numbers(record: Record) -> dict[str, float | int]:
    """The finite metrics, without ``step``."""
    return {n: v for n, v in record.items() if n != "step" and v is not None and math.isfinite(v)}

"""What the service keeps: sessions, their models and samplers, and requests with the futures of their answers."""

import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from logitless.tinker.adapter import Adapter, Snapshot
from logitless.tinker.samples import Request
from logitless.tinker.store import Checkpoint

Answer: TypeAlias = bytes | dict[str, Any]
"""Protobuf, or what becomes JSON."""


class FailedError(Exception):
    """Why a future has no result.

    Args:
        message: in words.
        category: ``user`` if the request was wrong, else ``server``.
    """

    def __init__(self, message: str, category: str) -> None:
        super().__init__(message)
        self.category = category


@dataclass
class Job:
    """A request that waits, with the future of its answer.

    Args:
        number: of its arrival.
        run: makes the answer; None once there is one, for it holds the request.
        num_bytes: of the request, then of the answer.
        model: that it is of, until there is an answer; None for samples.
    """

    id: str
    digest: bytes
    number: int
    run: Callable[[], Answer] | None = None
    num_bytes: int = 0
    model: "Model | None" = None
    arrived: float = field(default_factory=time.monotonic)
    answer: "Future[Answer]" = field(default_factory=Future)
    kind: ClassVar[str] = "other"

    def finish(self, outcome: Answer | FailedError) -> None:
        """Answer, unless that was done, and drop the request."""
        self.run = self.model = None
        self.num_bytes = len(outcome) if isinstance(outcome, bytes) else 0
        if self.answer.done():
            return
        if isinstance(outcome, FailedError):
            self.answer.set_exception(outcome)
        else:
            self.answer.set_result(outcome)


@dataclass
class SampleJob(Job):
    """A request for samples."""

    kind = "sample"
    request: Request | None = None
    sampler: "Sampler | None" = None

    def finish(self, outcome: Answer | FailedError) -> None:
        """As of every job."""
        self.request = self.sampler = None
        super().finish(outcome)

    @property
    def batch(self) -> tuple[Any, ...]:
        """What jobs of one call of the engine have in common."""
        assert self.request is not None
        return self.request.shared

    @property
    def version(self) -> int:
        """Of its weights."""
        assert self.sampler is not None
        return self.sampler.version

    @property
    def name(self) -> tuple[int, str]:
        """Distinct among jobs of one call of the engine; equal ones would give equal samples."""
        assert self.request is not None
        return self.version, self.request.id


@dataclass
class PassJob(Job):
    """A request of ``forward_backward``.

    Args:
        message: of the SDK.
        num_tokens: to be read, all targets of a position counted.
    """

    kind = "pass"
    message: Any = None
    num_tokens: int = 0

    @property
    def adds(self) -> bool:
        """Whether it adds to the gradient."""
        return not self.message.forward_only

    def finish(self, outcome: Answer | FailedError) -> None:
        """As of every job."""
        self.message = None
        super().finish(outcome)


@dataclass
class Model:
    """A model that a client trains.

    Args:
        id: of it, and of its training run.
        session: that it belongs to.
        num_bytes: of device memory, that its adapter takes.
        adapter: None until it was made.
        next_seq: of the request that runs next; 0 makes the model.
        waiting: requests by ``seq_id``.
        snapshots: of its unnamed samplers, oldest first.
    """

    id: str
    session: "Session"
    base_model: str
    user_metadata: dict[str, Any] | None = None
    num_bytes: int = 0
    adapter: Adapter | None = None
    next_seq: int = 0
    waiting: dict[int, Job] = field(default_factory=dict)
    snapshots: "OrderedDict[str, None]" = field(default_factory=OrderedDict)
    last_request: float = field(default_factory=time.time)


@dataclass
class Sampler:
    """A sampling session: of the base model, of a saved adapter, or of a snapshot.

    Args:
        version: of the weights; 0 for the base model.
        checkpoint: that is read when it is sampled from.
        weights: of a snapshot; None once they were dropped.
    """

    id: str
    session: "Session"
    base_model: str
    version: int = 0
    checkpoint: Checkpoint | None = None
    weights: Snapshot | None = None

    @property
    def is_dropped(self) -> bool:
        """Whether it was of a snapshot that is gone."""
        return self.version > 0 and self.weights is None


@dataclass
class Session:
    """A client.

    Args:
        number: of sessions before it; names its random numbers.
        owner: digest of its key.
        jobs: by request id, waiting or done; those that were retrieved are the first to go.
        samples: requests for samples that wait.
        usual: so many of them shared a call of the engine lately.
    """

    id: str
    number: int
    owner: str
    created: float
    seen: float
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None
    models: dict[str, Model] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    retrieved: "OrderedDict[str, None]" = field(default_factory=OrderedDict)
    samples: list[SampleJob] = field(default_factory=list)
    usual: int = 0

    @property
    def num_pending(self) -> int:
        """Requests that wait, or whose answer was not retrieved."""
        return len(self.jobs) - len(self.retrieved)

    @property
    def num_bytes(self) -> int:
        """Of requests that wait, and of answers."""
        return sum(job.num_bytes for job in self.jobs.values())

    def forget(self) -> int:
        """Drop the answer that was retrieved longest ago; returns its bytes."""
        return self.jobs.pop(self.retrieved.popitem(last=False)[0]).num_bytes

"""The state of the service: sessions, their models and samplers, and requests with the futures of their answers."""

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
    """Why a future has no result; ``category`` is ``user`` if the request was wrong, else ``server``."""

    def __init__(self, message: str, category: str) -> None:
        super().__init__(message)
        self.category = category


@dataclass
class Job:
    """A queued request and the future of its answer.

    Args:
        number: arrival order among all requests.
        run: makes the answer. It holds the request, and is None once there is an answer.
        num_bytes: size of the request, then of the answer.
        model: whose request this is, until there is an answer; None for samples.
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
        """Set the result unless there is one, and free the request."""
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
        self.request = self.sampler = None
        super().finish(outcome)

    @property
    def batch(self) -> tuple[Any, ...]:
        """Equal for jobs that may share a call of the engine."""
        assert self.request is not None
        return self.request.shared

    @property
    def version(self) -> int:
        assert self.sampler is not None
        return self.sampler.version

    @property
    def name(self) -> tuple[int, str]:
        """Distinct within a call of the engine; jobs with equal names would get equal samples."""
        assert self.request is not None
        return self.version, self.request.id


@dataclass
class PassJob(Job):
    """A request of ``forward_backward``.

    Args:
        message: the SDK's protobuf message.
        num_tokens: upper bound of the tokens to read, once for each target of a position.
    """

    kind = "pass"
    message: Any = None
    num_tokens: int = 0

    @property
    def adds(self) -> bool:
        """Whether it adds to the gradient."""
        return not self.message.forward_only

    def finish(self, outcome: Answer | FailedError) -> None:
        self.message = None
        super().finish(outcome)


@dataclass
class Model:
    """A model that a client trains.

    Args:
        id: also names its training run.
        num_bytes: device memory that its adapter takes.
        adapter: None until the first request has made it.
        next_seq: ``seq_id`` of the request that runs next; request 0 makes the model.
        waiting: requests by ``seq_id``.
        snapshots: ids of its unnamed samplers, oldest first.
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
    """A client's handle to sample with: the base model, a saved adapter, or a snapshot of a model.

    Args:
        version: of the weights; 0 for the base model.
        checkpoint: the saved adapter, read when it is first sampled from.
        weights: the snapshot; None once it was dropped.
    """

    id: str
    session: "Session"
    base_model: str
    version: int = 0
    checkpoint: Checkpoint | None = None
    weights: Snapshot | None = None

    @property
    def is_dropped(self) -> bool:
        """Whether its snapshot was dropped."""
        return self.version > 0 and self.weights is None


@dataclass
class Session:
    """A client's session.

    Args:
        number: how many sessions were created before; part of the seed of its samples.
        owner: digest of its key.
        jobs: by request id, waiting or done.
        retrieved: ids of jobs whose answer was sent, oldest first; they are dropped in this order.
        samples: waiting requests for samples.
        usual: how many of its requests recently shared a call of the engine.
        seen: when the last heartbeat came, by a clock that nobody sets.
    """

    id: str
    number: int
    owner: str
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None
    models: dict[str, Model] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    retrieved: "OrderedDict[str, None]" = field(default_factory=OrderedDict)
    samples: list[SampleJob] = field(default_factory=list)
    usual: int = 0
    seen: float = field(default_factory=time.monotonic)

    @property
    def num_pending(self) -> int:
        """Requests that wait or whose answer was not retrieved."""
        return len(self.jobs) - len(self.retrieved)

    @property
    def num_bytes(self) -> int:
        """Bytes of waiting requests and of answers."""
        return sum(job.num_bytes for job in self.jobs.values())

    def forget(self) -> int:
        """Drop the answer that was retrieved longest ago; returns its bytes."""
        return self.jobs.pop(self.retrieved.popitem(last=False)[0]).num_bytes

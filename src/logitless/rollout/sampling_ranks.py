"""Sampling on ranks of their own: an engine for the rank that trains, and the loop of the ranks that sample.

    rank that trains           "load", names   weights          "sample", prompts          completions, or an error
                                       │          │ NCCL, gloo            │                    ▲
    ranks that sample                  ▼          ▼                       ▼                    │ each its share

The sampling ranks keep no state but the model: each request names its weights' version and its seed. All messages
travel over one group, whose rank 0 trains. A thread of rank 0 sends "wait" in between, because no collective may wait
longer than the group's timeout, and warm start, evaluation or training may take longer.

In flight, weights arrive while completions are under way. Between two decoding steps a sampling rank checks a counter
in the ranks' store for a message that rank 0 has announced, and receives it. A rank that has finished its share keeps
receiving until all have. ``in_flight.py`` records which weights sampled which tokens. A repetition sends that record
with each request, and the sampling ranks keep copies of the weights.
"""

import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout

from logitless.distributed.failing import described, error_of
from logitless.distributed.ranks import Ranks
from logitless.distributed.shares import in_order
from logitless.errors import LostRankError
from logitless.rollout.arrays import Arrays, taking
from logitless.rollout.engine import Engine, SharedEngine, Weights, is_exact, together
from logitless.rollout.in_flight import DrawnVersions, RepeatingEngine, in_flight_engine
from logitless.rollout.sampling import SamplingOptions
from logitless.types import Completion, Prompt

ANNOUNCED, FINISHED = "sampling/announced", "sampling/finished"
"""Counters: messages that rank 0 sends while the others sample, and shares of requests that are finished."""

LOOK_SECONDS = 0.005
"""Between two looks of rank 0 at ``FINISHED``."""

STILL_THERE_SECONDS = 1.0
"""After so long without a message, sampling ranks are sent one, which fails where one is gone."""


class SamplingRanks:
    """An ``Engine`` whose samples come from other ranks, while this one trains.

    ``load`` copies the trained weights in their own dtype and returns. ``use`` sends a loaded version from another
    thread and on a stream of its own, while training changes the originals. Memory: a copy of the trained weights for
    each version that was loaded and is still to be used.

    Args:
        ranks: this rank, which is the first, and those that sample; None on further training ranks, which never ask.
        first: number of the first sampling rank among all ranks, for errors.
        in_flight: whether weights are sent while completions are under way.
        like_training: whether the layers of the training ranks may be bitwise identical to those of the sampling ranks.

    Attributes:
        drawn: in flight, which weights sampled which tokens in the calls since ``use``.
        exact: of ``ExactEngine``.
        transfer_numbers: seconds that the last finished push took.
    """

    def __init__(
        self, ranks: Ranks | None, *, first: int = 1, in_flight: bool = False, like_training: bool = True
    ) -> None:
        self._ranks, self._first, self._in_flight, self._like_training = ranks, first, in_flight, like_training
        self._lock = threading.Lock()  # a request and its reply
        self._copies: dict[int, _Copy] = {}
        self._sent: int | None = None
        self._loaded = threading.Event()
        self._recorded: DrawnVersions | None = None
        self.drawn = DrawnVersions()
        self.exact = like_training
        self.transfer_numbers: dict[str, float] = {}
        self._closed = threading.Event()
        if ranks is not None:
            pause = (ranks.timeout or default_pg_timeout).total_seconds() / 4
            threading.Thread(target=self._keep_waiting, args=(pause,), name="sampling ranks", daemon=True).start()

    def load(self, weights: Weights, version: int) -> None:
        """Copy the trained weights for a later ``use``; the first time, send all weights at once.

        The base model of a sampling rank may differ: random weights, or a base into which a warm start was merged.
        Weights in four bits are not sent: they never change, and every rank has read them.
        """
        if self._ranks is None:
            return
        named = weights.module.named_parameters()
        if self._sent is None:
            with self._lock:
                self._send(version, {name: p.detach() for name, p in named if p.is_floating_point()})
        else:  # no lock: another thread holds it while it waits for completions
            self._copies[version] = _Copy({name: p.detach().clone() for name, p in named if p.requires_grad})
            self._loaded.set()

    def use(self, version: int) -> None:
        """Sample with the weights of this version from now on, and forget older ones."""
        assert self._ranks is not None
        self.drawn = DrawnVersions()
        with self._lock:
            assert self._sent is not None
            if version == self._sent or (self._in_flight and version < self._sent):  # sent in the block before
                return
            self._send_copy(version)

    def repeat(self, drawn: DrawnVersions) -> None:
        """Sample the next calls with the versions of this record, all of which were loaded."""
        with self._lock:
            for version in sorted(self._copies):
                self._send_copy(version)
        self._recorded = drawn

    def _send_copy(self, version: int) -> None:
        """Send a version, then forget it and older ones."""
        copy = self._copies[version]
        with copy.on_a_stream_of_its_own():
            self._send(version, copy.tensors)
        self.forget(version + 1)

    def forget(self, version: int) -> None:
        """Free the copies of weights older than this version."""
        for older in [each for each in list(self._copies) if each < version]:
            del self._copies[older]

    def _send(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        assert self._ranks is not None
        begin = time.perf_counter()
        self._ranks.broadcast_object(["load", version, list(tensors)])
        self._ranks.broadcast(tensors.values())
        try:
            self._ranks.wait_for(next(iter(tensors.values())).device)
        except LostRankError:
            self._closed.set()  # or ``close`` would wait for that rank again, over gloo, which still works
            raise
        self._sent, self.transfer_numbers = version, {"weights/push_seconds": time.perf_counter() - begin}

    def sample(
        self, prompts: Sequence[Prompt], num_samples: int, options: SamplingOptions, *, seed: int
    ) -> list[list[Completion]]:
        """Completions by the sampling ranks, which divide the prompts among them.

        Raises:
            LogitlessError: of the rank that failed.
        """
        assert self._ranks is not None
        asked = [[prompt.id, prompt.token_ids.tolist()] for prompt in prompts]
        request = ["sample", asked, num_samples, asdict(options), seed]
        with self._lock:
            if self._recorded is not None:
                self._ranks.broadcast_object(["repeat", self._recorded.next(prompt.id for prompt in prompts)])
            if self._in_flight:
                finished = self._ranks.count(FINISHED) + self._ranks.world - 1
                self._ranks.broadcast_object([*request, self._ranks.count(ANNOUNCED)])
                self._send_until(finished)
            else:
                self._ranks.broadcast_object([*request, None])
            replies = self._ranks.all_gather_bytes(b"")[1:]
        shares, exact = [], self._like_training
        for rank, reply in enumerate(replies, start=self._first):
            head, _, numbers = reply.partition(b"\n")
            said = json.loads(head)
            if "failure" in said:
                raise error_of(said["failure"], "completions", rank)
            of_json = partial(Completion.of_json, array=taking(numbers))
            shares.append([[of_json(each) for each in group] for group in said["completions"]])
            exact &= said["exact"]
        self.exact = exact
        sampled = in_order(shares)
        if self._in_flight:
            self.drawn.add(sampled)
        return sampled

    def _send_until(self, finished: int) -> None:
        """Send weights as they come, until so many shares are finished."""
        assert self._ranks is not None
        ranks, last = self._ranks, time.monotonic()
        while ranks.count(FINISHED) < finished:
            newest = max(list(self._copies), default=self._sent)
            assert newest is not None
            assert self._sent is not None
            if newest > self._sent:
                ranks.count(ANNOUNCED, 1)
                self._send_copy(newest)
                last = time.monotonic()
            elif time.monotonic() - last > STILL_THERE_SECONDS:
                ranks.count(ANNOUNCED, 1)
                ranks.broadcast_object(["wait"])
                last = time.monotonic()
            else:
                self._loaded.wait(LOOK_SECONDS)
                self._loaded.clear()
        ranks.broadcast_object(["gather"])

    def close(self) -> None:
        """End the sampling ranks' loops. If one is lost, the others notice when this rank ends."""
        if self._ranks is not None and not self._closed.is_set():
            self._closed.set()
            with self._lock:
                self._ranks.broadcast_object(["end"])

    def _keep_waiting(self, pause: float) -> None:
        assert self._ranks is not None
        with suppress(LostRankError):  # the next request says so
            while not self._closed.wait(pause):
                with self._lock:
                    if not self._closed.is_set():
                        self._ranks.broadcast_object(["wait"])


class _Copy:
    """A copy of weights by name, which may still be being written on the device."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors, self._ready = tensors, None
        if next(iter(tensors.values())).is_cuda:
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record()

    @contextmanager
    def on_a_stream_of_its_own(self) -> Iterator[None]:
        """Inside, device work waits for the copy, but not for what training queued after it."""
        if self._ready is None:
            yield
            return
        device = next(iter(self.tensors.values())).device
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(device), torch.cuda.stream(stream):  # both are settings of the thread
            stream.wait_event(self._ready)
            yield


def sample_for(
    ranks: Ranks, engine: Engine | RepeatingEngine, model: nn.Module, *, in_flight: str | None = None
) -> None:
    """Sample for the rank that trains, until it closes its ``SamplingRanks``.

    Args:
        ranks: of ``SamplingRanks``.
        engine: samples with ``model``, whose weights are replaced in place; a ``SharedEngine`` is shared by all but
            the first of the ranks, or by several in a row of them.
        in_flight: of the recipe, for a ``SamplingRanks`` that sends weights in flight.

    Raises:
        LostRankError: another rank is gone.
        UnavailableError: the engine does not go on with other weights.
    """
    arriving = _Arriving(ranks, engine, model, recompute=in_flight == "recompute")
    while True:
        match ranks.broadcast_object(None):
            case ["load", version, names]:
                arriving.receive(version, names)
            case ["repeat", runs]:
                assert isinstance(engine, RepeatingEngine)
                engine.repeat(DrawnVersions({prompt: [call] for prompt, call in runs.items()}))
            case ["sample", asked, num_samples, options, seed, announced]:
                mine = [asked[i] for i in ranks.shared(len(asked), range(1, ranks.world))]
                prompts = [Prompt(id, "", token_ids) for id, token_ids in mine]
                with arriving.between_steps(announced), together(engine):
                    reply = _reply(engine, prompts, num_samples, _options(options), seed)
                ranks.all_gather_bytes(reply)
            case ["wait"]:
                pass
            case _:
                return


class _Arriving:
    """``Updates`` whose weights rank 0 sends."""

    def __init__(self, ranks: Ranks, engine: Engine, model: nn.Module, *, recompute: bool) -> None:
        self.recompute = recompute
        self._ranks, self._engine, self._model = ranks, engine, model
        self._parameters = dict(model.named_parameters())
        self._announced = 0
        self._due: tuple[int, list[str]] | None = None

    def receive(self, version: int, names: Sequence[str]) -> None:
        """Load the weights of a "load" message."""
        if isinstance(self._engine, SharedEngine):  # whose parameters are views of what it gathers layers into
            self._engine.receive(
                ((name, self._received(torch.empty_like(self._parameters[name]))) for name in names), version
            )
            return
        self._ranks.broadcast(self._parameters[name].detach() for name in names)
        self._ranks.wait_for(next(iter(self._parameters.values())).device)
        self._engine.load(Weights.of(self._model), version)

    def _received(self, tensor: Tensor) -> Tensor:
        self._ranks.broadcast([tensor])
        # For each, as hundreds of layers could fill CUDA's queue behind one that does not come: then no call returns.
        self._ranks.wait_for(tensor.device)
        return tensor

    @contextmanager
    def between_steps(self, announced: int | None) -> Iterator[None]:
        """Inside, the engine loads weights between two steps; at the end they are received until all ranks have
        finished.

        Args:
            announced: messages announced so far; None if weights stay.
        """
        if announced is None:
            yield
            return
        engine = in_flight_engine(self._engine)
        self._announced, engine.updates = announced, self
        try:
            yield
        finally:
            engine.updates = None
        if self._due is not None:  # by an engine that failed
            self.load()
        self._ranks.count(FINISHED, 1)
        while (said := self._ranks.broadcast_object(None)) != ["gather"]:
            if said[0] == "load":
                self.receive(*said[1:])

    def version(self, prompt_id: str, sample: int, token: int) -> None:
        """None: the loaded weights sample every token."""

    def due(self, needed: Callable[[], Collection[int | None]]) -> bool:  # noqa: ARG002 - time decides
        """Whether weights were announced; rank 0 sends them at ``load``."""
        while self._due is None and self._ranks.count(ANNOUNCED) > self._announced:
            self._announced += 1
            match self._ranks.broadcast_object(None):
                case ["load", version, names]:
                    self._due = version, names
        return self._due is not None

    def load(self) -> None:
        """Receive the announced weights."""
        assert self._due is not None
        (version, names), self._due = self._due, None
        self.receive(version, names)


def _reply(engine: Engine, prompts: Sequence[Prompt], num_samples: int, options: SamplingOptions, seed: int) -> bytes:
    """One line of JSON with the completions or the failure, followed by the bytes of their arrays."""
    arrays, said = Arrays(), dict[str, Any]()
    try:
        sampled = engine.sample(prompts, num_samples, options, seed=seed) if prompts else []
        said["completions"] = [[each.as_json(arrays.put) for each in group] for group in sampled]
        said["exact"] = is_exact(engine)
    except Exception as error:
        said = {"failure": described(error)}
    return json.dumps(said).encode() + b"\n" + arrays.joined()


def _options(fields: dict[str, Any]) -> SamplingOptions:
    """Sampling options from the JSON of their ``asdict``."""
    return SamplingOptions(**{name: _tuples(value) for name, value in fields.items()})


def _tuples(value: Any) -> Any:
    """A value from JSON, with tuples in place of lists."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value

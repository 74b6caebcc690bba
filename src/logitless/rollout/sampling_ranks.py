"""Sampling on ranks of their own: an engine for the rank that trains, and the loop of the ranks that sample.

    rank that trains           "load", names   weights          "sample", prompts          completions, or an error
                                       │          │ NCCL, gloo            │                    ▲
    ranks that sample                  ▼          ▼                       ▼                    │ each its share

The sampling ranks keep no state but the model: each request names its weights' version and its seed. All messages
travel over one group, whose rank 0 trains. A thread of it sends "wait" in between, for no collective of that group may
wait longer than its timeout, and warm start, evaluation or training may.
"""

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
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
from logitless.rollout.engine import Engine, ExactEngine, Weights
from logitless.rollout.sampling import SamplingOptions
from logitless.types import Completion, Prompt


class SamplingRanks:
    """An ``Engine`` whose samples come from other ranks, while this one trains.

    ``load`` copies the trained weights in their own dtype and returns. ``use`` sends one of the versions loaded so far,
    from another thread and on a stream of its own, while training changes the originals. Memory: a copy of the trained
    weights for each version that was loaded and is still to be used.

    Args:
        ranks: this rank, which is the first, and those that sample; None on further training ranks, which never ask.
        first: number of the first sampling rank among all ranks, for errors.

    Attributes:
        exact: whether what was sampled last is bitwise what training computes (``ExactEngine``).
        transfer_numbers: seconds that the last finished push took.
    """

    def __init__(self, ranks: Ranks | None, *, first: int = 1) -> None:
        self._ranks, self._first = ranks, first
        self._lock = threading.Lock()  # a request and its reply
        self._copies: dict[int, _Copy] = {}
        self._sent: int | None = None
        self.exact = False
        self.transfer_numbers: dict[str, float] = {}
        self._closed = threading.Event()
        if ranks is not None:
            pause = (ranks.timeout or default_pg_timeout).total_seconds() / 4
            threading.Thread(target=self._keep_waiting, args=(pause,), name="sampling ranks", daemon=True).start()

    def load(self, weights: Weights, version: int) -> None:
        """Copy the trained weights for a later ``use``. The first time all weights are sent at once.

        They may be random ones, or a base into which a warm start was merged. In four bits they never change, and are
        what every rank has read.
        """
        if self._ranks is None:
            return
        named = weights.module.named_parameters()
        if self._sent is None:
            with self._lock:
                self._send(version, {name: p.detach() for name, p in named if p.is_floating_point()})
        else:  # no lock: another thread holds it while it waits for completions
            self._copies[version] = _Copy({name: p.detach().clone() for name, p in named if p.requires_grad})

    def use(self, version: int) -> None:
        """Sample with the weights of this version from now on, and forget older ones."""
        assert self._ranks is not None
        with self._lock:
            if version == self._sent:
                return
            copy = self._copies[version]
            with copy.on_a_stream_of_its_own():
                self._send(version, copy.tensors)
        self.forget(version + 1)

    def forget(self, version: int) -> None:
        """Free the copies of weights older than this version, which nothing will use."""
        for older in [each for each in list(self._copies) if each < version]:
            del self._copies[older]

    def _send(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        assert self._ranks is not None
        begin = time.perf_counter()
        self._ranks.broadcast_object(["load", version, list(tensors)])
        self._ranks.broadcast(tensors.values())
        if (device := next(iter(tensors.values())).device).type == "cuda":
            torch.cuda.current_stream(device).synchronize()
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
        with self._lock:
            self._ranks.broadcast_object(["sample", asked, num_samples, asdict(options), seed])
            replies = self._ranks.all_gather_bytes(b"")[1:]
        shares, exact = [], True
        for rank, reply in enumerate(replies, start=self._first):
            head, _, numbers = reply.partition(b"\n")
            said = json.loads(head)
            if "failure" in said:
                raise error_of(said["failure"], "completions", rank)
            of_json = partial(Completion.of_json, array=taking(numbers))
            shares.append([[of_json(each) for each in group] for group in said["completions"]])
            exact &= said["exact"]
        self.exact = exact
        return in_order(shares)

    def close(self) -> None:
        """Let the sampling ranks go."""
        if self._ranks is not None:
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
    """A copy of weights that this thread's stream is writing.

    Args:
        tensors: by name.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors, self._ready = tensors, None
        if next(iter(tensors.values())).is_cuda:
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record()

    @contextmanager
    def on_a_stream_of_its_own(self) -> Iterator[None]:
        """Inside, work on the device waits for the copy, and not for what training queued after it."""
        if self._ready is None:
            yield
            return
        device = next(iter(self.tensors.values())).device
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(device), torch.cuda.stream(stream):  # both are settings of the thread
            stream.wait_event(self._ready)
            yield


def sample_for(ranks: Ranks, engine: Engine, model: nn.Module) -> None:
    """Sample for the rank that trains, until it closes its ``SamplingRanks``.

    Args:
        ranks: of ``SamplingRanks``.
        engine: samples with ``model``, whose weights are replaced in place.

    Raises:
        LostRankError: another rank is gone.
    """
    parameters = dict(model.named_parameters())
    while True:
        match ranks.broadcast_object(None):
            case ["load", version, names]:
                ranks.broadcast(parameters[name].detach() for name in names)
                engine.load(Weights.of(model), version)
            case ["sample", asked, num_samples, options, seed]:
                mine = [asked[i] for i in ranks.shared(len(asked), range(1, ranks.world))]
                prompts = [Prompt(id, "", token_ids) for id, token_ids in mine]
                ranks.all_gather_bytes(_reply(engine, prompts, num_samples, _options(options), seed))
            case ["wait"]:
                pass
            case _:
                return


def _reply(engine: Engine, prompts: Sequence[Prompt], num_samples: int, options: SamplingOptions, seed: int) -> bytes:
    """A line of JSON with the completions or why there are none, and the numbers of their arrays after it."""
    arrays, said = Arrays(), dict[str, Any]()
    try:
        sampled = engine.sample(prompts, num_samples, options, seed=seed) if prompts else []
        said["completions"] = [[each.as_json(arrays.put) for each in group] for group in sampled]
        said["exact"] = isinstance(engine, ExactEngine) and engine.exact
    except Exception as error:
        said = {"failure": described(error)}
    return json.dumps(said).encode() + b"\n" + arrays.joined()


def _options(fields: dict[str, Any]) -> SamplingOptions:
    """The options of ``asdict`` that were sent as JSON."""
    return SamplingOptions(**{name: _tuples(value) for name, value in fields.items()})


def _tuples(value: Any) -> Any:
    """A value from JSON, which has lists in place of tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value

"""Sessions, models, samplers and futures of the Tinker service, and the thread that runs their requests.

    request -> future, at once;   retrieve_future -> result or try_again

Keys take turns, and so do the sessions of a key: a busy client delays another by one call (``schedule.py``). Requests
that wait at the same time share a call if that changes no result: samples of several adapters, and passes that fit
into one. A failed request fails alone, and its future says why.

Every object belongs to the key whose session created it; other keys are refused. One lock guards the state, and the
thread holds it only between calls.
"""

import hashlib
import itertools
import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from logitless.errors import InputError, LogitlessError, RefusedError
from logitless.seeds import derived_seed
from logitless.tinker import wire
from logitless.tinker.adapter import Adapter, Shape, Snapshot
from logitless.tinker.samples import request_of
from logitless.tinker.schedule import Schedule
from logitless.tinker.sessions import Answer, FailedError, Job, Model, PassJob, SampleJob, Sampler, Session
from logitless.tinker.store import Checkpoint, Store
from logitless.tinker.trainer import Trainer

logger = logging.getLogger("logitless")

PENDING = 4096
"""The most requests of a session that wait, or whose answer was not retrieved."""

HELD_BYTES = 1 << 30
"""The most bytes of a key's requests that wait, and of its answers."""

ALL_HELD_BYTES = 4 << 30
"""The same of all keys together."""

TOKEN_BYTES = 40
"""Host memory of a token of a prompt that waits."""

SESSIONS = 256
"""The most sessions of a key."""

MODELS = 256
"""The most models of a key's sessions."""

RETRIEVED = 1024
"""Answers of a session that are kept after they were retrieved, for a client that lost one on its way."""

SNAPSHOTS = 16
"""Weights of unnamed samplers that are kept for each model; older ones are dropped, and samples from them refused."""

GO_ON = "make a new ServiceClient, and go on from a checkpoint (RestClient.list_user_checkpoints)"
"""What a client does whose session is gone."""

KEPT_CHECKPOINTS = 4
"""Checkpoints whose weights stay in memory after they were sampled from."""


class Service:
    """The methods behind the endpoints. They return at once; a thread, which ``close`` ends, does the work.

    Args:
        trainer: used by the service's thread alone.
        store: of checkpoints.
        names: names of the base model that clients may use; the first is the default.
        tokenizer_name: hub name or folder that clients load the tokenizer from.
        seed: of samples without a seed of their own.
        session_seconds: a session without a heartbeat for so long is dropped.
    """

    def __init__(
        self,
        trainer: Trainer,
        store: Store,
        *,
        names: Sequence[str],
        tokenizer_name: str,
        seed: int = 0,
        session_seconds: float = 600.0,
    ) -> None:
        self.trainer, self.store = trainer, store
        self.names, self.tokenizer_name, self.seed = tuple(names), tokenizer_name, seed
        self.session_seconds = session_seconds
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._state = threading.Condition()  # of a lock that who holds it may take again
        self._schedule = Schedule(self._sessions, trainer)
        self._numbers, self._session_numbers = itertools.count(), itertools.count()
        self._read: OrderedDict[int, Snapshot] = OrderedDict()  # used by the thread alone
        self._most = {"pass": 0, "sample": 0}
        self._calls = {kind: {"count": 0, "seconds": 0.0} for kind in ("pass", "sample", "other")}
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="logitless-tinker", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread after the call under way; futures that wait fail."""
        with self._state:
            self._closed = True
            self._state.notify_all()
        self._thread.join()
        with self._state:  # clients are still answered
            for session in self._sessions.values():
                self._fail_all(session, f"the service has ended: {GO_ON}")

    @property
    def is_serving(self) -> bool:
        """Whether its thread is alive."""
        return self._thread.is_alive()

    # --- sessions

    def create_session(self, request: wire.CreateSession, key: str) -> dict[str, Any]:
        """A new session of this key."""
        owner = owner_of(key)
        with self._state:
            self._drop_silent()
            if len(self._of(owner)) >= SESSIONS:
                raise RefusedError(
                    400, f"the key has {SESSIONS} sessions: close some, or let them end without heartbeats"
                )
            number = next(self._session_numbers)
            name = hashlib.blake2b(f"{time.time()}/{number}".encode(), digest_size=12).hexdigest()
            session = Session(f"s-{name}", number, owner, request.user_metadata, request.display_name)
            self._sessions[session.id] = session
        return {"type": "create_session", "session_id": session.id}

    def heartbeat(self, request: wire.OfSession, key: str) -> dict[str, Any]:
        """Keep a session alive; status 410 if it is gone, at which the SDK's heartbeats end."""
        with self._state:
            self.session(request.session_id, key).seen = time.monotonic()
        return {"type": "session_heartbeat"}

    def finish(self, session_id: str, key: str) -> None:
        """End a session: what waits fails, models and samplers are freed, checkpoints stay."""
        with self._state:
            session = self.session(session_id, key)
            del self._sessions[session_id]
            self._fail_all(session, "the session was finished")

    def sessions(self, key: str) -> list[Session]:
        with self._state:
            return self._of(owner_of(key))

    def _of(self, owner: str) -> list[Session]:
        return [session for session in self._sessions.values() if session.owner == owner]

    def session(self, session_id: str, key: str) -> Session:
        """A session of a key.

        Raises:
            RefusedError: 410, it is gone; 403, it is of another key.
        """
        with self._state:
            session = self._sessions.get(session_id)
        if session is None:
            raise RefusedError(
                410,
                f"session {session_id!r:.80} is gone: it was finished, silent, or of a service that was restarted; "
                + GO_ON,
            )
        if session.owner != owner_of(key):
            raise RefusedError(403, f"session {session_id!r:.80} belongs to another key")
        return session

    def _drop_silent(self) -> None:
        now = time.monotonic()
        for session in [each for each in self._sessions.values() if now - each.seen > self.session_seconds]:
            logger.info("session %s is dropped after %.0f seconds without a heartbeat", session.id, now - session.seen)
            del self._sessions[session.id]
            self._fail_all(session, "the session is gone: no heartbeat came")

    def _fail_all(self, session: Session, why: str) -> None:
        waiting = [*session.samples, *(job for model in session.models.values() for job in model.waiting.values())]
        session.samples.clear()
        for model in session.models.values():
            model.waiting.clear()
        for job in waiting:
            job.finish(FailedError(why, "server"))

    # --- models

    def create_model(self, request: wire.CreateModel, key: str, digest: bytes) -> dict[str, Any]:
        """Make an adapter; the answer's future has the model's id."""
        self._check_name(request.base_model)
        lora = request.lora_config
        if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
            raise RefusedError(400, "lora_config: train_attn, train_mlp or train_unembed is needed")
        with self._state:
            session, shape = self.session(request.session_id, key), Shape.of(lora)
            number, metadata = request.model_seq_id, request.user_metadata
            model = self._new_model(session, number, request.base_model, metadata, shape)
            seed = derived_seed(self.seed, "adapter", request.model_seq_id) if lora.seed is None else lora.seed

            def run() -> Answer:
                model.adapter = self.trainer.create(shape, seed=seed)
                return {"type": "create_model", "model_id": model.id}

            return self._arrived(model, 0, digest, run)

    def _new_model(
        self, session: Session, number: int, base_model: str, metadata: dict[str, Any] | None, shape: Shape
    ) -> Model:
        identity = f"{session.id}:train:{number}"
        if identity in session.models:
            return session.models[identity]
        if sum(len(each.models) for each in self._of(session.owner)) >= MODELS:
            raise RefusedError(400, f"the key's sessions have {MODELS} models: close some sessions")
        model = session.models[identity] = Model(identity, session, base_model, metadata)
        try:
            self._take_memory(model, shape)
        except RefusedError:
            del session.models[identity]
            raise
        return model

    def _take_memory(self, model: Model, shape: Shape) -> None:
        """Count the bytes of an adapter of this shape for a model, in place of those counted before.

        Raises:
            RefusedError: adapters would take more than half of the budget.
        """
        needed, room = self.trainer.bytes_of(shape), self.trainer.room
        held = sum(each.num_bytes for session in self._sessions.values() for each in session.models.values())
        held -= model.num_bytes
        if room is not None and held + needed > room:
            own = [each for session in self._of(model.session.owner) for each in session.models.values()]
            listed = ", ".join(f"{each.id} {each.num_bytes}" for each in own if each.num_bytes and each is not model)
            raise RefusedError(
                400,
                f"an adapter of rank {shape.rank} takes {needed} bytes with gradient and moments; {held} of the {room} "
                f"for adapters are held (of this key: {listed or 'none'}): choose a smaller rank or fewer parts, close "
                "sessions, or start the service with more --memory",
            )
        model.num_bytes = needed

    def held(self, key: str) -> dict[str, Any]:
        """Device and host bytes of a key's models, bytes of all models, and counts and seconds of calls by kind."""
        with self._state:
            every = [model for session in self._sessions.values() for model in session.models.values()]
            own = {model.id: model for session in self._of(owner_of(key)) for model in session.models.values()}
            return {
                "bytes_for_adapters": self.trainer.room,
                "held_bytes": sum(model.num_bytes for model in every),
                "sampling_bytes": self.trainer.stack_bytes,
                "most_adapters_in_a_call": dict(self._most),
                "calls": {kind: dict(each) for kind, each in self._calls.items()},
                "models": {
                    name: {"device_bytes": model.num_bytes, "snapshot_bytes": _snapshot_bytes(model)}
                    for name, model in own.items()
                },
            }

    def _check_name(self, name: str, what: str = "base_model") -> None:
        if name not in self.names:
            raise RefusedError(
                400,
                f"{what} {name!r:.200}: this service has {', '.join(self.names)} "
                "(serve-tinker --name gives a model further names)",
            )

    def model(self, model_id: str, key: str) -> Model:
        """A model of a key.

        Raises:
            RefusedError: unknown, gone, or of another key.
        """
        with self._state:
            session = self.session(model_id.partition(":")[0], key)
            if model_id not in session.models:
                raise RefusedError(404, f"there is no model {model_id!r:.120}")
            return session.models[model_id]

    def info(self, request: wire.OfModel, key: str) -> dict[str, Any]:
        """What the SDK asks about a model."""
        model = self.model(request.model_id, key)
        return {
            "type": "get_info",
            "model_id": model.id,
            "model_data": {"model_name": model.base_model, "tokenizer_id": self.tokenizer_name},
            "is_lora": True,
            "lora_rank": None if model.adapter is None else model.adapter.shape.rank,
            "model_name": model.base_model,
        }

    def forward_backward(self, body: bytes, key: str, digest: bytes) -> dict[str, Any]:
        """Add to a model's gradient, or only score."""
        message = wire.forward_backward_request(body)
        with self._state:
            model = self.model(message.model_id, key)
            kind = partial(PassJob, message=message, num_tokens=wire.num_tokens(message))
            return self._arrived(model, message.seq_id, digest, None, len(body), kind=kind)

    def refuse_in_turn(self, refused: RefusedError, body: bytes, key: str, digest: bytes) -> dict[str, Any]:
        """A future that fails with ``refused`` in its turn; its ``seq_id`` is used up: the SDK does not resend it.

        Raises:
            RefusedError: ``refused`` itself, if the body names no model of this key or no ``seq_id``.
        """
        try:
            place = json.loads(body)
            model_id, seq_id = str(place["model_id"]), int(place["seq_id"])
        except (ValueError, TypeError, LookupError, OverflowError):
            raise refused from None
        status, said = refused.status, str(refused)  # not itself: its frames hold the body

        def run(_: Adapter) -> Answer:
            raise RefusedError(status, said)

        return self._train(model_id, seq_id, key, digest, run)

    def optim_step(self, request: wire.OptimStep, key: str, digest: bytes) -> dict[str, Any]:
        def run(adapter: Adapter) -> Answer:
            return {"metrics": self.trainer.optim_step(adapter, request.adam_params)}

        return self._train(request.model_id, request.seq_id, key, digest, run)

    def save(self, kind: str, request: wire.SaveWeights, key: str, digest: bytes) -> dict[str, Any]:
        """Save a model's weights as a checkpoint of this kind, or for an unnamed sampler."""
        model = self.model(request.model_id, key)
        if request.path is None:  # sent again, it names another sampler: the SDK counts them on
            digest = repr(request.model_copy(update={"sampling_session_seq_id": None})).encode()

        def run(adapter: Adapter) -> Answer:
            if request.path is None and kind == "sampler_weights" and request.sampling_session_seq_id is not None:
                return self._unnamed_sampler(model, adapter, request.sampling_session_seq_id)
            if request.path is None:
                raise RefusedError(400, "path: a name of the checkpoint is needed")
            now = time.time()
            made = self.store.save(
                Checkpoint(
                    run=model.id,
                    kind=kind,
                    name=request.path,
                    base_model=model.base_model,
                    shape=adapter.shape,
                    owner=model.session.owner,
                    created=now,
                    expires=None if request.ttl_seconds is None else now + request.ttl_seconds,
                    user_metadata=request.user_metadata,
                ),
                self.trainer.tensors(adapter),
                self.trainer.optimizer_state(adapter) if kind == "weights" else {},
                self.trainer.peft_config(adapter.shape),
                overwrite=request.overwrite,
                recipients=request.age_encryption_recipients or (),
            )
            size = {"size_bytes": made.size} if kind == "external_weights" else {}
            return {"path": made.path, **size}

        return self._train(request.model_id, request.seq_id, key, digest, run)

    def _unnamed_sampler(self, model: Model, adapter: Adapter, number: int) -> Answer:
        weights = adapter.snapshot()
        sampler = Sampler(
            f"{model.session.id}:sample:{number}", model.session, model.base_model, weights.version, None, weights
        )
        with self._state:
            self._add(sampler)
            model.snapshots[sampler.id] = None
            while len(model.snapshots) > SNAPSHOTS:
                model.session.samplers[model.snapshots.popitem(last=False)[0]].weights = None
        return {"path": None, "sampling_session_id": sampler.id}

    def load(self, request: wire.LoadWeights, key: str, digest: bytes) -> dict[str, Any]:
        """Load a checkpoint into a model, or into a new one."""
        if request.base_model is not None:
            self._check_name(request.base_model)
        given = self._loadable(request, key) if request.model_id is None else None
        base = request.base_model or ("" if given is None else given.base_model)
        with self._state:
            if request.model_id is not None and request.seq_id is not None and request.session_id is None:
                model, seq_id = self.model(request.model_id, key), request.seq_id
            elif request.session_id is not None and request.model_seq_id is not None and request.model_id is None:
                session = self.session(request.session_id, key)
                assert given is not None
                model = self._new_model(session, request.model_seq_id, base, request.user_metadata, given.shape)
                seq_id = 0
            else:
                raise RefusedError(400, "model_id with seq_id, or session_id with model_seq_id is needed")

            def run() -> Answer:
                checkpoint = self._loadable(request, key)  # now: a request before this one may have saved it
                before = model.num_bytes
                with self._state:
                    self._take_memory(model, checkpoint.shape)
                try:
                    tensors, state = self.store.tensors(checkpoint, optimizer=request.optimizer)
                    model.adapter = self.trainer.loaded(checkpoint.shape, tensors, state)
                except Exception:
                    model.num_bytes = before
                    raise
                return {"type": "load_weights", "path": request.path, "model_id": model.id}

            return self._arrived(model, seq_id, digest, run)

    def _loadable(self, request: wire.LoadWeights, key: str) -> Checkpoint:
        checkpoint = self.checkpoint(request.path, key)
        self._check_name(checkpoint.base_model, f"{checkpoint.path}: an adapter of")
        if checkpoint.kind != "weights" and request.optimizer:
            raise RefusedError(400, f"{request.path}: checkpoints of samplers have no optimizer state")
        return checkpoint

    def checkpoint(self, path: str, key: str) -> Checkpoint:
        """A checkpoint of a key.

        Raises:
            RefusedError: unknown, or of another key.
        """
        try:
            found = self.store.find(path)
        except InputError as error:
            raise RefusedError(404, str(error)) from error
        if found.owner != owner_of(key):
            raise RefusedError(403, f"{path!r:.200} belongs to another key")
        return found

    def _train(
        self, model_id: str, seq_id: int, key: str, digest: bytes, run: Callable[[Adapter], Answer]
    ) -> dict[str, Any]:
        with self._state:
            model = self.model(model_id, key)

            return self._arrived(model, seq_id, digest, lambda: run(_adapter_of(model)))

    def _arrived(
        self,
        model: Model,
        seq_id: int,
        digest: bytes,
        run: Callable[[], Answer] | None,
        num_bytes: int = 0,
        kind: Callable[..., Job] = Job,
    ) -> dict[str, Any]:
        """Queue a request at its ``seq_id``; a request that is sent again gets the same future."""
        request_id = f"{model.id}:{seq_id}"
        promise = {"request_id": request_id, "model_id": model.id}
        if _is_known(model.session, request_id, digest):
            return promise
        if seq_id < model.next_seq:
            raise RefusedError(400, f"seq_id {seq_id} of {model.id} has run or was given up: {model.next_seq} is next")
        if seq_id > model.next_seq + PENDING:
            raise RefusedError(400, f"seq_id {seq_id} of {model.id} is out of order: {model.next_seq} is next")
        self._check_room(model.session, num_bytes)
        job = kind(request_id, digest, next(self._numbers), run, num_bytes, model=model)
        model.session.jobs[request_id] = model.waiting[seq_id] = job
        model.last_request = time.time()
        self._state.notify_all()
        return promise

    def _check_room(self, session: Session, num_bytes: int) -> None:
        for sessions, most in ((self._of(session.owner), HELD_BYTES), ([*self._sessions.values()], ALL_HELD_BYTES)):
            held = num_bytes + sum(each.num_bytes for each in sessions)
            for each in sessions:
                while held > most and each.retrieved:
                    held -= each.forget()
            if session.num_pending >= PENDING or held > most:
                raise RefusedError(
                    429,
                    f"{PENDING} requests of the session, {HELD_BYTES} bytes of the key or {ALL_HELD_BYTES} of all keys "
                    "wait already, or their answers were not read: retrieve answers, and send this one again",
                )

    def _note_retrieved(self, session: Session, request_id: str) -> None:
        if request_id in session.jobs:
            session.retrieved[request_id] = None
            session.retrieved.move_to_end(request_id)
        while len(session.retrieved) > RETRIEVED:
            session.forget()

    # --- sampling

    def create_sampler(self, request: wire.CreateSamplingSession, key: str) -> dict[str, Any]:
        """A sampling session of the base model or of a saved adapter."""
        session = self.session(request.session_id, key)
        checkpoint = None if request.model_path is None else self.checkpoint(request.model_path, key)
        if checkpoint is None or request.base_model:
            self._check_name(request.base_model or "")
        if checkpoint is not None:
            self._check_name(checkpoint.base_model, f"{checkpoint.path}: an adapter of")
        base = request.base_model or (self.names[0] if checkpoint is None else checkpoint.base_model)
        version = 0
        if checkpoint is not None:  # negative: no adapter's; the same for all samplers of a checkpoint
            said = f"{checkpoint.path}/{checkpoint.created}".encode()
            version = -1 - int.from_bytes(hashlib.blake2b(said, digest_size=7).digest())
        name = f"{session.id}:sample:{request.sampling_session_seq_id}"
        sampler = Sampler(name, session, base, version, checkpoint)
        with self._state:
            self._add(sampler)
        return {"type": "create_sampling_session", "sampling_session_id": sampler.id}

    def _add(self, sampler: Sampler) -> None:
        known = sampler.session.samplers.setdefault(sampler.id, sampler)
        if (known.version, known.base_model) != (sampler.version, sampler.base_model):
            raise RefusedError(400, f"{sampler.id} is another sampling session already: choose another number")

    def _weights(self, sampler: Sampler) -> Snapshot | None:
        """The weights to sample with; None for the base model. Those of the last few checkpoints stay in memory."""
        checkpoint = sampler.checkpoint
        if checkpoint is None:
            if sampler.is_dropped:
                raise _dropped(sampler)
            return sampler.weights
        if sampler.version not in self._read:
            if self.store.find(checkpoint.path).created != checkpoint.created:
                raise RefusedError(410, f"{checkpoint.path} was overwritten: create another sampling client of it")
            tensors, _ = self.store.tensors(checkpoint, optimizer=False)
            weights = self.trainer.saved(checkpoint.shape, tensors, sampler.version)
            self._read[sampler.version] = weights
            if len(self._read) > KEPT_CHECKPOINTS:
                self._read.popitem(last=False)
        return self._read[sampler.version]

    def sampler(self, sampler_id: str, key: str) -> Sampler:
        with self._state:
            session = self.session(sampler_id.partition(":")[0], key)
            if sampler_id not in session.samplers:
                raise RefusedError(404, f"there is no sampling session {sampler_id!r:.120}")
            return session.samplers[sampler_id]

    def sample(self, request: wire.Sample, key: str, digest: bytes) -> dict[str, Any]:
        sampler = self.sampler(request.sampling_session_id, key)
        if sampler.is_dropped:
            raise _dropped(sampler)
        wanted = request_of(
            request,
            # Without a seed, sessions sample differently; their ids would not be the same when a run is repeated.
            place=f"{sampler.session.number}:{sampler.id.partition(':')[2]}:{request.seq_id}",
            seed=self.seed,
            vocabulary=self.trainer.vocabulary,
            limit=self.trainer.limit,
        )
        request_id = f"{sampler.id}:{request.seq_id}"
        promise = {
            "request_id": request_id,
            "sample_sequence_ids": [f"{request_id}:{index}" for index in range(request.num_samples)],
        }
        with self._state:
            session = self.session(sampler.session.id, key)
            if not _is_known(session, request_id, digest):
                num_bytes = TOKEN_BYTES * len(wanted.tokens)
                self._check_room(session, num_bytes)
                number = next(self._numbers)
                job = SampleJob(request_id, digest, number, None, num_bytes, request=wanted, sampler=sampler)
                session.jobs[request_id] = job
                session.samples.append(job)
                if len(session.samples) == 1:  # the thread looks for the others by itself (``patience``)
                    self._state.notify_all()
        return promise

    # --- futures

    def future(self, request_id: str, key: str) -> "Future[Answer]":
        """The future of a request.

        Raises:
            RefusedError: 404, there is none; 410, its answer was retrieved and dropped, or its session is gone.
        """
        with self._state:
            session = self.session(request_id.partition(":")[0], key)
            if request_id not in session.jobs:
                raise RefusedError(404, f"no request {request_id!r:.120}, or its answer was retrieved long ago")
            return session.jobs[request_id].answer

    def retrieved(self, request_id: str, key: str) -> None:
        """Note that an answer was sent, so that it may be dropped later."""
        with self._state:
            self._note_retrieved(self.session(request_id.partition(":")[0], key), request_id)

    def cancel(self, request_id: str, key: str) -> None:
        """Drop a request for samples that still waits."""
        with self._state:
            session = self.session(request_id.partition(":")[0], key)
            for job in [each for each in session.samples if each.id == request_id]:
                session.samples.remove(job)
                job.finish(FailedError("cancelled by the client", "user"))
                self._note_retrieved(session, job.id)  # nobody will ask

    # --- the thread that serves

    def _serve(self) -> None:
        while True:
            with self._state:
                self._drop_silent()
                if self._closed:
                    return
                if not (jobs := self._schedule.next()):
                    self._state.wait(timeout=self._schedule.patience)
                    continue
            began = time.perf_counter()
            try:
                self._together(jobs)
            except Exception as error:  # without this thread all clients would wait for ever
                for job in jobs:
                    job.finish(_failure(error))
            call = self._calls[jobs[0].kind]
            call["count"] += 1
            call["seconds"] += time.perf_counter() - began

    def _together(self, jobs: Sequence[Job]) -> None:
        """Answer requests in one call. If the call fails, each runs by itself, so that only the one at fault fails."""
        read, outcomes = list[tuple[Job, Any]](), list[tuple[Job, Answer | FailedError]]()
        for job in jobs:
            try:
                read.append((job, self._read_of(job)))
            except Exception as error:
                outcomes.append((job, _failure(error)))
        try:
            answers = self._answers(type(jobs[0]), [each for _, each in read]) if read else []
            outcomes += zip([job for job, _ in read], answers, strict=True)
        except Exception as error:
            outcomes += [(job, _failure(error)) for job, _ in read[:1] if len(read) == 1]
        for job, outcome in outcomes:
            _finish(job, outcome)
        if len(outcomes) < len(jobs):  # find out whose fault it is
            for job, _ in read:
                self._together([job])

    def _read_of(self, job: Job) -> Any:
        """The trainer's arguments for a request."""
        if isinstance(job, SampleJob):
            assert job.sampler is not None
            return self._weights(job.sampler), job.request
        if isinstance(job, PassJob):
            assert job.model is not None
            trainer, adapter = self.trainer, _adapter_of(job.model)
            return adapter, wire.forward_backward(job.message, vocabulary=trainer.vocabulary, limit=trainer.limit)
        return job.run

    def _answers(self, kind: type[Job], read: Sequence[Any]) -> Sequence[Answer]:
        if kind is SampleJob:
            num_adapters = len({0 if weights is None else weights.version for weights, _ in read})
            self._most["sample"] = max(self._most["sample"], num_adapters)
            return [wire.sample_output(*result) for result in self.trainer.sample(read)]
        if kind is PassJob:
            self._most["pass"] = max(self._most["pass"], len(read))
            return [wire.forward_backward_output(*result) for result in self.trainer.forward_backward_together(read)]
        return [run() for run in read]


def _is_known(session: Session, request_id: str, digest: bytes) -> bool:
    """Whether this request came before; raises RefusedError if another request had its ``seq_id``."""
    known = session.jobs.get(request_id)
    if known is not None and known.digest != digest:
        raise RefusedError(400, f"the seq_id of {request_id} was another request's")
    return known is not None


def _adapter_of(model: Model) -> Adapter:
    if model.adapter is None:
        raise FailedError("the model could not be made", "user")
    return model.adapter


def _snapshot_bytes(model: Model) -> int:
    """Host memory of the snapshots behind a model's unnamed samplers."""
    samplers = [model.session.samplers[name] for name in model.snapshots]
    return sum(w.numel() * w.itemsize for each in samplers if each.weights is not None for w in each.weights.weights)


def owner_of(key: str) -> str:
    """A digest of a client's key, stored in place of the key."""
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def _dropped(sampler: Sampler) -> RefusedError:
    return RefusedError(
        410,
        f"the weights of {sampler.id} were dropped: those of the last {SNAPSHOTS} unnamed samplers of a model "
        "are kept; save_weights_for_sampler keeps a named one",
    )


def _finish(job: Job, outcome: Answer | FailedError) -> None:
    """Set a job's result. If a pass failed that would have added to a gradient, the gradient is marked as broken.

    Call it outside of ``except``: the error refers to its frames, which keep the memory of a pass alive.
    """
    adapter = None if job.model is None else job.model.adapter
    if isinstance(outcome, FailedError) and isinstance(job, PassJob) and job.adds and adapter is not None:
        adapter.broken = f"request {job.message.seq_id}: {outcome}"
    job.finish(outcome)
    if isinstance(outcome, FailedError) and outcome.category == "server":
        torch.cuda.empty_cache()  # it may have been out of memory


def _failure(error: Exception) -> FailedError:
    if isinstance(error, FailedError):
        return FailedError(str(error), error.category)  # without its frames, which hold the request
    if isinstance(error, RefusedError):
        return FailedError(str(error), "user")
    if isinstance(error, torch.OutOfMemoryError):
        return FailedError(f"out of memory: {error}; send less at once, or start with fewer --tokens-per-row", "server")
    if isinstance(error, LogitlessError):
        return FailedError(str(error), "user" if isinstance(error, ValueError) else "server")
    logger.exception("a request failed")
    return FailedError(f"{type(error).__name__}: {error}", "server")

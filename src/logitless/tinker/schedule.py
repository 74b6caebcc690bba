"""Which requests run next: keys take turns, then the sessions of a key. Requests that can share a call do.

Training requests of a model run in the order of ``seq_id``, whenever they arrive; samples run as they arrive.
"""

import itertools
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence

from logitless.tinker.sessions import FailedError, Job, Model, PassJob, SampleJob, Session
from logitless.tinker.trainer import Trainer

COMPLETIONS = 2048
"""A call of the engine takes no further request once it has so many completions: others wait for its end."""

GATHER_SECONDS = 0.02
"""A sample waits so long for the next one of the same batch, for they come one by one; five times as long while there
are fewer than usual. A batch in two calls of the engine would take twice as many steps."""

GATHER_MOST = 50
"""Times ``GATHER_SECONDS``, after which no sample waits for others, though they go on."""

MISSING_SECONDS = 120.0
"""Requests of a model wait so long for one before them that was refused or lost on its way."""


class Schedule:
    """Scheduler of the service's requests; callers hold the service's lock.

    Args:
        sessions: by id; reordered so that the ones served last come last.
        trainer: says what may share a call.
    """

    def __init__(self, sessions: OrderedDict[str, Session], trainer: Trainer) -> None:
        self._sessions, self._trainer = sessions, trainer
        self._turns, self._served = itertools.count(), dict[str, int]()  # by owner

    @property
    def patience(self) -> float:
        """Seconds to wait before looking again; short if samples wait for others of their batch."""
        return GATHER_SECONDS / 4 if any(session.samples for session in self._sessions.values()) else 5.0

    def next(self) -> Sequence[Job]:
        """Take the next request, and those that share its call, out of their queues; empty if none is due."""
        now = time.monotonic()
        for session in self._in_turn():
            for model in session.models.values():
                _fail_stalled(model, now)
            due: list[Job] = [job for m in session.models.values() if (job := m.waiting.get(m.next_seq)) is not None]
            due += session.samples[:1]
            if not due:
                continue
            first = min(due, key=lambda job: job.number)
            if isinstance(first, SampleJob):
                last = session.samples[-1]
                gap = GATHER_SECONDS * (1 if len(session.samples) >= session.usual else 5)
                if now - last.arrived < gap and now - first.arrived < GATHER_MOST * GATHER_SECONDS:  # more may come
                    continue
                return self._sampled_together(session, first)
            found = self._passes_together(first) if isinstance(first, PassJob) else [first]
            for job in found:
                assert job.model is not None
                del job.model.waiting[job.model.next_seq]
                job.model.next_seq += 1
                self._note_served(job.model.session)
            return found
        return []

    def _in_turn(self) -> list[Session]:
        """All sessions: first by key, then within a key, the longest unserved first."""
        return sorted(self._sessions.values(), key=lambda session: self._served.get(session.owner, -1))

    def _note_served(self, session: Session) -> None:
        self._sessions.move_to_end(session.id)
        owners = {each.owner for each in self._sessions.values()}
        self._served = {o: t for o, t in self._served.items() if o in owners} | {session.owner: next(self._turns)}

    def _passes_together(self, first: PassJob) -> list[Job]:
        """The first pass, and passes of other models that fit beside it.

        All add to gradients or none does, and no more models take part than the trainer allows.
        """
        found, num_tokens = list[Job]([first]), first.num_tokens
        for model in [model for session in self._in_turn() for model in session.models.values()]:
            job = model.waiting.get(model.next_seq)
            if not isinstance(job, PassJob) or job is first or job.adds != first.adds:
                continue
            fits = num_tokens + job.num_tokens <= self._trainer.tokens_per_row
            if fits and len(found) < self._trainer.passes_together:
                found.append(job)
                num_tokens += job.num_tokens
        return found

    def _sampled_together(self, own: Session, first: SampleJob) -> list[Job]:
        """Requests of all sessions for one call of the engine, taken in turn, the first one's session first."""
        found, versions, names = list[Job](), {first.version}, set[tuple[int, str]]()
        queues = {session.id: list(session.samples) for session in (own, *self._in_turn())}
        num_completions, served = 0, Counter[str]()
        while num_completions < COMPLETIONS and any(queues.values()):
            for name, queue in queues.items():
                while queue:
                    job = queue.pop(0)
                    if job.batch != first.batch or job.name in names:
                        continue  # equal names wait for another call
                    if job.version not in versions and len(versions) >= self._trainer.together:
                        continue
                    assert job.request is not None
                    found.append(job)
                    names.add(job.name)
                    versions.add(job.version)
                    num_completions += job.request.num_samples
                    self._sessions[name].samples.remove(job)
                    served[name] += 1
                    break
        for name, count in served.items():
            session = self._sessions[name]
            session.usual = max(count, session.usual // 2)
            self._note_served(session)
        return found


def _fail_stalled(model: Model, now: float) -> None:
    """Fail the requests of a model that wait for an earlier one which never came."""
    since = min((job.arrived for job in model.waiting.values()), default=now)
    if model.next_seq in model.waiting or now - since <= MISSING_SECONDS:
        return
    why = f"seq_id {model.next_seq} of {model.id} never came: send it and those behind it again, with new numbers"
    if model.adapter is not None:
        model.adapter.broken = why  # it may have been a part of the gradient
    model.next_seq = max(model.waiting) + 1
    for job in model.waiting.values():
        job.finish(FailedError(why, "user"))
    model.waiting.clear()

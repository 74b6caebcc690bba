"""``TurnTaking`` samples in parallel and pushes alone."""

import signal
import threading

import pytest
from torch import nn

from logitless.rollout.engine import ConcurrentEngine, Weights
from logitless.rollout.sampling import SamplingOptions
from logitless.rollout.turn_taking import TurnTaking
from logitless.types import Completion, Prompt
from tests.rollout.engines import StandIn

OPTIONS = SamplingOptions(max_new_tokens=1)
WEIGHTS = Weights.of(nn.Linear(1, 1))


def _waiting(of, count):
    """Wait until so many calls are inside."""
    while of() < count:
        threading.Event().wait(0.001)


def _started(call, *arguments):
    thread = threading.Thread(target=call, args=arguments)
    thread.start()
    return thread


class Gated(StandIn):
    """An engine whose calls of ``sample`` wait until the gate is opened."""

    prompts_at_once = 4

    def __init__(self):
        self.gate, self.lock = threading.Event(), threading.Lock()
        self.inside, self.inside_at_push = 0, []

    def sample(self, prompts, num_samples, options, *, seed):
        with self.lock:
            self.inside += 1
        assert self.gate.wait(300)
        version = self.version
        with self.lock:
            self.inside -= 1
        return [[Completion(p.id, (3,), "a", "stop", weights_version=version)] for p in prompts]

    def load(self, weights, version):
        self.inside_at_push.append(self.inside)
        self.version = version


def _asking(engine):
    found = {}

    def ask(name):
        found[name] = engine.sample([Prompt(name, "", (3,))], 1, OPTIONS, seed=0)[0][0].weights_version

    return found, ask


def test_calls_sample_side_by_side_and_a_push_waits_for_them_and_holds_up_the_next():
    inner = Gated()
    engine = TurnTaking(inner)
    assert isinstance(engine, ConcurrentEngine)
    assert engine.prompts_at_once == 4
    found, ask = _asking(engine)
    early = [_started(ask, name) for name in ("one", "two")]
    _waiting(lambda: inner.inside, 2)  # both at once
    push = _started(engine.load, WEIGHTS, 5)
    _waiting(lambda: engine._loading, 1)
    late = _started(ask, "late")
    late.join(0.05)
    assert (inner.inside, inner.inside_at_push) == (2, [])  # neither the push nor the late call got in
    inner.gate.set()
    for thread in (*early, push, late):
        thread.join(300)
    assert inner.inside_at_push == [0]
    assert found == {"one": 0, "two": 0, "late": 5}


def test_a_push_that_is_interrupted_while_it_waits_holds_nobody_up():
    inner = Gated()
    engine = TurnTaking(inner)
    found, ask = _asking(engine)
    early = _started(ask, "early")
    _waiting(lambda: inner.inside, 1)
    main = threading.main_thread().ident

    def interrupt():
        _waiting(lambda: engine._loading, 1)
        threading.Event().wait(0.2)
        signal.pthread_kill(main, signal.SIGINT)

    interrupting = _started(interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.load(WEIGHTS, 5)
    interrupting.join(300)
    inner.gate.set()
    late = _started(ask, "late")
    for thread in (early, late):
        thread.join(300)
    assert found == {"early": 0, "late": 0}

"""Engines that take turns: samples side by side, and a push alone."""

import threading

from torch import nn

from logitless.rollout.engine import ConcurrentEngine, Weights
from logitless.rollout.own_copy import TurnTaking
from logitless.rollout.sampling import SamplingOptions
from logitless.types import Completion, Prompt

OPTIONS = SamplingOptions(max_new_tokens=1)


class Meeting:
    """An engine whose calls of ``sample`` wait for each other, so that they must be there at the same time."""

    prompts_at_once = 4

    def __init__(self, calls):
        self.barrier, self.version, self.sampling = threading.Barrier(calls, timeout=30), 0, 0
        self.lock, self.pushed_alone = threading.Lock(), []

    def sample(self, prompts, num_samples, options, *, seed):
        with self.lock:
            self.sampling += 1
        self.barrier.wait()
        version = self.version
        with self.lock:
            self.sampling -= 1
        return [[Completion(p.id, (3,), "a", "stop", weights_version=version)] for p in prompts]

    def load(self, weights, version):
        self.pushed_alone.append(self.sampling == 0)
        self.version = version

    def close(self):
        pass


def test_calls_sample_side_by_side_and_a_push_waits_for_them_and_holds_up_the_next():
    inner = Meeting(calls=2)
    engine = TurnTaking(inner)
    assert isinstance(engine, ConcurrentEngine)
    assert engine.prompts_at_once == 4
    found = []

    def ask(name):
        found.append(engine.sample([Prompt(name, "", (3,))], 1, OPTIONS, seed=0)[0][0])

    early, late = threading.Thread(target=ask, args=("early",)), threading.Thread(target=ask, args=("late",))
    early.start()
    while not inner.sampling:
        threading.Event().wait(0.001)
    ask_too = threading.Thread(target=ask, args=("too",))
    ask_too.start()
    early.join()
    ask_too.join()  # both were inside at once, or the barrier would have broken
    push = threading.Thread(target=engine.load, args=(Weights.of(nn.Linear(1, 1)), 5))
    push.start()
    push.join()
    inner.barrier = threading.Barrier(1)
    late.start()
    late.join()
    assert inner.pushed_alone == [True]
    assert {c.prompt_id: c.weights_version for c in found} == {"early": 0, "too": 0, "late": 5}

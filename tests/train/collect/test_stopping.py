"""What a signal ends on several ranks; whole runs that one ends are in ``test_data_parallel.py``."""

from contextlib import nullcontext
from types import SimpleNamespace

from logitless.rollout.environment import SingleTurn
from logitless.rollout.environments.harness import HarnessEpisodes
from logitless.train import loop as module
from logitless.train.loop import Loop


def test_sampling_is_ended_between_two_steps_but_not_that_of_a_harness_in_a_thread_of_its_own(monkeypatch):
    monkeypatch.setattr(module, "stopping_together", lambda *_: "between two steps")
    loop, found = object.__new__(Loop), []
    loop.ranks, loop.engines = SimpleNamespace(world=2), SimpleNamespace(distinct=())
    for environment in (SingleTurn(), HarnessEpisodes(None, None, None)):
        loop.parts = SimpleNamespace(inputs=SimpleNamespace(environment=environment))
        found.append(loop._at_once())
    assert found[0] == "between two steps"
    assert isinstance(found[1], nullcontext)

"""Refills that stream: a place is filled again while others are still sampled, never more often than in rounds."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest

from logitless.rewards.reward import weighted
from logitless.rewards.text.length import Length
from logitless.rollout.engine import ConcurrentEngine
from logitless.rollout.environment import Reply, SingleTurn
from logitless.train.collect.ahead import AheadCollector, ReplayingCollector
from logitless.train.collect.block_log import BlockLog
from logitless.train.collect.collector import Collector
from logitless.train.collect.refill import OneAtATime
from logitless.types import Completion, Prompt
from tests.train.engines import FakeEngine
from tests.train.tiny import tiny_recipe

PROMPTS = [Prompt(str(i), "ab", (3, 4)) for i in range(12)]


class Gated(FakeEngine):
    """An engine of several threads: a prompt waits for its gate, and has a signal unless it is named here."""

    prompts_at_once = 8

    def __init__(self, without_signal=(), gates=(), fails_at=None):
        self.without, self.gates, self.fails_at = set(without_signal), dict(gates), fails_at
        self.asked, self.lock = [], threading.Lock()

    def sample(self, prompts, num_samples, options, *, seed):
        with self.lock:
            self.asked += [(p.id, seed) for p in prompts]
        for prompt in prompts:
            if prompt.id == self.fails_at:
                raise RuntimeError("the server is gone")
            if prompt.id in self.gates:
                assert self.gates[prompt.id].wait(300)
        return [
            [_completion(p, 2 if p.id in self.without else 1 + i, seed) for i in range(num_samples)] for p in prompts
        ]


def _completion(prompt, length, seed):
    return Completion(prompt.id, (3,) * length, "a" * length, "stop", (-(seed % 97) / 97,) * length, weights_version=0)


@pytest.fixture
def collector(tmp_path):
    """A collector of four prompts a block, in the order of an unshuffled list, which is closed at the test's end."""
    with ExitStack() as opened:

        def made(engine, *, kind=AheadCollector, max_refills=2, blocks=2):
            options = tiny_recipe(tmp_path, rollout__zero_signal="refill", rollout__max_refills=max_refills).rollout
            more = {} if kind is Collector else {"log": BlockLog(tmp_path / "collected", PROMPTS)}
            if kind is AheadCollector:
                more |= {"staleness": 1, "blocks": blocks}
            found = kind(PROMPTS, engine, OneAtATime(SingleTurn()), weighted([Length()]), options, seed=0, **more)
            if kind is AheadCollector:
                opened.callback(found.close)
            return found

        yield made


@pytest.fixture
def order(collector):
    """The ids of the prompts in the order in which a collector draws them."""
    return [PROMPTS[i].id for i in collector(Gated(), kind=Collector).order.next(5)]


def test_a_place_without_a_signal_is_filled_again_while_the_others_are_still_sampled(collector, order):
    *first, fifth = order
    gates = {prompt: threading.Event() for prompt in first[1:]}
    engine = Gated(without_signal=first[:1], gates=gates)
    assert isinstance(engine, ConcurrentEngine)
    made = collector(engine, blocks=1)
    opener = threading.Thread(target=_open_when, args=(engine, fifth, gates.values()))
    opener.start()
    block = made.next(0)  # would wait for ever, were the fifth prompt not asked for before the gates open
    opener.join()
    assert [group.prompt.id for group in block.sampled] == [*first, fifth]
    assert block.kept == (False, True, True, True, True)
    assert block.rounds == 2


def _open_when(engine, prompt, gates):
    end = threading.Event()
    for _ in range(3000):
        if prompt in [asked for asked, _ in engine.asked]:
            break
        end.wait(0.01)
    for gate in gates:
        gate.set()


def test_a_place_is_refilled_as_often_as_there_would_be_rounds(collector):
    block = collector(Gated(without_signal=[p.id for p in PROMPTS]), max_refills=1, blocks=1).next(0)
    assert (len(block.sampled), any(block.kept), block.rounds) == (8, False, 2)


def test_a_block_that_needs_no_refill_is_the_one_that_rounds_would_draw(collector):
    made, waiting = collector(Gated()), collector(Gated(), kind=Collector)
    for block in range(2):
        assert made.next(block) == waiting.next(block)


def test_the_log_has_what_streamed_in_and_replays_it(collector, order):
    made = collector(Gated(without_signal=order[:2]))
    blocks = [made.next(block) for block in range(2)]
    assert len(blocks[0].sampled) == 6
    replayed = collector(Gated(fails_at="0"), kind=ReplayingCollector)
    assert [replayed.next(block) for block in range(2)] == blocks


def test_refills_of_a_prompt_that_comes_again_have_seeds_of_their_own(collector):
    engine = Gated(without_signal=[p.id for p in PROMPTS])
    collector(engine, max_refills=5, blocks=1).next(0)
    assert len(engine.asked) == 24  # twice through the prompts
    times = Counter(seed for _, seed in engine.asked)  # in whatever order threads came to ask
    assert sorted(times.values()) == [1] * 20 + [4]  # the first prompts of a block share one


def test_an_engine_that_fails_stops_the_block_and_leaves_no_thread(collector, order):
    made = collector(Gated(fails_at=order[2]))
    with pytest.raises(RuntimeError, match="the server is gone"):
        made.next(0)
    made.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("logitless-episodes") and t.is_alive()]


def test_an_environment_is_asked_by_one_thread_at_a_time():
    inside, most = [], []

    class Counting:
        def start(self, prompt, *, seed):
            return prompt.id

        def reply(self, state, turn):
            inside.append(state)
            most.append(len(inside))
            threading.Event().wait(0.01)
            inside.remove(state)
            return Reply(reward=1.0)

    shared = OneAtATime(Counting())
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(shared.reply, range(6), [Completion("7", (3,), "a", "stop")] * 6))
    assert most == [1] * 6
    assert shared.start(replace(PROMPTS[0], id="x"), seed=0) == "x"

"""Blocks collected ahead: never further than the recipe says, written down, and the same run again from what was."""

import json
import shutil
import threading
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
from torch import nn

from logitless.distributed.ranks import Ranks
from logitless.errors import DataError
from logitless.rewards.reward import weighted
from logitless.rewards.text.length import Length
from logitless.rollout.engine import Weights
from logitless.rollout.environment import SingleTurn
from logitless.rollout.sampling_ranks import SamplingRanks
from logitless.train.collect.ahead import AheadCollector
from logitless.train.collect.block_log import BlockLog
from logitless.train.collect.collector import Collector
from logitless.train.store.checkpoint import checkpoints, load_checkpoint
from logitless.types import Completion, Prompt
from tests.train.engines import FakeEngine
from tests.train.tiny import assert_equal, finished_run, start, tiny_recipe

PROMPTS = [Prompt(str(i), "ab", (3, 4)) for i in range(8)]


class Noting(FakeEngine):
    """An engine that says when it is asked, and how many blocks had been trained on."""

    def __init__(self, seconds=0.0, fails_at=None):
        self.trained, self.begun, self.seconds, self.fails_at = 0, [], seconds, fails_at

    def sample(self, prompts, num_samples, options, *, seed):
        self.begun.append(self.trained)
        if len(self.begun) - 1 == self.fails_at:
            raise RuntimeError("the engine is gone")
        time.sleep(self.seconds)
        lengths = range(1, 1 + num_samples)
        return [[Completion(p.id, (3,) * n, "a" * n, "stop", (-1.0 / 3,) * n) for n in lengths] for p in prompts]


@pytest.fixture
def ahead(tmp_path):
    """A collector that goes ahead, in a folder of this test, and is closed at its end."""
    with ExitStack() as opened:

        def made(engine, *, staleness, blocks=6, log="collected", replayed=None):
            options = tiny_recipe(tmp_path).rollout
            arguments = (PROMPTS, engine, SingleTurn(), weighted([Length()]), options)
            log = BlockLog(tmp_path / log, PROMPTS)
            found = AheadCollector(*arguments, seed=0, staleness=staleness, blocks=blocks, log=log, replayed=replayed)
            opened.callback(found.close)
            return found

        yield made


class Apart(SamplingRanks):
    """Sampling ranks that are this one."""

    def __init__(self):
        super().__init__(Ranks.alone())
        self.noting = Noting()

    def sample(self, *arguments, **options):
        self.exact = True
        sampled = self.noting.sample(*arguments, **options)
        return [[replace(each, weights_version=0) for each in group] for group in sampled]

    def train(self, collector, blocks):
        """Ask for each block with weights of its own; returns the blocks."""
        found = []
        for block in blocks:
            self.load(Weights.of(nn.Linear(1, 1)), block)
            collector.expect(block)
            found.append(collector.next(block))
            until(lambda: collector._begun == min(6, block + 1 + collector.staleness))  # noqa: B023
        return found


def until(condition):
    """Wait until a thread has done something."""
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_block_begins_only_when_all_but_so_many_before_it_were_trained_on(ahead, staleness):
    engine = Noting()
    collector = ahead(engine, staleness=staleness)
    for block in range(6):
        engine.trained = block
        collector.next(block)
        until(lambda: len(engine.begun) == min(6, block + 1 + staleness))  # noqa: B023 - and goes on ahead by itself
        time.sleep(0.02)
        assert len(engine.begun) == min(6, block + 1 + staleness)
    assert max(block - trained for block, trained in enumerate(engine.begun)) == staleness


def test_the_blocks_are_those_of_a_collector_that_waits(ahead, tmp_path):
    collector = ahead(Noting(), staleness=2, blocks=4)
    waiting = Collector(PROMPTS, Noting(), SingleTurn(), weighted([Length()]), tiny_recipe(tmp_path).rollout, seed=0)
    for block in range(4):
        assert collector.state_dict() == waiting.state_dict()
        assert collector.next(block) == waiting.next(block)


def test_what_is_in_the_log_is_not_drawn_again(ahead, tmp_path):
    first = ahead(Noting(), staleness=1, blocks=3)
    blocks = [first.next(b) for b in range(3)]
    first.close()
    (tmp_path / "collected" / "block-000003.json").unlink()
    engine = Noting()
    again = ahead(engine, staleness=1, blocks=3)
    again.load_state_dict(json.loads((tmp_path / "collected" / "block-000002.json").read_text())["before"])
    assert [again.next(b) for b in (1, 2)] == blocks[1:]
    assert len(engine.begun) == 1


def test_an_engine_that_fails_in_the_thread_stops_the_one_who_waits(ahead):
    collector = ahead(Noting(fails_at=1), staleness=2)
    collector.next(0)
    with pytest.raises(RuntimeError, match="gone"):
        collector.next(1)


def test_whoever_waits_can_be_interrupted_and_ask_again(ahead):
    collector = ahead(Noting(seconds=0.2), staleness=1)
    before = collector.state_dict()
    first = collector.next(0)
    collector.load_state_dict(before)  # what the loop does after Ctrl-C: the block that is under way is not lost
    assert len({g.prompt.id for block in (first, collector.next(1)) for g in block.sampled}) == 8


def test_a_log_of_other_prompts_or_without_the_block_is_refused(ahead, tmp_path):
    ahead(Noting(), staleness=1, blocks=1).next(0)
    with pytest.raises(DataError, match="block 2"):
        BlockLog(tmp_path / "collected", PROMPTS).read(1)
    with pytest.raises(DataError, match="KeyError"):
        BlockLog(tmp_path / "collected", PROMPTS[:1]).read(0)
    file = tmp_path / "collected" / "block-000001.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "schema_number": 1}))
    with pytest.raises(DataError, match="schema 1, of another version"):
        BlockLog(tmp_path / "collected", PROMPTS).read(0)


def test_a_resumed_run_keeps_no_weights_that_only_sampled_logged_blocks_and_knows_that_they_were_exact(ahead):
    first = Apart()
    first.train(ahead(first, staleness=1), range(6))
    again = Apart()
    blocks = again.train(ahead(again, staleness=1), range(6))
    assert not again.noting.begun
    assert len(again._copies) <= 2
    assert all(block.exact for block in blocks)


def test_a_checkpoint_waits_for_no_block_whose_weights_are_still_to_be_trained(ahead):
    in_turns = Apart()
    in_turns.train(collector := ahead(in_turns, staleness=0), range(6))
    again = Apart()
    replaying = ahead(again, staleness=2, log="again", replayed=collector.log)
    again.load(Weights.of(nn.Linear(1, 1)), 0)
    replaying.expect(0)
    replaying.next(0)
    settling = threading.Thread(target=replaying.settle, args=(1,), kwargs={"in_training": False}, daemon=True)
    settling.start()
    settling.join(300)
    assert not settling.is_alive()


# --- whole runs


def assert_same_end(one, other):
    """The same last checkpoint, and the same metrics of training."""
    assert_equal(*(load_checkpoint(run.checkpoints).tensors for run in (one, other)))
    kept = ("reward/mean", "loss/total", "optimizer/grad_norm", "rollout/lag_max", "step", "block")
    lines = [[[line.get(name) for name in kept] for line in run.read_metrics()] for run in (one, other)]
    assert lines[0] == lines[1]


def logged(run):
    """The blocks in the log of a run."""
    return [json.loads(file.read_text()) for file in sorted(run.collected.glob("*.json"))]


@pytest.fixture(scope="module")
def asynchronous(tmp_path_factory):
    """A run with two blocks ahead, and its folder and changes."""
    folder, changes = tmp_path_factory.mktemp("ahead"), {"train__blocks": 6, "rollout__staleness": 2}
    return folder, changes, finished_run(folder, **changes)


def test_every_block_is_sampled_by_the_weights_that_are_so_many_blocks_old(asynchronous):
    _, changes, run = asynchronous
    staleness, rows = changes["rollout__staleness"], logged(run)
    assert [row["block"] for row in rows] == list(range(6))
    assert [row["begun_after"] for row in rows] == [max(0, block - staleness) for block in range(6)]
    first_step: dict[int, int] = {}
    for record in run.read_metrics()[1:]:
        first_step.setdefault(record["block"], record["step"])
    lags = {record["block"]: record["rollout/lag_max"] for record in run.read_metrics() if "rollout/lag_max" in record}
    assert lags == {block: first_step[block] - first_step[max(1, block - staleness)] for block in range(1, 7)}
    assert [row["versions"] for row in rows] == [[first_step[row["begun_after"] + 1] - 1] for row in rows]
    assert not any(thread.name == "collector" for thread in threading.enumerate())


def test_a_run_that_was_stopped_goes_on_from_its_log_in_every_bit(asynchronous, tmp_path):
    folder, changes, run = asynchronous
    stopped = tmp_path / "runs" / "tiny"
    shutil.copytree(run.path, stopped)
    for path in checkpoints(stopped / "checkpoints"):
        if int(path.name.split("-")[1]) > 2:
            shutil.rmtree(path)
    assert_same_end(run, finished_run(folder, resume=True, output=str(tmp_path / "runs"), **changes))


def test_on_policy_is_the_default_and_needs_no_log(tmp_path):
    assert not (finished_run(tmp_path, train__blocks=1).path / "collected").exists()


def test_a_folder_without_a_log_is_refused(tmp_path):
    (tmp_path / "nothing").mkdir()
    engine = {"name": "recorded", "path": str(tmp_path / "nothing")}
    with pytest.raises(DataError, match="staleness"):
        start(tiny_recipe(tmp_path, rollout__engine=engine))

"""The journal alone: seconds, lines, summary, and who writes."""

import json
import math

import pytest
import torch

from logitless.distributed.ranks import Ranks
from logitless.train.block import JudgedBlock
from logitless.train.record.journal import Journal
from logitless.train.record.live_view import LiveView
from logitless.train.record.run_folder import RunFolder, create_run_folder
from logitless.train.record.wall_clock import WallClock
from tests.train.groups import group_of, judged


class Second(Ranks):
    """A rank that is not the first, with nobody beside it."""

    @property
    def is_first(self) -> bool:
        return False


class Kept:
    """A writer that keeps what it is given."""

    def __init__(self):
        self.records = []

    def write(self, record):
        self.records.append(record)

    def close(self):
        pass


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    return create_run_folder(tmp_path, "run", unique=False)


def journal(folder: RunFolder, writer: Kept | None = None, ranks: Ranks | None = None) -> Journal:
    writers = [] if writer is None else [writer]
    return Journal(folder, LiveView(3, silent=True), writers, torch.device("cpu"), ranks or Ranks.alone())


def test_the_seconds_of_a_phase_add_up_and_those_of_a_broken_one_count(folder):
    kept = journal(folder)
    with kept.phase("rollout") as first:
        pass
    with pytest.raises(ZeroDivisionError), kept.phase("rollout") as second:
        1 / 0  # noqa: B018
    assert kept.clock.seconds()["rollout"] == pytest.approx(first[0] + second[0])
    assert min(first[0], second[0]) > 0


def test_a_line_goes_to_the_folder_and_the_writers_and_lists_to_the_folder_alone(folder):
    writer = Kept()
    journal(folder, writer).write({"step": 1, "block": 1, "loss/total": 0.5}, {"parallel/tokens_per_rank": [3, 4]})
    [line], [record] = folder.read_metrics(), writer.records
    assert line == {**record, "parallel/tokens_per_rank": [3, 4]}
    assert (record["step"], record["loss/total"]) == (1, 0.5)
    assert {"memory/peak_bytes", "time/elapsed_seconds"} <= record.keys()


def test_a_writer_that_fails_ends_no_run_and_is_left_out(folder, capsys):
    class Down(Kept):
        def write(self, record):
            super().write(record)
            raise ConnectionError("the service is down")

        close = write

    down, other = Down(), Kept()
    kept = Journal(folder, LiveView(3), [down, other], torch.device("cpu"))
    for step in (1, 2):
        kept.write({"step": step, "block": step})
    kept.close_writers()
    assert [len(writer.records) for writer in (down, other)] == [1, 2]
    assert len(folder.read_metrics()) == 2
    assert "Down failed and gets no further metrics; metrics.jsonl has them all: ConnectionError: the service" in (
        capsys.readouterr().out.replace("\n", " ")
    )


def summary_of(kept, **more):
    """What a journal writes at the end."""
    kept.write_summary(more)
    return json.loads(kept.folder.summary.read_text())


def test_the_summary_has_the_first_and_the_last_accuracy_and_reward(folder):
    kept = journal(folder)
    kept.write({"step": 0, "block": 1, "evaluation/accuracy": 0.25})
    for step, reward in ((1, 0.5), (2, 0.75), (3, 1.0)):
        kept.write({"step": step, "block": step, "reward/mean": reward, "evaluation/accuracy": reward / 2})
    kept.write({"step": 4, "block": 3})
    expected = {"accuracy_before": 0.25, "accuracy_after": 0.5, "reward_first_block": 0.5, "reward_last_block": 1.0}
    assert summary_of(kept, name="run").items() >= (expected | {"name": "run"}).items()


def test_the_summary_has_held_out_rewards_what_was_scored_and_the_first_failures(folder):
    kept = journal(folder)
    kept.write({"step": 0, "block": 1, "evaluation/reward_mean": 0.25, "held_out/hard/reward_mean": 0.125})
    kept.write({"step": 1, "block": 1, "evaluation/reward_mean": 0.5, "held_out/hard/reward_mean": math.nan})
    kept.write_rollouts(1, judged([group_of("7", [None, None])]))
    assert kept.nothing_scored
    kept.first_failures({"mine": "KeyError: 'answer'"})
    kept.first_failures({"mine": "another"})
    kept.write_rollouts(2, judged([group_of("7", [None, 1.0])]))
    assert not kept.nothing_scored
    expected = {
        "held_out_reward_before": 0.25,
        "held_out_reward_after": 0.5,
        "held_out_reward_before/hard": 0.125,
        "held_out_reward_after/hard": None,
        "completions": 4,
        "scored_completions": 1,
        "first_failure/mine": "KeyError: 'answer'",
    }
    assert summary_of(kept).items() >= expected.items()


def test_a_run_has_no_signal_if_no_block_that_was_scored_had_one(folder):
    kept, scored, unscored = journal(folder), judged([group_of("7", [1.0, 1.0])]), judged([group_of("7", [None, None])])
    kept.write_rollouts(1, unscored, has_signal=False)
    kept.write_rollouts(2, scored)  # learned from something else
    assert not kept.no_signal
    kept.write_rollouts(3, scored, has_signal=False)
    assert kept.no_signal
    kept.write_rollouts(4, scored, has_signal=True)
    assert not kept.no_signal
    assert summary_of(kept)["blocks_with_signal"] == 1


def test_blocks_with_a_signal_are_not_counted_for_a_run_whose_first_blocks_were_not(folder):
    kept, scored = journal(folder), judged([group_of("7", [1.0, 1.0])])
    kept.load_state_dict({"lines": 0, "seconds": {}, "summary": {"scored_completions": 800}})
    kept.write_rollouts(51, scored, has_signal=False)
    assert not kept.no_signal


def test_it_goes_on_from_its_state_and_takes_back_later_lines(folder):
    kept = journal(folder)
    kept.write({"step": 0, "block": 1, "evaluation/accuracy": 0.25})
    state = json.loads(json.dumps(kept.state_dict()))
    kept.write({"step": 1, "block": 1, "evaluation/accuracy": 0.5})
    again = journal(folder)
    again.load_state_dict(state)
    assert [line["step"] for line in folder.read_metrics()] == [0]
    assert again.summary == {"accuracy_before": 0.25}
    again.write({"step": 1, "block": 1, "evaluation/accuracy": 0.75})
    assert again.summary == {"accuracy_before": 0.25, "accuracy_after": 0.75}


@pytest.mark.parametrize(
    ("summary", "seconds"),
    [
        (None, {"rollout": 4.0, "checkpoint": 1.0}),  # killed
        ({"rollout": 4.5, "checkpoint": 1.0, "report": 2.0}, {"rollout": 4.5, "checkpoint": 1.0, "report": 2.0}),
        (
            {"rollout": 3.0},
            {"rollout": 4.0, "checkpoint": 1.0},
        ),  # of a process before the one that saved, and was killed
    ],
)
def test_seconds_go_on_from_the_summary_or_from_a_checkpoint_that_came_after_it(folder, summary, seconds):
    if summary is not None:
        folder.write_summary({"seconds": summary})
    clock = WallClock(clock=lambda: 0.0)
    again = Journal(folder, LiveView(3, silent=True), [], torch.device("cpu"), clock=clock)
    again.load_state_dict({"lines": 0, "seconds": {"rollout": 4.0, "checkpoint": 1.0}, "summary": {}})
    assert clock.seconds() == {**seconds, "unnamed": 0.0}


def test_the_sample_that_is_shown_is_of_a_group_that_is_trained_on(folder):
    shown = []
    view = LiveView(3, silent=True)
    view.update = lambda record, sample: shown.append(sample)
    kept = Journal(folder, view, [], torch.device("cpu"))
    groups = (group_of("7", [1.0, 1.0]), group_of("8", [0.0, 1.0]))
    kept.write_rollouts(1, JudgedBlock(groups, (False, True), 1), [[None, None], [-0.5, 0.5]])
    kept.write({"step": 1, "block": 1})
    kept.write_rollouts(2, JudgedBlock(groups[:1], (False,), 1))
    kept.write({"step": 1, "block": 2})
    of_trained = (groups[1].prompt.text, groups[1].completions[0].text, 0.0)
    assert shown == [of_trained, of_trained]


def test_another_rank_keeps_the_same_summary_and_writes_nothing(folder):
    writer = Kept()
    other = journal(folder, writer, Second())
    other.write({"step": 0, "block": 1, "evaluation/accuracy": 0.25})
    other.write_rollouts(1, judged([group_of("7", [0.0, 1.0])]), [[0.5, -0.5]])
    other.write_summary({})
    assert other.state_dict()["lines"] == 1
    assert other.summary == {"accuracy_before": 0.25, "completions": 2, "scored_completions": 2}
    assert not folder.metrics.exists() or folder.read_metrics() == []
    assert not folder.summary.exists()
    assert list(folder.read_rollouts()) == writer.records == []

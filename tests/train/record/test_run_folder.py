"""What is written is read back; a crash cuts at most the last line; nothing that exists is overwritten."""

import errno
import json
import os
from pathlib import Path
from unittest import mock

import pyarrow.parquet
import pytest

from logitless.errors import ConfigurationError, DataError, InputError, TrainingError
from logitless.train.record.run_folder import create_run_folder, open_run_folder, taken
from logitless.train.store.atomic import write_atomically
from logitless.train.store.checkpoint import BackgroundSaver
from tests.train.fake_run import fake_groups
from tests.train.interrupting import before


def _checkpoint(folder, block):
    saver = BackgroundSaver(folder.checkpoints, keep=9)
    saver.save(block=block, step=block, tensors={}, state={})
    saver.wait()


@pytest.fixture
def folder(tmp_path):
    """The folder of a run that has not begun."""
    return create_run_folder(tmp_path, "toy")


def test_an_existing_run_is_an_error_that_names_the_ways_out(tmp_path, folder):
    folder.write_config("name: toy")
    _checkpoint(folder, 0)
    _checkpoint(folder, 1)
    with pytest.raises(ConfigurationError, match="--resume"):
        create_run_folder(tmp_path, "toy")


def test_a_failed_start_does_not_block_the_repaired_one(tmp_path, folder):
    folder.write_config("name: toy")
    folder.append_metrics({"step": 0})
    _checkpoint(folder, 0)
    (folder.path / "warm_start").mkdir()
    assert create_run_folder(tmp_path, "toy") == folder
    folder.clear()
    assert sorted(path.name for path in folder.path.iterdir()) == ["checkpoints", "rollouts"]
    assert not any(folder.checkpoints.iterdir())


def test_a_start_that_is_killed_while_it_writes_its_first_file_does_not_block_the_next(tmp_path, folder):
    (folder.path / ".provenance.json.partial").touch()
    assert create_run_folder(tmp_path, "toy") == folder


def test_a_start_that_is_killed_while_it_clears_the_folder_does_not_block_the_next(tmp_path, folder):
    names, listed, unlink = ["config.yaml", "provenance.json", "metrics.jsonl"], Path.iterdir, Path.unlink

    def killed_at_the_third(path):
        if path.name == names[2]:
            raise KeyboardInterrupt
        unlink(path)

    def in_order(path):
        return sorted(listed(path), key=lambda each: names.index(each.name) if each.name in names else 3)

    for name in names:
        (folder.path / name).touch()
    with (
        mock.patch.object(Path, "unlink", killed_at_the_third),
        mock.patch.object(Path, "iterdir", in_order),
        pytest.raises(KeyboardInterrupt),
    ):
        folder.clear()
    assert create_run_folder(tmp_path, "toy") == folder


def test_a_failed_start_is_removed_without_an_error_while_its_first_checkpoint_is_still_written(
    tmp_path, monkeypatch, folder
):
    folder.write_config("name: toy")

    def written(name, **_):
        if name == "checkpoints":
            (folder.checkpoints / ".saving-block").touch()

    before(monkeypatch, os, "rmdir", written)
    folder.remove_after_failed_start(ValueError)
    assert create_run_folder(tmp_path, "toy") == folder


@pytest.mark.parametrize("names", [["model"], ["tensorboard"], ["config.yaml", "thesis.tex"], ["notes"]])
def test_a_folder_with_anything_that_a_start_does_not_write_is_left_alone(tmp_path, names):
    for name in names:
        (tmp_path / "toy" / name).mkdir(parents=True)
    with pytest.raises(ConfigurationError, match="given the existing"):
        create_run_folder(tmp_path, "toy")


@pytest.mark.parametrize(
    ("run", "forks", "resumable"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_to_resume_is_advised_only_where_a_run_is_and_none_is_forked(tmp_path, run, forks, resumable):
    folder = create_run_folder(tmp_path, "toy")
    if run:
        folder.write_config("name: toy")
    said = str(taken(folder, forks=forks))
    assert ("Add --resume" in said, "--set name=..., or --numbered" in said) == (resumable, True)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match="write"):
        create_run_folder(tmp_path / "file" / "below", "toy")


def test_opening_a_folder_without_a_run_is_an_error(tmp_path):
    for path, given in ((tmp_path / "empty", "a folder without a config.yaml"), (tmp_path / "none", "nothing")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(ConfigurationError, match=f"given {given}. Check the path"):
            open_run_folder(path)


def test_the_newest_five_runs_in_a_folder_or_beside_it_are_named(tmp_path):
    for number in range(7):
        config = create_run_folder(tmp_path, f"run-{number}").config
        config.write_text("name: toy")
        os.utime(config, (number, number))
    for path in (tmp_path / "none", tmp_path):
        expected = rf"Name one of those in {tmp_path}, newest first: run-6, run-5, run-4, run-3, run-2\."
        with pytest.raises(ConfigurationError, match=expected):
            open_run_folder(path)


def test_a_checkpoint_named_as_fork_takes_it_is_answered_with_the_option_of_other_commands(tmp_path):
    run = create_run_folder(tmp_path, "longer")
    run.write_config("name: longer")
    with pytest.raises(ConfigurationError, match=rf"Name {run.path}; .* --checkpoint 50\."):
        open_run_folder(Path(f"{run.path}:50"))


def test_metrics_are_read_back_with_null_for_what_json_does_not_have(folder):
    folder.append_metrics({"step": 1, "optimizer/grad_norm": float("inf"), "loss/total": float("nan")})
    folder.append_metrics({"step": 2, "loss/total": 0.1})
    assert folder.metrics.read_text().splitlines() == [
        '{"step": 1, "optimizer/grad_norm": null, "loss/total": null}',
        '{"step": 2, "loss/total": 0.1}',
    ]
    assert folder.read_metrics()[1] == {"step": 2, "loss/total": 0.1}


@pytest.mark.parametrize("record", [{"step": 1, "rewards/mean": 1.0}, {"loss/total": 1.0}])
def test_an_unknown_metric_or_a_line_without_its_step_is_refused_before_it_is_written(folder, record):
    with pytest.raises(InputError):
        folder.append_metrics(record)
    assert not folder.metrics.exists()


@pytest.mark.parametrize("rest", ['{"step": 4, "loss/to', '{"step": 4}', '{"step": 4, \n', "\x00\x00\n"])
def test_a_last_line_that_a_crash_cut_is_left_out(folder, rest):
    folder.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 3)) + rest)
    assert [record["step"] for record in folder.read_metrics()] == [1, 2, 3]


def test_a_malformed_line_before_the_last_is_an_error_with_its_number(folder):
    folder.metrics.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(DataError, match="line 2"):
        folder.read_metrics()


def test_a_run_that_goes_on_leaves_the_file_that_it_would_have_left_without_a_stop(tmp_path):
    whole, stopped = create_run_folder(tmp_path, "whole"), create_run_folder(tmp_path, "stopped")
    records = [{"block": step // 2, "step": step, "loss/total": 0.1 * step} for step in range(1, 7)]
    for record in records:
        whole.append_metrics(record)
    for record in records[:5]:
        stopped.append_metrics(record)
    with stopped.metrics.open("a") as file:
        file.write('{"block": 3, "st')
    stopped.truncate_metrics(num_lines=3)
    for record in records[3:]:
        stopped.append_metrics(record)
    assert stopped.metrics.read_bytes() == whole.metrics.read_bytes()


def test_truncating_before_the_first_line_leaves_an_empty_file(folder):
    folder.truncate_metrics(num_lines=0)
    assert folder.metrics.read_text() == ""
    assert folder.read_metrics() == []


def test_rollouts_hold_every_completion_with_what_was_said_of_it(folder):
    groups = fake_groups(3, 12)
    advantages = [[0.25 * number for number in range(8)] for _ in groups]
    assert folder.write_rollouts(3, groups, advantages).name == "part-000003.parquet"
    ((number, rows),) = folder.read_rollouts()
    assert (number, len(rows)) == (3, 32)
    group, row = groups[1], rows[8 + 5]
    completion, verdict = group.completions[5], group.verdicts[5]["style"]
    expected = {"block": 3, "prompt_id": group.prompt.id, "prompt": group.prompt.text, "completion": completion.text}
    expected |= {"num_tokens": completion.length, "finish_reason": completion.finish_reason, "advantage": 1.25}
    expected |= {"reward": group.rewards[5], "reward/style": verdict.score}
    assert {name: row[name] for name in expected} == expected
    said = json.loads(row["verdicts"])["style"]
    assert tuple(map(tuple, said["detail"])) == verdict.detail
    assert said["status"] == verdict.status


def test_an_ungraded_verdict_and_an_absent_advantage_are_null(folder):
    for block in range(1, 12):
        groups = fake_groups(block, 12)
        ungraded = sum(v["style"].score is None for group in groups for v in group.verdicts)
        if ungraded:
            break
    table = pyarrow.parquet.read_table(folder.write_rollouts(1, groups))
    assert table["advantage"].null_count == 32
    assert table["reward/style"].null_count == ungraded > 0


def test_another_number_of_advantages_than_completions_is_refused(folder):
    with pytest.raises(InputError, match="one advantage a completion"):
        folder.write_rollouts(1, fake_groups(1, 12), [[0.0] * 7] * 4)


def test_a_full_disk_leaves_the_old_file_and_says_what_to_do(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(TrainingError, match=r"No space left.*--resume"):
        write_atomically(path, b"new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_metrics_on_a_full_disk_are_an_error_of_ours(folder):
    folder.metrics.mkdir()
    with pytest.raises(TrainingError, match="metrics"):
        folder.append_metrics({"step": 1})


def test_a_rollout_file_that_is_not_parquet_is_named(folder):
    (folder.rollouts / "part-000001.parquet").write_bytes(b"not Parquet")
    with pytest.raises(DataError, match="part-000001"):
        list(folder.read_rollouts())

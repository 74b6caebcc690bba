"""Where a run begins: what is wrong with it is said before anything is loaded, and a complete run is left as it is."""

import json
import logging
import re
from pathlib import Path
from unittest import mock

import pytest

from logitless.cli.main import main
from logitless.errors import ConfigurationError, TrainingError
from logitless.train.loop import Loop
from logitless.train.recipe.loading import dump_recipe
from tests.train.tiny import finished_run, start, tiny_recipe


def _fails(*_arguments: object, **_options: object) -> None:
    raise AssertionError("something was loaded")


@pytest.fixture
def loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logitless.train.assembly.stages.tokenizer_of", _fails)


@pytest.mark.usefixtures("loads_nothing")
@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({}, {}, r"Add --resume \(in Python resume=True\) to go on with it, choose another name"),
        ({"name": "new"}, {"resume": True}, r"a run to resume at .*new; given none. Leave out --resume to start it"),
        ({"name": "new"}, {"fork": "no/such/run"}, "the folder of a run at no/such/run; given nothing"),
        ({"name": "new", "algorithm": {"preset": "grop"}}, {}, "Did you mean 'grpo'"),
        (
            {"seed": 5},
            {"resume": True},
            r"another seed \(5, not \d+\)\. Repeat the --set.*, or start a run of another name\.$",
        ),
    ],
)
def test_what_is_wrong_with_the_beginning_is_said_before_anything_is_loaded(tmp_path, changes, options, said):
    folder = tmp_path / "runs" / "tiny"
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_recipe(tiny_recipe(tmp_path)))
    (folder / "notes.txt").write_text("ours")
    with pytest.raises(ConfigurationError, match=said):
        start(tiny_recipe(tmp_path, **changes), **options)
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "notes.txt", "rollouts"]


@pytest.mark.usefixtures("loads_nothing")
def test_a_run_that_is_not_there_is_named_by_its_whole_path(tmp_path, monkeypatch):
    """``output`` starts at the current folder, which need not be the one that the run was started in."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=rf"a run to resume at {re.escape(str(tmp_path))}/runs/new; given"):
        start(tiny_recipe(tmp_path, name="new", output="runs"), resume=True)


def test_the_remedy_of_a_refused_resume_names_a_fork_where_there_can_be_one(tmp_path):
    short = {"train__blocks": 1, "kl": None}
    finished_run(tmp_path, **short)
    for key, value, can_fork in (
        ("train__optimizer", {"learning_rate": 0.5}, True),
        ("model__source__hidden_size", 32, False),
    ):
        with pytest.raises(ConfigurationError) as error:
            start(tiny_recipe(tmp_path, **short, **{key: value}), resume=True)
        assert ("--fork" in error.value.remedy) == can_fork


@pytest.mark.parametrize("resume", [True, False])
def test_a_run_that_an_error_ended_before_its_first_checkpoint_begins_again(tmp_path, resume):
    fails = mock.patch.object(Loop, "_evaluated", side_effect=TrainingError(needed="a", given="b", remedy="C."))
    with fails, pytest.raises(TrainingError):
        finished_run(tmp_path, train__blocks=1)
    assert (tmp_path / "runs" / "tiny" / "summary.json").exists()
    assert finished_run(tmp_path, train__blocks=1, resume=resume).read_metrics()[-1]["block"] == 1


def test_a_complete_run_is_not_begun_again_and_says_how_it_goes_on(tmp_path, monkeypatch, caplog):
    changes = {"train__blocks": 1, "kl": None}
    folder = finished_run(tmp_path, **changes)
    folder.report.write_text("the report")  # the last thing of a run, which these tests leave out
    before = {path: path.stat().st_mtime_ns for path in folder.path.rglob("*")}
    with monkeypatch.context() as patched, caplog.at_level(logging.INFO, "logitless"):
        patched.setattr("logitless.train.assembly.stages.tokenizer_of", _fails)
        assert finished_run(tmp_path, **changes, resume=True) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.path.rglob("*")} == before
    assert f"{folder.path} is complete, after block 1 of 1" in caplog.text
    assert "to train on, set train.blocks above 1 and resume again" in caplog.text
    folder.summary.unlink()  # killed before all of its end was written
    finished_run(tmp_path, **changes, resume=True)
    assert folder.summary.is_file()
    for damaged in (b"", b"\x84", b"[]", b"{}"):
        folder.summary.write_bytes(damaged)
        folder.report.write_text("the report")
        finished_run(tmp_path, **changes, resume=True)
        assert json.loads(folder.summary.read_text())["blocks"] == 1
    finished_run(tmp_path, **changes | {"train__blocks": 2}, resume=True)
    assert folder.read_metrics()[-1]["block"] == 2


def test_a_dry_run_says_that_a_start_would_be_refused(tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text(dump_recipe(tiny_recipe(tmp_path)))
    arguments = ["train", str(tmp_path / "recipe.yaml"), "--dry-run"]
    assert main(arguments) == 0
    assert "refused" not in capsys.readouterr().out
    assert main([*arguments, "--resume"]) == 2
    assert "needed a run to resume" in capsys.readouterr().err
    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("ours")
    assert main(arguments) == 0
    assert "a start here is refused: needed a run folder that does not exist yet" in capsys.readouterr().out


def test_a_folder_is_not_scored(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("one").mkdir()
    assert main(["score", "--reward", "math:fsum", "--prompts", "one", "--responses", "x"]) == 2
    assert "given a folder. Name a file; `logitless sample RUN" in capsys.readouterr().err

"""``logitless.train`` runs what the command line runs, and its callbacks are told what happens."""

import re
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
import yaml

import logitless
from logitless.distributed import Ranks
from logitless.errors import ConfigurationError
from logitless.train.recipe.config import Recipe
from logitless.train.recipe.loading import parse_recipe
from logitless.train.record.metrics import repeatable
from logitless.train.run import run_recipe
from tests.ranks import run_on_ranks
from tests.train.interrupting import stopped_at
from tests.train.tiny import repeated, tiny_raw, tiny_recipe

PAGE = (Path(__file__).parents[2] / "docs" / "runs.md").read_text(encoding="utf-8")


class Noting(logitless.Callback):
    """Writes down what it is told, and asks for a stop where it is told to."""

    def __init__(self, stop_at=None):
        self.heard, self.stop_at = [], stop_at

    def on_start(self, path, recipe):
        self.heard.append(("start", path.name, recipe.train.blocks))

    def on_block(self, metrics):
        self.heard.append(("block", metrics["block"], metrics))
        return self.stop_at == ("block", metrics["block"])

    def on_evaluation(self, metrics):
        self.heard.append(("evaluation", metrics["step"], metrics))
        return self.stop_at == ("evaluation", metrics["step"])

    def on_checkpoint(self, path):
        assert (path / "index.json").is_file()
        self.heard.append(("checkpoint", path.name, None))

    def on_end(self, result):
        assert result.folder.summary.is_file()
        self.heard.append(("end", result.ended_by, result))

    @property
    def in_short(self):
        return [(kind, what) for kind, what, _ in self.heard]


TWO_BLOCKS = {"train__blocks": 2, "train__epochs_per_block": 1, "kl": None}


SHORT = {"kl": None, "train": {"blocks": 1, "tokens_per_step": 40, "tokens_per_micro_batch": 32}}


def test_a_path_a_mapping_and_a_recipe_are_the_same_run(tmp_path):
    raw = tiny_raw(tmp_path) | SHORT
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(raw | {"name": "path"}))
    results = [
        logitless.train(file),
        logitless.train(raw | {"name": "mapping"}),
        logitless.train(parse_recipe(raw | {"name": "recipe"})),
        logitless.train(Recipe.model_validate(raw | {"name": "unresolved"})),
        logitless.train(str(file), numbered=True),
    ]
    names = ["path", "mapping", "recipe", "unresolved", "path-2"]
    assert [result.folder.path.name for result in results] == names
    first, *others = [repeated(result.folder) for result in results]
    assert all(other == first for other in others)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What the callbacks of a run of two blocks were told."""
    told = Noting()
    logitless.train(tiny_recipe(tmp_path_factory.mktemp("whole"), **TWO_BLOCKS), callbacks=[told])
    return told


def test_a_run_of_python_tells_its_callbacks_everything_in_order(whole):
    assert whole.in_short == [
        ("start", "tiny"),
        ("evaluation", 0),
        ("checkpoint", "block-000000-step-000000"),
        ("block", 1),
        ("checkpoint", "block-000001-step-000002"),
        ("block", 2),
        ("evaluation", 4),
        ("checkpoint", "block-000002-step-000004"),
        ("end", "blocks"),
    ]
    result = whole.heard[-1][2]
    assert result.complete
    lines = result.folder.read_metrics()
    for kind, number, metrics in whole.heard:
        if kind == "block":
            of_block = [line for line in lines if line["block"] == number and line["step"] > 0]
            assert len(of_block) == 2
            told = {name: value for line in of_block for name, value in line.items() if name in metrics}
            assert {name: metrics[name] for name in told} == pytest.approx(told, nan_ok=True)
            assert "reward/mean" in metrics
            assert ("evaluation/accuracy" in metrics) == (number == 2)
    assert result.metrics["evaluation/accuracy"] == lines[-1]["evaluation/accuracy"]


@pytest.mark.parametrize("moment", [("block", 1), ("evaluation", 0)])
def test_a_callback_stops_a_run_which_goes_on_bit_for_bit(whole, tmp_path, moment):
    told, rest, recipe = Noting(moment), Noting(), tiny_recipe(tmp_path, **TWO_BLOCKS)
    result = logitless.train(recipe, callbacks=[logitless.Callback(), told])
    assert (result.ended_by, result.callback, result.complete) == ("callback", "Noting", False)
    assert result.exit_status == 0
    assert told.in_short[-1] == ("end", "callback")
    assert not result.folder.model.exists()
    assert logitless.train(recipe, resume="auto", callbacks=[rest]).complete
    assert ("block", 1) in told.in_short + rest.in_short
    assert repeated(result.folder) == repeated(whole.heard[-1][2].folder)


def test_a_block_that_was_resumed_amid_its_steps_is_told_whole(whole, tmp_path):
    recipe, rest = tiny_recipe(tmp_path, **TWO_BLOCKS), Noting()
    stopped_at(1, recipe)
    logitless.train(recipe, resume=True, callbacks=[rest])
    [one], [other] = ([repeatable(m) for kind, n, m in e.heard if (kind, n) == ("block", 1)] for e in (whole, rest))
    assert one == other


@pytest.mark.parametrize("given", [[logitless.Callback], logitless.Callback(), [logitless.Callback(), print]])
def test_what_is_no_list_of_callbacks_is_refused_before_anything_is_made(tmp_path, given):
    with pytest.raises(ConfigurationError, match="as a list of instances of logitless"):
        logitless.train(tiny_recipe(tmp_path, **TWO_BLOCKS), callbacks=given)
    assert not (tmp_path / "runs").exists()


def test_an_error_in_a_callback_ends_the_run(tmp_path):
    class Broken(logitless.Callback):
        def on_block(self, metrics):
            raise ZeroDivisionError(metrics["block"])

    with pytest.raises(ZeroDivisionError):
        logitless.train(tiny_recipe(tmp_path, **TWO_BLOCKS), callbacks=[Broken()])
    assert not (tmp_path / "runs" / "tiny" / "lock.json").exists()


def _on_ranks(rank, folder):
    told = Noting(("block", 1))
    with mock.patch("logitless.train.run.write_report"):
        result = run_recipe(tiny_recipe(folder, **TWO_BLOCKS), callbacks=[told], ranks=Ranks(data=dist.group.WORLD))
    return result.ended_by, result.callback, len(told.heard)


def test_callbacks_are_called_on_the_first_rank_and_stop_all(tmp_path):
    tiny_raw(tmp_path)
    (first, second) = run_on_ranks(2, _on_ranks, tmp_path)
    assert first[:2] == second[:2] == ("callback", "Noting")
    assert first[2] > 0
    assert second[2] == 0


def test_a_numbered_run_that_torchrun_may_start_again_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(ConfigurationError, match="may start again"):
        logitless.train(tiny_recipe(tmp_path), numbered=True)


def test_the_example_of_the_page_runs(tmp_path, monkeypatch, capsys):
    # with an accuracy of 0, so that the callback does not stop the run
    raw = tiny_raw(tmp_path) | SHORT | {"evaluation": {"success_at": 100.0}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(raw))
    monkeypatch.chdir(tmp_path)
    [program] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(program, {})
    assert re.search(r"tiny True blocks \d", capsys.readouterr().out)


def test_the_sections_of_the_page_are_valid(tmp_path):
    raw, [shown] = tiny_raw(tmp_path), re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    sections = yaml.safe_load(shown)
    recipe = parse_recipe(raw | {name: sections[name] for name in ("evaluation", "checkpoint")})
    assert recipe.evaluation.stop.patience == 4
    assert recipe.checkpoint.keep_best.metric == recipe.evaluation.stop.metric

"""Early stopping and the best checkpoint: the same run after any stop, and what is exported is said."""

import json
import shutil
import signal
from unittest import mock

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from logitless.distributed import Ranks
from logitless.errors import ConfigurationError
from logitless.train.loop import Loop
from logitless.train.recipe.evaluation import StopSection, WatchSection
from logitless.train.recipe.loading import dump_recipe
from logitless.train.record.best import Best
from logitless.train.record.run_folder import RunFolder, create_run_folder
from logitless.train.run import run_recipe
from logitless.train.saved_policy import chosen_source, load_policy
from logitless.train.store import checkpoint as checkpoints
from tests.ranks import run_on_ranks
from tests.train.interrupting import stop_at
from tests.train.tiny import assert_equal, assert_same_run, finished_run, held_out_set, start, tiny_raw, tiny_recipe

ACCURACY = [0.1, 0.3, 0.7, 0.6, 0.7, 0.5, 0.9]
"""Before the first block, after it, ...: the best is after the second block, and two evaluations are no better."""

WATCHED = {
    "train__blocks": 6, "train__epochs_per_block": 1, "evaluation__every_blocks": 1,
    "evaluation__stop": {"patience": 2}, "checkpoint__every_blocks": 3, "checkpoint__keep": 1,
    "checkpoint__keep_best": {}, "kl": None,
}  # fmt: skip
BEST = "block-000002-step-000004"


_EVALUATED = Loop._evaluated


def _accurate(self, sets):
    """An evaluation that finds the accuracy that it is told to, by the blocks done; all else of the run is as ever."""
    return _EVALUATED(self, sets) | {f"{each.metrics}/accuracy": ACCURACY[self._done] for each in sets}


@pytest.fixture
def evaluated(monkeypatch):
    monkeypatch.setattr(Loop, "_evaluated", _accurate)


def _weights(run):
    return load_file(run.model / "model.safetensors")


LAST = "block-000004-step-000008"


def _saved(run):
    return [path.name for path in checkpoints.checkpoints(run.checkpoints)]


def _assert_exported(run, checkpoint=BEST):
    """The model of a run is that checkpoint's."""
    kept = checkpoints.read_checkpoint(run.checkpoints / checkpoint).tensors
    assert_equal(
        _weights(run), {name.removeprefix("parameter/"): t for name, t in kept.items() if "parameter/" in name}
    )


def _exported(run):
    return json.loads(run.summary.read_text())["exported"]


def test_a_run_stops_early_and_exports_the_best_weights_and_says_so(tmp_path, evaluated, capsys):
    result = run_recipe(tiny_recipe(tmp_path, **WATCHED))
    assert (result.ended_by, result.complete, result.exit_status) == ("early_stopping", True, 0)
    assert result.metrics["block"] == 4
    run = result.folder
    assert _saved(run) == [BEST, LAST]
    assert json.loads(run.summary.read_text())["ended_by"] == "early_stopping"
    best = {"which": "best", "block": 2, "step": 4, "metric": "evaluation/accuracy", "value": 0.7}
    assert _exported(run) == best
    _assert_exported(run)
    with pytest.raises(AssertionError):
        _assert_exported(run, LAST)
    said = capsys.readouterr().out
    assert "early stopping: 2 evaluations without a better value than evaluation/accuracy 0.7 after block 2" in said
    assert "model/ has the weights of the best evaluation/accuracy, 0.7, after block 2 (step 4)" in said
    assert "best evaluation/accuracy 0.3 after block 1" in said
    assert "best evaluation/accuracy 0.7 after block 2" in said
    assert load_policy(run, "model").step == 4
    assert chosen_source(run, "best").name == BEST
    assert chosen_source(run, "latest").name == LAST


@pytest.mark.parametrize("step", [4, *(pytest.param(step, marks=pytest.mark.slow) for step in (3, 6, 7, 8))])
def test_a_run_that_was_stopped_anywhere_stops_early_at_the_same_block_in_every_bit(
    tmp_path, evaluated, monkeypatch, step
):
    whole = finished_run(tmp_path / "whole", **WATCHED)
    recipe = tiny_recipe(tmp_path / "stopped", **WATCHED)
    with monkeypatch.context() as patched:
        stop_at(step, patched)
        assert start(recipe)[1] == (step == 8)
    result = run_recipe(recipe, resume=True)
    assert result.ended_by == "early_stopping"
    assert _saved(result.folder) == _saved(whole) == [BEST, LAST]
    assert_same_run(whole, result.folder)
    states = [checkpoints.load_checkpoint(run.checkpoints).state["loop"] for run in (whole, result.folder)]
    assert states[0] == states[1]
    assert_equal(_weights(whole), _weights(result.folder))


@pytest.mark.parametrize(("patience", "stopped", "best"), [(2, 4, BEST), (4, 6, "block-000006-step-000012")])
def test_the_best_checkpoint_is_that_of_an_evaluation_which_a_resumed_run_made_first(
    tmp_path, evaluated, monkeypatch, patience, stopped, best
):
    def pressed(loop, sets):
        if loop._done == stopped:
            signal.raise_signal(signal.SIGTERM)
        return _accurate(loop, sets)

    recipe = tiny_recipe(tmp_path, **{**WATCHED, "evaluation__stop": {"patience": patience}})
    with monkeypatch.context() as patched:
        patched.setattr(Loop, "_evaluated", pressed)
        assert run_recipe(recipe).ended_by == "signal"
    result = run_recipe(recipe, resume=True)
    assert result.complete
    assert result.metrics["block"] == stopped
    assert chosen_source(result.folder, "best").name == best
    _assert_exported(result.folder, best)


def test_the_best_checkpoint_of_a_run_that_kept_none_is_refused_in_words(tmp_path):
    run = create_run_folder(tmp_path, "run")
    run.write_config(dump_recipe(tiny_recipe(tmp_path)))
    with pytest.raises(ConfigurationError, match=r"checkpoint\.keep_best in .*config\.yaml, for the checkpoint 'best'"):
        chosen_source(run, "best")


def test_more_patience_lets_a_run_that_stopped_early_go_on(tmp_path, evaluated):
    run_recipe(tiny_recipe(tmp_path, **WATCHED))
    result = run_recipe(tiny_recipe(tmp_path, **{**WATCHED, "evaluation__stop": {"patience": 4}}), resume=True)
    assert result.ended_by == "blocks"
    assert _exported(result.folder)["value"] == 0.9
    assert _saved(result.folder) == ["block-000006-step-000012"]


def test_without_keep_best_the_last_weights_are_exported_and_it_is_said(tmp_path, evaluated, capsys):
    run = finished_run(tmp_path, **{**WATCHED, "checkpoint__keep_best": None})
    assert _exported(run) == {"which": "last", "block": 4, "step": 8}
    assert "model/ has the last weights, after block 4 (step 8)" in capsys.readouterr().out
    assert _saved(run) == [LAST]


def test_the_best_of_a_set_that_is_evaluated_because_the_run_stops_early_is_exported(tmp_path, evaluated):
    watched = {**WATCHED, "checkpoint__keep_best": {"metric": "held_out/more/accuracy"}}
    tiny_raw(tmp_path)
    exported = _exported(finished_run(tmp_path, **watched, evaluation__sets=held_out_set(tmp_path, every_blocks=100)))
    assert (exported["which"], exported["block"], exported["value"]) == ("best", 4, ACCURACY[4])


def test_a_best_checkpoint_that_is_gone_is_said_and_another_one_is_sought(tmp_path, evaluated, capsys):
    run = finished_run(tmp_path, **{**WATCHED, "train__blocks": 4, "evaluation__stop": None})
    shutil.rmtree(run.checkpoints / BEST)
    finished_run(tmp_path, **{**WATCHED, "train__blocks": 5, "evaluation__stop": None}, resume=True)
    assert "the checkpoint of evaluation/accuracy 0.7 after block 2 is gone" in capsys.readouterr().out
    assert _exported(run)["block"] == 5


def _on_two_ranks(rank, folder):
    with mock.patch.object(Loop, "_evaluated", _accurate), mock.patch("logitless.train.run.write_report"):
        result = run_recipe(tiny_recipe(folder, **WATCHED), ranks=Ranks(data=dist.group.WORLD))
    return result.ended_by, _saved(result.folder)


@pytest.mark.slow
def test_ranks_stop_early_together_and_export_the_best_shards(tmp_path):
    tiny_raw(tmp_path)
    assert run_on_ranks(2, _on_two_ranks, tmp_path) == [("early_stopping", [BEST, LAST])] * 2
    _assert_exported(RunFolder(tmp_path / "runs" / "tiny"))


# --- the rule -------------------------------------------------------------------------------------------------------


def test_smaller_is_better_under_min_and_only_by_more_than_min_delta():
    best = Best(StopSection(metric="evaluation/length_mean", mode="min", patience=3, min_delta=1.0))
    for block, value in enumerate([9.0, 8.5, 7.9, float("nan"), 7.0, 6.91]):
        best.see({"evaluation/length_mean": value}, block=block, step=block)
    assert (best.value, best.block, best.since, best.is_over) == (7.9, 2, 3, True)


def test_an_evaluation_of_other_sets_is_passed_over_and_one_without_the_metric_is_an_error():
    best = Best(WatchSection(metric="held_out/hard/reward_mean"))
    best.see({"evaluation/reward_mean": 1.0}, block=1, step=1)
    assert (best.value, best.since) == (None, 0)
    with pytest.raises(ConfigurationError, match=r"'held_out/hard/reward_mean', and there are held_out/hard/accuracy"):
        best.see({"held_out/hard/accuracy": 1.0}, block=1, step=1)


def test_what_was_seen_of_another_metric_counts_for_nothing():
    accuracy, reward = Best(WatchSection()), Best(WatchSection(metric="evaluation/reward_mean"))
    accuracy.see({"evaluation/accuracy": 0.5}, block=1, step=1)
    reward.load_state_dict(accuracy.state_dict())
    assert reward.value is None


@pytest.mark.parametrize(
    "changes",
    [
        {"checkpoint__keep_best": {"metric": "length/mean"}},
        {"evaluation__stop": {"metric": "evaluation/accuracy"}},
    ],
)
def test_a_metric_of_training_and_a_stop_without_patience_are_refused(tmp_path, changes):
    with pytest.raises(ConfigurationError, match=r"evaluation\.stop\.patience|evaluation/length/mean is nearest"):
        tiny_recipe(tmp_path, **changes)


@pytest.mark.parametrize("metric", ["evaluation/acuracy", "accuracy"])
def test_a_misspelt_metric_is_refused_before_the_start_with_the_nearest_name(tmp_path, metric):
    for key, section in (("evaluation__stop", {"patience": 1}), ("checkpoint__keep_best", {})):
        with pytest.raises(ConfigurationError, match=f"given {metric}, where evaluation/accuracy is nearest"):
            tiny_recipe(tmp_path, **{key: {**section, "metric": metric}})

"""A fork starts from another run's checkpoint: with the same keys it has the bits of that run going on."""

import json
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from logitless.distributed import Ranks
from logitless.errors import ConfigurationError
from logitless.train import checkpoint as checkpoints
from logitless.train.fork import parent_of
from logitless.train.metrics import repeatable
from logitless.train.provenance import parent_in
from logitless.train.run import run_recipe, start
from logitless.train.run_folder import RunFolder
from tests.ranks import run_on_ranks
from tests.train.interrupting import stop_at
from tests.train.tiny import tiny_recipe

LORA = {"model__lora": {"rank": 2, "targets": ["q_proj", "v_proj", "down_proj"]}}


def _last(folder):
    return checkpoints.load_checkpoint(folder.checkpoints)


def _assert_same_end(one, other):
    ends = _last(one), _last(other)
    assert ends[0].folder.name == ends[1].folder.name
    assert ends[0].tensors.keys() == ends[1].tensors.keys()
    for name, tensor in ends[0].tensors.items():
        assert torch.equal(tensor, ends[1].tensors[name]), name


@pytest.mark.parametrize("kind", ["every weight", "lora after a warm start"])
def test_a_fork_with_the_same_keys_has_the_bits_of_the_run_going_on(tmp_path, kind):
    changes = {}
    if kind != "every weight":
        tiny_recipe(tmp_path)
        warm = {"data": {"name": "file", "path": str(tmp_path / "train.jsonl")}, "steps": 3}
        changes = {**LORA, "warm_start": warm}
    whole, _ = start(tiny_recipe(tmp_path, **changes))
    fork, complete = start(tiny_recipe(tmp_path, **changes, name="fork"), fork=f"{whole.path}:1")
    assert complete
    _assert_same_end(whole, fork)
    lines = [repeatable(line) for line in whole.read_metrics() if line["block"] > 1]
    assert [repeatable(line) for line in fork.read_metrics()[1:]] == lines
    assert [number for number, _ in fork.read_rollouts()] == [2, 3]
    parent = parent_in(fork)
    assert parent["run"] == str(whole.path)
    assert (parent["block"], parent["checkpoint"]) == (1, "block-000001-step-000004")
    assert parent["changed"] == {}


def test_a_fork_takes_other_keys_and_says_what_begins_anew(tmp_path, capsys):
    whole, _ = start(tiny_recipe(tmp_path, train__blocks=2))
    changes = {"train__optimizer": {"learning_rate": 3e-3}, "rewards": [{"name": "length", "cap": 4}]}
    other = tiny_recipe(tmp_path, **changes, name="fork", kl=None, seed=0, train__tokens_per_step=80)
    (tmp_path / "train.jsonl").write_text((tmp_path / "train.jsonl").read_text().replace('"ah"', '"ae"'))
    fork, complete = start(other, fork=str(whole.path))
    assert complete
    first, *lines = fork.read_metrics()
    assert (first["step"], first["block"]) == (_last(whole).state["progress"]["step"], 3)
    assert "evaluation/accuracy" in first
    assert {line["optimizer/learning_rate"] for line in lines} == {3e-3}
    assert [line["block"] for line in lines][-1] == 3
    assert parent_in(fork)["changed"]["train.optimizer.learning_rate"] == {"from": 0.01, "to": 0.003, "rounding": False}
    said = capsys.readouterr().out
    assert f"fork of {whole.path}: begins after 2 blocks" in said
    assert "begins anew: the KL coefficient (another kl); the place in the prompts (other data.train" in said


def test_a_fork_in_another_dtype_begins_with_the_same_master_weights(tmp_path):
    parent, _ = start(tiny_recipe(tmp_path, train__blocks=1, kl=None))
    recipe = tiny_recipe(tmp_path, kl=None, name="fork", train__blocks=2, model__trained_dtype="bfloat16")
    fork, complete = start(recipe, fork=str(parent.path))
    assert complete
    begun = checkpoints.read_checkpoint(checkpoints.checkpoints(fork.checkpoints)[0]).tensors
    before = _last(parent).tensors
    assert begun.keys() == before.keys()
    for name in begun:
        if not name.startswith("random/"):
            assert torch.equal(begun[name], before[name]), name


def test_a_fork_that_was_stopped_goes_on_bitwise_and_knows_its_parent(tmp_path, monkeypatch):
    parent, _ = start(tiny_recipe(tmp_path, train__blocks=1))
    whole, _ = start(tiny_recipe(tmp_path, name="whole"), fork=str(parent.path))
    with monkeypatch.context() as patched:
        stop_at(6, patched)
        stopped, complete = start(tiny_recipe(tmp_path, name="stopped"), fork=str(parent.path))
    assert not complete
    assert start(tiny_recipe(tmp_path, name="stopped"), resume="auto", fork=str(parent.path))[1]
    _assert_same_end(whole, stopped)
    assert [repeatable(line) for line in whole.read_metrics()] == [repeatable(line) for line in stopped.read_metrics()]
    assert parent_in(stopped)["run"] == str(parent.path)
    assert len(json.loads(stopped.provenance.read_text())["starts"]) == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (LORA, "model.lora"),
        ({"model__source__hidden_size": 32}, "model.source"),
        ({"seed": 3}, "seed"),
        ({"train__optimizer": {"moments": "8bit"}}, "train.optimizer.moments"),
        ({"algorithm": {"preset": "ppo"}}, "without a value loss"),
        ({"train__blocks": 1}, r"train\.blocks of at least 2"),
    ],
)
def test_what_a_fork_cannot_carry_is_refused_in_words_and_leaves_no_folder(tmp_path, changes, said):
    parent, _ = start(tiny_recipe(tmp_path, train__blocks=1, kl=None))
    with pytest.raises(ConfigurationError, match=said):
        start(tiny_recipe(tmp_path, kl=None, name="fork", **changes), fork=str(parent.path))
    assert not (tmp_path / "runs" / "fork").exists()


def _fork_on_ranks(rank, folder, parent):
    with mock.patch("logitless.train.run.write_report"):
        return start(tiny_recipe(folder, name="fork"), fork=parent, ranks=Ranks(data=dist.group.WORLD))[1]


def test_ranks_fork_what_one_process_wrote(tmp_path):
    parent, _ = start(tiny_recipe(tmp_path))
    assert run_on_ranks(2, _fork_on_ranks, tmp_path, f"{parent.path}:1") == [True, True]
    fork = RunFolder(tmp_path / "runs" / "fork")
    norms = [
        [line["optimizer/grad_norm"] for line in run.read_metrics() if line["block"] > 1 and line["step"] > 4]
        for run in (parent, fork)
    ]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_a_checkpoint_amid_a_block_is_passed_over_and_refused_by_name(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        stop_at(5, patched)
        stopped, _ = start(tiny_recipe(tmp_path))
    assert parent_of(str(stopped.path)).progress["block"] == 1
    assert _last(stopped).folder.name == "block-000001-step-000005"
    with pytest.raises(ConfigurationError, match="at the end of a block"):
        parent_of(f"{stopped.path}:block-000001-step-000005")
    with pytest.raises(ConfigurationError, match="there are block-000000-step-000000"):
        parent_of(f"{stopped.path}:9")
    with pytest.raises(ConfigurationError, match=r"config\.yaml"):
        parent_of(str(tmp_path / "none"))


def test_a_fork_that_was_killed_before_its_first_checkpoint_is_not_begun_without_its_parent(tmp_path):
    parent, _ = start(tiny_recipe(tmp_path, train__blocks=1))
    fork, _ = start(tiny_recipe(tmp_path, name="fork"), fork=str(parent.path))
    for path in checkpoints.checkpoints(fork.checkpoints):
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    for path in (*fork.rollouts.iterdir(), fork.summary, *fork.model.iterdir()):
        path.unlink()
    fork.model.rmdir()
    with pytest.raises(ConfigurationError, match=rf"--fork {parent.path}:block-000001"):
        start(tiny_recipe(tmp_path, name="fork"), resume=True)
    assert start(tiny_recipe(tmp_path, name="fork"), resume="auto", fork=str(parent.path))[1]


@pytest.mark.parametrize("options", [{"numbered": True, "resume": True}, {"fork": "runs/x", "resume": True}])
def test_two_ways_to_begin_are_refused(tmp_path, options):
    with pytest.raises(ConfigurationError, match="one way to begin"):
        run_recipe(tiny_recipe(tmp_path), **options)

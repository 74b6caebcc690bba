"""A fork starts from another run's checkpoint: with the same keys it is bitwise that run going on."""

import json
import shutil

import pytest
import torch.distributed as dist

from logitless.distributed import Ranks
from logitless.errors import ConfigurationError
from logitless.train.fork import parent_of
from logitless.train.record.provenance import parent_in
from logitless.train.record.run_folder import RunFolder
from logitless.train.run import run_recipe
from logitless.train.store.checkpoint import checkpoints, load_checkpoint, read_checkpoint
from tests.ranks import run_on_ranks
from tests.train.interrupting import stopped_at
from tests.train.tiny import (
    assert_equal,
    assert_same_end,
    completed,
    finished_run,
    repeated,
    start,
    start_without_report,
    tiny_recipe,
    warm_start,
)

LORA = {"model__lora": {"rank": 2, "targets": ["q_proj", "v_proj", "down_proj"]}}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("parent")


@pytest.fixture(scope="module")
def parent(home) -> RunFolder:
    return finished_run(home)


@pytest.fixture
def fork_recipe(home, tmp_path):
    """The parent's recipe with changes, for a fork in a folder of this test."""
    return lambda **changes: tiny_recipe(home, output=str(tmp_path), **{"name": "fork", **changes})


def _assert_goes_on(parent, fork):
    """From the end of the first block on, the fork is its parent."""
    assert_same_end(parent, fork)
    assert repeated(fork)[1:] == [line for line in repeated(parent) if line["block"] > 1]
    assert [number for number, _ in fork.read_rollouts()] == [2, 3]
    said = parent_in(fork)
    assert (said["run"], said["block"], said["checkpoint"]) == (str(parent.path), 1, "block-000001-step-000004")
    assert said["changed"] == {}


def test_a_fork_with_the_same_keys_is_bitwise_the_run_going_on_also_where_it_was_stopped(parent, fork_recipe):
    fork = stopped_at(6, fork_recipe(), fork=f"{parent.path}:1")
    completed(fork_recipe(), resume="auto", fork=f"{parent.path}:1")
    _assert_goes_on(parent, fork)
    assert len(json.loads(fork.provenance.read_text())["starts"]) == 2


def test_a_fork_of_lora_after_a_warm_start_is_bitwise_the_run_going_on(tmp_path):
    changes = LORA | {"warm_start": warm_start(tmp_path)}
    whole = finished_run(tmp_path, **changes)
    fork = completed(tiny_recipe(tmp_path, **changes, name="fork"), fork=f"{whole.path}:1")
    _assert_goes_on(whole, fork)


def test_a_fork_takes_other_keys_and_says_what_begins_anew(parent, fork_recipe, tmp_path, capsys):
    (tmp_path / "other.jsonl").write_text('{"prompt": "ae", "answer": "ea"}\n' * 8)
    changes = {"train__optimizer": {"learning_rate": 3e-3}, "rewards": [{"name": "length", "cap": 4}]}
    changes |= {"kl": None, "seed": 0, "train__tokens_per_step": 80, "train__blocks": 4}
    fork = completed(fork_recipe(**changes, data__train__path=str(tmp_path / "other.jsonl")), fork=str(parent.path))
    first, *lines = fork.read_metrics()
    assert (first["step"], first["block"]) == (load_checkpoint(parent.checkpoints).state["progress"]["step"], 4)
    assert "evaluation/accuracy" in first
    assert {line["optimizer/learning_rate"] for line in lines} == {3e-3}
    assert [line["block"] for line in lines][-1] == 4
    assert parent_in(fork)["changed"]["train.optimizer.learning_rate"] == {"from": 0.01, "to": 0.003, "rounding": False}
    said = capsys.readouterr().out
    assert f"fork of {parent.path}: begins after 3 blocks" in said
    assert "begins anew: the KL coefficient (another kl); the place in the prompts (other data.train" in said


def test_a_fork_in_another_dtype_begins_with_the_same_master_weights(parent, fork_recipe):
    fork = completed(fork_recipe(model__trained_dtype="bfloat16", train__blocks=2), fork=f"{parent.path}:1")
    folders = checkpoints(fork.checkpoints)[0], parent.checkpoints / "block-000001-step-000004"
    begun, before = (read_checkpoint(folder).tensors for folder in folders)
    assert begun.keys() == before.keys()
    assert_equal(*({n: t for n, t in each.items() if not n.startswith("random/")} for each in (begun, before)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (LORA, "model.lora"),
        ({"model__source__hidden_size": 32}, "model.source"),
        ({"seed": 3}, "seed"),
        ({"train__optimizer": {"moments": "8bit"}}, "train.optimizer.moments"),
        ({"algorithm": {"preset": "ppo"}, "kl": None}, "without a value loss"),
        ({"train__blocks": 1}, r"train\.blocks of at least 2"),
    ],
)
def test_what_a_fork_cannot_carry_is_refused_in_words_and_leaves_no_folder(
    parent, fork_recipe, tmp_path, changes, said
):
    with pytest.raises(ConfigurationError, match=said):
        start(fork_recipe(**changes), fork=f"{parent.path}:1")
    assert not (tmp_path / "fork").exists()


def _fork_on_ranks(rank, home, output, parent):
    recipe = tiny_recipe(home, output=output, name="fork")
    return start_without_report(recipe, fork=parent, ranks=Ranks(data=dist.group.WORLD))[1]


def test_ranks_fork_what_one_process_wrote(parent, home, tmp_path):
    assert run_on_ranks(2, _fork_on_ranks, home, str(tmp_path), f"{parent.path}:1") == [True, True]
    norms = [
        [line["optimizer/grad_norm"] for line in run.read_metrics() if line["block"] > 1 and line["step"] > 4]
        for run in (parent, RunFolder(tmp_path / "fork"))
    ]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_a_checkpoint_amid_a_block_is_passed_over_and_refused_by_name(tmp_path):
    stopped = stopped_at(5, tiny_recipe(tmp_path))
    assert parent_of(str(stopped.path)).progress["block"] == 1
    assert load_checkpoint(stopped.checkpoints).folder.name == "block-000001-step-000005"
    for place, said in (
        (f"{stopped.path}:block-000001-step-000005", "at the end of a block"),
        (f"{stopped.path}:9", "there are block-000000-step-000000"),
        (str(tmp_path / "none"), r"the folder of a run at .*none; given nothing"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            parent_of(place)


def test_a_fork_that_was_killed_before_its_first_checkpoint_is_not_begun_without_its_parent(parent, fork_recipe):
    place, recipe = f"{parent.path}:2", fork_recipe()
    fork, _ = start(recipe, fork=place)
    for left in (fork.checkpoints, fork.rollouts, fork.model):
        shutil.rmtree(left)
    fork.summary.unlink()
    with pytest.raises(ConfigurationError, match=rf"--fork {parent.path}:block-000002"):
        start(recipe, resume=True)
    completed(recipe, resume="auto", fork=place)


@pytest.mark.parametrize("options", [{"numbered": True, "resume": True}, {"fork": "runs/x", "resume": True}])
def test_two_ways_to_begin_are_refused(tmp_path, options):
    with pytest.raises(ConfigurationError, match="one way to begin"):
        run_recipe(tiny_recipe(tmp_path), **options)


def test_a_value_of_resume_that_says_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="resume of True, False or 'auto'; given 'yes'"):
        run_recipe(tiny_recipe(tmp_path), resume="yes")

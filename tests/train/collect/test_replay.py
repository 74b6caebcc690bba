"""A run that is repeated is the same in every bit, or ends at the first token, metric or weight that is not."""

import json
import shutil

import pytest

from logitless.cli.main import main
from logitless.cli.output import program
from logitless.errors import ConfigurationError, TrainingError
from logitless.rollout.transformers import TransformersEngine
from logitless.train.block import JudgedBlock
from logitless.train.collect.replay import check_same_block
from logitless.train.entry import train
from logitless.train.record.run_folder import RunFolder
from logitless.types import Completion, Group, Prompt, Verdict
from tests.train.interrupting import before, stop_at
from tests.train.tiny import assert_same_run, finished_run, tiny_recipe


def block_of(token_ids=(4, 5), logp=(-0.5, -0.25), version=3, score=1.0):
    """A block of two completions, of which the second is so."""
    completions = [
        Completion("7", (4, 5), "ab", "stop", (-0.5, -0.25), weights_version=3),
        Completion("7", token_ids, "ab", "stop", logp, weights_version=version),
    ]
    verdicts = ({"exact": Verdict.graded(1.0)}, {"exact": Verdict.graded(score)})
    return JudgedBlock((Group(Prompt("7", "", (3,)), tuple(completions), verdicts, (1.0, score)),), (True,), 1)


AT = "block 3, prompt '7', completion 2, token"


@pytest.mark.parametrize(
    ("other", "recorded", "here"),
    [
        ({"token_ids": (4, 6)}, f"{AT} 2: id 5 by version 3, log-prob -0.25", "id 6 by version 3, log-prob -0.25"),
        ({"logp": (-0.5, -0.25000003)}, f"{AT} 2: id 5", "log-prob -0.25000002"),
        ({"version": 2}, f"{AT} 1: id 4 by version 3", "id 4 by version 2"),
        ({"token_ids": (4,), "logp": (-0.5,)}, f"{AT} 2: id 5", "none, it ended before"),
        ({"score": 0.5}, "block 3: the recorded prompts, rewards and texts", "others, of the same tokens"),
    ],
    ids=str,
)
def test_the_first_difference_is_named_with_both_tokens(other, recorded, here):
    check_same_block(2, block_of(), block_of())
    with pytest.raises(TrainingError) as error:
        check_same_block(2, block_of(**other), block_of())
    assert recorded in error.value.needed
    assert here in error.value.given


@pytest.fixture
def repeated(tmp_path):
    """A run with a log, and a function that repeats it."""
    run = finished_run(tmp_path, rollout__staleness=1, train__blocks=5)
    arguments = ["train", "--replay", str(run.path)]
    return run, lambda *sets: main([*arguments, *(each for setting in sets for each in ("--set", setting))])


def test_a_run_is_repeated_with_its_own_recipe_beside_it(repeated):
    run, repeat = repeated
    assert repeat() == 0
    assert_same_run(run, RunFolder(run.path.with_name("tiny-replay")))


def test_the_first_token_that_differs_is_named(repeated, capsys, monkeypatch):
    _, repeat = repeated
    calls = []

    def spoil(self, prompts, *_, **__):
        calls.append(1)
        if len(calls) == 4:  # after the evaluation and two blocks
            self._version -= 1

    before(monkeypatch, TransformersEngine, "sample", spoil)
    assert repeat() == 1
    said = capsys.readouterr().err
    assert "block 3, prompt" in said
    assert "completion 1, token 1: id" in said
    assert "by version" in said


def test_a_replay_that_is_stopped_is_to_begin_anew(repeated, capsys, monkeypatch):
    run, repeat = repeated
    stop_at(2, monkeypatch)
    assert repeat("train.blocks=5") == 130
    assert f"next: {program()} train --replay {run.path} --set train.blocks=5\n" in capsys.readouterr().out


def test_what_differs_besides_tokens_is_named_at_the_end(repeated, capsys):
    _, repeat = repeated
    assert repeat("evaluation.success_at=7") == 1
    assert "evaluation/accuracy of block 1, step 0: 1.0; given 0.0" in capsys.readouterr().err


def test_a_run_that_stopped_early_is_repeated_to_its_end(tmp_path):
    evaluation = {"every_blocks": 1, "stop": {"patience": 2}}
    run = finished_run(tmp_path, rollout__staleness=1, train__blocks=9, evaluation=evaluation)
    assert json.loads(run.summary.read_text())["ended_by"] == "early_stopping"
    assert main(["train", "--replay", str(run.path)]) == 0


def unlogged(run):
    (run.collected / "block-000003.json").unlink()


def unfinished(run):
    run.write_summary({"ended_by": "signal", "blocks": 5})


def without_checkpoint(run):
    shutil.rmtree(run.checkpoints)


def forked(run):
    parent = {"parent": {"run": "runs/x", "checkpoint": "1"}}
    run.provenance.write_text(json.dumps(json.loads(run.provenance.read_text()) | parent))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (unlogged, "no log of 1 blocks, the first of them 3"),
        (unfinished, "one that is not finished"),
        (without_checkpoint, "no checkpoint"),
        (forked, "a fork"),
    ],
)
def test_a_run_that_cannot_be_repeated_is_refused_with_the_reason(repeated, change, reason, capsys):
    run, repeat = repeated
    change(run)
    assert repeat() == 2
    assert f"given {reason}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "restarts", "given"),
    [({"resume": True}, "0", "resume"), ({"fork": "runs/x"}, "0", "fork"), ({}, "1", "a restart by torchrun")],
)
def test_a_replay_starts_anew(tmp_path, options, restarts, given, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    with pytest.raises(ConfigurationError, match=f"a replay from the first block on; given {given}"):
        train(tiny_recipe(tmp_path), replay=tmp_path, **options)
    with pytest.raises(SystemExit):
        main(["train", "--replay", "runs/x", "--resume"])


def test_a_recipe_beside_a_run_to_repeat_is_one_too_many(capsys):
    assert main(["train", "recipe.yaml", "--replay", "runs/x"]) == 2
    assert main(["train"]) == 2
    assert capsys.readouterr().err.count("a recipe, or a run to --replay") == 2

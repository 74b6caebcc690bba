"""A run that is repeated is the same in every bit, or ends at the first token, metric or weight that is not."""

import json
import logging
import shutil
from contextlib import nullcontext
from dataclasses import replace

import pytest
import yaml

from logitless.cli.main import main
from logitless.cli.output import program
from logitless.errors import ConfigurationError, TrainingError
from logitless.rollout.transformers import TransformersEngine
from logitless.train.assembly import stages
from logitless.train.block import JudgedBlock
from logitless.train.collect.replay import check_same_block, check_same_end, last_whole, repeated_on
from logitless.train.entry import train
from logitless.train.recipe.loading import load_recipe
from logitless.train.record.run_folder import RunFolder
from logitless.train.store.checkpoint import checkpoints, load_checkpoint, read_checkpoint
from logitless.types import Completion, Group, Prompt, Verdict
from tests.train.interrupting import before, stop_at, stopped_at
from tests.train.tiny import assert_same_run, assert_same_tensors, finished_run, tiny_recipe


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


def test_a_block_is_the_same_whether_or_not_its_sampler_is_known_to_be_exact():
    check_same_block(2, replace(block_of(), exact=True), block_of())


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


@pytest.mark.parametrize("was_killed", [False, True])
def test_an_unfinished_run_is_repeated_up_to_its_last_whole_block(was_killed, tmp_path, caplog, capsys):
    run = stopped_at(10, tiny_recipe(tmp_path, rollout__staleness=1, train__blocks=5))
    *_, whole, amid = checkpoints(run.checkpoints)
    assert whole.name.startswith("block-000002")
    if was_killed:
        shutil.rmtree(amid)
        run.summary.unlink()
    with caplog.at_level(logging.INFO, "logitless"):
        assert main(["train", "--replay", str(run.path)]) == 0
    assert (
        f"is that of {run.path} up to block 2, its last whole one, bit for bit" in caplog.text + capsys.readouterr().out
    )
    again = RunFolder(run.path.with_name("tiny-replay"))
    assert_same_tensors(read_checkpoint(whole), load_checkpoint(again.checkpoints))
    last = last_whole(run)
    for block, is_compared in ((3, False), (2, True)):
        lines = [line | {"loss/total": 7.0} if line["block"] == block else line for line in run.read_metrics()]
        run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        with pytest.raises(TrainingError, match="loss/total of block 2") if is_compared else nullcontext():
            check_same_end(again, run, last)


def test_one_process_repeats_a_run_that_had_samplers_in_turns_and_says_so(repeated, caplog):
    run, repeat = repeated
    recipe = yaml.safe_load(run.config.read_text())
    recipe["parallel"]["sampling"] = 1  # the same run on two processes: test_sampling_ranks.py
    run.write_config(yaml.safe_dump(recipe))
    assert main(["train", "--replay", str(run.path), "--dry-run"]) == 0
    with caplog.at_level(logging.INFO, "logitless"):
        assert repeat() == 0
    assert "no process is left to sample alone" in caplog.text
    assert load_recipe(RunFolder(run.path.with_name("tiny-replay")).config).parallel.sampling == 0


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that is not changed."""
    return finished_run(tmp_path_factory.mktemp("finished"), rollout__staleness=1, train__blocks=2)


def copied(run, folder):
    return RunFolder(shutil.copytree(run.path, folder / "copy"))


def trained_on(run, folder, *numbers):
    """The run, as if so many processes had trained it, and after a resume so many."""
    copy = copied(run, folder)
    lines = run.read_metrics()
    for at, line in enumerate(lines):
        line["parallel/tokens_per_rank"] = [1] * numbers[at * len(numbers) // len(lines)]
    copy.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return copy


TURNS, WHOLE = {"sampling": 0}, {"shard": 1, "replicate": 2}
GPU = {"rollout__engine": {"name": "gpu"}}


@pytest.mark.parametrize(
    ("trained", "recipe", "world", "chosen"),
    [
        (1, {"sampling": 1}, 1, TURNS),
        (1, {"sampling": 1}, 2, {"sampling": 1}),
        (1, {"sampling": 3}, 2, {"sampling": 1}),
        (2, {"sampling": 2}, 2, TURNS | WHOLE),  # shards would round otherwise than copies beside samplers
        (2, {"sampling": 2, "shard": 2}, 2, TURNS | {"shard": 2, "replicate": 1}),
        (2, {"sampling": "auto"}, 3, {"sampling": 1}),
        (2, {}, 2, {"sampling": 0, "shard": "auto"}),
        (2, {"sampling": 2, "deterministic": True}, 1, TURNS),
        (2, {"sampling": 1, "deterministic": True}, 2, {"sampling": 1}),
        (2, {"sampling": 1, "deterministic": True}, 4, TURNS),  # three cannot train
        (1, {"sampling": 2, "sampling_shards": 2}, 3, {"sampling": 2, "sampling_shards": 2}),
        (1, {"sampling": 2, "sampling_shards": 2}, 2, {"sampling": 1, "sampling_shards": "auto"}),
        (1, {"sampling": 2, "sampling_shards": 2}, 1, TURNS | {"sampling_shards": "auto"}),
        (2, {"sampling": 2, "sampling_shards": 2, "shard": 2}, 2, TURNS | {"sampling_shards": 2}),
    ],
    ids=str,
)
def test_a_replay_chooses_who_samples_so_that_as_many_train_as_before(
    tmp_path, finished, trained, recipe, world, chosen
):
    changes = {f"parallel__{name}": value for name, value in recipe.items()} | GPU
    recipe = tiny_recipe(tmp_path, rollout__staleness=1, **changes)
    found = repeated_on(world, trained_on(finished, tmp_path, trained), recipe).parallel
    assert {name: getattr(found, name) for name in chosen} == chosen


@pytest.mark.parametrize(
    ("trained", "sampling", "world", "needed"),
    [
        ([2], 1, 1, "rounds gradients: 2; given 1 in all, parallel.sampling: 1. Start 2 of them"),
        ([1], 0, 2, "rounds gradients: 1; given 2 in all, parallel.sampling: 0. Start 1 of them"),
        ([1, 2], 0, 2, "rounds gradients: 1, after a resume 2; .* Repeat a run that was not resumed"),
    ],
)
def test_another_number_of_processes_to_train_is_refused_before_anything_is_loaded(
    tmp_path, finished, trained, sampling, world, needed
):
    recipe = tiny_recipe(tmp_path, rollout__staleness=1, parallel__sampling=sampling)
    with pytest.raises(ConfigurationError, match=needed):
        repeated_on(world, trained_on(finished, tmp_path, *trained), recipe)


def tensor(name):
    """Changes the checksum of a tensor."""

    def change(checkpoint):
        file = checkpoint / "index.json"
        index = json.loads(file.read_text())
        index["tensors"][name]["pieces"][0]["sha256"] = "0"
        file.write_text(json.dumps(index))

    return change


def entry(section, name, value):
    """Changes an entry of the state."""

    def change(checkpoint):
        file = checkpoint / "state.json"
        state = json.loads(file.read_text())
        assert name in state[section]
        state[section][name] = value
        file.write_text(json.dumps(state))

    return change


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (tensor("parameter/lm_head.weight"), "parameter/lm_head.weight"),
        (tensor("random/torch"), "random/torch"),
        (entry("progress", "skipped", 1), "state/progress/skipped"),
        (entry("collector", "position", 7), "state/collector/position"),
        (entry("random", "numpy", {"pos": 7}), "state/random/numpy/pos"),
        (entry("journal", "seconds", {"rollout": 1e9}), None),
    ],
)
def test_the_first_checkpoint_and_what_differs_there_are_named_though_the_last_is_the_same(
    tmp_path, finished, change, name
):
    copy = copied(finished, tmp_path)
    first, second, _ = checkpoints(copy.checkpoints)
    shutil.rmtree(first)  # kept by one run alone
    change(second)
    if name is None:
        check_same_end(copy, finished)
        return
    with pytest.raises(TrainingError, match=f"what was recorded: {name} of checkpoint {second.name}"):
        check_same_end(copy, finished)


def unlogged(run):
    (run.collected / "block-000003.json").unlink()


def unfinished(run):
    run.write_summary({"ended_by": "signal", "blocks": 0})
    for checkpoint in checkpoints(run.checkpoints)[1:]:
        shutil.rmtree(checkpoint)


def went_on(run):
    last = checkpoints(run.checkpoints)[-1]
    last.rename(last.with_name("block-000006-step-000099"))


def without_checkpoint(run):
    shutil.rmtree(run.checkpoints)


def forked(run):
    parent = {"parent": {"run": "runs/x", "checkpoint": "1"}}
    run.provenance.write_text(json.dumps(json.loads(run.provenance.read_text()) | parent))


@pytest.mark.parametrize(
    ("change", "reason", "remedy"),
    [
        (unlogged, "no log of 1 blocks, the first of them 3", "Only rollout.staleness and parallel.sampling"),
        (unfinished, "one without a whole block", "Go on with it (--resume)"),
        (went_on, "one that went on after its end, to block-000006-step-000099", "Finish it with --resume"),
        (without_checkpoint, "no checkpoint", "no weights can be compared"),
        (forked, "a fork", "Fork runs/x:1 again"),
    ],
)
def test_a_run_that_cannot_be_repeated_is_refused_with_the_reason_and_what_to_do(
    repeated, change, reason, remedy, capsys, monkeypatch
):
    run, repeat = repeated
    change(run)
    before(monkeypatch, stages, "tokenizer_of", lambda *_: pytest.fail("loaded before the refusal"))
    assert repeat() == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"given {reason}" in said
    assert remedy in said


def test_servers_cannot_sample_again_and_the_log_is_to_be_trained_on(repeated, capsys, monkeypatch):
    run, repeat = repeated
    before(monkeypatch, stages, "tokenizer_of", lambda *_: pytest.fail("loaded before the refusal"))
    assert repeat("rollout.engine={name: vllm_server, model: tiny, urls: ['http://127.0.0.1:9']}") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"Train on what was sampled: rollout.engine={{name: recorded, path: {run.path}}}" in said


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

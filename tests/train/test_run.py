"""A run can be left alone: its folder, its lock, its saves in the background, and what it takes to go on."""

import gc
import hashlib
import json
import shutil
import signal
import threading
import time

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from logitless.errors import CheckpointError, ConfigurationError, TrainingError, UnavailableError
from logitless.rollout.transformers import TransformersEngine
from logitless.train import checkpoint as checkpoints
from logitless.train import run as runs
from logitless.train.learner import Learner
from logitless.train.live_view import LiveView
from logitless.train.recipe import load_recipe
from logitless.train.run import start
from logitless.train.run_folder import RunFolder
from tests.train.tiny import tiny_recipe

SHORT = {"train__blocks": 1, "train__epochs_per_block": 1, "kl": None, "data__held_out": None}
WARM_START = {"steps": 3}


def _folder(tmp_path) -> RunFolder:
    return RunFolder(tmp_path / "runs" / "tiny")


def _at_step(monkeypatch, step, do) -> None:
    """Do something when the metrics of that step are shown."""
    plain = LiveView.update

    def update(self, record, sample):
        plain(self, record, sample)
        if record["step"] == step:
            do()

    monkeypatch.setattr(LiveView, "update", update)


def _stop_at(monkeypatch, step, number=signal.SIGINT) -> None:
    _at_step(monkeypatch, step, lambda: signal.raise_signal(number))


# --- the folder -----------------------------------------------------------------------------------------------------


def test_a_numbered_run_is_called_as_its_folder_and_goes_on_by_that_name(tmp_path, monkeypatch):
    start(tiny_recipe(tmp_path, **SHORT))
    with monkeypatch.context() as patched:
        _stop_at(patched, 1)
        folder, complete = start(tiny_recipe(tmp_path, **SHORT), numbered=True)
    assert not complete
    assert folder.path.name == "tiny-2"
    assert load_recipe(folder.config).name == "tiny-2"
    assert json.loads(folder.summary.read_text())["name"] == "tiny-2"
    again, complete = start(tiny_recipe(tmp_path, **SHORT, name="tiny-2"), resume=True)
    assert complete
    assert again == folder


def test_a_second_process_cannot_join_a_run(tmp_path, monkeypatch):
    recipe, refused = tiny_recipe(tmp_path, **SHORT), []

    def join():
        for options in ({"resume": True}, {}):
            with pytest.raises(ConfigurationError, match=r"lock\.json|--resume") as error:
                start(recipe, **options)
            refused.append(str(error.value))

    with monkeypatch.context() as patched:
        _at_step(patched, 1, join)
        folder, complete = start(recipe)
    assert complete
    assert len(refused) == 2
    assert "for this process alone" in refused[0]
    assert [record["step"] for record in folder.read_metrics()] == list(range(len(folder.read_metrics())))
    assert not (folder.path / "lock.json").exists()


def test_a_start_that_fails_leaves_no_folder(tmp_path, monkeypatch):
    def broken(*arguments, **options):
        raise UnavailableError(needed="a writer", given="none", remedy="Repair it.")

    with monkeypatch.context() as patched:
        patched.setattr(runs, "open_writers", broken)
        with pytest.raises(UnavailableError):
            start(tiny_recipe(tmp_path, **SHORT))
    assert not any((tmp_path / "runs").iterdir())


def test_a_start_that_was_killed_blocks_neither_a_new_start_nor_a_resume(tmp_path, monkeypatch):
    whole, _ = start(tiny_recipe(tmp_path / "whole", **SHORT))
    for number, resume in enumerate([False, True]):
        recipe = tiny_recipe(tmp_path / str(number), **SHORT)
        folder = _folder(tmp_path / str(number))
        folder.warm_start.mkdir(parents=True)  # half of one
        folder.write_config(runs.dump_recipe(recipe))
        folder.append_metrics({"step": 0})
        (folder.checkpoints / ".saving-block-000000-step-000000").mkdir(parents=True)
        found, complete = start(recipe, resume=resume)
        assert complete
        assert found == folder
        assert len(folder.read_metrics()) == len(whole.read_metrics())


def test_a_run_whose_checkpoints_are_gone_is_not_begun_again_silently(tmp_path):
    recipe = tiny_recipe(tmp_path, **{**SHORT, "train__blocks": 2})
    folder, _ = start(recipe)
    shutil.rmtree(folder.checkpoints)
    with pytest.raises(CheckpointError, match="given none"):
        start(recipe, resume=True)
    assert len(list(folder.read_rollouts())) == 2


def test_the_folder_says_what_each_start_was_made_with(tmp_path):
    start(tiny_recipe(tmp_path, **SHORT))
    folder, _ = start(tiny_recipe(tmp_path, **{**SHORT, "train__blocks": 2}), resume=True)
    found = json.loads(folder.provenance.read_text())
    first, second = found["starts"]
    assert first["step"] == 0 < second["step"]
    assert second["packages"]["torch"] == torch.__version__
    assert second["device"] == "cpu"
    assert found["schema_number"] == 1
    assert json.loads(folder.summary.read_text())["schema_number"] == 1
    assert load_recipe(folder.config).schema_number == 1


def test_rows_that_changed_under_a_run_are_noticed_and_a_rewritten_file_of_the_same_rows_is_none(tmp_path):
    start(tiny_recipe(tmp_path, **SHORT))
    longer = tiny_recipe(tmp_path, **{**SHORT, "train__blocks": 2})
    path = tmp_path / "train.jsonl"
    before = path.read_text()
    path.write_text(before.replace('"answer": "ha"', '"answer": "hb"'))
    with pytest.raises(ConfigurationError, match=r"other rows in train .*provenance\.json"):
        start(longer, resume=True)
    path.write_text(before.replace('", "', '" ,  "') + "\n")
    assert start(longer, resume=True)[1]


def test_recorded_completions_that_changed_under_a_run_are_noticed(tmp_path):
    rows = [
        {"prompt_id": str(prompt), "token_ids": [3] * length, "text": "a" * length, "finish_reason": "stop"}
        for prompt in range(8)
        for length in (1, 2, 3, 4)
    ]
    path = tmp_path / "recorded.jsonl"
    changes = {**SHORT, "rollout__engine": {"name": "recorded", "path": str(path)}}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    start(tiny_recipe(tmp_path, **changes))
    path.write_text("".join(json.dumps(row | {"token_ids": [4] * len(row["token_ids"])}) + "\n" for row in rows))
    with pytest.raises(ConfigurationError, match="other rows in completions"):
        start(tiny_recipe(tmp_path, **{**changes, "train__blocks": 2}), resume=True)


# --- state that cannot be read --------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["progress", "controllers", "collector", "journal", "random", "loop"])
def test_a_state_without_a_key_is_an_error_that_names_the_checkpoint(tmp_path, key):
    folder, _ = start(tiny_recipe(tmp_path, **SHORT))
    last = checkpoints.checkpoints(folder.checkpoints)[-1]
    state = json.loads((last / "state.json").read_text())
    del state[key]
    (last / "state.json").write_text(json.dumps(state))
    index = json.loads((last / "index.json").read_text())
    index["state_sha256"] = hashlib.sha256((last / "state.json").read_bytes()).hexdigest()
    (last / "index.json").write_text(json.dumps(index))
    lines = folder.metrics.read_text()
    with pytest.raises(CheckpointError, match=rf"{last.name}.*{key}.*Delete this checkpoint"):
        start(tiny_recipe(tmp_path, **{**SHORT, "train__blocks": 2}), resume=True)
    assert folder.metrics.read_text() == lines


# --- signals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_scheduler_or_a_closed_terminal_stops_a_run_as_ctrl_c_does(tmp_path, monkeypatch, number):
    recipe = tiny_recipe(tmp_path, kl=None, data__held_out=None, train__blocks=2)
    with monkeypatch.context() as patched:
        _stop_at(patched, 3, number)
        folder, complete = start(recipe)
    assert not complete
    assert checkpoints.checkpoints(folder.checkpoints)[-1].name.endswith("step-000003")
    assert not folder.model.exists()
    assert start(recipe, resume=True)[1]
    assert folder.model.exists()


# --- saves in the background ----------------------------------------------------------------------------------------


def _slow_saves(monkeypatch, seconds) -> None:
    plain = checkpoints.write_tensors

    def slow(path, tensors):
        time.sleep(seconds)
        return plain(path, tensors)

    monkeypatch.setattr(checkpoints, "write_tensors", slow)


def test_a_block_is_rolled_out_while_its_predecessor_is_saved_and_no_step_is_taken(tmp_path, monkeypatch):
    events, rolled_out = [], threading.Event()
    write, sample, step = checkpoints.write_tensors, TransformersEngine.sample, Learner.step

    def writing(path, tensors):
        if "block-000001" in str(path):
            assert threading.current_thread() is not threading.main_thread()
            assert rolled_out.wait(300), "the save holds up the next block"
            time.sleep(0.1)
            events.append("saved")
        return write(path, tensors)

    def sampling(self, *arguments, **options):
        events.append("rollout")
        if events.count("rollout") == 2:
            rolled_out.set()
        return sample(self, *arguments, **options)

    def stepping(self):
        events.append("step")
        return step(self)

    monkeypatch.setattr(checkpoints, "write_tensors", writing)
    monkeypatch.setattr(TransformersEngine, "sample", sampling)
    monkeypatch.setattr(Learner, "step", stepping)
    one_step = {"train__tokens_per_step": 1000, "train__tokens_per_micro_batch": 1000}
    start(tiny_recipe(tmp_path, **{**SHORT, **one_step, "train__blocks": 2}))
    assert events == ["rollout", "step", "rollout", "saved", "step"]


def test_what_a_slow_save_writes_is_what_a_quick_one_writes(tmp_path, monkeypatch):
    quick, _ = start(tiny_recipe(tmp_path / "quick"))
    _slow_saves(monkeypatch, 0.1)
    slow, _ = start(tiny_recipe(tmp_path / "slow"))
    folders = [checkpoints.checkpoints(run.checkpoints) for run in (quick, slow)]
    assert [path.name for path in folders[0]] == [path.name for path in folders[1]]
    for one, other in zip(*folders, strict=True):
        ends = [checkpoints.read_checkpoint(path).tensors for path in (one, other)]
        assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_stop_waits_for_the_save(tmp_path, monkeypatch):
    _slow_saves(monkeypatch, 0.2)
    with monkeypatch.context() as patched:
        _stop_at(patched, 1)
        folder, complete = start(tiny_recipe(tmp_path, kl=None, data__held_out=None))
    assert not complete
    assert checkpoints.checkpoints(folder.checkpoints)[-1].name == "block-000000-step-000001"


def test_blocks_without_a_step_are_saved_at_the_end(tmp_path):
    changes = {**SHORT, "train__blocks": 2, "rewards": [{"name": "exact"}], "rollout__zero_signal": "drop"}
    folder, _ = start(tiny_recipe(tmp_path, **changes))
    assert [path.name for path in checkpoints.checkpoints(folder.checkpoints)] == [
        f"block-{block:06d}-step-000000" for block in range(3)
    ]


def test_a_full_disk_in_the_warm_start_is_an_error_in_words_that_leaves_no_folder(tmp_path, monkeypatch):
    from logitless.train.policy import Policy

    def full(self, folder, tokenizer):
        (folder / "half").write_text("x")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Policy, "save", full)
    tiny_recipe(tmp_path)
    data = {"name": "file", "path": str(tmp_path / "train.jsonl")}
    with pytest.raises(TrainingError, match=r"No space left.*Free disk space"):
        start(tiny_recipe(tmp_path, **SHORT, warm_start={"data": data, **WARM_START}))
    assert not any((tmp_path / "runs").iterdir())


# --- rewards that fail ----------------------------------------------------------------------------------------------


def _failing(tmp_path, **changes):
    faulty = {"name": "function", "path": "tests.train.faulty_rewards:raising"}
    changes = {**SHORT, "train__blocks": 9, "rewards": [faulty, {"name": "length", "cap": 6}], **changes}
    return tiny_recipe(tmp_path, **changes)


def test_a_reward_that_always_raises_stops_the_run_with_the_first_failure_shown(tmp_path):
    with pytest.raises(TrainingError, match=r"(?s)100% by raising, and as bad for 3 blocks.*Traceback.*Error"):
        start(_failing(tmp_path))
    assert [number for number, _ in _folder(tmp_path).read_rollouts()] == [1, 2, 3]


def test_blocks_over_the_limit_are_counted_across_a_stop(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        _stop_at(patched, 1)
        start(_failing(tmp_path, train__max_blocks_unscored=2, train__tokens_per_step=1000))
    with pytest.raises(TrainingError, match="2 blocks in a row"):
        start(_failing(tmp_path, train__max_blocks_unscored=2, train__tokens_per_step=1000), resume=True)
    assert [number for number, _ in _folder(tmp_path).read_rollouts()] == [1, 2]


def test_a_limit_of_everything_lets_such_a_run_go_on(tmp_path):
    assert start(_failing(tmp_path, train__max_unscored_fraction=1.0, train__blocks=4))[1]


# --- memory ---------------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """The most bytes that were alive at once in tensors large enough to be weights."""

    def __init__(self, smallest: int) -> None:
        super().__init__()
        self.smallest, self.peak, self._alive = smallest, 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        grown = False
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                storage = leaf.untyped_storage()
                if storage.nbytes() >= self.smallest and storage._cdata not in self._alive:
                    self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                    grown = True
        if grown:
            self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
            self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out


LARGE = {"model__source__hidden_size": 128, "model__source__intermediate_size": 512}
SMALLEST = 4 * 128 * 128  # a projection; every activation of these runs is smaller


def _peak(recipe, **options) -> int:
    gc.collect()
    with LiveBytes(SMALLEST) as live:
        start(recipe, **options)
    return live.peak


def _weights() -> int:
    return 4 * (4 * 128 * 128 + 3 * 128 * 512)


def test_a_resumed_run_holds_no_more_than_a_fresh_one(tmp_path):
    fresh = _peak(tiny_recipe(tmp_path, **LARGE, train__blocks=1))
    resumed = _peak(tiny_recipe(tmp_path, **LARGE, train__blocks=2), resume=True)
    assert 5 * _weights() <= fresh, "weights, gradients, two moments and the reference are not counted"
    assert resumed <= fresh + 4 * 128 * 512, "more than one tensor above the run itself"


def test_lora_after_a_warm_start_holds_the_base_once_also_when_it_goes_on(tmp_path):
    tiny_recipe(tmp_path)
    lora = {"rank": 1, "targets": ["q_proj"]}
    data = {"name": "file", "path": str(tmp_path / "train.jsonl")}
    few = {"rollout__prompts_per_block": 1, "rollout__completions_per_prompt": 2, "data__held_out": None}
    warm_start = {"data": data, "sequences_per_step": 2, **WARM_START}
    changes = {**LARGE, **few, "model__lora": lora, "warm_start": warm_start}
    fresh = _peak(tiny_recipe(tmp_path, **changes, train__blocks=1))
    resumed = _peak(tiny_recipe(tmp_path, **changes, train__blocks=2), resume=True)
    largest = 4 * 128 * 512
    assert _weights() <= resumed <= fresh + largest
    assert fresh < 2 * _weights(), "a second base"


# --- where its files stand ------------------------------------------------------------------------------------------


def test_a_run_goes_on_with_the_same_tokenizer_and_data_in_another_place(tmp_path):
    start(tiny_recipe(tmp_path, **SHORT))
    moved = tmp_path / "moved"
    moved.mkdir()
    (tmp_path / "tokenizer").rename(moved / "tokenizer")
    (tmp_path / "train.jsonl").rename(moved / "train.jsonl")
    places = {"model__tokenizer": str(moved / "tokenizer"), "data__train__path": str(moved / "train.jsonl")}
    recipe = tiny_recipe(tmp_path, **(SHORT | {"train__blocks": 2} | places))
    folder, complete = start(recipe, resume=True)
    assert complete
    assert load_recipe(folder.config) == recipe
    lines = (moved / "train.jsonl").read_text().splitlines(keepends=True)
    (moved / "train.jsonl").write_text("".join(reversed(lines)))
    with pytest.raises(ConfigurationError, match="other rows in train"):
        start(recipe, resume=True)


def test_a_recipe_of_python_with_relative_paths_is_written_with_whole_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_recipe(tmp_path)
    recipe = tiny_recipe(tmp_path, **SHORT, data__train__path="train.jsonl", model__tokenizer="./tokenizer")
    folder, _ = start(recipe)
    monkeypatch.chdir(folder.path)
    assert load_recipe(folder.config) == recipe
    assert recipe.data.train.path == tmp_path / "train.jsonl"


@pytest.mark.parametrize("share", [1.0, 0.2])
def test_a_run_that_may_keep_few_activations_is_the_same_run(tmp_path, share):
    plain, _ = start(tiny_recipe(tmp_path / "plain", train__blocks=1))
    budget = round(share * 32 * 2000)  # of 32 tokens at about 2 KB a layer
    limited, _ = start(tiny_recipe(tmp_path / "limited", train__blocks=1, train__activation_memory=budget))
    for a, b in zip(plain.read_metrics(), limited.read_metrics(), strict=True):
        assert a.get("loss/total") == b.get("loss/total")
        assert a.get("optimizer/grad_norm") == b.get("optimizer/grad_norm")


def test_two_ways_to_save_activations_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"beside train\.activation_memory"):
        tiny_recipe(tmp_path, model__gradient_checkpointing=True, train__activation_memory=1000)

"""A run can be left alone: its folder, its lock, its saves in the background, and what it takes to go on."""

import gc
import hashlib
import json
import shutil
import threading
import time
from math import inf

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from logitless.errors import CheckpointError, ConfigurationError, TrainingError
from logitless.rollout.transformers import TransformersEngine
from logitless.train.learn.learner import Learner
from logitless.train.learn.policy import Policy
from logitless.train.recipe.loading import dump_recipe, load_recipe
from logitless.train.record.run_folder import RunFolder
from logitless.train.saved_policy import load_policy
from logitless.train.store import checkpoint as checkpoints
from logitless.types import Completion
from tests.train.interrupting import at_step, before, stopped_at
from tests.train.tiny import (
    ONE_STEP,
    SHORT,
    completed,
    finished_run,
    give_chat_template,
    recorded_engine,
    start,
    tiny_recipe,
    warm_start,
)

TWO_BLOCKS = {**SHORT, "train__blocks": 2}


def _folder(tmp_path) -> RunFolder:
    return RunFolder(tmp_path / "runs" / "tiny")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The home of a run of one block."""
    home = tmp_path_factory.mktemp("finished")
    start(tiny_recipe(home, **SHORT))
    return home


@pytest.fixture
def finished(trained, tmp_path) -> RunFolder:
    """That run, with its tokenizer and its data, in another place."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return _folder(tmp_path)


# --- the folder -----------------------------------------------------------------------------------------------------


def test_a_numbered_run_is_called_as_its_folder_and_goes_on_by_that_name(finished, tmp_path):
    folder = stopped_at(1, tiny_recipe(tmp_path, **SHORT), numbered=True)
    assert folder.path.name == "tiny-2"
    assert load_recipe(folder.config).name == "tiny-2"
    assert json.loads(folder.summary.read_text())["name"] == "tiny-2"
    assert start(tiny_recipe(tmp_path, **SHORT, name="tiny-2"), resume=True) == (folder, True)


def test_a_run_says_which_rows_it_leaves_out(tmp_path, capsys):
    recipe = tiny_recipe(tmp_path, **SHORT)
    with (tmp_path / "train.jsonl").open("a") as rows:
        rows.write(json.dumps({"id": 8, "answer": "a row without a prompt"}) + "\n")
    start(recipe)
    assert "train: 8 prompts of 9 rows; left out: 1 empty" in capsys.readouterr().out


def test_a_second_process_cannot_join_a_run(tmp_path, monkeypatch):
    recipe, refused = tiny_recipe(tmp_path, **SHORT), []

    def join():
        for options in ({"resume": True}, {}):
            with pytest.raises(ConfigurationError, match=r"lock\.json|--resume") as error:
                start(recipe, **options)
            refused.append(str(error.value))

    with monkeypatch.context() as patched:
        at_step(1, patched, join)
        folder = finished_run(tmp_path, **SHORT)
    assert len(refused) == 2
    assert "for this process alone" in refused[0]
    assert [record["step"] for record in folder.read_metrics()] == list(range(len(folder.read_metrics())))
    assert not (folder.path / "lock.json").exists()


@pytest.mark.parametrize("resume", [False, True])
def test_a_start_that_was_killed_blocks_neither_a_new_start_nor_a_resume(trained, tmp_path, resume):
    recipe, folder = tiny_recipe(tmp_path, **SHORT), _folder(tmp_path)
    folder.warm_start.mkdir(parents=True)  # half of one
    folder.write_config(dump_recipe(recipe))
    folder.append_metrics({"step": 0})
    (folder.checkpoints / ".saving-block-000000-step-000000").mkdir(parents=True)
    assert start(recipe, resume=resume) == (folder, True)
    assert len(folder.read_metrics()) == len(_folder(trained).read_metrics())


def test_a_run_whose_checkpoints_are_gone_is_not_begun_again_silently(finished, tmp_path):
    shutil.rmtree(finished.checkpoints)
    with pytest.raises(CheckpointError, match="given none"):
        start(tiny_recipe(tmp_path, **SHORT), resume=True)
    assert len(list(finished.read_rollouts())) == 1


def test_a_run_goes_on_in_another_place_for_more_blocks_and_says_what_each_start_was_made_with(finished, tmp_path):
    recipe = tiny_recipe(tmp_path, **TWO_BLOCKS, checkpoint__keep=2)
    assert start(recipe, resume=True) == (finished, True)
    assert finished.read_metrics()[-1]["block"] == 2
    assert load_recipe(finished.config) == recipe
    assert len(checkpoints.checkpoints(finished.checkpoints)) == 2
    found = json.loads(finished.provenance.read_text())
    first, second = found["starts"]
    assert first["step"] == 0 < second["step"]
    assert second["packages"]["torch"] == torch.__version__
    assert second["device"] == "cpu"
    summary = json.loads(finished.summary.read_text())
    assert found["schema_number"] == summary["schema_number"] == recipe.schema_number == 1


def test_rows_that_changed_under_a_run_are_noticed_and_a_rewritten_file_of_the_same_rows_is_none(finished, tmp_path):
    longer, path = tiny_recipe(tmp_path, **TWO_BLOCKS), tmp_path / "train.jsonl"
    before = path.read_text()
    other_order = "".join(reversed(before.splitlines(keepends=True)))
    for changed in (before.replace('"answer": "ha"', '"answer": "hb"'), other_order):
        path.write_text(changed)
        with pytest.raises(ConfigurationError, match=r"other rows in train .*provenance\.json"):
            start(longer, resume=True)
    path.write_text(before.replace('", "', '" ,  "') + "\n")
    completed(longer, resume=True)


def test_recorded_completions_that_changed_under_a_run_are_noticed(tmp_path):
    def recorded(token):
        lengths = [(str(prompt), length) for prompt in range(8) for length in (1, 2, 3, 4)]
        return recorded_engine(tmp_path, [Completion(p, (token,) * n, "a" * n, "stop") for p, n in lengths])

    finished_run(tmp_path, **SHORT, rollout__engine=recorded(3))
    with pytest.raises(ConfigurationError, match="other rows in completions"):
        start(tiny_recipe(tmp_path, **TWO_BLOCKS, rollout__engine=recorded(4)), resume=True)


def test_code_that_changed_under_a_run_is_named_once_where_the_run_goes_on_and_in_a_fork(tmp_path, caplog):
    file = tmp_path / "mine.py"
    file.write_text("def reward(completions):\n    return [float(len(each)) for each in completions]\n")
    changes = {**SHORT, "rewards": [{"name": "function", "path": f"{file}:reward"}]}
    run = finished_run(tmp_path, **changes)

    def said(blocks, **options):
        caplog.clear()
        completed(
            tiny_recipe(tmp_path, **changes | {"train__blocks": blocks, "name": options.pop("name", "tiny")}), **options
        )
        return [record.message for record in caplog.records if "mine.py" in record.message]

    assert said(2, resume=True) == []
    file.write_text(file.read_text() + "# mended\n")
    warning = f"{file} has changed since {run.path} was last started: from here on its new code counts"
    assert said(3, name="fork", fork=str(run.path)) == [warning]
    assert (said(3, resume=True), said(4, resume=True)) == ([warning], [])
    codes = [each["code"][str(file)] for each in json.loads(run.provenance.read_text())["starts"]]
    assert codes[0] == codes[1] != codes[2] == codes[3] == hashlib.sha256(file.read_bytes()).hexdigest()


# --- state that cannot be read --------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["progress", "controllers", "collector", "journal", "random", "loop"])
def test_a_state_without_a_key_is_an_error_that_names_the_checkpoint(finished, tmp_path, key):
    last = checkpoints.checkpoints(finished.checkpoints)[-1]
    state = json.loads((last / "state.json").read_text())
    del state[key]
    (last / "state.json").write_text(json.dumps(state))
    index = json.loads((last / "index.json").read_text())
    index["state_sha256"] = hashlib.sha256((last / "state.json").read_bytes()).hexdigest()
    (last / "index.json").write_text(json.dumps(index))
    lines = finished.metrics.read_text()
    with pytest.raises(CheckpointError, match=rf"{last.name}.*{key}.*Delete this checkpoint"):
        start(tiny_recipe(tmp_path, **TWO_BLOCKS), resume=True)
    assert finished.metrics.read_text() == lines


# --- saves ----------------------------------------------------------------------------------------------------------


def test_a_block_is_rolled_out_while_its_predecessor_is_saved_and_no_step_is_taken(tmp_path, monkeypatch):
    events, rolled_out = [], threading.Event()

    def writing(path, tensors):
        if "block-000001" in str(path):
            assert threading.current_thread() is not threading.main_thread()
            assert rolled_out.wait(300), "the save holds up the next block"
            time.sleep(0.1)
            events.append("saved")

    def sampling(*arguments, **options):
        events.append("rollout")
        if events.count("rollout") == 2:
            rolled_out.set()

    before(monkeypatch, checkpoints, "write_tensors", writing)
    before(monkeypatch, TransformersEngine, "sample", sampling)
    before(monkeypatch, Learner, "step", lambda _: events.append("step"))
    start(tiny_recipe(tmp_path, **TWO_BLOCKS, **ONE_STEP))
    assert events == ["rollout", "step", "rollout", "saved", "step"]


def test_a_full_disk_in_the_warm_start_is_an_error_in_words_that_leaves_no_folder(tmp_path, monkeypatch):
    def full(self, folder, tokenizer):
        (folder / "half").write_text("x")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Policy, "save", full)
    with pytest.raises(TrainingError, match=r"No space left.*Free disk space"):
        start(tiny_recipe(tmp_path, **SHORT, warm_start=warm_start(tmp_path)))
    assert not any((tmp_path / "runs").iterdir())


@pytest.mark.parametrize("warm", [False, True], ids=["random weights", "warm start"])
def test_an_adapter_whose_base_only_the_run_has_is_refused_elsewhere_with_the_command_that_merges_it(
    warm, trained, tmp_path
):
    changes = {"model__lora": {"rank": 2}}
    if warm:
        source = str(RunFolder(trained / "runs" / "tiny").model)
        changes |= {"model__source": source, "model__random_weights": False, "warm_start": warm_start(tmp_path)}
    run = finished_run(tmp_path, **{**SHORT, **changes})
    for auto in (AutoModelForCausalLM, AutoPeftModelForCausalLM):
        with pytest.raises(OSError, match="only this run has: `logitless export RUN` merges it"):
            auto.from_pretrained(str(run.model))
    load_policy(run)  # here it is complete


# --- rewards that fail ----------------------------------------------------------------------------------------------


def test_blocks_that_nothing_could_score_are_counted_across_a_stop_and_end_the_run(tmp_path):
    faulty = {"name": "function", "path": "tests.train.faulty_rewards:raising_often"}
    rewards = [faulty, {"name": "length", "cap": 6}]
    changes = {**SHORT, **ONE_STEP, "train__blocks": 9, "train__max_blocks_unscored": 2, "rewards": rewards}
    stopped_at(1, tiny_recipe(tmp_path, **changes))
    with pytest.raises(TrainingError, match=r"(?s)% by raising_often, and as bad for 2 blocks.*Traceback.*Error"):
        start(tiny_recipe(tmp_path, **changes), resume=True)
    assert [number for number, _ in _folder(tmp_path).read_rollouts()] == [1, 2]


class RaisesAtOnce:
    def start(self, prompt, *, seed):
        raise KeyError("no such table")

    def reply(self, state, turn):
        raise AssertionError("no episode began")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"rewards": [{"name": "function", "path": "tests.train.faulty_rewards:raising"}]},
            "the first by raising: raised: RuntimeError: broken. Repair it",
        ),
        (
            {
                "rollout__environment": {"name": "own", "factory": f"{__name__}:RaisesAtOnce"},
                "rollout__limits": {"max_turns": 2, "max_tokens": 20},
            },
            "the environment failed: KeyError: 'no such table'. Repair it",
        ),
    ],
    ids=["reward", "environment"],
)
def test_a_reward_or_environment_that_raises_at_every_completion_ends_the_run_after_its_first_block(
    changes, said, tmp_path, capsys
):
    give_chat_template(tmp_path)
    with pytest.raises(TrainingError, match=f"scored without an error; given an error at each of .*{said}"):
        start(tiny_recipe(tmp_path, **{**SHORT, "train__blocks": 9, **changes}))
    assert "Traceback" in capsys.readouterr().out
    assert [number for number, _ in _folder(tmp_path).read_rollouts()] == [1]


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
LARGEST = 4 * 128 * 512
WEIGHTS = 4 * 4 * 128 * 128 + 3 * LARGEST
ADAPTER = {
    "model__lora": {"rank": 1, "targets": ["q_proj"]},
    "rollout__prompts_per_block": 1,
    "rollout__completions_per_prompt": 2,
    "data__held_out": None,
}


# Of float32 training: weights, gradients, two moments and the reference. Under LoRA: a base, and no second one.
@pytest.mark.parametrize(
    ("lora", "least", "most"), [(False, 5, inf), (True, 1, 2)], ids=["full", "lora after a warm start"]
)
def test_a_resumed_run_holds_no_more_than_a_fresh_one(tmp_path, lora, least, most):
    changes = {**LARGE, **ADAPTER, "warm_start": warm_start(tmp_path, sequences_per_step=2)} if lora else LARGE
    peaks = []
    for blocks in (1, 2):
        gc.collect()
        with LiveBytes(4 * 128 * 128) as live:  # a projection; every activation of these runs is smaller
            start(tiny_recipe(tmp_path, **changes, train__blocks=blocks), resume=blocks > 1)
        peaks.append(live.peak)
    fresh, resumed = peaks
    assert least * WEIGHTS <= min(fresh, resumed)
    assert fresh < most * WEIGHTS
    assert resumed <= fresh + LARGEST, "more than one tensor above the run itself"


def test_a_run_that_may_keep_few_activations_is_the_same_run(tmp_path):
    found = []
    for name, budget in (("plain", None), ("limited", round(0.2 * 32 * 2000))):  # of 32 tokens at about 2 KB a layer
        lines = finished_run(tmp_path, name=name, train__blocks=1, train__activation_memory=budget).read_metrics()
        found.append([(line.get("loss/total"), line.get("optimizer/grad_norm")) for line in lines])
    assert found[0] == found[1]

"""Ranks that only sample beside those that train: the same run as on one process, at any staleness, in every bit."""

import json
import os
import signal
import subprocess
import sys
from unittest import mock

import pytest
import torch.distributed as dist

from logitless.distributed import Ranks
from logitless.errors import ConfigurationError, EngineError
from logitless.rollout.transformers import TransformersEngine
from logitless.train.collect.replay import check_same_end
from logitless.train.learn.learner import Learner
from logitless.train.recipe.loading import load_recipe
from logitless.train.record.run_folder import RunFolder
from logitless.train.run import run_recipe
from tests import warm
from tests.ranks import DEVICES, run_on_ranks
from tests.train.test_rank_faults import ENVIRONMENT, TORCHRUN
from tests.train.tiny import TINY_LLAMA, completed, finished_run, program_in, start, tiny_raw, tiny_recipe

BLOCKS = {"train__blocks": 5}
WIDE = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
WIDE |= {"vocab_size": 4000, "head_dim": 64, "num_hidden_layers": 2}
ON_GPU = {
    "model__device": "cuda",
    "model__source": TINY_LLAMA | WIDE,
    "model__trained_dtype": "bfloat16",
    "model__layers": "row_invariant",
    "rollout__engine": {"name": "gpu"},
}
CENTRED = {"algorithm": {"surrogate": {"name": "reinforce"}, "score_centering": "device"}}
ON = {"cpu": BLOCKS, "cuda": BLOCKS | ON_GPU}


def _run(rank, folder, changes, resume=False, stop_at=None, fails_at=None):
    """What ended the run. After the step ``stop_at`` comes SIGTERM; a call of the engine on rank 1 fails."""
    plain, calls = TransformersEngine.sample, []

    def step(self, plain=Learner.step):
        record = plain(self)
        if record["step"] == stop_at:
            signal.raise_signal(signal.SIGTERM)
        return record

    def sample(self, *arguments, **named):
        calls.append(1)
        if len(calls) == fails_at and rank == 1:
            raise EngineError(needed="a device", given="none any more", remedy="Look for it.")
        return plain(self, *arguments, **named)

    with (
        mock.patch.object(TransformersEngine, "sample", sample),
        mock.patch.object(Learner, "step", step),
        mock.patch("logitless.train.run.write_report"),
    ):
        recipe = tiny_recipe(folder, **changes)
        return run_recipe(recipe, ranks=Ranks(data=dist.group.WORLD), resume=resume).ended_by


def beside(folder, *more, training=1, sampling=1, ended_by="blocks", device="cpu", **changes):
    """The folder of a run with ranks that only sample."""
    tiny_raw(folder)
    changes = {**ON[device], "parallel__sampling": sampling, **changes}
    ends = run_on_ranks(training + sampling, _run, folder, changes, *more, device=device)
    assert ends == [ended_by] * (training + sampling)
    return RunFolder(folder / "runs" / "tiny")


def in_turns(folder, *, device="cpu", **changes):
    """The folder of the same run on one process."""
    return finished_run(folder, **{**ON[device], **changes})


def assert_same(one, other):
    """The same metrics, weights and completions, in every bit."""
    check_same_end(one, other)
    rows = [[row for _, rows in run.read_rollouts() for row in rows] for run in (one, other)]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("staleness", "sampling", "more"),
    [
        pytest.param(0, 1, {}, marks=pytest.mark.slow),
        (1, "auto", {}),
        pytest.param(3, 1, CENTRED, marks=pytest.mark.slow),
    ],
)
def test_a_run_on_two_processes_is_the_run_on_one_in_every_bit(tmp_path, staleness, sampling, more, device):
    changes = {"rollout__staleness": staleness, "device": device, **more}
    alone = in_turns(tmp_path / "alone", **changes)
    found = beside(tmp_path / "beside", parallel__sampling=sampling, **changes)
    assert_same(alone, found)
    assert load_recipe(found.config).parallel.sampling == sampling
    logged = [json.loads(file.read_bytes()) for file in sorted(found.collected.glob("*.json"))]
    assert [row["begun_after"] for row in logged] == [max(0, block - staleness) for block in range(5)]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("training", "sampling"), [(2, 2), (1, 3)])
def test_ranks_that_train_in_order_and_several_that_sample_are_one_too(tmp_path, training, sampling, device):
    changes = {"parallel__deterministic": True, "rollout__staleness": 1, "device": device, **CENTRED}
    if device == "cpu":  # rows of other batches are rounded otherwise
        changes["rollout__max_rows"] = 1
    alone = in_turns(tmp_path / "alone", **changes)
    assert_same(alone, beside(tmp_path / "beside", training=training, sampling=sampling, **changes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [{"model__trained_dtype": "bfloat16"}, {"model__lora": {"rank": 2}}], ids=["all", "lora"]
)
def test_weights_that_are_sharded_in_training_are_sent_whole(tmp_path, more):
    changes = {"parallel__shard": 2, "rollout__staleness": 1, "rollout__max_rows": 1, **more}
    alone = beside(tmp_path / "alone", training=2, sampling=0, **changes)
    assert_same(alone, beside(tmp_path / "beside", training=2, **changes))


@pytest.mark.parametrize("device", DEVICES)
def test_an_adapter_after_a_warm_start_is_sent_with_the_base_that_it_was_merged_into(tmp_path, device):
    tiny_raw(tmp_path)
    data = {"name": "file", "path": str(tmp_path / "train.jsonl")}
    changes = {"model__lora": {"rank": 2}, "warm_start": {"data": data, "steps": 3}, "train__blocks": 2}
    if device == "cuda":
        changes |= {"model__dtype": "bfloat16"}
    changes |= {"rollout__staleness": 1, "device": device}
    assert_same(in_turns(tmp_path / "alone", **changes), beside(tmp_path / "beside", **changes))


@pytest.mark.parametrize(("stop_at", "more"), [pytest.param(4, {}, marks=pytest.mark.slow), (6, CENTRED)])
def test_what_was_stopped_beside_samplers_goes_on_in_turns_and_is_the_same_run(tmp_path, stop_at, more):
    changes = {"rollout__staleness": 2, **more}
    stopped = tmp_path / "stopped"
    beside(stopped, False, stop_at, ended_by="signal", **changes)
    found = in_turns(stopped, resume=True, **changes)
    assert_same(in_turns(tmp_path / "whole", **changes), found)


PROGRAM = """
import os, signal, sys, time
from datetime import timedelta
import torch
from logitless.cli.main import main
from logitless.distributed import exit_reasons
from logitless.distributed.ranks import Ranks
from logitless.rollout.sampling_ranks import SamplingRanks
from logitless.rollout.transformers import TransformersEngine
from logitless.train.learn.learner import Learner

rank, where, fault = os.environ["RANK"], sys.argv.pop(1), sys.argv.pop(1)

def killed(self):
    os.kill(os.getpid(), signal.SIGKILL)

def hung(self):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(1000)

def memory(self):
    raise torch.OutOfMemoryError("no room for weights")

def impatient(self):
    # Not NCCL's: what is tested is that this rank ends before NCCL's watchdog would end it.
    self._ranks.data._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=2))
    object.__setattr__(self._ranks, "timeout", timedelta(seconds=2))

def at(call_number, happens, kind, name):
    plain, calls = getattr(kind, name), []
    def call(self, *arguments, **named):
        calls.append(1)
        if len(calls) == call_number:
            happens(self)
        return plain(self, *arguments, **named)
    setattr(kind, name, call)

engine = TransformersEngine
if torch.cuda.is_available():
    from logitless.rollout.gpu.engine import GpuEngine as engine

exit_reasons.GRACE_SECONDS = 1.0
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by which the launcher would end the other before it says why
    of, *place = {
        "push": ("1", 3, Ranks, "broadcast"),
        "sampling": ("1", 4, engine, "sample"),
        "training": ("0", 7, Learner, "step"),
    }[where]
    if rank == of:
        call_number, kind, name = place
        at(call_number, globals()[fault], kind, name)
    elif fault == "hung":
        at(3, impatient, SamplingRanks, "_send")
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


SAID = {
    "cpu": {
        "killed": "rank {rank}, which says nothing: killed, or hung",
        "memory": "rank {rank}: OutOfMemoryError: no room for weights",
    },
    # A process that waits in NCCL cannot speak before its launcher, which names the dead one, or NCCL ends it.
    "cuda": {
        "killed": "local_rank: {rank} ",
        "hung": "rank {rank}, which says nothing: killed, or hung",
        "memory": "OutOfMemoryError: no room for weights",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("where", "fault", "rank", "changes"),
    [
        ("push", "killed", 1, {"rollout__staleness": 1}),
        ("push", "hung", 1, {"rollout__staleness": 1}),
        ("push", "memory", 1, {"rollout__staleness": 1}),
        ("sampling", "killed", 1, {"checkpoint__every_blocks": 100}),
        ("training", "killed", 0, {"rollout__staleness": 1}),
        ("sampling", "killed", 1, {"rollout__staleness": 1, "rollout__in_flight": "recompute"}),
    ],
)
def test_a_rank_that_fails_is_named_and_the_run_goes_on_as_if_nothing_had_happened(
    tmp_path, where, fault, rank, changes, device
):
    recipe = tiny_recipe(tmp_path, parallel__sampling=1, **ON[device], **changes).model_dump(mode="json")
    program = program_in(tmp_path, PROGRAM, recipe, where, fault)
    if device == "cpu":
        done = warm.run("-m", "tests.torchrun", "1", *program, environment=os.environ)
    else:
        launcher = [sys.executable, *TORCHRUN, "--max-restarts", "1", *program]
        done = subprocess.run(launcher, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    said = SAID[device]
    assert said.get(fault, said["killed"]).format(rank=rank) in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr
    found = RunFolder(tmp_path / "runs" / "tiny")
    starts = json.loads(found.provenance.read_text())["starts"]
    assert [start["step"] > 0 for start in starts] == [False, True]  # from a checkpoint
    replay = found.path if "rollout__in_flight" in changes else None
    alone = tiny_recipe(tmp_path / "alone", **ON[device], **changes)
    assert_same(completed(alone, replay=replay), found)


def test_an_engine_that_fails_on_a_sampling_rank_ends_the_run_with_the_rank_and_a_checkpoint(tmp_path):
    with pytest.raises(EngineError, match=r"none any more \(on rank 1\)"):
        beside(tmp_path, False, None, 4)
    found = in_turns(tmp_path, resume=True)
    assert_same(in_turns(tmp_path / "whole"), found)


def test_all_processes_sampling_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"a further process to train; given 1 in all"):
        start(tiny_recipe(tmp_path, parallel__sampling=1))

"""Ranks that only sample beside those that train: the same run as on one process, at any staleness, in every bit."""

import json
import shutil
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from logitless.distributed import Ranks
from logitless.errors import ConfigurationError, LostRankError, TrainingError
from logitless.rollout.transformers import TransformersEngine
from logitless.train.collect.replay import check_same_end
from logitless.train.record.run_folder import RunFolder
from logitless.train.run import run_recipe
from logitless.train.store.checkpoint import checkpoints
from tests.ranks import run_on_ranks
from tests.train.tiny import completed, start, tiny_raw, tiny_recipe

BLOCKS = {"train__blocks": 5}
SAMPLING = {"parallel__sampling": 1}


def _run(rank, folder, changes, device, options, fails_at=None):
    """Whether the run is complete; after ``fails_at`` calls the sampling rank's engine fails."""
    plain, calls = TransformersEngine.sample, []

    def sample(self, *arguments, **named):
        calls.append(rank)
        if len(calls) == fails_at and rank == 1:
            raise OSError("the device is gone")
        return plain(self, *arguments, **named)

    recipe = tiny_recipe(folder, model__device=device, **changes)
    with mock.patch.object(TransformersEngine, "sample", sample), mock.patch("logitless.train.run.write_report"):
        return run_recipe(recipe, ranks=Ranks(data=dist.group.WORLD), **options).complete


def apart(folder, *, num_ranks=2, device="cpu", fails_at=None, options={}, **changes):
    """The folder of a run with a rank that only samples."""
    tiny_raw(folder)
    arguments = (folder, {**BLOCKS, **SAMPLING, **changes}, device, options, fails_at)
    assert run_on_ranks(num_ranks, _run, *arguments, device=device) == [True] * num_ranks
    return RunFolder(folder / "runs" / changes.get("name", "tiny"))


def in_turns(folder, **changes):
    """The folder of the same run on one process."""
    with torch.random.fork_rng(devices=[]):
        return completed(tiny_recipe(folder, **BLOCKS, **changes))


def assert_same(one, other):
    check_same_end(one, other)
    rows = [[row for _, rows in run.read_rollouts() for row in rows] for run in (one, other)]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_run_on_two_processes_is_the_run_on_one_in_every_bit(tmp_path, staleness):
    changes = {"rollout__staleness": staleness}
    alone, beside = in_turns(tmp_path / "a", **changes), apart(tmp_path / "b", **changes)
    assert_same(alone, beside)
    logged = [json.loads(file.read_bytes()) for file in sorted(beside.collected.glob("*.json"))]
    assert [row["begun_after"] for row in logged] == [max(0, block - staleness) for block in range(5)]

"""Weights that FSDP2 shards, sampled with by layers gathered one by one: the run with a whole copy on each rank."""

import json
import os
from contextlib import ExitStack
from unittest import mock

import pytest
import torch.distributed as dist

from logitless.distributed.layer_shards import LayerShards
from logitless.distributed.ranks import Ranks
from logitless.head import fused
from logitless.rollout.gpu import steps
from logitless.train.collect.replay import check_same_end
from logitless.train.record.run_folder import RunFolder
from logitless.train.run import run_recipe
from tests import warm
from tests.head.interpreter import complete_interpreter, interpreted
from tests.ranks import DEVICES, run_on_ranks
from tests.train.test_sampling_ranks import WIDE
from tests.train.tiny import TINY_LLAMA, program_in, tiny_raw, tiny_recipe

pytest.importorskip("triton")

CHANGES = {
    "model__source": TINY_LLAMA | {"num_hidden_layers": 2, "head_dim": 16},
    "rollout__engine": {"name": "gpu"},
    "rollout__prompts_per_block": 3,
    "rollout__completions_per_prompt": 2,
    "rollout__sampling": {"max_new_tokens": 3},
    "train__blocks": 2,
    "train__epochs_per_block": 1,
    "train__tokens_per_step": 1000,
    "kl": None,
}


def _run(rank, folder, changes):
    """What ended the run, and the bytes that this rank sampled with."""
    held, plain = [], LayerShards.__init__

    def seen(self, *arguments):
        plain(self, *arguments)
        held.append(self.num_bytes)

    with ExitStack() as stack:
        stack.enter_context(mock.patch("logitless.train.run.write_report"))
        stack.enter_context(mock.patch.object(LayerShards, "__init__", seen))
        if interpreted():
            complete_interpreter()
            stack.enter_context(mock.patch.object(steps, "STEPS", 3))
            stack.enter_context(mock.patch.object(fused, "why_not", fused._unsupported))
        ended = run_recipe(tiny_recipe(folder, **changes), ranks=Ranks(data=dist.group.WORLD)).ended_by
    return ended, held


def _same(*folders):
    check_same_end(*folders)
    rows = [[row for _, rows in run.read_rollouts() for row in rows] for run in folders]
    assert rows[0] == rows[1]


def _finished(folder, num_ranks, device, **changes):
    """The run's folder, and what each rank says."""
    tiny_raw(folder)
    on_gpu = {"model__device": "cuda", "model__trained_dtype": "bfloat16", "model__source": TINY_LLAMA | WIDE}
    on_gpu = on_gpu if device == "cuda" else {}
    ends = run_on_ranks(num_ranks, _run, folder, CHANGES | on_gpu | changes, device=device)
    assert [ended for ended, _ in ends] == ["blocks"] * num_ranks
    return RunFolder(folder / "runs" / "tiny"), [held for _, held in ends]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_ranks_that_only_sample_with_sharded_layers_have_the_bits_of_one_process_in_turns(tmp_path, device):
    changes = {"model__layers": "row_invariant", "rollout__staleness": 1}
    alone, _ = _finished(tmp_path / "alone", 1, device, **changes)
    beside, held = _finished(
        tmp_path / "beside", 3, device, parallel__sampling=2, parallel__sampling_shards=2, **changes
    )
    _same(alone, beside)
    assert [len(each) for each in held] == [0, 1, 1]


@pytest.mark.parametrize("device", DEVICES)
def test_a_run_that_samples_with_sharded_layers_is_the_run_with_whole_copies_in_every_bit(tmp_path, device):
    whole, [_, [before]] = _finished(tmp_path / "whole", 2, device, parallel__sampling_shards=1)
    shared, [_, [after]] = _finished(tmp_path / "shared", 2, device, parallel__sampling_shards=2)
    _same(whole, shared)
    assert before.buffers == 0
    assert after.pieces < 0.6 * before.pieces


PROGRAM = """
import os, signal, sys
from logitless.cli.main import main
from logitless.distributed import exit_reasons, layer_shards
from logitless.head import fused
from logitless.rollout.gpu import steps
from tests.head.interpreter import complete_interpreter

complete_interpreter()
fused.why_not, steps.STEPS, exit_reasons.GRACE_SECONDS = fused._unsupported, 3, 1.0
plain, calls = layer_shards._Turns.ready, []

def killed(self, number):
    calls.append(1)
    if len(calls) == 30:  # in the second layer of a pass of the second block
        os.kill(os.getpid(), signal.SIGKILL)
    plain(self, number)

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by which the launcher would end the other before it says why
    if os.environ["RANK"] == "1":
        layer_shards._Turns.ready = killed
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not interpreted(), reason="for Triton's interpreter")
def test_a_rank_that_is_killed_in_the_middle_of_a_pass_is_named_and_the_run_goes_on_as_if_nothing_happened(tmp_path):
    changes = CHANGES | {"parallel__sampling_shards": 2}
    recipe = tiny_recipe(tmp_path, **changes).model_dump(mode="json")
    program = program_in(tmp_path, PROGRAM, recipe)
    done = warm.run("-m", "tests.torchrun", "1", *program, environment=os.environ)
    assert "rank 1, which says nothing: killed, or hung" in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr
    found = RunFolder(tmp_path / "runs" / "tiny")
    assert len(json.loads(found.provenance.read_text())["starts"]) == 2
    _same(_finished(tmp_path / "whole", 2, "cpu", parallel__sampling_shards=2)[0], found)

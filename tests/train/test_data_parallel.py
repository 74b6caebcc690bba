"""Several ranks that train one policy: they draw, judge and train on what one rank would, each on tokens of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from logitless.cli.main import main
from logitless.distributed import Ranks
from logitless.models.char_tokenizer import character_tokenizer
from logitless.models.loading import load_model
from logitless.rollout.transformers import TransformersEngine
from logitless.train.collect import stopping
from logitless.train.collect.collector import GroupSampler
from logitless.train.learn.learner import Learner
from logitless.train.recipe.loading import load_recipe
from logitless.train.record.metrics import repeatable
from logitless.train.record.run_folder import RunFolder
from logitless.train.run import run_recipe
from logitless.train.store import checkpoint as checkpoints
from tests.ranks import run_on_ranks
from tests.rollout.fake_vllm import Served, serving
from tests.train.tiny import (
    ALPHABET,
    TINY_LLAMA,
    assert_equal,
    assert_same_run,
    finished_run,
    start,
    tiny_raw,
    tiny_recipe,
)

ROOT = Path(__file__).parents[2]


def _run(rank, folder, changes, resume=False, stop_at=None, number=signal.SIGINT):
    """The exit status of the tiny recipe's run, whose last rank gets a signal after the step ``stop_at``."""
    ranks = Ranks(data=dist.group.WORLD)
    plain = Learner.step

    def step(self):
        record = plain(self)
        if record["step"] == stop_at and ranks.rank == ranks.world - 1:
            signal.raise_signal(number)
        return record

    torch.use_deterministic_algorithms(True)
    try:
        with mock.patch.object(Learner, "step", step), mock.patch("logitless.train.run.write_report"):
            return run_recipe(tiny_recipe(folder, **changes), ranks=ranks, resume=resume).exit_status
    finally:
        torch.use_deterministic_algorithms(False)


def assert_same(one, other):
    """The same run, and the same model at its end."""
    assert_equal(*(load_file(folder.model / "model.safetensors") for folder in (one, other)))
    assert_same_run(one, other)


def _on(num_ranks, folder, changes, resume=False, status=0, **signalled):
    """The folder of a run on so many ranks, all of which end with this status."""
    tiny_raw(folder)
    if num_ranks == 1:
        return finished_run(folder, resume=resume, **changes)
    assert run_on_ranks(num_ranks, _run, folder, changes, resume, *signalled.values()) == [status] * num_ranks
    return RunFolder(folder / "runs" / "tiny")


def _assert_alike(one, several, num_ranks, *, tolerance=1e-5):
    """Completions are equal, metrics up to rounding; in steps of several ranks, more than one had tokens."""
    for (_, rows), (_, found) in zip(one.read_rollouts(), several.read_rollouts(), strict=True):
        for row, other in zip(rows, found, strict=True):
            same = ("prompt_id", "completion", "finish_reason", "reward", "verdicts")
            assert [row[name] for name in same] == [other[name] for name in same]
    with_tokens = 0
    for record, other in zip(one.read_metrics(), several.read_metrics(), strict=True):
        tokens = other.pop("parallel/tokens_per_rank", None)
        if "optimizer/tokens" in record:
            assert num_ranks in (None, len(tokens))
            assert sum(tokens) == record["optimizer/tokens"]
            with_tokens += sum(n > 0 for n in tokens) > 1
        other["optimizer/micro_batches"] = record.get("optimizer/micro_batches")
        for name, value in repeatable(record).items():
            # differences of log-probs are nothing but rounding, here of up to a sequence of them
            least = 1e-4 if "difference" in name else 1e-6
            assert other[name] == pytest.approx(value, rel=tolerance, abs=least, nan_ok=True), (record["step"], name)
    assert with_tokens or num_ranks is None


TWO_TEACHERS = {
    "source": dict.fromkeys(["ha", "gb", "fc", "ed"], "self") | dict.fromkeys(["de", "cf", "bg", "ah"], "start"),
    "column": "answer",
    "template": "{% if answer != 'ah' %}{{ answer }}{{ prompt }}{% endif %}",
}
"""After prompts of their own; one prompt has none."""

CASES = {
    "grpo with a KL that is controlled": {},
    "refills, and a block of fewer prompts than ranks": {
        "rollout__zero_signal": "refill",
        "rollout__prompts_per_block": 2,
    },
    "one step a block, whose own pass the gate reads": {
        "train__epochs_per_block": 1,
        "train__tokens_per_step": 10_000,
        "rollout__parity": {"stop": {"max": 1e-4, "sequence": 1e-3}},
    },
    "a value head, rows of one sequence": {"algorithm": {"preset": "ppo"}, "train__tokens_per_micro_batch": 13},
    "an adapter whose base is its teacher, in the loss and in the advantage": {
        "kl": None,
        "model__lora": {"rank": 2},
        "teacher": {"source": "base", "divergence": "reverse_kl", "advantage": 0.5},
        "parallel__deterministic": True,
    },
    "the divergence from a teacher, of sharded weights, one rank at times without tokens": {
        "kl": None,
        "train__tokens_per_micro_batch": 13,
        "teacher": TWO_TEACHERS | {"divergence": "jensen_shannon"},
    },
    "two teachers after prompts of their own, of sharded weights": {
        "kl": None,
        "teacher": TWO_TEACHERS | {"advantage": 1},
    },
}


@pytest.mark.parametrize(
    ("case", "num_ranks"),
    [
        (next(iter(CASES)), 2),
        *(
            pytest.param(case, n, marks=pytest.mark.slow)
            for case, n in zip(list(CASES)[1:], (3, 2, 3, 2, 2, 2), strict=True)
        ),
    ],
)
def test_ranks_draw_and_train_on_what_one_rank_would(case, num_ranks, tmp_path):
    one, several = (_on(number, tmp_path / str(number), CASES[case]) for number in (1, num_ranks))
    _assert_alike(one, several, num_ranks)
    assert _files(one) == _files(several)


@pytest.mark.slow
def test_ranks_of_sharded_weights_learn_from_a_server_what_one_rank_would(tmp_path):
    source = TINY_LLAMA | {"initializer_range": 0.5}
    served = Served(lambda: load_model(source, random_weights=True, seed=5), character_tokenizer(ALPHABET))
    with serving(served) as url:
        teacher = {
            "source": dict.fromkeys(["ha", "gb", "fc", "ed"], "start") | dict.fromkeys(["de", "cf", "bg", "ah"], url),
            "column": "answer",
            "divergence": "reverse_kl",
            "top_k": 4,
        }
        changes = {"kl": None, "train__tokens_per_micro_batch": 13, "teacher": teacher}
        one, several = (_on(number, tmp_path / str(number), changes) for number in (1, 2))
    _assert_alike(one, several, 2)
    assert any(0 < record.get("teacher/tail", 0) < 1 for record in several.read_metrics())


def test_a_rank_without_a_micro_batch_of_the_step_in_order_knows_the_gates_numbers(tmp_path):
    changes = {
        **CASES["one step a block, whose own pass the gate reads"],
        "train__tokens_per_micro_batch": 10_000,
        "parallel__deterministic": True,
    }
    runs = [_on(number, tmp_path / str(number), changes) for number in (1, 2)]
    one, two = ([record for record in run.read_metrics() if "optimizer/tokens" in record] for run in runs)
    assert {record["parallel/tokens_per_rank"][1] for record in two} == {0}
    assert all("parity/difference_max" in record for record in two)
    assert [r["parity/difference_max"] for r in one] == [r["parity/difference_max"] for r in two]


def _files(run):
    """All but checkpoints and the report, which tests leave out on this process."""
    paths = [path.relative_to(run.path) for path in run.path.rglob("*")]
    return sorted(path for path in paths if path.parts[0] not in ("checkpoints", "report.html"))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """A run of two ranks that nothing stopped."""
    return _on(2, tmp_path_factory.mktemp("whole"), {})


@pytest.mark.slow
def test_the_same_run_twice_on_two_ranks_is_the_same_run(two_ranks, tmp_path):
    assert_same(two_ranks, _on(2, tmp_path, {}))


# in an epoch, at a block's end
@pytest.mark.parametrize(
    ("step", "number", "status"),
    [(2, signal.SIGINT, 130), pytest.param(4, signal.SIGTERM, 143, marks=pytest.mark.slow)],
)
def test_a_signal_heard_by_one_rank_stops_all_and_resume_continues_bitwise(two_ranks, tmp_path, step, number, status):
    folder = _on(2, tmp_path, {}, status=status, stop_at=step, number=number)
    assert folder.read_metrics()[-1]["step"] == step
    _on(2, tmp_path, {}, resume=True)
    assert_same(two_ranks, folder)


def _run_signalled(rank, folder, changes, during):
    """The exit status of the run and the decoding steps of the call of the sampler in which the last rank gets SIGTERM.

    It gets it when the other ranks have begun with that call, which wait amid its first step until one has said so.
    """
    ranks, calls, steps = Ranks(data=dist.group.WORLD), [], []
    call, advance = GroupSampler.__call__, TransformersEngine._advance

    def sampled(self, prompts, *arguments, **options):
        calls.append(len(prompts))
        return call(self, prompts, *arguments, **options)

    def advanced(self, *arguments):
        if len(calls) == during:
            steps.append(len(calls))
            last, until = ranks.rank == ranks.world - 1, time.monotonic() + 60
            waited_for, number = ("begun", ranks.world - 1) if last else (stopping.STOPPED, 1)
            ranks.count("begun", int(not last))
            while ranks.count(waited_for) < number and time.monotonic() < until:
                time.sleep(0.02)
            if last:
                signal.raise_signal(signal.SIGTERM)
        return advance(self, *arguments)

    with (
        mock.patch.object(GroupSampler, "__call__", sampled),
        mock.patch.object(TransformersEngine, "_advance", advanced),
        mock.patch.object(stopping, "LOOK_SECONDS", 0.0),
    ):
        return _run(rank, folder, changes), len(steps)


@pytest.mark.parametrize(("during", "last_step"), [(4, 7), pytest.param(5, 8, marks=pytest.mark.slow)])
def test_a_signal_to_one_rank_ends_sampling_on_all_and_resume_continues_bitwise(during, last_step, tmp_path):
    rows = [{"id": f"h{pair}", "prompt": pair, "answer": pair[::-1]} for pair in ("ca", "db", "ac", "bd")]
    (tmp_path / "four.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = {"data__held_out": {"name": "file", "path": str(tmp_path / "four.jsonl")}}
    whole = _on(2, tmp_path / "whole", held_out)
    tiny_raw(tmp_path)
    # The calls: an evaluation, block 1, block 2, an evaluation (4), block 3 (5), an evaluation.
    assert run_on_ranks(2, _run_signalled, tmp_path, held_out, during) == [(143, 1)] * 2
    folder = RunFolder(tmp_path / "runs" / "tiny")
    assert folder.read_metrics()[-1]["step"] == last_step
    _on(2, tmp_path, held_out, resume=True)
    assert_same(whole, folder)
    assert all("parallel/tokens_per_rank" in line for line in folder.read_metrics()[1:])


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_run_goes_on_with_another_number_of_ranks(two_ranks, tmp_path, before, after):
    folder = _on(before, tmp_path, {"train__blocks": 2})
    _on(after, tmp_path, {}, resume=True)
    for record, other in zip(two_ranks.read_metrics(), folder.read_metrics(), strict=True):
        if "optimizer/grad_norm" in record:
            assert other["optimizer/grad_norm"] == pytest.approx(record["optimizer/grad_norm"], rel=1e-5)
            assert ("parallel/tokens_per_rank" in other) == ((before if record["block"] <= 2 else after) == 2)


def test_a_run_of_several_ranks_is_exported_to_one_folder_bitwise_equal_to_its_shards(two_ranks, tmp_path):
    assert main(["export", str(two_ranks.path), "--out", str(tmp_path / "exported"), "--dtype", "float32"]) == 0
    assert [path.name for path in (tmp_path / "exported").glob("*.safetensors")] == ["model.safetensors"]
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "exported").named_parameters())
    tensors = checkpoints.load_checkpoint(two_ranks.checkpoints).tensors
    assert_equal(loaded, {n.partition("/")[2]: t for n, t in tensors.items() if n.startswith("parameter/")})


SHORT = [
    "warm_start.steps=10",
    "warm_start.sequences_per_step=32",
    "warm_start.data.size=400",
    "data.train.size=200",
    "data.held_out.size=24",
    "rollout.prompts_per_block=8",
    "rollout.completions_per_prompt=8",
    "rewards.0.partial_credit=true",
    "train.blocks=3",
    "train.tokens_per_step=300",
    "train.tokens_per_micro_batch=200",
    "evaluation.every_blocks=3",
    "checkpoint.every_blocks=3",
]


def _quickstart_alike(tmp_path, num_ranks, tolerance, *settings, of_several=()):
    """The quickstart under torchrun and in this process: what is drawn is equal, numbers are to a tolerance."""
    settings = [*SHORT, f"output={tmp_path}", *settings]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    torchrun += ["--nproc-per-node", str(num_ranks), "-m", "logitless"]
    sets = [argument for each in [*settings, "name=several", *of_several] for argument in ("--set", each)]
    child = subprocess.run(
        [*torchrun, "train", "recipes/quickstart.yaml", *sets],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.count("finished: ") == 1  # the first rank speaks, the others are silent
    several = RunFolder(tmp_path / "several")
    assert child.stdout.count("block 3/3") == len([r for r in several.read_metrics() if r["block"] == 3])
    one, _ = start(load_recipe(ROOT / "recipes/quickstart.yaml", [*settings, "name=one"]))
    _assert_alike(one, several, num_ranks, tolerance=tolerance)


@pytest.mark.slow
def test_the_quickstart_on_four_ranks_under_torchrun_is_the_quickstart(tmp_path):
    _quickstart_alike(tmp_path, 4, 1e-5, "model.device=cpu")


@pytest.mark.multi_gpu
def test_the_quickstart_on_two_gpus_is_the_quickstart_of_one(tmp_path):
    # draws are equal only where no bit depends on how many rows a GPU has
    same_bits = ["model.device=cuda", "rollout.engine={name: gpu}", "parallel.deterministic=true"]
    _quickstart_alike(tmp_path, 2, 1e-4, *same_bits, of_several=["parallel.replicate=2"])

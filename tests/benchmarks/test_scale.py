"""``bench scale`` measures what its rows say, on CPU processes in place of GPUs."""

import argparse
import json
from dataclasses import replace

import pytest
import torch.distributed as dist

import scale
from logitless.distributed import Ranks
from rollout_workloads import Workload
from scale import Work, head_over_shards, measured
from scale_block import block_over_ranks
from script import main
from shapes import TINY
from tests.ranks import run_on_ranks

WORK = Work(tokens=64, length=16, micro_batches=2, steps=2, head_budget=1000, device="cpu")


def _row(rank, layout):
    return measured(Ranks(data=dist.group.WORLD), TINY, layout, WORK)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["shard", "all_rows", "sequence", "in_order"])
def test_two_processes_are_measured_together(layout):
    rows = run_on_ranks(2, _row, layout)
    alone = measured(Ranks.alone(), TINY, "shard", replace(WORK, steps=1))
    for row in rows:
        assert (row["gpus"], row["model"], len(row["seconds"])) == (2, "tiny", 2)
        dimension = {"in_order": "replicate", "all_rows": "shard"}.get(layout, layout)
        assert row["parallel"] == {"replicate": 1, "shard": 1, "sequence": 1} | {dimension: 2}
        read = 128 if layout == "sequence" else 256
        assert row["tokens_per_second"] == pytest.approx(read / (sum(row["seconds"]) / 2))
        assert row["bytes_per_second"] > 0
        if layout != "in_order":  # half of float32 is all of bfloat16
            assert row["weight_bytes"] == pytest.approx(alone["weight_bytes"], rel=0.05)
            assert row["forecast_bytes"] < alone["forecast_bytes"]
        else:
            assert row["weight_bytes"] == alone["weight_bytes"]
            assert row["forecast_bytes"] >= alone["forecast_bytes"]
    assert alone["bytes_per_second"] is None


def _head(rank):
    return head_over_shards(Ranks(data=dist.group.WORLD), TINY, replace(WORK, steps=1))


@pytest.mark.slow
def test_the_head_over_shards_is_timed_with_and_without_overlap():
    for row in run_on_ranks(2, _head):
        assert (row["layout"], row["gpus"], row["tokens"]) == ("head", 2, 64)
        assert row["seconds"].keys() == {"whole", "waits", "overlaps"}
        assert all(seconds > 0 for seconds in row["seconds"].values())


BLOCK = Workload.parse("2x4-8-1:8")


def _block(rank, layout):
    return block_over_ranks(Ranks(data=dist.group.WORLD), TINY, layout, BLOCK, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["replicate", "shard"])
def test_a_whole_block_of_two_processes_has_twice_the_prompts_of_one(layout):
    for row in run_on_ranks(2, _block, layout):
        assert (row["gpus"], row["layout"], row["engine"]) == (2, f"block_{layout}", "transformers")
        assert row["parallel"] == {"replicate": 1, "shard": 1, "sequence": 1} | {layout: 2}
        assert row["tokens"] == BLOCK.tokens
        assert BLOCK.tokens < row["drawn_tokens"] <= replace(BLOCK, prompts=4).tokens  # some end by themselves
        assert row["seconds"].keys() == {"handing_over", "rollout", "scoring", "training"}
        assert row["tokens_per_second"] == pytest.approx(row["drawn_tokens"] / sum(row["seconds"].values()))


@pytest.mark.slow
def test_rows_are_kept_as_they_come_and_compared_with_one_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    options = ["--models", "tiny", "--device", "cpu", "--output", str(tmp_path), "--steps", "1", "--head"]
    options += ["--tokens", "64", "--length", "16", "--layouts", "shard"]
    assert main(scale, [*options, "--gpus", "1,2"]) == 0
    file = tmp_path / "scale-tiny.json"
    first = json.loads(file.read_text())["rows"][0]
    again = first | {"tokens_per_second": 2 * first["tokens_per_second"]}
    scale._keep(argparse.Namespace(output=tmp_path, device="cpu"), again)  # in the place of the first
    rows = json.loads(file.read_text())["rows"]
    assert rows[0]["tokens_per_second"] == again["tokens_per_second"]
    assert [(row["gpus"], row["layout"]) for row in rows] == [(1, "shard"), (2, "head"), (2, "shard")]
    assert rows[2]["efficiency"] == rows[2]["tokens_per_second"] / rows[0]["tokens_per_second"] / 2


# --- what was measured ------------------------------------------------------------------------------------------------


"""Models with rows of one, two and four GPUs whose steps do not wait for the host, as those of 0.5B do."""

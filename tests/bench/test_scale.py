"""``bench scale`` measures what its rows say, on CPU processes in place of GPUs."""

import pytest
import torch.distributed as dist

from logitless.bench.scale import measured
from logitless.bench.step_contenders import TINY
from logitless.cli.main import main
from logitless.distributed import Ranks
from tests.ranks import run_on_ranks


def _row(rank, layout):
    ranks = Ranks(data=dist.group.WORLD)
    return measured(ranks, TINY, layout, tokens=64, length=16, steps=2, device="cpu")


@pytest.mark.parametrize("layout", ["shard", "sequence"])
def test_two_processes_are_measured_together(layout):
    rows = run_on_ranks(2, _row, layout)
    alone = measured(Ranks.alone(), TINY, "shard", tokens=64, length=16, steps=1, device="cpu")
    for row in rows:
        assert (row["gpus"], row["model"], len(row["seconds"])) == (2, "tiny", 2)
        assert row["parallel"] == {"replicate": 1, "shard": 1, "sequence": 1} | {layout: 2}
        read = 128 if layout == "shard" else 64
        assert row["tokens_per_second"] == pytest.approx(read / (sum(row["seconds"]) / 2))
        assert row["bytes_per_second"] > 0
        assert row["weight_bytes"] == pytest.approx(alone["weight_bytes"], rel=0.05)  # half of float32, all of bfloat16
    assert alone["bytes_per_second"] is None


def test_more_gpus_than_there_are_is_an_error(capsys):
    assert main(["bench", "scale", "--gpus", "1,64"]) == 1
    assert "needed 64 CUDA devices" in capsys.readouterr().err


def test_an_unknown_layout_is_bad_input():
    with pytest.raises(ValueError, match="a layout of shard, replicate, sequence"):
        measured(Ranks.alone(), TINY, "everything", tokens=8, length=8, steps=1, device="cpu")

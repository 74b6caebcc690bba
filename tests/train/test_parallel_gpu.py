"""Ranks of a GPU each, in any arrangement, give the loss and gradients of one GPU."""

import pytest
import torch

from logitless.distributed.arrangement import Arrangement
from tests.ranks import run_on_ranks
from tests.train.test_parallel import LLAMA, _check, _gradients, _groups
from tests.train.tiny import tiny_raw

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
CHUNKED = {"train__training_backend": "chunked"}

ON_GPUS = {
    "shards": ({}, Arrangement(1, 2, 1)),
    "copies": ({}, Arrangement(2, 1, 1)),
    "shared sequences": ({}, Arrangement(1, 1, 2)),
    "a shared vocabulary": ({"parallel__vocabulary": "all_rows"}, Arrangement(1, 2, 1)),
    "a reference on the host": ({"parallel__reference": "host"}, Arrangement(1, 2, 1)),
    "shards, a value head, many rows": (
        {"algorithm": {"preset": "ppo"}, "train__tokens_per_micro_batch": 13},
        Arrangement(1, 2, 1),
    ),
}


@pytest.mark.parametrize("case", ON_GPUS)
def test_two_gpus_have_the_gradients_of_one_to_rounding(case, tmp_path):
    changes, arrangement = ON_GPUS[case]
    changes = {"model__source": LLAMA, **CHUNKED, **changes}
    _check(tmp_path, changes, 2, arrangement, dtype=torch.float32, rtol=2e-3, atol=2e-4, device="cuda")


def test_bfloat16_weights_with_sharded_masters_have_the_gradients_of_one_gpu_to_rounding(tmp_path):
    changes = {"model__source": LLAMA, "model__trained_dtype": "bfloat16", **CHUNKED}
    _check(tmp_path, changes, 2, Arrangement(1, 2, 1), dtype=None, rtol=0.1, atol=0.02, device="cuda")


ON_FOUR = [Arrangement(1, 4, 1), Arrangement(4, 1, 1), Arrangement(1, 1, 4), Arrangement(2, 2, 1), Arrangement(1, 2, 2)]


@pytest.mark.parametrize("arrangement", ON_FOUR, ids=str)
def test_four_gpus_have_the_gradients_of_one_to_rounding(arrangement, tmp_path):
    changes = {"model__source": LLAMA, **CHUNKED}
    _check(tmp_path, changes, 4, arrangement, dtype=torch.float32, rtol=2e-3, atol=2e-4, device="cuda")


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_summed_in_order_several_gpus_have_the_bits_of_one(num_ranks, tmp_path):
    changes = {
        "model__source": LLAMA,
        "parallel__deterministic": True,
        "train__tokens_per_micro_batch": 17,
        **CHUNKED,
    }
    tiny_raw(tmp_path)
    groups = _groups(tmp_path, changes, None, "cuda")
    _, losses, gradients = _gradients(0, tmp_path, changes, None, groups, None, "cuda")
    arguments = (tmp_path, changes, None, groups, Arrangement(num_ranks, 1, 1), "cuda")
    for found in run_on_ranks(num_ranks, _gradients, *arguments, device="cuda"):
        assert found[1] == losses
        for step, of_one in zip(found[2], gradients, strict=True):
            assert all(torch.equal(step[name], gradient.cpu()) for name, gradient in of_one.items())

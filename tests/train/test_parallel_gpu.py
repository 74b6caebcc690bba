"""Ranks of a GPU each, in any arrangement, give the loss and gradients of one GPU."""

import pytest
import torch
import torch.distributed as dist

from logitless.distributed.arrangement import Arrangement
from logitless.distributed.sharding import whole
from logitless.errors import UnavailableError
from logitless.train.assembly.model import policy_model, tokenizer_of
from logitless.train.block import pack_groups
from logitless.train.learn.policy import Policy
from tests.ranks import run_on_ranks
from tests.train.groups import group_of
from tests.train.test_parallel import LLAMA, _check, _gradients, _groups
from tests.train.tiny import tiny_raw, tiny_recipe

pytestmark = pytest.mark.multi_gpu
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


def test_bfloat16_weights_with_sharded_master_weights_have_the_gradients_of_one_gpu_to_rounding(tmp_path):
    changes = {"model__source": LLAMA, "model__trained_dtype": "bfloat16", "model__layers": "transformers", **CHUNKED}
    # products of other numbers of rows are rounded otherwise: by 2**-8 of hidden states, in a few places
    roundings = {"rtol": 0.1, "atol": 0.02, "scores": 0.05}
    _check(tmp_path, changes, 2, Arrangement(1, 2, 1), dtype=None, **roundings, device="cuda")


ON_FOUR = [Arrangement(1, 4, 1), Arrangement(4, 1, 1), Arrangement(1, 1, 4), Arrangement(2, 2, 1), Arrangement(1, 2, 2)]


@pytest.mark.parametrize("arrangement", ON_FOUR, ids=str)
def test_four_gpus_have_the_gradients_of_one_to_rounding(arrangement, tmp_path):
    changes = {"model__source": LLAMA, **CHUNKED}
    _check(tmp_path, changes, 4, arrangement, dtype=torch.float32, rtol=2e-3, atol=2e-4, device="cuda")


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_summed_in_order_several_gpus_are_bitwise_those_of_one(num_ranks, tmp_path):
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


WIDE = LLAMA | {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
LIMIT = 800 * 2**20


def _within(rank, folder, source, limit, device):
    """What a rank can do whose GPU gives it this many bytes: bytes of all weights, what sampling says, bytes that were
    pushed, the probe's log-probs, trained gradients, and the peak."""
    recipe = tiny_recipe(
        folder,
        model__source=source,
        model__dtype="bfloat16",
        model__lora={"rank": 2, "targets": ["q_proj"]},
        kl=None,
        train__head_memory_budget=2**20,
    )
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(rank).total_memory)
    try:
        model = policy_model(recipe.model, tokenizer_of(recipe.model), seed=0, device=torch.device("cpu"))
        policy = Policy(model, memory_budget=2**20)
        policy.shard(Arrangement(1, dist.get_world_size(), 1).mesh(device))
        said = None
        try:
            policy.gather()
        except UnavailableError as error:
            said = str(error)
        policy.release()
        weights = policy.weights()
        pushed = sum(tensor.nbytes for _, tensor in weights.tensors())
        probed = weights.score((3, 4, 5), (6, 7), 0.8)
        block = pack_groups([group_of("a", [1.0, 0.0], [4, 3])])
        policy.scores(block.packed, temperature=1.0, backend="chunked").logp.sum().backward()
        gradients = [whole(p.grad).abs().sum().item() for p in policy.named_parameters().values() if p.grad is not None]
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
        return policy.sharded.whole_bytes, said, pushed, probed, gradients, peak
    finally:
        if device == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)


def test_weights_that_fit_no_single_gpu_are_cut_trained_pushed_and_probed(tmp_path):
    tiny_raw(tmp_path)
    for needed, said, pushed, probed, gradients, peak in run_on_ranks(
        2, _within, tmp_path, WIDE, LIMIT, "cuda", device="cuda"
    ):
        assert peak <= LIMIT < needed
        assert pushed == pytest.approx(needed, rel=0.01)  # the adapters are merged
        assert "for all weights, which are whole while this process samples" in said
        assert len(probed) == 2
        assert any(gradients)

"""Where whole weights would not fit, ``auto`` samples with sharded layers; the forecast counts what they take."""

import pytest
import torch

from logitless.distributed.arrangement import Arrangement
from logitless.train.assembly import resolve
from logitless.train.plan.sampling_shards import with_sampling_shards
from logitless.train.plan.training_memory import memory_of_rank, memory_of_sampler
from tests.train.tiny import TINY_LLAMA, tiny_model, tiny_recipe

WIDE = TINY_LLAMA | {"num_hidden_layers": 6, "hidden_size": 128, "intermediate_size": 512}
LAYER = 4 * (4 * 128 * 128 + 3 * 128 * 512 + 2 * 128)  # attention, MLP and norms, in float32
GPU = {"rollout__engine": {"name": "gpu"}}
TWO = Arrangement(shard=2)


def bytes_of(recipe):
    return memory_of_rank(recipe, tiny_model(recipe, "meta"), TWO)


def test_a_copy_is_counted_with_its_pieces_two_layers_and_what_is_whole(tmp_path):
    found = bytes_of(tiny_recipe(tmp_path, model__source=WIDE, parallel__sampling_shards=2))
    whole = 4 * (2 * 11 * 128 + 128)  # embedding, LM head and the last norm
    assert found.always["copy that samples"] == whole + 3 * LAYER + 2 * LAYER
    assert "whole weights" not in found.moments["sampling"]


def test_processes_that_only_sample_hold_half_of_the_layers_each(tmp_path):
    weights = []
    for shards in ("auto", 2):
        recipe = tiny_recipe(tmp_path, model__source=WIDE, parallel={"sampling": 2, "sampling_shards": shards}, **GPU)
        weights.append(memory_of_sampler(recipe, tiny_model(recipe, "meta"))["weights"])
    whole = 4 * (2 * 11 * 128 + 128)
    assert weights == [whole + 6 * LAYER, whole + 3 * LAYER + 2 * LAYER]


@pytest.mark.parametrize(
    ("changes", "arrangement", "room", "expected"),
    [
        ({}, TWO, -1, 2),
        ({}, TWO, 0, "auto"),
        ({}, TWO, None, "auto"),
        ({}, Arrangement(replicate=2), -1, "auto"),
        ({"parallel__sampling": 2}, TWO, -1, "auto"),  # others sample, with weights of their own
        ({"rollout__engine": {"name": "transformers"}}, TWO, -1, "auto"),
        ({"train__scoring_backend": "chunked"}, TWO, -1, "auto"),  # the engine gpu has another
    ],
)
def test_all_processes_share_a_copy_where_whole_weights_do_not_fit(
    tmp_path, monkeypatch, changes, arrangement, room, expected
):
    monkeypatch.setattr(resolve, "device_of", lambda _: torch.device("cuda"))
    recipe = tiny_recipe(tmp_path, model__source=WIDE, **changes)
    room = None if room is None else bytes_of(recipe).peak_bytes + room
    found, line = with_sampling_shards(recipe, tiny_model(recipe, "meta"), arrangement, room)
    assert found.parallel.sampling_shards == expected
    assert line.startswith("2, for") == (expected == 2)

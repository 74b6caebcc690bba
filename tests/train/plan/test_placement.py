"""Each GPU has a copy where it fits; else ``auto`` samples with sharded layers, whose memory the forecast counts."""

import math

import pytest
import torch

from logitless.distributed.arrangement import Arrangement
from logitless.train.assembly import resolve
from logitless.train.plan.placement import COPY_SHARE, placed, with_sampling_shards
from logitless.train.plan.training_memory import memory_of_rank, memory_of_sampler
from logitless.train.record.memory import size_text
from tests.train.tiny import TINY_LLAMA, tiny_model, tiny_recipe

WIDE = TINY_LLAMA | {"num_hidden_layers": 6, "hidden_size": 128, "intermediate_size": 512}
LAYER = 4 * (4 * 128 * 128 + 3 * 128 * 512 + 2 * 128)  # attention, MLP and norms, in float32
GPU = {"rollout__engine": {"name": "gpu"}}
TWO = Arrangement(shard=2)


def bytes_of(recipe):
    return memory_of_rank(recipe, tiny_model(recipe, "meta"), TWO)


def with_shards(recipe, number):
    return recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"sampling_shards": number})})


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
    ("changes", "arrangement", "fits", "expected"),
    [
        ({}, TWO, {1, 2}, 1),
        ({}, TWO, {2}, 2),
        ({}, TWO, {"auto"}, "auto"),  # gathered weights alone
        ({}, TWO, {}, 2),
        ({}, TWO, None, "auto"),
        ({}, Arrangement(replicate=2), {}, "auto"),
        ({"parallel__sampling": 2}, TWO, {}, "auto"),  # others sample, with weights of their own
        ({"rollout__engine": {"name": "transformers"}}, TWO, {}, "auto"),
        ({"train__scoring_backend": "chunked"}, TWO, {}, "auto"),  # the engine gpu has another
    ],
)
def test_each_gpu_samples_with_a_whole_copy_beside_shards_if_it_fits_and_else_all_share_one(
    tmp_path, monkeypatch, changes, arrangement, fits, expected
):
    monkeypatch.setattr(resolve, "device_of", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    plain, recipe = (tiny_recipe(tmp_path, model__source=WIDE, **each) for each in ({}, changes))
    bytes_needed = {
        number: math.ceil(bytes_of(with_shards(plain, number)).peak_bytes / (1 if number == "auto" else COPY_SHARE))
        for number in ("auto", 1, 2)
    }
    assert bytes_needed["auto"] < bytes_needed[2] < bytes_needed[1]
    room = None if fits is None else max([bytes_needed["auto"] - 1, *(bytes_needed[each] for each in fits)])
    found, line = with_sampling_shards(recipe, tiny_model(recipe, "meta"), arrangement, room)
    assert found.parallel.sampling_shards == expected
    assert line.startswith(f"{expected}, for so a GPU needs ") == (expected != "auto")


@pytest.mark.parametrize(
    ("changes", "arrangement", "more", "copies"),
    [
        ({}, TWO, 1, 2),
        ({}, TWO, -1, 1),
        ({}, TWO, None, 1),
        ({"parallel__shard": 2}, TWO, 1, 1),
        ({"parallel__vocabulary": "own_rows"}, TWO, 1, 1),  # a choice about shards
        ({"parallel__sampling_shards": 2}, TWO, 1, 1),
        ({"model__layers": "transformers"}, TWO, 1, 1),
        ({"rollout__engine": {"name": "transformers"}}, TWO, 1, 1),
        ({"parallel__sequence": 2}, Arrangement(sequence=2), 1, 1),
    ],
)
def test_each_gpu_has_a_copy_of_the_weights_where_that_fits_and_nothing_says_otherwise(
    tmp_path, monkeypatch, changes, arrangement, more, copies
):
    monkeypatch.setattr(resolve, "device_of", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    recipe = tiny_recipe(tmp_path, model__source=WIDE, model__trained_dtype="bfloat16", **changes)
    model = tiny_model(recipe, "meta")
    needed = memory_of_rank(recipe, model, Arrangement(replicate=2)).peak_bytes
    room = None if more is None else math.ceil(needed / COPY_SHARE) + more
    found, lines = placed(recipe, model, arrangement, room)
    assert found.parallel.replicate == copies
    assert (found.parallel.shard == 1) == (copies == 2)
    copied = [line for line in lines if line.startswith("parallel.replicate: 2, for with whole weights a GPU needs ")]
    assert len(copied) == (copies == 2)


def test_a_plan_without_gpus_says_what_a_copy_would_need(tmp_path):
    recipe = tiny_recipe(tmp_path, model__source=WIDE)
    model = tiny_model(recipe, "meta")
    needed = memory_of_rank(recipe, model, Arrangement(replicate=2)).peak_bytes
    found, [line] = placed(recipe, model, TWO, None)
    assert found is recipe
    assert line.endswith(f"holds {size_text(needed)}")

"""Requests for samples, checked against a model of 11 tokens and 256 positions."""

import numpy as np
import pytest

from logitless.errors import RefusedError
from logitless.tinker import wire
from logitless.tinker.samples import request_of

PROMPT = {"chunks": [{"tokens": [3, 4]}, {"tokens": [5]}]}
SPARSE = {"data": [7, -1], "dtype": "int64", "shape": [2, 4], "sparse_col_indices": [0, 3]}

FULL = {
    "prompt": {"chunks": [{"tokens": [3] * 256}]},
    "sampling_params": {"max_tokens": 1},
    "prompt_logprobs": True,
}
"""What the SDK's compute_logprobs sends for a prompt that takes all positions."""


def requested(**changed):
    asked = {"prompt": PROMPT, "sampling_params": {"max_tokens": 2}, "sampling_session_id": "", "seq_id": 0}
    return request_of(wire.Sample(**asked | changed), place="0", seed=1, vocabulary=11, limit=256)


def targets(*data, shape=(2, 1), **more):
    return {"target_prompt_logprobs": {"data": data, "dtype": "int64", "shape": shape, **more}}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"prompt": {"chunks": []}}, "0 prompt tokens"),
        ({"prompt": {"chunks": [{"tokens": [99]}]}}, "0 to 10 are needed"),
        ({"sampling_params": {"max_tokens": 254}}, "256 positions; lower max_tokens, or shorten the prompt"),
        (
            {"prompt": {"chunks": [{"tokens": [3] * 256}]}},
            "max_tokens 2: the model has 256 positions; shorten the prompt",
        ),
        ({**FULL, "prompt_logprobs": False}, "max_tokens 1: the model has 256 positions; shorten the prompt"),
        ({**FULL, "sampling_params": {"max_tokens": 2}}, "256 positions; shorten the prompt"),
        ({**FULL, "prompt": {"chunks": [{"tokens": [3] * 257}]}}, "257 prompt tokens .*; shorten the prompt"),
        ({"sampling_params": {"stop": [99]}}, "stop: .* 0 to 10 are needed"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 3}, "less than the prompt"),
        ({"topk_prompt_logprobs": 12}, "the model has 11"),
        ({"topk_sample_logprobs": 12}, "the model has 11"),
        (targets(1, 11), "target_prompt_logprobs: .* 0 to 10 are needed"),
        (targets(-1, -1), "at least one id"),
        (targets(1, 1, 1, shape=(3, 1)), "2 rows, one a token"),
        (targets(*[1] * 130, shape=(2, 65)), "at most 64 columns"),
        (targets(1), "1 numbers for shape"),
        (targets(1, 1, sparse_crow_indices=[0, 1, 2]), "2 numbers for shape"),
        ({"target_prompt_logprobs": {**SPARSE, "sparse_crow_indices": [0, 1]}}, "do not fit together"),
        ({"target_prompt_logprobs": {**SPARSE, "sparse_crow_indices": [0, 1, 2], "shape": [2, 3]}}, "out of range"),
    ],
)
def test_what_the_model_does_not_have_is_refused_in_words(changed, said):
    with pytest.raises(RefusedError, match=said) as refused:
        requested(**changed)
    assert refused.value.status == 400


def test_an_empty_list_of_stops_ignores_eos_tokens_too():
    assert requested(sampling_params={"stop": []}).options.ignore_eos
    assert not requested().options.ignore_eos
    assert not requested(sampling_params={"stop": [3]}).options.ignore_eos


@pytest.mark.parametrize(
    "changed", [{}, {"sampling_params": {}}, {"prompt_logprobs": False, "topk_prompt_logprobs": 1}]
)
def test_a_prompt_that_takes_all_positions_is_scored_without_a_sample(changed):
    assert requested(**FULL | changed).only_scores
    assert not requested(prompt_logprobs=True, sampling_params={"max_tokens": 1}).only_scores


def test_a_seed_names_random_numbers_by_the_prompt_and_without_one_they_are_of_the_place():
    assert (requested().id, requested().seed) == ("0", 1)
    seeded = requested(sampling_params={"seed": 7})
    assert (seeded.id, seeded.seed, seeded.options.max_new_tokens) == ("(3, 4, 5)", 7, 253)


def test_a_cell_of_a_sparse_tensor_is_in_its_row():
    found = requested(target_prompt_logprobs={**SPARSE, "sparse_crow_indices": [0, 0, 2]}).targets
    assert np.array_equal(found.rows, [1, 1])
    dense = requested(**targets(1, 2, 3, -1, shape=(2, 2))).targets
    assert np.array_equal(dense.rows, [0, 0, 1, 1])

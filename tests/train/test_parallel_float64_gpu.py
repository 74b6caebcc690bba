"""In float64 ranks of a GPU each, in mixtures of all dimensions, give the loss and gradients of one GPU to 1e-12."""

import pytest

from tests.train.test_parallel import FLOAT64, SLOW, _check
from tests.train.tiny import TINY_GPT2

pytestmark = pytest.mark.multi_gpu
CASES = [
    "shards, a value head",
    "copies of shards",
    "shared sequences, GSPO",
    "shards and shared sequences",
    "a shared vocabulary, sequences and shards",
]


@pytest.mark.parametrize("case", CASES)
def test_in_float64_gpus_in_any_arrangement_have_the_scores_loss_and_gradients_of_one(case, tmp_path):
    changes, arrangement = {**FLOAT64, **SLOW}[case]
    changes = {"model__source": TINY_GPT2, "train__training_backend": "chunked", **changes}
    num_ranks = arrangement.replicate * arrangement.weights
    _check(tmp_path, changes, num_ranks, arrangement, device="cuda")

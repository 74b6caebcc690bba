"""A step on a GPU with too little memory for its micro-batches is repeated with smaller ones, and is the same step."""

from dataclasses import replace

import pytest
import torch

from logitless.train.block import pack_groups
from tests.train.groups import group_of
from tests.train.learn.test_learner import learner, weights

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ordinary_memory")]
LENGTHS = [500, 700, 900, 1000]


def group(number):
    """A group whose completions do not begin alike, so that each of their tokens is read."""
    made = group_of(str(number), [0.0, 1.0, 1.0, 0.0], LENGTHS)
    completions = [
        replace(each, token_ids=(3 + number, 3 + i, *each.token_ids[2:])) for i, each in enumerate(made.completions)
    ]
    return replace(made, completions=tuple(completions))


GROUPS = [group(number) for number in range(4)]
SIZE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8}
BIG = {
    **{f"model__source__{name}": value for name, value in SIZE.items()},
    "model__source__num_key_value_heads": 8,
    "model__source__max_position_embeddings": 2048,
    "model__device": "cuda",
    "model__layers": "transformers",
    "train__tokens_per_step": 100_000,
    "train__tokens_per_micro_batch": 13_000,
    "train__optimizer__learning_rate": 1e-4,
}


def test_a_step_that_runs_out_of_memory_is_the_step_that_does_not(tmp_path):
    def begun():
        made = learner(tmp_path, **BIG)
        made.begin(made.score(pack_groups(GROUPS), GROUPS))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return made

    plenty = begun()
    expected = plenty.step()
    needed, wanted = torch.cuda.max_memory_reserved(), weights(plenty)
    del plenty
    made = begun()
    total = torch.cuda.get_device_properties(0).total_memory
    held = torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction((held + 0.8 * (needed - held)) / total)
    try:
        record = made.step()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert made.halved is not None
    assert "instead of 13,000" in made.halved
    assert record["optimizer/halvings"] == 1
    assert record["optimizer/micro_batches"] > expected["optimizer/micro_batches"] == 1
    assert record["loss/total"] == pytest.approx(expected["loss/total"], abs=1e-5)
    assert record["optimizer/grad_norm"] == pytest.approx(expected["optimizer/grad_norm"], rel=1e-4)
    moved = [(a - b).abs().mean() for a, b in zip(weights(made), wanted, strict=True)]
    assert max(moved) < 1e-6  # a step moves a weight by 1e-4; sums in another order turn the sign of few of them

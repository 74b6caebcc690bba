"""The learner alone: a block through its epochs, the state it goes on from, and what it refuses."""

import json

import pytest
import torch

from logitless.errors import TrainingError
from logitless.train.block import pack_groups
from logitless.train.learner import Learner
from logitless.train.policy import Policy
from logitless.train.setup import algorithm_of, device_of, policy_model, tokenizer_of
from tests.train.groups import group_of
from tests.train.tiny import tiny_recipe

GROUPS = [group_of(name, [0.0, 1.0, 1.0, 0.0], [3, 5, 6, 6]) for name in "abcd"]  # 80 tokens: two steps of 40


def learner(folder, **changes) -> Learner:
    recipe = tiny_recipe(folder, **{"kl": None, **changes})
    tokenizer = tokenizer_of(recipe.model)
    model = policy_model(recipe.model, tokenizer, seed=0, device=device_of(recipe.model))
    return Learner(recipe, algorithm_of(recipe), Policy(model), None, reward_weights={})


def begin(made: Learner) -> None:
    made.begin(made.with_advantages(made.score(pack_groups(GROUPS)), GROUPS))


def weights(made: Learner) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in made.policy.model.parameters()]


def test_a_block_is_trained_on_for_all_its_epochs_and_then_over(tmp_path):
    made = learner(tmp_path)
    begin(made)
    records = []
    while made.in_training:
        records.append(made.step())
    assert [(r["step"], r["block"], r["epoch"]) for r in records] == [(1, 1, 1), (2, 1, 1), (3, 1, 2), (4, 1, 2)]
    assert [r["optimizer/tokens"] for r in records] == [40, 40, 40, 40]
    assert records[0]["ratio/min"] == records[0]["ratio/max"] == 1 != records[1]["ratio/max"]
    assert (made.progress.block, made.version) == (1, 4)
    with pytest.raises(ValueError, match="call begin first"):
        made.step()


def test_a_block_without_a_token_counts_as_done_and_leaves_the_weights(tmp_path):
    made = learner(tmp_path)
    before = weights(made)
    made.end_block()
    assert (made.progress.block, made.version, made.in_training) == (1, 0, False)
    assert all(map(torch.equal, weights(made), before))


@pytest.mark.parametrize("steps", [1, 3])
def test_it_goes_on_from_its_state_in_the_middle_of_a_block(tmp_path, steps):
    whole = learner(tmp_path)
    begin(whole)
    for _ in range(steps):
        whole.step()
    tensors = {name: tensor.detach().clone() for name, tensor in whole.tensors().items()}
    state = json.loads(json.dumps(whole.state_dict()))
    again = learner(tmp_path, model__random_weights=True)
    with torch.no_grad():
        for parameter in again.policy.model.parameters():
            parameter.zero_()
    again.load_state(tensors, state)
    while whole.in_training:
        assert again.step() == whole.step()
    assert not again.in_training
    assert all(map(torch.equal, weights(whole), weights(again)))


def test_a_step_without_a_finite_gradient_is_skipped_and_too_many_end_the_run(tmp_path):
    made = learner(tmp_path, train__max_skipped_in_a_row=2)
    begin(made)
    with torch.no_grad():
        made.policy.model.lm_head.weight[0, 0] = torch.inf
    before = weights(made)
    assert made.step()["optimizer/skipped_steps"] == 1
    assert made.check_skipped() == "step 1 skipped: its gradient is not finite"
    made.step()
    assert all(map(torch.equal, weights(made), before))
    with pytest.raises(TrainingError, match=r"2 steps in a row without \(train.max_skipped_in_a_row\)"):
        made.check_skipped()


def test_a_lone_rank_has_no_numbers_by_rank(tmp_path):
    assert learner(tmp_path).by_rank == {}

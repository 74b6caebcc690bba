"""A block in training comes back from a checkpoint as it went in."""

import json
from dataclasses import fields, is_dataclass, replace

import pytest
import torch

from logitless.objective.advantage import Gae, GroupCentered
from logitless.train.store.stored_block import load_block, stored_block
from tests.train.groups import advantaged, group_of


def _assert_equal(one, other):
    assert type(one) is type(other)
    for f in fields(one):
        before, after = getattr(one, f.name), getattr(other, f.name)
        if isinstance(before, torch.Tensor):
            assert torch.equal(before.nan_to_num(nan=7.0), after.nan_to_num(nan=7.0)), f.name
        elif is_dataclass(before):
            _assert_equal(before, after)
        else:
            assert before == after, f.name


@pytest.mark.parametrize("value_old", [None, torch.tensor([0.5, 0.25, 0.125])])
def test_a_block_comes_back_with_every_field(value_old):
    groups = [group_of("1", [1.0, 2.0, None], lengths=[2, 0, 1])]
    estimator = GroupCentered() if value_old is None else Gae(1.0, 0.5)
    block = advantaged(groups, estimator, logp_ref=torch.rand(3), value_old=value_old)
    if value_old is None:
        taught = replace(block.packed, teacher=torch.tensor([0, 0, -1]), inputs_of_teacher=block.packed.inputs)
        block = replace(block, packed=taught)
    tensors, state = stored_block(block)
    assert all(name.startswith("block/") for name in tensors)
    _assert_equal(block, load_block({**tensors, "other": torch.zeros(1)}, json.loads(json.dumps(state))))


def test_a_block_that_a_version_without_teachers_stored_has_none():
    block = advantaged([group_of("1", [1.0, 2.0], lengths=[2, 1])], GroupCentered())
    tensors, state = stored_block(block)
    later = ("block/packed/teacher", "block/packed/inputs_of_teacher", "block/logp_teacher")
    older = {name: value for name, value in state.items() if name not in later}
    assert len(state) - len(older) == len(later)
    _assert_equal(block, load_block(tensors, older))
    with pytest.raises(KeyError):
        load_block(tensors, {})


def test_a_value_that_no_field_takes_is_refused_and_not_left_out():
    tensors, state = stored_block(advantaged([group_of("1", [1.0, 2.0], lengths=[2, 1])], GroupCentered()))
    with pytest.raises(KeyError, match="block/live, which is of another version"):
        load_block(tensors, {**state, "block/live": [True, True]})

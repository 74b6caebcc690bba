"""Several sources: each gives its share of every draw, nothing twice in one, and a state goes on where it was taken."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitless.data.mixing import MixedOrder, most_of
from logitless.data.prompts import PromptOrder
from logitless.errors import CheckpointError, DataError

MEMBERS = {"a": range(12), "b": range(12, 20), "c": range(20, 28)}
WEIGHTS = {"a": 2.0, "b": 1.0, "c": 1.0}


def mixed(weights=WEIGHTS, seed=0, most=4, members=MEMBERS):
    return MixedOrder(members, weights, seed=seed, most=most)


def source_of(index):
    return next(name for name, indices in MEMBERS.items() if index in indices)


def test_the_source_that_is_furthest_behind_comes_next():
    order = mixed()
    # shares 1/2, 1/4, 1/4: after the first prompt a is ahead by half a prompt, b and c are behind by a quarter each
    assert [source_of(index) for index in order.next(8)] == ["a", "b", "c", "a", "a", "b", "c", "a"]


def test_an_epoch_of_a_source_holds_each_of_its_prompts_once():
    order = mixed()
    drawn = [index for _ in range(8) for index in order.next(4)]  # 32: of a 16, of b and c 8 each
    count = Counter(drawn)
    assert [count[index] for index in (*MEMBERS["b"], *MEMBERS["c"])] == [1] * 16
    assert sum(count[index] for index in MEMBERS["a"]) == 16
    assert set(MEMBERS["a"]) <= set(drawn)


def test_another_seed_gives_other_prompts_of_the_same_sources():
    one, other = mixed(seed=1).next(12), mixed(seed=2).next(12)
    assert one != other
    assert [source_of(index) for index in one] == [source_of(index) for index in other]
    assert one == mixed(seed=1).next(12)


@given(
    st.lists(st.floats(0.01, 100), min_size=2, max_size=6),
    st.integers(1, 40),
    st.integers(0, 30),
    st.integers(1, 4),
)
def test_each_source_has_its_share_of_every_request_and_no_prompt_is_in_one_twice(weights, most, before, epochs):
    names = [str(number) for number in range(len(weights))]
    whole = sum(weights)
    sizes = [most_of(weight / whole, most, len(weights)) + epochs - 1 for weight in weights]
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    members = {name: range(start, start + size) for name, start, size in zip(names, starts, sizes, strict=True)}
    order = MixedOrder(members, dict(zip(names, weights, strict=True)), seed=3, most=most)
    for _ in range(before):
        order.next(1)
    for _ in range(3):
        drawn = order.next(most)
        assert len(set(drawn)) == most
        for name, weight in zip(names, weights, strict=True):
            given = sum(index in members[name] for index in drawn)
            assert abs(given - most * weight / whole) < len(weights)


@given(st.lists(st.integers(1, 4), max_size=12), st.lists(st.integers(1, 4), min_size=1, max_size=12))
def test_an_order_restored_from_its_state_gives_the_same_prompts(before, after):
    order, resumed = mixed(), mixed()
    for count in before:
        order.next(count)
    resumed.load_state_dict(order.state_dict())
    assert [order.next(count) for count in after] == [resumed.next(count) for count in after]


def test_a_state_of_other_weights_sources_or_seeds_is_refused():
    state = mixed().state_dict()
    with pytest.raises(CheckpointError, match="shares"):
        mixed(weights={"a": 1.0, "b": 1.0, "c": 1.0}).load_state_dict(state)
    with pytest.raises(CheckpointError, match="seed"):
        mixed(seed=5).load_state_dict(state)
    with pytest.raises(CheckpointError, match="shares"):
        mixed().load_state_dict(PromptOrder(28, 0).state_dict())


def test_a_source_with_fewer_prompts_than_a_request_may_take_is_refused_with_the_number():
    with pytest.raises(DataError, match=r"at least 4 prompts of the source 'b'.*given 3"):
        mixed(members={**MEMBERS, "b": range(12, 15)}, most=8, weights={"a": 2.0, "b": 1.0, "c": 1.0})

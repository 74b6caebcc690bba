"""Ctrl-C ends a test wherever it comes."""

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize("time", ["first", "second"])
def test_what_another_test_lets_garbage_collections_call_is_gone(time: str) -> None:
    assert gc.callbacks == []
    gc.callbacks.append(lambda phase, info: None)


@given(st.integers())
def test_hypothesis_needs_no_calls_of_garbage_collections(number: int) -> None:
    gc.collect(0)
    assert isinstance(number, int)

"""What ``conftest.py`` does to every test."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import pytest_collection_modifyitems


@pytest.mark.parametrize("num_gpus", [0, 1, 2])
def test_what_needs_gpus_is_skipped_where_there_are_too_few(monkeypatch, num_gpus):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    needed, skipped = {"": 0, "gpu": 1, "multi_gpu": 2}, {}
    items = [
        SimpleNamespace(get_closest_marker=mark.__eq__, add_marker=partial(skipped.__setitem__, mark))
        for mark in needed
    ]
    pytest_collection_modifyitems(items)
    assert set(skipped) == {mark for mark, number in needed.items() if number > num_gpus}
    assert {given.name for given in skipped.values()} <= {"skip"}

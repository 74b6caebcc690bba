"""Calls of the driver for page memory, without a device; test_page_memory_gpu.py tests on a device."""

from collections import Counter

import pytest
import torch

from logitless.rollout.gpu import page_memory
from logitless.rollout.gpu.page_memory import PageMemory


@pytest.fixture
def asked(monkeypatch):
    """Calls of the driver by name; the call ``asked.fails`` runs out of memory the third time."""
    asked = Counter()
    asked.fails = None

    def driver(name, *_):
        if name == asked.fails and asked[name] == 2:
            raise torch.OutOfMemoryError(name)
        asked[name] += 1

    monkeypatch.setattr(page_memory, "_driver", driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    return asked


@pytest.mark.parametrize("fails", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_what_was_mapped_before_memory_ran_out_is_given_back(asked, fails):
    memory = PageMemory(4, torch.device("cpu"))
    asked.fails = fails
    with pytest.raises(torch.OutOfMemoryError):
        memory._map(2**21)
    assert asked["cuMemCreate"] == asked["cuMemRelease"] >= 2
    memory.close()
    assert asked["cuMemMap"] == asked["cuMemUnmap"] >= 2


def test_every_part_is_mapped_once_and_taken_away_once(asked):
    memory = PageMemory(4, torch.device("cpu"))
    memory._map(2**21)
    assert (asked["cuMemMap"], asked["cuMemUnmap"]) == (4, 0)
    memory.close()
    memory.close()
    assert [asked[name] for name in ("cuMemCreate", "cuMemRelease", "cuMemMap", "cuMemUnmap")] == [4] * 4

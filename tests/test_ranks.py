"""The processes that tests of several ranks run on."""

import importlib
import os

import torch
import torch.distributed as dist

from tests.ranks import run_on_ranks


def rank_and_sum(rank):
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    return rank, total.item()


def test_ranks_talk_to_each_other():
    assert run_on_ranks(2, rank_and_sum) == [(0, 3.0), (1, 3.0)]


def test_no_module_that_was_collected_skips_them():
    importlib.import_module("tests.mutation")
    assert "LOGITLESS_ONE_PROCESS" not in os.environ

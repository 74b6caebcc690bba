"""Sampling with sharded layers is measured beside whole copies, and has their completions."""

from unittest import mock

import pytest
import torch.distributed as dist

from logitless.distributed.ranks import Ranks
from logitless.head import fused
from tests.head.interpreter import complete_interpreter, interpreted
from tests.ranks import run_on_ranks

pytest.importorskip("triton")

PART = dict.fromkeys(("seconds", "gather_seconds", "load_seconds", "peak_gib", "weights_gib", "forecast_gib"), 2.0)


def test_a_row_is_of_the_slowest_process_and_fits_where_all_do():
    from shards import _of_all

    parts = [PART | {"tokens": 10, "completions": "a"}, PART | {"tokens": 20, "completions": "b", "seconds": 3.0}]
    assert _of_all(parts)["tokens_per_second"] == 10.0
    assert _of_all(parts)["fits"]
    assert _of_all([parts[0], None]) == {"fits": False}


def _rows(rank):
    from shards import rows_of

    complete_interpreter()
    with mock.patch.object(fused, "why_not", fused._unsupported):  # ranks serve other tests afterwards
        return list(rows_of(Ranks(data=dist.group.WORLD), ["tiny"], [(2, None), (1, None)], "3x2-5-2:4", "cpu"))


@pytest.mark.slow
@pytest.mark.skipif(not interpreted(), reason="for Triton's interpreter")
def test_both_ways_have_the_same_completions():
    two, one = run_on_ranks(2, _rows)[0]
    assert (two["shards"], one["shards"]) == (2, 1)
    assert two["completions"] == one["completions"]
    assert two["forecast_gib"] != one["forecast_gib"]

"""The law of ``benchmarks/rollout.py`` on a GPU, where steps are CUDA graphs."""

import pytest

import rollout_contenders as contenders
from rollout_workloads import Workload
from tests.rollout.gpu.wide import WIDE, wide_family

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ordinary_memory")]


@pytest.mark.parametrize(("model_type", "routers"), [("qwen3_moe", 2), ("glm4_moe", 1)])
def test_routes_that_graphs_noted_are_those_of_packed_passes_of_every_block(model_type, routers, monkeypatch):
    class Subject:
        vocabulary = WIDE["vocab_size"]

        def __init__(self, _):
            self.model = wide_family(model_type).requires_grad_(False)

    monkeypatch.setattr(contenders, "Subject", Subject)
    *_, last = contenders.law("wide", Workload.parse("6x5-70-20:60"), 1500)
    assert last["blocks"] > 1
    assert last["routes"] == routers * last["tokens"]
    assert last["mismatched_tokens"] == last["mismatched_routes"] == 0

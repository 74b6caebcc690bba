"""What only a GPU build of vLLM has: weights over NCCL, sleep and wake. Written, and not run yet."""

import pytest
import torch

from logitless.rollout.engine import Weights
from logitless.rollout.sampling import SamplingOptions
from logitless.rollout.vllm.in_process import VllmEngine
from logitless.rollout.vllm.nccl_transfer import NcclSync
from logitless.rollout.vllm.probe import Probe
from logitless.types import Prompt
from tests.vllm.conftest import PATIENCE, PROMPT, TOKENIZER, engine_at, tiny_model, tiny_server

pytest.importorskip("vllm")

PROMPTS = [Prompt("0", "", PROMPT[:8])]
OPTIONS = SamplingOptions(max_new_tokens=8)


@pytest.mark.multi_gpu
def test_weights_over_nccl_arrive(tmp_path):
    environment = ("--weight-transfer-config", '{"backend": "nccl"}')
    model = tiny_model(1).to("cuda:1")
    with tiny_server(tmp_path, *environment) as process:
        sync = NcclSync("policy", PATIENCE, address="127.0.0.1", port=29600)
        engine = engine_at(process.url, sync=sync)
        for version in range(2):
            engine.load(Weights.of(model), version)
            assert engine.sample(PROMPTS, 2, OPTIONS, seed=0)[0][0].weights_version == version
            with torch.no_grad():
                model.lm_head.weight.mul_(-1)
        engine.close()


@pytest.mark.gpu
def test_memory_is_given_away_between_rounds_and_weights_survive(tmp_path):
    model = tiny_model(1).to("cuda")
    engine = VllmEngine(
        TOKENIZER,
        dtype="float32",
        context=512,
        memory_fraction=0.3,
        sleep=True,
        eager=True,
        max_rows=16,
        probe=Probe(PROMPT, 1e-3),
    )
    engine.load(Weights.of(model), 0)
    first = engine.sample(PROMPTS, 2, OPTIONS, seed=0)
    assert torch.cuda.mem_get_info()[0] > 0.7 * torch.cuda.mem_get_info()[1]
    engine.load(Weights.of(model), 1)
    again = engine.sample(PROMPTS, 2, OPTIONS, seed=0)
    assert [c.token_ids.tolist() for c in again[0]] == [c.token_ids.tolist() for c in first[0]]
    engine.close()

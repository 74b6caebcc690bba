"""A real server with LoRA: the adapter alone is pushed, each version under a name of its own."""

import pytest
import torch

from logitless.errors import EngineError
from logitless.models.lora import LoraOptions, add_lora
from logitless.rollout.engine import Weights
from logitless.rollout.sampling import SamplingOptions
from logitless.rollout.vllm.probe import scored_tokens
from logitless.rollout.vllm.weight_sync import AdapterSync
from logitless.types import Prompt
from tests.vllm.conftest import PATIENCE, PROMPT, engine_at, server_at, tiny_model, tiny_server

PROMPTS = [Prompt(str(n), "", tuple(PROMPT[: n + 3])) for n in range(3)]
OPTIONS = SamplingOptions(max_new_tokens=16)


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    with tiny_server(tmp_path_factory.mktemp("server"), "--enable-lora", "--max-lora-rank", "8") as process:
        yield process


def _policy(base=99):
    """The servers' base model with an adapter that does something."""
    policy = add_lora(tiny_model(base), LoraOptions(rank=4, alpha=8.0), seed=0)
    _move(policy)
    return policy


def _move(policy):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)


def test_versions_follow_each_other_and_log_probs_are_the_policys(process):
    policy, engine = _policy(), engine_at(process.url, sync=AdapterSync(PATIENCE))
    names = []
    for version in range(3):
        engine.load(Weights.of(policy), version)
        names.append(engine._sync.model())
        [group, *_] = engine.sample(PROMPTS, 4, OPTIONS, seed=1)
        for completion in group:
            expected = scored_tokens(policy, PROMPTS[0].token_ids, completion.token_ids, 1.0)
            assert completion.logp_sampler == pytest.approx(expected, abs=1e-4)
            assert completion.weights_version == version
        assert engine.transfer_numbers["weights/pushed_bytes"] < 100_000
        _move(policy)
    served = server_at(process.url).models()
    assert [name in served for name in names] == [False, False, True]
    engine.close()


def test_an_adapter_that_the_server_lost_is_pushed_again(process):
    policy, engine = _policy(), engine_at(process.url, sync=AdapterSync(PATIENCE))
    engine.load(Weights.of(policy), 0)
    expected = engine.sample(PROMPTS, 2, OPTIONS, seed=1)
    server_at(process.url).unload_adapter(engine._sync.model())
    found = engine.sample(PROMPTS, 2, OPTIONS, seed=1)
    assert [[c.token_ids.tolist() for c in g] for g in found] == [[c.token_ids.tolist() for c in g] for g in expected]
    assert engine._watched[0].restarts == 1
    engine.close()


def test_an_adapter_on_another_base_model_is_found_by_the_probe(process):
    engine = engine_at(process.url, sync=AdapterSync(PATIENCE))
    with pytest.raises(EngineError, match="nats of the trainer's"):
        engine.load(Weights.of(_policy(base=1)), 0)
    engine.close()

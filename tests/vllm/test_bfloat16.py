"""A real server in bfloat16, with an LM head of its own: how far equal weights are apart, and what a step changes."""

import pytest
import torch

from logitless.rollout.engine import Weights
from logitless.rollout.sampling import SamplingOptions
from logitless.rollout.vllm.probe import scored_tokens
from logitless.types import Prompt
from tests.vllm.conftest import PROMPT, engine_at, tiny_model, tiny_server


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    with tiny_server(tmp_path_factory.mktemp("server"), tied=False, dtype="bfloat16") as process:
        yield process


@pytest.fixture(scope="module")
def model():
    return tiny_model(1, tied=False).to(torch.bfloat16)


@pytest.fixture(scope="module")
def engine(process, model):
    engine = engine_at(process.url, max_difference=0.3, dtype=torch.bfloat16)
    engine.load(Weights.of(model), 0)
    yield engine
    engine.close()


def test_prompts_of_one_to_three_tokens_are_answered(engine):
    prompts = [Prompt(str(n), "", PROMPT[:n]) for n in (1, 2, 3)]
    groups = engine.sample(prompts, 2, SamplingOptions(max_new_tokens=4), seed=0)
    assert [len(group) for group in groups] == [2, 2, 2]


def test_equal_weights_differ_by_rounding_and_sequences_by_much_more(engine, model):
    prompts = [Prompt(str(n), "", PROMPT[n : n + 8]) for n in range(8)]
    options = SamplingOptions(max_new_tokens=200)
    groups = engine.sample(prompts, 4, options, seed=0)
    token, sequence = [], []
    for prompt, group in zip(prompts, groups, strict=True):
        for c in group:
            scored = torch.tensor(scored_tokens(model, prompt.token_ids, c.token_ids, 1.0))
            token.append((scored - torch.tensor(c.logp_sampler)).abs())
            sequence.append(float((scored - torch.tensor(c.logp_sampler)).sum()))
    mean = float(torch.cat(token).mean())
    # bfloat16 keeps 8 bits: a logit of size 2 has neighbours 2^-7 apart; float32 is below 1e-5.
    assert 1e-4 < mean < 0.05
    assert max(map(abs, sequence)) > 5 * mean


def test_a_small_step_changes_few_weights_and_only_they_are_sent(process):
    masters = tiny_model(2, tied=False)
    engine = engine_at(process.url, max_difference=0.3, dtype=torch.bfloat16, differences_in_a_row=4)
    engine.load(Weights.of(masters), 0)
    whole = engine.transfer_numbers["weights/pushed_bytes"]
    with torch.no_grad():
        for parameter in masters.parameters():
            parameter += 1e-6 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    engine.load(Weights.of(masters), 1)
    # Weights of size 0.1 have neighbours 2^-12 to 2^-11 apart: a step of 1e-6 moves about one in 300.
    assert 0 < engine.transfer_numbers["weights/changed_fraction"] < 0.05
    assert engine.transfer_numbers["weights/pushed_bytes"] < whole / 5
    engine.close()


def test_vllms_own_reload_serves_a_model_whose_lm_head_is_not_tied(process):
    engine = engine_at(process.url, max_difference=0.3, dtype=torch.bfloat16, loader="reload")
    engine.load(Weights.of(tiny_model(3, tied=False)), 0)
    assert engine.transfer_numbers["weights/probe_difference_max"] < 0.3
    engine.close()

"""The probe compares a sampler's log-probs with the trainer's; a difference above the bound stops the run."""

import numpy as np
import pytest
import torch

from logitless.errors import EngineError
from logitless.rollout.transformers import TransformersEngine
from logitless.rollout.vllm.api import Sampled
from logitless.rollout.vllm.probe import TEMPERATURE, Probe, probe_prompt, scored_tokens
from logitless.types import Prompt
from tests.rollout.policy import TOKENIZER, tiny_policy


def _ask(model, change=lambda logp: logp):
    engine = TransformersEngine(model, TOKENIZER)

    def ask(prompt, num_samples, options, seed):
        [group] = engine.sample([Prompt("p", "", tuple(prompt))], num_samples, options, seed=seed)
        return [
            Sampled(c.token_ids, np.array([change(x) for x in c.logp_sampler], np.float32), c.finish_reason)
            for c in group
        ]

    return ask


@pytest.mark.parametrize("attention", ["packed", "sdpa"])
def test_equal_weights_pass_and_the_difference_is_returned(attention):
    model = tiny_policy(attention=attention).train()
    probe = Probe(probe_prompt(TOKENIZER, 20), max_difference=1e-4)
    assert probe.check(_ask(model), model, where="here", version=0) < 1e-4
    assert model.training


@pytest.mark.parametrize(
    "change", [lambda logp: logp + 0.01, lambda logp: float("nan"), lambda logp: logp * TEMPERATURE]
)
def test_another_log_prob_stops_the_run(change):
    model = tiny_policy()
    with pytest.raises(EngineError, match="after weights of version 7 were pushed"):
        Probe((3, 4), max_difference=1e-4).check(_ask(model, change), model, where="there", version=7)


def test_other_weights_stop_the_run():
    other = _ask(tiny_policy(seed=1))
    with pytest.raises(EngineError, match="there and"):
        Probe((3, 4), max_difference=1e-4).check(other, tiny_policy(), where="x", version=0)


def test_a_second_probe_of_the_same_weights_asks_what_the_trainer_said_before_and_not_the_model():
    model, known = tiny_policy(), {}
    ask, probe = _ask(tiny_policy()), Probe((3, 4), max_difference=1e-4)
    probe.check(ask, model, where="x", version=0, known=known)
    assert len(known) == 2
    with torch.no_grad():
        model.lm_head.weight.add_(torch.randn(11, 16))
    assert probe.check(ask, model, where="x", version=0, known=known) < 1e-4
    with pytest.raises(EngineError):
        probe.check(ask, model, where="x", version=0)
    other = _ask(tiny_policy(seed=1))
    with pytest.raises(EngineError):  # other tokens from the first on, or others' log-probs
        probe.check(other, model, where="x", version=0, known=known)


def test_tokens_are_scored_at_the_temperature():
    model = tiny_policy()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[3, 4, 5, 6]])).logits[0].double()
    expected = [(logits[i] / 0.5).log_softmax(-1)[token].item() for i, token in ((1, 5), (2, 6))]
    assert scored_tokens(model, (3, 4), (5, 6), 0.5) == pytest.approx(expected, abs=1e-5)


def test_the_prompt_is_of_ordinary_tokens():
    assert set(probe_prompt(TOKENIZER, 200)) == set(range(3, 11))

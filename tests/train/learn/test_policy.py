"""Scoring through the policy equals full logits; the reference under LoRA is the base model itself, not a copy."""

import pytest
import torch

from logitless.data.packing import pack
from logitless.models.loading import load_model
from logitless.models.lora import LoraOptions, add_lora
from logitless.models.value_head import value_head_for
from logitless.train.learn.policy import AdaptersOff, Policy
from logitless.types import Completion, Prompt
from tests.train.learn.test_step import LLAMA

OPTIONS = {"temperature": 0.8, "backend": "chunked"}
LORA = LoraOptions(rank=2, targets=("q_proj", "down_proj", "lm_head"))


def _model():
    return load_model(LLAMA, random_weights=True, seed=2)


def _batch():
    prompts = [Prompt("a", "", (1, 2, 3)), Prompt("b", "", (4,))]
    answers = [(5, 6), (7, 8, 9)]
    return pack([(p, Completion(p.id, ids, "", "stop")) for p, ids in zip(prompts, answers, strict=True)])


def _adapted() -> Policy:
    """A LoRA policy that has moved away from its base."""
    policy = Policy(add_lora(_model(), LORA, seed=1))
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    return policy


def test_autocast_makes_products_in_its_dtype_and_scores_in_float32():
    policy, batch = Policy(_model(), autocast=torch.bfloat16), _batch()
    scores = policy.scores(batch, **OPTIONS)
    assert scores.logp.dtype == torch.float32
    plain = Policy(_model()).scores(batch, **OPTIONS)
    assert 0 < (scores.logp - plain.logp).abs().max() < 0.2
    scores.logp.sum().backward()
    assert {p.grad.dtype for p in policy.model.parameters() if p.grad is not None} == {torch.float32}


def _with_value_head(policy: Policy) -> Policy:
    policy.value_head = value_head_for(policy.model)
    torch.nn.init.normal_(policy.value_head.weight, generator=torch.Generator().manual_seed(0))
    torch.nn.init.constant_(policy.value_head.bias, 0.25)
    return policy


def _rows(**options):
    """Of each token of the batch, the model's output and the place in it that predicts the token."""
    model = _model()
    for ids, count in (((1, 2, 3, 5, 6), 2), ((4, 7, 8, 9), 3)):
        output = model(torch.tensor([ids]), **options)
        yield from ((output, j - 1) for j in range(len(ids) - count, len(ids)))


def test_a_value_is_read_from_the_hidden_state_that_predicts_its_token():
    policy = _with_value_head(Policy(_model()))
    hidden = [output.hidden_states[-1][0, at] for output, at in _rows(output_hidden_states=True)]
    values = [float((row @ policy.value_head.weight[0]).detach()) + 0.25 for row in hidden]
    assert policy.scores(_batch(), **OPTIONS).value.tolist() == pytest.approx(values, abs=1e-5)
    assert Policy(_model()).scores(_batch(), **OPTIONS).value is None


def test_a_value_head_costs_no_pass_of_its_own(monkeypatch):
    from logitless.train.learn import policy as module

    plain, calls = module.backbone_hidden, []
    monkeypatch.setattr(module, "backbone_hidden", lambda *arguments: calls.append(1) or plain(*arguments))
    _with_value_head(Policy(_model())).scores(_batch(), **OPTIONS)
    assert len(calls) == 1


def test_values_are_float32_products_under_autocast_too():
    policy = _with_value_head(Policy(_model(), autocast=torch.bfloat16))
    scores = policy.scores(_batch(), **OPTIONS)
    assert scores.value.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        hidden = policy.model(torch.tensor([[1, 2, 3, 5]]), output_hidden_states=True).hidden_states[-1][0, 2]
    expected = hidden.float() @ policy.value_head.weight[0] + 0.25
    assert float(scores.value[0].detach()) == pytest.approx(float(expected.detach()), abs=1e-6)


def test_the_value_loss_reaches_the_backbone_and_under_lora_the_adapter_alone():
    for policy in (Policy(_model()), _adapted()):
        _with_value_head(policy).scores(_batch(), **OPTIONS).value.sum().backward()
        trained = {n: p for n, p in policy.named_parameters().items() if p.requires_grad}
        reached = {name for name, p in trained.items() if p.grad is not None and p.grad.abs().max() > 0}
        assert reached == {name for name in trained if "lm_head" not in name}
        assert {"value_head.weight", "value_head.bias"} < reached
        frozen = [p for p in policy.named_parameters().values() if not p.requires_grad]
        assert all(p.grad is None for p in frozen)
        assert bool(frozen) == policy.is_adapter


def test_the_reference_of_a_policy_with_a_value_head_has_none():
    policy = _with_value_head(_adapted())
    assert AdaptersOff(policy).scores(_batch(), **OPTIONS).value is None

"""A teacher's term of the loss and its advantages, by hand in value and gradient."""

from dataclasses import replace

import pytest
import torch

from logitless.errors import ConfigurationError, InputError
from logitless.objective.distillation import (
    Distillation,
    DistillationOutput,
    distillation_diagnostics,
    teacher_advantage,
)
from logitless.objective.presets import algorithm
from logitless.objective.surrogate import Clip
from tests.objective.batches import batch_of, double


def test_the_term_is_the_weight_times_the_sum_of_divergences_by_the_weights_of_the_policy_loss():
    divergence = double(1, 2, 4).requires_grad_()
    output = Distillation(weight=3.0).loss(divergence, batch_of([0, 0, 1], token_weight=double(0.5, 0.25, 0.125)))
    assert output.loss.item() == 3 * (0.5 + 0.5 + 0.5)
    output.loss.backward()
    assert divergence.grad.tolist() == [1.5, 0.75, 0.375]
    assert output.divergence.tolist() == [1, 2, 4]
    assert not output.divergence.requires_grad


def test_what_stands_in_a_token_of_weight_0_reaches_neither_loss_nor_gradient():
    divergence = double(1, torch.nan).requires_grad_()
    output = Distillation(weight=1.0).loss(divergence, batch_of([0, 1], token_weight=double(0.5, 0)))
    output.loss.backward()
    assert output.loss.item() == 0.5
    assert divergence.grad.tolist() == [0.5, 0]
    assert output.divergence.tolist() == [1, 0]
    assert output.trained.tolist() == [True, False]


def test_the_advantage_is_positive_where_the_teacher_finds_a_token_likelier_than_the_sampler_did():
    teacher = double(-1, -3).requires_grad_()
    found = teacher_advantage(teacher, double(-2, -1), 0.5)
    assert found.tolist() == [0.5, -1]
    assert not found.requires_grad


def test_the_mean_gradient_of_a_teachers_advantage_over_all_tokens_is_that_of_the_reverse_kl():
    logits, log_q = double(0.3, -1.2, 0.7, 2.0).requires_grad_(), double(1.0, 0.5, -0.5, 0.2).log_softmax(0)
    log_p = logits.log_softmax(0)
    weight = 0.5 * log_p.detach().exp()  # every token, as often as the policy samples it; a coefficient
    batch = batch_of([0, 1, 2, 3], advantage=teacher_advantage(log_q, log_p), token_weight=weight)
    loss = algorithm("reinforce").objective(log_p, None, batch).loss
    wanted = torch.autograd.grad(0.5 * (log_p.exp() * (log_p - log_q)).sum(), logits, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], wanted, rtol=0, atol=1e-15)


def test_the_first_step_on_a_teachers_advantage_is_verls_policy_gradient_of_k1_in_its_own_numbers():
    # verl, August 2026: kl_penalty "k1" as advantage of compute_policy_loss_vanilla (use_policy_gradient), token-mean.
    # Its other estimators weigh the gradient of one sample's KL, and forward_kl_topk cuts the teacher: no counterpart.
    logp, teacher = double(-0.5, -1.25, -2.0, -0.75).requires_grad_(), double(-1.0, -0.5, -2.5, -0.25)
    batch = batch_of([0, 0, 0, 1], advantage=teacher_advantage(teacher, logp), logp_old=logp.detach())
    clipped = replace(algorithm("dapo").objective, surrogate=Clip(0.8, 1.2, dual=3.0))
    loss = clipped(logp, None, replace(batch, token_weight=torch.full((4,), 0.25, dtype=torch.float64))).loss
    loss.backward()
    assert loss.item() == pytest.approx(-0.0625, rel=1e-12)
    assert logp.grad.tolist() == pytest.approx([0.125, -0.1875, 0.125, -0.125], rel=1e-12)


def test_tokens_without_a_log_prob_of_the_sampler_are_refused_for_the_advantage():
    with pytest.raises(InputError, match="none for 1 of 2 tokens"):
        teacher_advantage(double(-1, -1), double(-2, torch.nan))


def test_the_mean_divergence_is_over_trained_tokens_of_all_micro_batches_and_ranks():
    zero = torch.tensor(0.0)
    tails = torch.tensor([[0.25, 0.5], [9.0, 9.0]])  # the second token is not trained
    one = DistillationOutput(zero, double(3, 0), torch.tensor([True, False]), tails)
    of_others = torch.tensor([[0.75, 0.0], [torch.nan, torch.nan]])  # no server grades the second one
    other = DistillationOutput(zero, double(1, 2), torch.tensor([True, True]), of_others)
    found = {name: value.item() for name, value in distillation_diagnostics([one, other]).items()}
    assert found == {"teacher/divergence": 2, "teacher/tail_of_policy": 0.5, "teacher/tail": 0.25}
    one, other = replace(one, tails=None), replace(other, tails=None)
    twice = distillation_diagnostics([one, other], gather=lambda rows: torch.cat([rows, rows * double(5, 1, 1, 1, 1)]))
    assert twice.keys() == {"teacher/divergence"}
    assert twice["teacher/divergence"].item() == 6 * (1 + 5) / 6


@pytest.mark.parametrize("distillation", [Distillation(weight=1.0), Distillation(advantage=1.0)])
def test_a_completion_with_advantage_0_is_trained_on_under_a_teacher(distillation):
    assert algorithm("grpo").silent_without_advantage
    assert not _with(algorithm("grpo"), distillation).silent_without_advantage


@pytest.mark.parametrize(("preset", "words"), [("gspo", "tokens that share an advantage"), ("nll", "reads advantages")])
def test_a_teachers_advantage_is_refused_where_no_token_has_an_advantage_of_its_own(preset, words):
    found = algorithm(preset, {"epsilon_low": 0.2, "epsilon_high": 0.2} if preset == "gspo" else {})
    _with(found, Distillation(weight=1.0))
    with pytest.raises(ConfigurationError, match=words):
        _with(found, Distillation(advantage=1.0))


def _with(found, distillation):
    return replace(found, distillation=distillation)

"""KL estimators: values by hand, expected values and gradients by enumerating a small vocabulary."""

import math

import pytest
import torch

from logitless.errors import InputError
from logitless.objective.divergence import KLPenalty, k1, k2, k3, kl_in_reward
from tests.objective.batches import double

VOCABULARY = 5


def policies():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, VOCABULARY, generator=generator, dtype=torch.float64)
    policy, reference, old = logits[0].requires_grad_(), logits[1], logits[2]
    return policy, reference.log_softmax(0), old.log_softmax(0)


def gradient(loss, logits):
    return torch.autograd.grad(loss, logits, retain_graph=True)[0]


def forward_and_reverse(logits, reference):
    """Gradients of KL(pi || ref) and KL(ref || pi)."""
    logp = logits.log_softmax(0)
    to_reference = (logp.exp() * (logp - reference)).sum()
    from_reference = (reference.exp() * (reference - logp)).sum()
    return gradient(to_reference, logits), gradient(from_reference, logits)


def expected_gradient(penalty, drawn_from, logits, reference):
    """Gradient of ``sum_v p_drawn(v) kl(v)``, the probability of drawing v being no function of the parameters."""
    logp = logits.log_softmax(0)
    log_ratio = logp - drawn_from
    terms = penalty(logp, reference, log_ratio, log_ratio)
    return gradient((drawn_from.exp() * terms.kl).sum(), logits)


def test_k1_and_k3_have_the_kl_to_the_reference_for_expectation():
    logits, reference, _ = policies()
    logp = logits.detach().log_softmax(0)
    truth = (logp.exp() * (logp - reference)).sum()
    for estimator in (k1, k3):
        torch.testing.assert_close((logp.exp() * estimator(logp - reference)).sum(), truth, rtol=1e-12, atol=1e-12)
    assert (logp.exp() * k2(logp - reference)).sum() > 0


@pytest.mark.parametrize("level", ["token", "surrogate"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("on_policy", [True, False])
def test_ratio_corrected_estimators_train_the_kl_from_policy_to_reference(estimator, level, on_policy):
    logits, reference, old = policies()
    drawn = logits.detach().log_softmax(0) if on_policy else old
    truth, _ = forward_and_reverse(logits, reference)
    found = expected_gradient(KLPenalty(estimator, ratio_corrected=level), drawn, logits, reference)
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)


def test_uncorrected_k2_trains_it_on_policy_only():
    logits, reference, old = policies()
    truth, _ = forward_and_reverse(logits, reference)
    on_policy = logits.detach().log_softmax(0)
    torch.testing.assert_close(expected_gradient(KLPenalty("k2"), on_policy, logits, reference), truth)
    assert not torch.allclose(expected_gradient(KLPenalty("k2"), old, logits, reference), truth, atol=1e-3)


def test_uncorrected_k3_trains_the_other_direction_on_policy():
    logits, reference, _ = policies()
    truth, other = forward_and_reverse(logits, reference)
    on_policy = logits.detach().log_softmax(0)
    found = expected_gradient(KLPenalty("k3"), on_policy, logits, reference)
    torch.testing.assert_close(found, other, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(found, truth, atol=1e-3)


def test_uncorrected_k1_in_the_loss_has_an_expected_gradient_of_zero():
    logits, reference, _ = policies()
    logp = logits.log_softmax(0)
    expected = gradient((logp.detach().exp() * k1(logp - reference)).sum(), logits)
    torch.testing.assert_close(expected, torch.zeros_like(expected), rtol=0, atol=1e-15)


def test_each_correction_reads_the_ratio_of_its_name():
    # d = 1; lr 0 per token, log 3 at the surrogate's level: k2 = 1/2 and 3/2
    zero, three, logp, reference = double(0), double(math.log(3)), double(-1), double(-2)
    assert KLPenalty("k2", "token")(logp, reference, zero, three).kl.item() == 0.5
    assert KLPenalty("k2", "surrogate")(logp, reference, zero, three).kl.item() == pytest.approx(1.5)
    assert KLPenalty("k2")(logp, reference, zero, three).kl.item() == 0.5
    with pytest.raises(InputError, match="logp_old"):
        KLPenalty("k3", "token")(logp, reference, None, None)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_clamped_difference_is_counted_and_has_no_gradient(estimator):
    logp = torch.tensor([-50.0, -1.0, -0.5], requires_grad=True)
    reference = torch.tensor([-1.0, -1.5, -50.0])
    terms = KLPenalty(estimator)(logp, reference, None, None)
    terms.kl.sum().backward()
    assert terms.clamped.tolist() == [True, False, True]
    assert (logp.grad != 0).tolist() == [False, True, False]
    assert terms.log_ratio_ref.tolist() == [-49.0, 0.5, 49.5]
    limit = {"k2": 200.0, "k3": math.exp(20) - 21}[estimator]
    assert terms.kl[0].item() == pytest.approx(limit, rel=1e-6)


def test_a_difference_on_the_clamp_is_not_clamped():
    # d = 0.5 and 0.75 under a clamp of 0.5: k2 = 0.125 for both, with the gradient d of the first alone
    logp = torch.tensor([-1.0, -1.0], requires_grad=True)
    terms = KLPenalty("k2", clamp=0.5)(logp, torch.tensor([-1.5, -1.75]), None, None)
    terms.kl.sum().backward()
    assert terms.kl.tolist() == [0.125, 0.125]
    assert terms.clamped.tolist() == [False, True]
    assert logp.grad.tolist() == [0.5, 0.0]
    assert not terms.log_ratio_ref.requires_grad


def test_without_a_clamp_the_difference_is_what_it_is():
    terms = KLPenalty("k3", clamp=None)(torch.tensor([-26.0]), torch.tensor([-1.0]), None, None)
    assert terms.kl.item() == pytest.approx(math.exp(25) - 26, rel=1e-6)
    assert terms.clamped.tolist() == [False]


def test_no_gradient_reaches_the_reference():
    reference = torch.tensor([-1.0], requires_grad=True)
    logp = torch.tensor([-2.0], requires_grad=True)
    KLPenalty("k3")(logp, reference, None, None).kl.sum().backward()
    assert reference.grad is None


def test_other_libraries_names_are_aliases():
    assert KLPenalty("mse") == KLPenalty("k2")
    assert KLPenalty("low_var_kl") == KLPenalty("k3")


def test_kl_in_the_reward_is_a_plain_difference_without_gradient():
    old = torch.tensor([-1.0, -2.0], requires_grad=True)
    cost = kl_in_reward(old, torch.tensor([-1.5, -1.0]))
    assert cost.tolist() == [0.5, -1.0]
    assert not cost.requires_grad

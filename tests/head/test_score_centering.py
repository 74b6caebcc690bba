"""What centering is for: no gradient where nothing is stale, and no bias of an advantage's mean where something is."""

import math

import pytest
import torch

from logitless.errors import InputError
from logitless.head import score_centering
from logitless.types import LMHead
from tests.head.cases import Case
from tests.head.two_streams import BACKENDS, corner, scored, two

OPTIONS = [{}, {"bias": True, "lora": 2, "temperature": "per token", "softcap": 4.0}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spread", [2.0, 20.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sampler_with_the_policys_weights_gives_a_gradient_of_0_in_every_bit(backend, spread, dtype, options):
    given = two(Case(70, 1301, 16, dtype=dtype, spread=spread, **options), "centering", near=0.0)
    found = scored(given, given.student, backend=backend)
    assert not found["value"].any()
    assert torch.equal(found["logp"], found["logp_teacher"])
    for gradient in torch.autograd.grad(found["value"], list(given.student.leaves.values()), given.grad_value):
        assert not gradient.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_without_staleness_the_centred_loss_has_the_bits_of_the_plain_one(dtype):
    given = two(Case(70, 1301, 16, bias=True, dtype=dtype), "centering", near=0.0)
    advantage, gradients = given.grad_value, []
    for weight in (0.0, 1.0):
        found = scored(given, given.student, memory_budget=0)
        loss = -advantage * found["logp"] + weight * advantage * found["value"]
        gradients.append(torch.autograd.grad(loss.sum(), list(given.student.leaves.values())))
    for plain, centred in zip(*gradients, strict=True):
        assert torch.equal(plain, centred)


@pytest.mark.parametrize("target", [None, 0, 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_tokens_give_the_value_and_gradient_worked_by_hand(backend, target):
    # p = (1/3, 2/3), q = (3/4, 1/4): 5/12 log(1/3) - 5/12 log(2/3) = -5/12 log 2; the logits' gradient is q - p.
    streams = corner([0.0, math.log(2.0)], [math.log(3.0), 0.0])
    found = score_centering(*streams, None if target is None else torch.tensor([target]), backend=backend)
    found.centering.sum().backward()
    assert found.centering.item() == pytest.approx(-5 / 12 * math.log(2), rel=1e-13)
    assert streams[1].weight.grad.flatten().tolist() == pytest.approx([5 / 12, -5 / 12], rel=1e-13)


class Enumerated:
    """A policy over 7 tokens in 5 states, ``steps`` optimizer steps ahead of its sampler; float64."""

    def __init__(self, steps: int) -> None:
        generator = torch.Generator().manual_seed(0)
        normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
        self.hidden, self.sampler = normal(5, 3), normal(7, 3)
        self.policy = self.sampler + 0.5 * steps * normal(7, 3)
        self.of_state, self.of_token = normal(5, 1), normal(5, 7)

    def gradient(self, advantage: torch.Tensor, estimator: str, backend: str = "chunked") -> torch.Tensor:
        """The policy's gradient of the loss, averaged over every token the sampler (or the policy) may give."""
        states, tokens = (index.flatten() for index in torch.meshgrid(torch.arange(5), torch.arange(7), indexing="ij"))
        weight = self.policy.clone().requires_grad_()
        streams = (self.hidden[states], weight, self.hidden[states], LMHead(self.sampler))
        scores = score_centering(*streams, tokens, backend=backend)
        p, q = scores.logp.detach().exp(), scores.logp_sampler.exp()
        loss = -advantage.expand(5, 7).flatten() * scores.logp
        if estimator == "on-policy":
            loss = p * loss
        elif estimator == "truncated":
            loss = q * (p / q).clamp(max=2.0) * loss
        elif estimator == "centred":
            loss = q * (loss + advantage.expand(5, 7).flatten() * scores.centering)
        else:
            loss = q * loss
        return torch.autograd.grad(loss.sum(), weight)[0]


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_advantage_of_the_state_has_the_on_policy_gradient_where_a_truncated_ratio_has_not(backend, steps):
    given = Enumerated(steps)
    wanted = given.gradient(given.of_state, "on-policy", backend)
    assert float((given.gradient(given.of_state, "centred", backend) - wanted).abs().max()) < 1e-14
    for biased in ("truncated", "uncorrected"):
        assert float((given.gradient(given.of_state, biased, backend) - wanted).abs().max()) > 1e-2


def _float8(weight):
    return weight.to(torch.float8_e4m3fn).double()


def _int8(weight):
    step = weight.abs().amax(1, keepdim=True) / 127
    return (weight / step).round() * step


@pytest.mark.parametrize("rounded", [_float8, _int8])
def test_under_a_copy_in_eight_bits_an_advantage_of_the_state_has_the_on_policy_gradient(rounded):
    given = Enumerated(0)
    given.sampler = rounded(given.policy)
    wanted = given.gradient(given.of_state, "on-policy")
    assert float((given.gradient(given.of_state, "centred") - wanted).abs().max()) < 1e-14
    assert float((given.gradient(given.of_state, "uncorrected") - wanted).abs().max()) > 1e-3


@pytest.mark.parametrize("steps", [1, 4])
def test_a_baseline_does_not_change_the_mean_gradient_as_it_does_with_a_truncated_ratio(steps):
    given = Enumerated(steps)
    shifted = given.of_token + given.of_state
    for estimator, bound in (("on-policy", 1e-14), ("centred", 1e-14)):
        change = given.gradient(shifted, estimator) - given.gradient(given.of_token, estimator)
        assert float(change.abs().max()) < bound, estimator
    change = given.gradient(shifted, "truncated") - given.gradient(given.of_token, "truncated")
    assert float(change.abs().max()) > 1e-2


def test_what_an_advantage_owes_to_its_token_is_averaged_under_the_sampler():
    """The mean gradient is -Cov(A, grad log p) under q; on-policy it is the same under p."""
    given = Enumerated(2)
    weight = given.policy.clone().requires_grad_()
    log_p = (given.hidden @ weight.T).log_softmax(1)
    for estimator, weights in (("centred", (given.hidden @ given.sampler.T)), ("on-policy", log_p.detach())):
        shares = weights.softmax(1)
        centred = given.of_token - (shares * given.of_token).sum(1, keepdim=True)
        wanted = torch.autograd.grad(-(shares * centred * log_p).sum(), weight, retain_graph=True)[0]
        torch.testing.assert_close(given.gradient(given.of_token, estimator), wanted, atol=1e-14, rtol=0)


def test_arguments_that_do_not_fit_name_the_sampler():
    with pytest.raises(InputError, match="one row of sampler_hidden for each row of hidden"):
        score_centering(torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(2, 4), torch.zeros(5, 4))
    with pytest.raises(InputError, match="of the sampler: weight of shape"):
        score_centering(torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3, 4), torch.zeros(5, 3))

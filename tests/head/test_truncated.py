"""A teacher by its largest log-probs and one bucket for the rest: exact over these, and a bound over all tokens."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from logitless.errors import InputError, UnavailableError
from logitless.head import token_divergence, truncated_divergence
from logitless.head.truncated import LEAST_TAIL, with_tail
from logitless.types import LMHead
from tests.head.cases import DEVICES, Case, assert_same, error, exact_copy, gradient_error, plain_logits, problem
from tests.head.two_streams import defined

BACKENDS = ("reference", "chunked")
KINDS = ("forward_kl", "reverse_kl", "jensen_shannon", "total_variation")
CASES = [
    Case(1, 2, 1),
    Case(13, 31, 7, bias=True),
    Case(29, 1031, 11, temperature="per token", softcap=3.0, scale=0.5, bias=True),  # several blocks of columns
    Case(29, 53, 11, lora=3, trained=False, bias=True, softcap=5.0),
    Case(29, 53, 11, lora=2, temperature=0.6),
]


def _teacher(case, student, k):
    """Log-probs of another model, [N, V] in float64; its k largest tokens and their log-probs."""
    other = problem(replace(case, seed=case.seed + 1, dtype=torch.float64, weight_dtype=None, bias=False))
    log_q = plain_logits(other).detach().log_softmax(1).to(student.hidden.device)
    logp, ids = log_q.topk(k, 1)
    return log_q, ids, logp


def _upstream(student):
    return student.grad_logp.clone()  # 0 in every third row


def _with_gradients(student, value):
    gradients = torch.autograd.grad(value, list(student.leaves.values()), _upstream(student).to(value.dtype))
    return {"value": value.detach()} | dict(zip(student.leaves, gradients, strict=True))


def _run(given, ids, logp, kind, **options):
    student = given.leaf_copy()
    beta = 0.3 if kind == "jensen_shannon" else None
    found = truncated_divergence(
        student.hidden, student.head, ids, logp, kind=kind, beta=beta, temperature=student.temperature, **options
    )
    return _with_gradients(student, found.divergence)


def _by_definition(student, ids, logp, kind):
    """Probabilities of all tokens, merged into those of the events; the divergences as papers write them."""
    p = plain_logits(student).softmax(1)
    is_tail = torch.ones_like(p).scatter(1, ids, 0.0)
    merged_p = torch.cat([p.gather(1, ids), (p * is_tail).sum(1, keepdim=True)], 1)
    q = logp.exp()
    merged_q = torch.cat([q, 1 - q.sum(1, keepdim=True)], 1)
    return _with_gradients(student, defined(merged_p.log(), merged_q.log().to(merged_p), kind, 0.3))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_value_and_all_gradients_are_those_of_merged_float64_probabilities(backend, kind, case):
    given = problem(case)
    _, ids, logp = _teacher(case, given, min(5, case.vocabulary - 1))
    budget = {"memory_budget": 0} if backend == "chunked" else {}  # the smallest tiles
    found = _run(given, ids, logp, kind, backend=backend, **budget)
    assert_same(found, _by_definition(given.leaf_copy(), ids, logp, kind), 1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_further_from_the_truth_than_the_plain_path_in_the_same_dtype(backend, kind, dtype, device):
    case = Case(61, 211, 48, bias=True, lora=2, softcap=30.0, spread=4.0, dtype=dtype)
    given = problem(case, device)
    _, ids, logp = _teacher(case, given, 7)
    exact, found = _by_definition(exact_copy(given), ids, logp, kind), _run(given, ids, logp, kind, backend=backend)
    usual = _by_definition(given.leaf_copy(dtype), ids, logp, kind)
    for name, value in exact.items():
        assert error(found[name], value) <= 1.5 * error(usual[name], value) + gradient_error(given), name


@settings(max_examples=30, deadline=None)
@drawn(k=st.integers(1, 20), kind=st.sampled_from(KINDS), spread=st.sampled_from([0.1, 2.0, 8.0]), seed=st.integers(0))
def test_it_is_a_lower_bound_that_grows_with_k_to_the_exact_divergence(k, kind, spread, seed):
    given = problem(Case(9, 22, 5, spread=spread, seed=seed))
    log_q = _teacher(Case(9, 22, 5, seed=seed), given, 1)[0]
    log_q = (0.9 * log_q.exp() + 0.1 / 22).log()  # the last token, alone in the tail, is far above LEAST_TAIL
    options = {"kind": kind, "beta": 0.3 if kind == "jensen_shannon" else None}
    fewer, more, most = (
        truncated_divergence(given.hidden, given.head, *log_q.topk(size, 1)[::-1], **options).divergence
        for size in (k, k + 1, 21)
    )
    one_hot = torch.eye(9, dtype=torch.float64)
    exact = token_divergence(given.hidden, given.head, one_hot, LMHead(log_q.T), **options).divergence
    assert (fewer <= more + 1e-12).all()
    assert (more <= exact + 1e-12).all()
    torch.testing.assert_close(most, exact, atol=1e-12, rtol=0)


def test_two_tokens_and_a_tail_by_hand():
    # p = (1/2, 1/4, 1/8, 1/8), q = (1/4, 1/2, 1/4): KL(q||p) = 1/4 log(1/2) + 1/2 log 2 + 1/4 log 1 = log(2) / 4
    weight = torch.tensor([[0.5], [0.25], [0.125], [0.125]]).double().log().requires_grad_()
    logp = torch.tensor([[0.25, 0.5]]).double().log()
    found = truncated_divergence(torch.ones(1, 1).double(), weight, torch.tensor([[0, 1]]), logp, kind="forward_kl")
    found.divergence.sum().backward()
    assert found.divergence.item() == pytest.approx(torch.tensor(2.0).double().log().item() / 4)
    assert (found.tail.item(), found.tail_teacher.item()) == (pytest.approx(0.25), pytest.approx(0.25))
    # p - q at the tokens; p_tail - q_tail = 0 is shared by the tail's tokens in the ratio of their probabilities
    assert weight.grad.flatten().tolist() == pytest.approx([0.25, -0.25, 0.0, 0.0], abs=1e-15)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_students_tail_far_below_rounding_keeps_its_log_prob_and_gradient(backend, kind):
    given = torch.tensor([[0.0], [-60.0], [-61.0]]).requires_grad_()  # p of the tail is about 1e-26
    found = truncated_divergence(
        torch.ones(1, 1), given, torch.tensor([[0]]), torch.tensor([[0.5]]).log(), kind=kind, backend=backend
    )
    found.divergence.sum().backward()
    wide = given.detach().double().requires_grad_()
    exact = truncated_divergence(
        torch.ones(1, 1).double(), wide, torch.tensor([[0]]), torch.tensor([[0.5]]).double().log(), kind=kind
    )
    exact.divergence.sum().backward()
    torch.testing.assert_close(found.divergence.double(), exact.divergence, rtol=1e-5, atol=0)
    torch.testing.assert_close(given.grad.double(), wide.grad, rtol=1e-5, atol=1e-7)
    assert found.tail.item() == pytest.approx(exact.tail.item(), rel=1e-4)
    assert exact.tail.item() == pytest.approx(1.2e-26, rel=0.05)


def test_a_tail_that_rounding_lost_counts_as_the_least_that_float32_log_probs_tell():
    logp = torch.tensor([[0.0, -30.0]])
    assert with_tail(logp).exp()[0, 2].item() == pytest.approx(LEAST_TAIL)
    found = truncated_divergence(torch.ones(1, 1), torch.zeros(4, 1), torch.tensor([[0, 3]]), logp, kind="reverse_kl")
    assert found.divergence.isfinite().all()


def test_tokens_masked_by_a_bias_of_minus_infinity_are_no_part_of_the_tail():
    bias = torch.tensor([0.0, -torch.inf, 0.0, 0.0])
    weight, logp = torch.zeros(4, 1), torch.tensor([[0.5]]).log()
    for masked, expected in ((bias, 2 / 3), (torch.tensor([0.0, *[-torch.inf] * 3]), 0.0)):
        head = LMHead(weight.clone().requires_grad_(), bias=masked.clone().requires_grad_())
        hidden = torch.ones(1, 1, requires_grad=True)
        found = truncated_divergence(hidden, head, torch.tensor([[0]]), logp, kind="total_variation")
        found.divergence.sum().backward()
        assert found.tail.item() == pytest.approx(expected)
        assert all(leaf.grad.isfinite().all() for leaf in (hidden, head.weight, head.bias))


def test_no_rows_give_no_values_and_zero_gradients():
    weight = torch.zeros(5, 3, requires_grad=True)
    none = torch.zeros(0, 2)
    found = truncated_divergence(torch.zeros(0, 3), weight, none.long(), none, kind="forward_kl")
    found.divergence.sum().backward()
    assert found.divergence.shape == (0,)
    assert not weight.grad.any()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ids": torch.tensor([[1, 1]])}, "different tokens in range"),
        ({"ids": torch.tensor([[1, 4]])}, "different tokens in range"),
        ({"ids": torch.tensor([[-1, 1]])}, "targets in range"),
        ({"ids": torch.tensor([1, 2])}, "of the same K tokens a row"),
        ({"ids": torch.tensor([[0, 1, 2, 3]]), "logp_teacher": torch.zeros(1, 4)}, "fewer than 4 tokens"),
        ({"kind": "centering"}, "a divergence 'forward_kl'"),
        ({"beta": 0.5}, "beta with kind='jensen_shannon' alone"),
    ],
    ids=str,
)
def test_what_does_not_fit_together_is_refused(changes, words):
    given = {"ids": torch.tensor([[0, 1]]), "logp_teacher": torch.tensor([[-1.0, -2.0]]), "kind": "forward_kl"}
    with pytest.raises(InputError, match=words):
        truncated_divergence(torch.ones(1, 1), torch.zeros(4, 1), **given | changes)


def test_there_is_no_fused_kernel_and_no_second_derivative():
    weight, ids, logp = torch.zeros(4, 1, requires_grad=True), torch.tensor([[0]]), torch.tensor([[-1.0]])
    with pytest.raises(UnavailableError, match="given 'fused'"):
        truncated_divergence(torch.ones(1, 1), weight, ids, logp, kind="forward_kl", backend="fused")
    found = truncated_divergence(torch.ones(1, 1), weight, ids, logp, kind="forward_kl")
    with pytest.raises(UnavailableError, match="differentiated twice"):
        torch.autograd.grad(found.divergence.sum(), weight, create_graph=True)

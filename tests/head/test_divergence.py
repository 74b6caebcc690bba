"""What holds for divergences of two streams, for every backend."""

import itertools
import logging
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from logitless.errors import InputError, UnavailableError
from logitless.head import contract, token_divergence, token_scores
from logitless.types import LMHead
from tests.head.cases import Case, assert_same, error, gradient_error, score_error
from tests.head.two_streams import BACKENDS, KINDS, RESULTS, corner, measured, plain, run, scored, truth, two
from tests.rounding import of_sum

SHAPES = [(1, 1, 1), (1, 2, 1), (2, 1, 3), (3, 17, 1), (13, 31, 7), (64, 128, 16), (67, 131, 33)]
OPTIONS = [
    {"bias": True},
    {"softcap": 3.0, "temperature": "per token", "scale": 0.25, "bias": True},
    {"temperature": 0.6},
    {"trained": False},
    {"lora": 3, "trained": False, "bias": True, "softcap": 5.0},
    {"lora": 1, "temperature": "per token", "scale": 2.0},
]
CASES = [Case(*shape) for shape in SHAPES] + [Case(29, 53, 11, **options) for options in OPTIONS]
BETAS = {"jensen_shannon": (0.001, 0.5, 0.999)}
TEACHERS = [{}, {"width": 2, "vocabulary": 41, "bias": True, "softcap": 2.0}, {"vocabulary": 70, "lora": 2}]
TEACHERS += [{"temperature": "per token", "scale": 0.5}]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_results_and_all_gradients_are_those_of_full_float64_probabilities(backend, kind, case):
    for beta in BETAS.get(kind, (None,)):
        given = two(case, kind, beta)
        assert_same(run(given, backend), truth(given), 1e-12)


@pytest.mark.parametrize("teacher", TEACHERS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_teacher_may_differ_in_width_vocabulary_head_and_temperature(backend, kind, teacher):
    given = two(Case(29, 53, 11, bias=True, lora=2, softcap=4.0), kind, **teacher)
    found = run(given, backend)
    assert_same(found, truth(given), 1e-12)
    for name in ("weight", "bias", "lora_b"):
        assert len(found[f"grad_{name}"]) == 53
        assert not found[f"grad_{name}"][given.vocabulary :].any()


@pytest.mark.parametrize("spread", [1.0, 8.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_further_from_the_truth_than_the_plain_path_in_the_same_dtype(backend, kind, dtype, spread):
    case = Case(61, 211, 48, bias=True, lora=2, softcap=30.0, spread=spread, dtype=dtype)
    given = two(case, kind)
    exact, found, usual = truth(given), run(given, backend), plain(given)
    for name, value in exact.items():
        assert error(found[name], value) <= 1.5 * error(usual[name], value) + gradient_error(given.student), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_values_of_bfloat16_inputs_are_float32_exact(backend, kind):
    given = two(Case(61, 211, 256, spread=4.0, dtype=torch.bfloat16), kind, width=128)
    exact, found = truth(given), measured(given, backend)
    # A measure weighs the errors of both streams' logits, each by a probability or by a log-ratio of it.
    bound = (score_error(given.student) + score_error(given.teacher)) * max(1.0, float(exact["value"].abs().max()))
    for name in RESULTS:
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name].double(), exact[name], atol=bound, rtol=0)


# p = (1/2, 1/2), q = (3/4, 1/4). m of beta = 1/4 is 3/4 p + 1/4 q = (9/16, 7/16).
BY_HAND = {
    # 3/4 log(3/2) + 1/4 log(1/2); p - q
    "forward_kl": (0.75 * math.log(1.5) + 0.25 * math.log(0.5), (-0.25, 0.25)),
    # 1/2 log(2/3) + 1/2 log 2; p_0 (log(p_0/q_0) - KL) = (log(2/3) - log 2) / 4 = -log(3) / 4
    "reverse_kl": (0.5 * math.log(4 / 3), (-math.log(3) / 4, math.log(3) / 4)),
    # 1/4 KL(q||m) + 3/4 KL(p||m); 3/4 p_0 (log(p_0/m_0) - KL(p||m)) = 3/16 (log(8/9) - log(8/7)) = 3/16 log(7/9)
    "jensen_shannon": (
        0.25 * (0.75 * math.log(4 / 3) + 0.25 * math.log(4 / 7))
        + 0.75 * (0.5 * math.log(8 / 9) + 0.5 * math.log(8 / 7)),
        (3 / 16 * math.log(7 / 9), -3 / 16 * math.log(7 / 9)),
    ),
    # (|1/2 - 3/4| + |1/2 - 1/4|) / 2; signs (-1, 1) have mean 0 under p: p_0 (-1) / 2
    "total_variation": (0.25, (-0.25, 0.25)),
}


@pytest.mark.parametrize("target", [None, 0, 1])
@pytest.mark.parametrize("kind", BY_HAND)
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_tokens_give_the_values_and_gradients_worked_by_hand(backend, kind, target):
    value, gradient = BY_HAND[kind]
    streams = corner([0.0, 0.0], [math.log(3.0), 0.0])
    found = token_divergence(
        *streams,
        None if target is None else torch.tensor([target]),
        kind=kind,
        beta=0.25 if kind == "jensen_shannon" else None,
        backend=backend,
    )
    found.divergence.sum().backward()
    assert found.divergence.item() == pytest.approx(value, rel=1e-13)
    assert streams[1].weight.grad.flatten().tolist() == pytest.approx(gradient, rel=1e-13)
    assert found.entropy.item() == pytest.approx(math.log(2))
    assert found.entropy_teacher.item() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    if target is None:
        assert found.logp is found.logp_teacher is None
    else:
        assert found.logp.item() == pytest.approx(-math.log(2))
        assert found.logp_teacher.item() == pytest.approx(math.log((0.75, 0.25)[target]))


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_jensen_shannon_is_trls_generalized_jsd_loss_at_every_beta(backend, beta):
    trainer = pytest.importorskip("trl.experimental.gkd").GKDTrainer
    given = two(Case(29, 53, 11, temperature=0.7), "jensen_shannon", beta, temperature=0.7)
    student = given.student.leaf_copy()
    z = student.hidden @ student.head.weight.T
    theirs = trainer.generalized_jsd_loss(
        z, given.teacher.hidden @ given.teacher.head.weight.T, beta=beta, temperature=0.7, reduction="none"
    ).sum(-1)
    gradients = torch.autograd.grad(theirs, list(student.leaves.values()), given.grad_value)
    ours = scored(given, student, backend=backend)["value"]
    # Their beta is rounded to the logits' dtype; ours is not: float64 here.
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)
    found = torch.autograd.grad(ours, list(student.leaves.values()), given.grad_value)
    for mine, other in zip(found, gradients, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-12, rtol=0)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_float32_values_are_no_further_off_than_trls_chunked_kernel(beta):
    kernel = pytest.importorskip("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
    given = two(Case(61, 211, 48, spread=4.0, dtype=torch.float32), "jensen_shannon", beta)
    student, teacher = given.student, given.teacher
    theirs, _ = kernel.apply(student.hidden, student.head.weight, None, teacher.hidden, teacher.head.weight, None, beta)
    exact, found = truth(given)["value"], run(given)["value"]
    assert error(found, exact) <= error(theirs.detach(), exact) + gradient_error(student)


@pytest.mark.parametrize(("kind", "beta"), [("forward_kl", 0.0), ("reverse_kl", 1.0)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_beta_at_its_ends_is_the_kl_of_that_name(backend, kind, beta):
    named, by_beta = (run(two(Case(9, 31, 5), *each), backend) for each in ((kind, None), ("jensen_shannon", beta)))
    for name, value in named.items():
        assert torch.equal(by_beta[name], value), name


def test_beta_of_jensen_shannon_is_a_half_unless_given():
    given = two(Case(9, 31, 5), "jensen_shannon", 0.5)
    assert torch.equal(measured(given, beta=None)["value"], measured(given)["value"])


@settings(max_examples=40, deadline=None)
@drawn(
    rows=st.integers(0, 70),
    vocabulary=st.integers(1, 40) | st.integers(500, 1100),
    teacher_vocabulary=st.integers(1, 40) | st.integers(500, 1100),
    width=st.integers(1, 9),
    budget=st.integers(0, 4_000_000),
    kind=st.sampled_from(KINDS),
    beta=st.floats(0.01, 0.99),
    with_bias=st.booleans(),
    softcap=st.sampled_from([None, 4.0]),
)
def test_any_shape_under_any_budget_gives_the_reference(
    rows, vocabulary, teacher_vocabulary, width, budget, kind, beta, with_bias, softcap
):
    case = Case(rows, vocabulary, width, bias=with_bias, softcap=softcap, lora=2)
    given = two(case, kind, beta if kind == "jensen_shannon" else None, vocabulary=teacher_vocabulary)
    assert_same(run(given, memory_budget=budget), run(given, "reference"), 1e-12)


@settings(max_examples=25, deadline=None)
@drawn(kind=st.sampled_from(KINDS), cuts=st.lists(st.integers(0, 150), max_size=4), budget=st.sampled_from([None, 0]))
def test_any_partition_of_the_rows_gives_the_same_results_and_gradients(kind, cuts, budget):
    given = two(Case(150, 1201, 5, bias=True, lora=2, temperature="per token"), kind)
    whole = run(given, memory_budget=budget)
    ends = sorted({0, 150, *cuts})
    parts = []
    for begin, end in itertools.pairwise(ends):
        some = slice(begin, end)
        student, teacher = (_rows(problem, some) for problem in (given.student, given.teacher))
        part = replace(given, student=student, teacher=teacher, grad_value=given.grad_value[some])
        parts.append(run(part, memory_budget=budget))
    per_row = (*RESULTS, "grad_hidden")
    joined = {name: torch.cat([part[name] for part in parts]) for name in per_row}
    joined |= {name: sum(part[name] for part in parts) for name in whole if name not in per_row}
    assert_same(joined, whole, 1e-12)


def _rows(problem, some):
    fields = {
        name: value[some].detach()
        for name in ("hidden", "target", "temperature", "grad_logp", "grad_entropy")
        if isinstance(value := getattr(problem, name), torch.Tensor)
    }
    fields["hidden"].requires_grad_(problem.hidden.requires_grad)
    return replace(problem, **fields).leaf_copy()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_of_both_streams_are_those_of_token_scores(backend, kind):
    given = two(Case(29, 53, 11, bias=True, softcap=4.0), kind, lora=2)
    found = measured(given, backend)
    for of, problem in (("", given.student), ("_teacher", given.teacher)):
        scores = token_scores(
            problem.hidden, problem.head, given.student.target, temperature=problem.temperature, backend=backend
        )
        torch.testing.assert_close(found[f"logp{of}"], scores.logp, atol=1e-12, rtol=0)
        torch.testing.assert_close(found[f"entropy{of}"], scores.entropy, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_targets_change_no_measure_and_no_entropy(backend, kind):
    given = two(Case(29, 53, 11), kind)
    with_targets, without = measured(given, backend), measured(given, backend, with_target=False)
    assert without["logp"] is without["logp_teacher"] is None
    for name in ("value", "entropy", "entropy_teacher"):
        torch.testing.assert_close(without[name], with_targets[name], atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_streams_are_exactly_0_apart(kind, budget, dtype):
    given = two(Case(70, 1301, 16, bias=True, lora=2, temperature="per token", dtype=dtype), kind, near=0.0)
    assert not measured(given, memory_budget=budget)["value"].any()


@pytest.mark.parametrize("kind", KINDS[:4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_streams_have_no_gradient_beyond_the_rounding_of_one_sum(backend, kind):
    given = two(Case(31, 61, 16), kind, near=0.0)
    given.student.grad_logp.zero_()
    given.student.grad_entropy.zero_()
    largest = max(float(leaf.detach().abs().max()) for leaf in given.student.leaves.values())
    bound = of_sum(torch.float64, 61, largest * float(given.grad_value.abs().sum()))
    for name, value in run(given, backend).items():
        if name.startswith("grad_"):
            assert float(value.abs().max()) <= bound, name


@pytest.mark.parametrize("kind", KINDS[:3])
def test_float32_divergences_of_close_streams_keep_their_gradient(kind):
    """p and q differ by 1e-4 of themselves: their difference is a difference of numbers, good to 1e-7 of these."""
    given = two(Case(61, 211, 48, dtype=torch.float32), kind, near=1e-5)
    given.student.grad_logp.zero_()
    given.student.grad_entropy.zero_()
    exact, found, usual = truth(given), run(given), plain(given)
    for name in ("grad_hidden", "grad_weight"):
        assert error(found[name], exact[name]) <= 1.5 * error(usual[name], exact[name]) + gradient_error(given.student)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jensen_shannon", "total_variation"])
def test_a_target_of_probability_nearly_one_in_both_streams_has_an_exact_value_and_gradient(kind):
    # Two tokens, logits (a, 0) and (b, 0): 1 - p = s / (1 + s) with s = exp(-a), far below float32's 1 - 6e-8.
    a, b, beta = 20.0, 21.0, 0.3
    head, teacher = (torch.tensor([[x], [0.0]]).requires_grad_() for x in (a, b))
    ones = torch.ones(1, 1)
    options = {"kind": kind, "beta": beta if kind == "jensen_shannon" else None, "backend": "chunked"}
    found = token_divergence(ones, head, ones, teacher, torch.tensor([0]), **options)
    found.divergence.sum().backward()
    streams = corner([a, 0.0], [b, 0.0])
    exact = token_divergence(*streams, torch.tensor([0]), **options)
    exact.divergence.sum().backward()
    assert found.divergence.item() == pytest.approx(exact.divergence.item(), rel=1e-5, abs=0)
    assert head.grad.flatten().tolist() == pytest.approx(streams[1].weight.grad.flatten().tolist(), rel=1e-5, abs=0)
    assert head.grad.any()
    assert teacher.grad is None


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jensen_shannon", "centering"])
def test_a_target_improbable_in_both_streams_keeps_the_gradient_of_its_own_logit(kind):
    # Two tokens again, and the target is the one of probability 2e-9 and 8e-10, which float32 cannot take from 1.
    exact, found = (
        two(Case(1, 2, 1, dtype=dtype), kind, 0.3 if kind == "jensen_shannon" else None, width=1)
        for dtype in (torch.float64, torch.float32)
    )
    gradients = []
    for given in (exact, found):
        with torch.no_grad():
            given.student.hidden.fill_(1)
            given.teacher.hidden.fill_(1)
            given.student.head.weight.copy_(torch.tensor([[20.0], [0.0]]))
            given.teacher.head.weight.copy_(torch.tensor([[21.0], [0.0]]))
            given.student.target.fill_(1)
        value = measured(given)["value"].sum()
        gradients.append(torch.autograd.grad(value, given.student.head.weight)[0][1].item())
    assert gradients[0] != 0
    assert gradients[1] == pytest.approx(gradients[0], rel=1e-5, abs=0)


@pytest.mark.parametrize("target", [None, 0, 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_streams_that_share_no_token_have_the_largest_jensen_shannon_divergence_and_no_nan(backend, target):
    # p = (1, 0, 0) and q = (0, 1, 0) to float32, with log-ratios of 500: -beta log beta - (1 - beta) log(1 - beta).
    beta, ones = 0.3, torch.ones(1, 1)
    weight, teacher = (torch.tensor(logits)[:, None].requires_grad_() for logits in ([500.0, 0, 0], [0.0, 500.0, 0]))
    streams = (ones, weight, ones, teacher, None if target is None else torch.tensor([target]))
    found = token_divergence(*streams, kind="jensen_shannon", beta=beta, backend=backend)
    found.divergence.sum().backward()
    assert found.divergence.item() == pytest.approx(-beta * math.log(beta) - (1 - beta) * math.log(1 - beta), rel=1e-6)
    assert float(weight.grad.abs().max()) < 1e-6
    assert token_divergence(*streams, kind="total_variation", backend=backend).divergence.item() == pytest.approx(1.0)
    for kind in ("forward_kl", "reverse_kl"):
        assert token_divergence(*streams, kind=kind, backend=backend).divergence.item() == pytest.approx(500.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_masked_in_both_streams_do_not_exist(backend, kind):
    given = two(Case(9, 24, 8, bias=True), kind)
    mask = torch.where(torch.arange(24) < 13, 0.0, float("-inf"))
    masked, short = [], []
    for problem in (given.student, given.teacher):
        with torch.no_grad():
            problem.head.bias.add_(mask)
        masked.append(replace(problem, target=given.student.target % 13).leaf_copy())
        head = LMHead(problem.head.weight.detach()[:13], bias=problem.head.bias.detach()[:13])
        head.weight.requires_grad_()
        short.append(replace(masked[-1], head=head, leaves={}).leaf_copy())
    results = [run(replace(given, student=a, teacher=b), backend) for a, b in (masked, short)]
    for name in (*RESULTS, "grad_hidden"):
        torch.testing.assert_close(results[0][name], results[1][name], atol=1e-12, rtol=0)
    torch.testing.assert_close(results[0]["grad_weight"][:13], results[1]["grad_weight"], atol=1e-12, rtol=0)
    assert not results[0]["grad_weight"][13:].any()


@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("target", [0, 1200, None])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_that_one_stream_alone_excludes_makes_one_kl_infinite_and_no_other_measure(backend, target, budget):
    if backend == "reference" and budget is not None:
        pytest.skip("the reference has no budget")
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 4).double(), torch.randn(1201, 4).double()
    bias = torch.zeros(1201).double()
    bias[700:] = float("-inf")  # whole blocks of columns
    streams = (hidden, LMHead(weight, bias=bias)), (hidden, LMHead(weight.flip(0)))
    given = None if target is None else torch.full((3,), target)
    options = {"backend": backend, "memory_budget": budget}
    for kind in ("forward_kl", "reverse_kl", "jensen_shannon", "total_variation"):
        for order in (1, -1):
            student, teacher = streams[::order]
            value = token_divergence(*student, *teacher, given, kind=kind, **options).divergence
            infinite = kind == ("forward_kl" if order == 1 else "reverse_kl")
            assert value.isinf().all() if infinite else value.isfinite().all(), (kind, order)
            assert (value > 0).all()


@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_excluded_tokens_whose_probability_in_the_other_stream_is_0_make_no_kl_infinite(dtype, budget):
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 4, dtype=dtype), torch.randn(1201, 4, dtype=dtype)
    beyond = torch.arange(1201) >= 600  # whole blocks of columns
    excluded, impossible = (torch.zeros(1201).masked_fill(beyond, x).to(dtype) for x in (-math.inf, -1000.0))
    streams = hidden, LMHead(weight, bias=excluded), hidden, LMHead(weight.flip(0), bias=impossible)
    found = token_divergence(*streams, kind="forward_kl", backend="chunked", memory_budget=budget).divergence
    exact = token_divergence(*streams, kind="forward_kl", backend="reference").divergence
    torch.testing.assert_close(found, exact, atol=of_sum(dtype, 1201), rtol=of_sum(dtype, 1201))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stream", ["student", "teacher"])
def test_a_nan_stays_in_its_row(backend, kind, stream):
    given = two(Case(23, 31, 16, bias=True), kind)
    clean = run(given, backend)
    with torch.no_grad():
        getattr(given, stream).hidden[5, 3] = float("nan")
    spoilt = run(given, backend)
    others = torch.arange(23) != 5
    assert spoilt["value"][5].isnan()
    for name in (*RESULTS, "grad_hidden"):
        assert torch.equal(spoilt[name][others], clean[name][others]), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_in_rows_without_gradient_reaches_no_gradient(kind):
    given = two(Case(23, 31, 16), kind)
    for gradient in (given.grad_value, given.student.grad_logp, given.student.grad_entropy):
        gradient[1::4] = 0
    clean = run(given)
    with torch.no_grad():
        given.student.hidden[1::4] = float("nan")
    spoilt = run(given)
    assert not spoilt["grad_hidden"][1::4].any()
    assert torch.equal(spoilt["grad_weight"], clean["grad_weight"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows_give_empty_results_and_zero_gradients(backend, kind):
    found = run(two(Case(0, 31, 16, bias=True, lora=2), kind), backend)
    assert all(found[name].shape == (0,) for name in RESULTS)
    assert found["grad_hidden"].shape == (0, 16)
    assert not any(found[f"grad_{name}"].any() for name in ("weight", "bias", "lora_a", "lora_b"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_result_may_be_differentiated_alone(backend, kind):
    given = two(Case(23, 31, 16, bias=True, softcap=4.0), kind)
    whole, parts = run(given, backend), []
    for name in RESULTS[:3]:
        student = given.student.leaf_copy()
        upstream = {"value": given.grad_value, "logp": student.grad_logp, "entropy": student.grad_entropy}[name]
        parts.append(torch.autograd.grad(scored(given, student, backend=backend)[name], student.hidden, upstream)[0])
    assert_same({"h": sum(parts)}, {"h": whole["grad_hidden"]}, 1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_teacher_gets_no_gradient(backend, kind):
    given = two(Case(9, 31, 5, bias=True), kind, trained=True)
    found = measured(given, backend)
    assert not found["logp_teacher"].requires_grad
    assert not found["entropy_teacher"].requires_grad
    sum(found[name].sum() for name in RESULTS).backward()
    assert given.student.head.weight.grad is not None
    assert all(leaf.grad is None for leaf in given.teacher.leaves.values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_come_in_the_dtype_of_what_they_belong_to(backend, dtype):
    weight = torch.ones(5, 16, dtype=dtype, requires_grad=True)
    hidden = torch.ones(3, 16, dtype=dtype, requires_grad=True)
    head = LMHead(weight, bias=torch.zeros(5, requires_grad=True))
    other = torch.float64 if dtype == torch.float64 else torch.float32
    teacher = torch.ones(3, 2, dtype=other), torch.ones(7, 2, dtype=other)
    found = token_divergence(hidden, head, *teacher, kind="forward_kl", backend=backend)
    found.divergence.sum().backward()
    assert found.divergence.dtype == other
    assert (hidden.grad.dtype, weight.grad.dtype, head.bias.grad.dtype) == (dtype, dtype, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_scoring_and_training_give_the_same_bits(backend, kind):
    given = two(Case(77, 61, 24, dtype=torch.bfloat16), kind)
    with torch.no_grad():
        scored_only = measured(given, backend)
    for name, value in measured(given, backend).items():
        assert torch.equal(scored_only[name], value), name


@pytest.mark.parametrize("kind", KINDS)
def test_the_inputs_dtype_decides_inside_autocast_too(kind):
    given = two(Case(23, 31, 16, dtype=torch.float32), kind)
    outside = run(given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = run(given)
    for name, value in outside.items():
        assert torch.equal(inside[name], value), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_activation_checkpointing_changes_nothing(backend):
    given = two(Case(23, 31, 16), "reverse_kl")

    def loss(hidden, weight):
        streams = (hidden, weight, given.teacher.hidden, given.teacher.head, given.student.target)
        found = token_divergence(*streams, kind="reverse_kl", backend=backend)
        return (found.divergence * given.grad_value + found.logp).sum()

    results = []
    for wrapped in (False, True):
        leaves = [leaf.detach().clone().requires_grad_() for leaf in (given.student.hidden, given.student.head.weight)]
        (checkpoint(loss, *leaves, use_reentrant=False) if wrapped else loss(*leaves)).backward()
        results.append([leaf.grad for leaf in leaves])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_a_second_derivative_is_refused():
    given = two(Case(), "forward_kl")
    with pytest.raises(UnavailableError, match=r"create_graph=True.*backend='chunked'.*backend='reference'"):
        torch.autograd.grad(measured(given)["value"].sum(), given.student.hidden, create_graph=True)


ARGUMENTS = {
    "hidden": torch.zeros(3, 4),
    "head": torch.zeros(11, 4),
    "teacher_hidden": torch.zeros(3, 2),
    "teacher_head": torch.zeros(9, 2),
    "target": torch.tensor([0, 5, 8]),
    "kind": "forward_kl",
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kind": "kl"}, "a divergence 'forward_kl'.*given 'kl'"),
        ({"beta": 0.5}, "beta with kind='jensen_shannon' alone"),
        ({"kind": "jensen_shannon", "beta": 1.5}, "beta between 0 and 1; given 1.5"),
        ({"kind": "jensen_shannon", "beta": float("nan")}, "beta between 0 and 1; given nan"),
        ({"target": torch.tensor([0, 5, 9])}, "range\\(9\\), the tokens that both heads have.*Compare the tokenizers"),
        ({"target": torch.tensor([0, -1, 5])}, "range\\(11\\)"),
        ({"teacher_hidden": torch.zeros(2, 2)}, "one row of teacher_hidden for each row of hidden \\(3\\)"),
        ({"teacher_hidden": torch.zeros(3, 2).double()}, "both streams in float64, or neither"),
        ({"teacher_hidden": torch.zeros(3, 2, device="meta")}, "teacher_hidden on cpu, like hidden"),
        ({"teacher_head": torch.zeros(9, 3)}, "of the teacher: weight of shape \\[9, 2\\]"),
        ({"teacher_temperature": 0.0}, "of the teacher: a positive, finite temperature"),
        ({"temperature": -1.0}, "a positive, finite temperature"),
        ({"memory_budget": -1}, "a memory budget of 0"),
        ({"backend": "triton"}, "a backend 'auto'"),
    ],
)
def test_arguments_that_do_not_fit_are_errors_that_say_what_to_do(changed, message):
    with pytest.raises(InputError, match=message):
        token_divergence(**ARGUMENTS | changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"backend": "fused"}, "tensors are on cpu.*backend='chunked'"),
        ({"backend": "reference", "memory_budget": 9}, "bound its memory.*backend='chunked'"),
    ],
)
def test_what_cannot_run_says_so(changed, message):
    with pytest.raises(UnavailableError, match=message):
        token_divergence(**ARGUMENTS | changed)


def test_auto_takes_chunked_and_says_so_once(caplog):
    contract._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="logitless"):
        found = [token_divergence(**ARGUMENTS | {"target": None}) for _ in range(2)]
    assert [record.getMessage() for record in caplog.records] == [
        "head backend of two streams: chunked (fused cannot run: tensors are on cpu, the kernels need a CUDA device)"
    ]
    assert not found[0].divergence.any()


def test_a_teacher_without_a_temperature_of_its_own_has_the_students():
    given = two(Case(9, 31, 5, temperature=0.7), "forward_kl", temperature=0.7)
    both, one = measured(given), measured(given, teacher_temperature=None)
    assert torch.equal(one["value"], both["value"])

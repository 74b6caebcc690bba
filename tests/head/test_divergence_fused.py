"""The fused backend of two streams, its kernels under Triton's interpreter: the truth, bits of a row, what is kept."""

import itertools
import math
from dataclasses import replace
from unittest import mock

import pytest
import torch

from logitless.errors import UnavailableError
from logitless.head import contract, divergence_chunked, fused, token_divergence
from logitless.types import LMHead
from tests.head.cases import Case, assert_same, error, gradient_error, tolerance
from tests.head.interpreter import complete_interpreter, interpreted
from tests.head.test_chunked import Allocations
from tests.head.test_divergence_chunked import product_keeps_rows
from tests.head.two_streams import KINDS, RESULTS, Two, corner, measured, plain, run, scored, truth, two

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not interpreted(), reason="needs Triton's interpreter")

BUDGETS = (None, 0)
"""With the first, products of every block are kept; with the second, none."""

CASES = [
    Case(1, 2, 1),
    Case(3, 17, 1),
    Case(9, 31, 7, temperature=0.6),
    Case(13, 53, 11, bias=True, lora=3, trained=False, softcap=5.0),
    Case(13, 53, 11, bias=True, softcap=3.0, temperature="per token", scale=0.25, lora=1),
]
BETAS = {"jensen_shannon": (0.01, 0.5, 0.99)}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """The kernels, with tiles of 8 rows and 24 columns."""
    complete_interpreter()
    monkeypatch.setattr(fused, "why_not", fused._unsupported)
    monkeypatch.setattr(divergence_chunked, "CPU_ROWS", 8)
    monkeypatch.setattr(divergence_chunked, "CPU_COLUMNS", 24)


def single(case: Case) -> Case:
    return replace(case, dtype=torch.float32)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_results_and_all_gradients_are_those_of_full_float64_probabilities(kind, case, budget):
    for beta in BETAS.get(kind, (None,)):
        given = two(single(case), kind, beta)
        found, exact = run(given, "fused", memory_budget=budget), truth(given)
        assert_same(found, exact, tolerance("fused", given=given.student))
        assert_same(found, run(given, "chunked"), tolerance("fused", given=given.student))


@pytest.mark.parametrize(
    "teacher", [{"vocabulary": 70, "lora": 2}, {"width": 2, "vocabulary": 41, "bias": True, "softcap": 2.0}], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_may_differ_in_width_vocabulary_and_head(kind, teacher):
    given = two(single(Case(13, 53, 11, softcap=4.0)), kind, **teacher)
    found = run(given, "fused")
    assert_same(found, truth(given), tolerance("fused", given=given.student))
    assert len(found["grad_weight"]) == 53
    assert not found["grad_weight"][given.vocabulary :].any()


@pytest.mark.parametrize("kind", KINDS)
def test_several_blocks_of_a_program_give_the_truth(kind, monkeypatch):
    monkeypatch.setattr(divergence_chunked, "CPU_COLUMNS", 4096)
    given = two(single(Case(3, 2300, 8)), kind)
    assert_same(run(given, "fused"), truth(given), tolerance("fused", given=given.student))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_no_further_from_the_truth_than_the_plain_path_in_the_same_dtype(kind, dtype):
    given = two(Case(21, 53, 24, bias=True, lora=2, softcap=30.0, spread=4.0, dtype=dtype), kind)
    exact, found, usual = truth(given), run(given, "fused"), plain(given)
    for name, value in exact.items():
        assert error(found[name], value) <= 1.5 * error(usual[name], value) + gradient_error(given.student), name


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"dtype": torch.bfloat16}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_gradient_change_nothing_of_the_others(kind, options, budget):
    given = two(Case(**{"rows": 21, "vocabulary": 53, "width": 16, "dtype": torch.float32} | options), kind)
    for gradient in (given.grad_value, given.student.grad_logp, given.student.grad_entropy):
        gradient[[0, 3, 4, 20]] = 0
    found, exact = run(given, "fused", memory_budget=budget), truth(given)
    for name, value in exact.items():
        assert error(found[name], value) <= gradient_error(given.student), name
    assert not found["grad_hidden"][[0, 3, 4, 20]].any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_results_have_the_same_bits_in_every_partition_and_under_every_budget(kind, monkeypatch):
    monkeypatch.setattr(divergence_chunked, "CPU_ROWS", 64)
    given = two(single(Case(70, 40, 32, bias=True, temperature="per token")), kind, width=48)
    for problem in (given.student, given.teacher):
        if not product_keeps_rows(problem.hidden.detach()[:64], problem.head.weight.detach()):
            pytest.skip("torch's product of this processor depends on where a row stands")
    with torch.no_grad():
        whole = measured(given, "fused")
        for begin, end in itertools.pairwise((0, 1, 17, 70)):
            part = measured(_some(given, slice(begin, end)), "fused", memory_budget=0)
            for name, value in whole.items():
                assert torch.equal(part[name], value[begin:end]), name


def _some(given: Two, rows: slice) -> Two:
    def cut(problem):
        return replace(problem, **{name: getattr(problem, name)[rows] for name in ("hidden", "target", "temperature")})

    return replace(given, student=cut(given.student), teacher=cut(given.teacher))


@pytest.mark.parametrize("kind", KINDS)
def test_scoring_and_training_give_the_same_bits(kind):
    given = two(Case(21, 53, 24, dtype=torch.bfloat16), kind)
    with torch.no_grad():
        scored_only = measured(given, "fused")
    for name, value in measured(given, "fused").items():
        assert torch.equal(scored_only[name], value), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_equal_streams_are_exactly_0_apart(kind, dtype):
    given = two(Case(9, 61, 16, bias=True, lora=2, temperature="per token", dtype=dtype), kind, near=0.0)
    assert not measured(given, "fused")["value"].any()


@pytest.mark.parametrize("kind", KINDS[:3])
def test_divergences_of_close_streams_keep_their_gradient(kind):
    given = two(single(Case(21, 61, 24)), kind, near=1e-5)
    given.student.grad_logp.zero_()
    given.student.grad_entropy.zero_()
    exact, found, usual = truth(given), run(given, "fused"), plain(given)
    for name in ("grad_hidden", "grad_weight"):
        assert error(found[name], exact[name]) <= 1.5 * error(usual[name], exact[name]) + gradient_error(given.student)


@pytest.mark.parametrize("kind", KINDS[:4])
def test_a_target_of_probability_nearly_one_in_both_streams_has_an_exact_value_and_gradient(kind):
    a, b = 20.0, 21.0
    head, teacher = (torch.tensor([[x], [0.0]]).requires_grad_() for x in (a, b))
    ones, options = torch.ones(1, 1), {"kind": kind, "beta": 0.3 if kind == "jensen_shannon" else None}
    found = token_divergence(ones, head, ones, teacher, torch.tensor([0]), backend="fused", **options)
    found.divergence.sum().backward()
    streams = corner([a, 0.0], [b, 0.0])
    exact = token_divergence(*streams, torch.tensor([0]), backend="chunked", **options)
    exact.divergence.sum().backward()
    assert found.divergence.item() == pytest.approx(exact.divergence.item(), rel=1e-5, abs=0)
    assert head.grad.flatten().tolist() == pytest.approx(streams[1].weight.grad.flatten().tolist(), rel=1e-5, abs=0)


@pytest.mark.parametrize("target", [None, 0, 1])
def test_streams_that_share_no_token_have_the_largest_divergences_and_no_nan(target):
    beta, ones = 0.3, torch.ones(1, 1)
    weight, teacher = (torch.tensor(logits)[:, None].requires_grad_() for logits in ([500.0, 0, 0], [0.0, 500.0, 0]))
    streams = (ones, weight, ones, teacher, None if target is None else torch.tensor([target]))
    found = token_divergence(*streams, kind="jensen_shannon", beta=beta, backend="fused")
    found.divergence.sum().backward()
    assert found.divergence.item() == pytest.approx(-beta * math.log(beta) - (1 - beta) * math.log(1 - beta), rel=1e-6)
    assert float(weight.grad.abs().max()) < 1e-6
    assert token_divergence(*streams, kind="total_variation", backend="fused").divergence.item() == pytest.approx(1.0)
    for kind in ("forward_kl", "reverse_kl"):
        assert token_divergence(*streams, kind=kind, backend="fused").divergence.item() == pytest.approx(500.0)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_masked_in_both_streams_do_not_exist(kind):
    given = two(single(Case(9, 60, 8, bias=True)), kind)
    mask = torch.where(torch.arange(60) < 13, 0.0, float("-inf"))  # a block of columns and a half
    for problem in (given.student, given.teacher):
        with torch.no_grad():
            problem.head.bias.add_(mask)
    given = replace(given, student=replace(given.student, target=given.student.target % 13).leaf_copy())
    found, other = run(given, "fused"), run(given, "chunked")
    assert_same(found, other, tolerance("fused", given=given.student))
    assert not found["grad_weight"][13:].any()


@pytest.mark.parametrize("target", [0, 60, None])
def test_a_token_that_one_stream_alone_excludes_makes_one_kl_infinite_and_no_other_measure(target):
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 4), torch.randn(61, 4)
    bias = torch.zeros(61).masked_fill(torch.arange(61) >= 30, float("-inf"))
    streams = (hidden, LMHead(weight, bias=bias)), (hidden, LMHead(weight.flip(0)))
    given = None if target is None else torch.full((3,), target)
    for kind in KINDS[:4]:
        for order in (1, -1):
            student, teacher = streams[::order]
            value = token_divergence(*student, *teacher, given, kind=kind, backend="fused").divergence
            infinite = kind == ("forward_kl" if order == 1 else "reverse_kl")
            assert value.isinf().all() if infinite else value.isfinite().all(), (kind, order)
            assert (value > 0).all()


def test_excluded_tokens_whose_probability_in_the_other_stream_is_0_make_no_kl_infinite():
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 4), torch.randn(61, 4)
    beyond = torch.arange(61) < 30  # first, so that a later maximum takes their weight away
    excluded, impossible = (torch.zeros(61).masked_fill(beyond, x) for x in (-math.inf, -1000.0))
    streams = hidden, LMHead(weight, bias=excluded), hidden, LMHead(weight.flip(0), bias=impossible)
    found = token_divergence(*streams, kind="forward_kl", backend="fused").divergence
    exact = token_divergence(*streams, kind="forward_kl", backend="reference").divergence
    torch.testing.assert_close(found, exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", ["student", "teacher"])
def test_a_nan_stays_in_its_row(kind, stream):
    given = two(single(Case(11, 31, 16)), kind)
    clean = run(given, "fused")
    with torch.no_grad():
        getattr(given, stream).hidden[5, 3] = float("nan")
    spoilt = run(given, "fused")
    others = torch.arange(11) != 5
    assert spoilt["value"][5].isnan()
    for name in (*RESULTS, "grad_hidden"):
        assert torch.equal(spoilt[name][others], clean[name][others]), name


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_give_empty_results_and_zero_gradients(kind):
    found = run(two(single(Case(0, 31, 16, bias=True, lora=2)), kind), "fused")
    assert all(found[name].shape == (0,) for name in RESULTS)
    assert not any(found[f"grad_{name}"].any() for name in ("weight", "bias", "lora_a", "lora_b"))


@pytest.mark.parametrize(
    ("kind", "kept", "forward", "backward"),
    # three blocks of columns and two streams; a second pass where both normalisers must be known
    [
        ("reverse_kl", 3, 6, 0),
        ("reverse_kl", 1, 6, 4),
        ("reverse_kl", 0, 6, 6),
        ("jensen_shannon", 3, 6, 0),
        ("jensen_shannon", 0, 12, 6),
        ("total_variation", 2, 8, 2),
    ],
)
def test_products_that_fit_into_the_budget_are_computed_once(kind, kept, forward, backward, monkeypatch):
    calls, product = [], divergence_chunked.product
    monkeypatch.setattr(divergence_chunked, "product", lambda *a, **k: calls.append(1) or product(*a, **k))
    given = two(single(Case(8, 60, 16)), kind)
    budget = 8 * 24 * (divergence_chunked.FUSED_BYTES + divergence_chunked.KEPT_BYTES * kept)
    value = measured(given, "fused", memory_budget=budget)["value"]
    assert len(calls) == forward
    value.sum().backward(retain_graph=True)
    assert len(calls) == forward + backward
    first = given.student.hidden.grad.clone()
    value.sum().backward()  # what was kept is gone: computed again, and the same
    assert len(calls) == forward + backward + 6
    torch.testing.assert_close(given.student.hidden.grad, 2 * first)


def test_a_student_that_is_not_trained_keeps_no_products(monkeypatch):
    given = two(single(Case(8, 60, 16)), "reverse_kl")
    plan = divergence_chunked._forward_plan
    found = []
    monkeypatch.setattr(divergence_chunked, "_forward_plan", lambda *a: found.append(plan(*a)[2]) or plan(*a))
    with torch.no_grad():
        measured(given, "fused")
    measured(given, "fused")
    assert found[0] == 0
    assert found[1] >= 3


@pytest.mark.parametrize(("rows", "kept"), [(16, 3), (16, 1), (16, 0), (40, 0)])
@pytest.mark.parametrize("all_rows", [True, False])
@pytest.mark.parametrize("kind", ["reverse_kl", "jensen_shannon"])
def test_logits_stay_within_the_budget(kind, all_rows, rows, kept, monkeypatch):
    monkeypatch.setattr(divergence_chunked, "CPU_COLUMNS", 48)  # more than rows: vectors of all rows are not counted
    given = two(single(Case(rows, 144, 8, bias=True)), kind)
    gradient = torch.ones(rows)
    gradient[5:9] = 1.0 if all_rows else 0.0
    budget = 16 * 48 * (divergence_chunked.FUSED_BYTES + divergence_chunked.KEPT_BYTES * kept)
    with Allocations(columns=48) as made:
        measured(given, "fused", memory_budget=budget)["value"].backward(gradient)
    assert budget // 2 <= made.peak <= budget


@pytest.mark.parametrize("budget", [0, 10**5, 10**6, 10**7])
def test_the_plan_stays_within_its_budget_where_a_tile_fits(budget):
    for rows in (1, 8, 100, 999):
        size, kept = divergence_chunked.fused_tile(rows, 1000, budget, torch.device("cpu"))
        entries = divergence_chunked.FUSED_BYTES + divergence_chunked.KEPT_BYTES * kept
        smallest = divergence_chunked.FUSED_BYTES * 8 * 24
        assert size.rows * size.columns * entries <= max(budget, smallest)
        assert (size.rows, size.columns) == (size.rows // 8 * 8, 24)
        assert kept == 0 or size.rows >= rows


def test_a_second_derivative_is_refused():
    given = two(single(Case()), "forward_kl")
    with pytest.raises(UnavailableError, match=r"create_graph=True.*backend='fused'.*backend='reference'"):
        torch.autograd.grad(measured(given, "fused")["value"].sum(), given.student.hidden, create_graph=True)


def test_float64_is_refused_and_auto_takes_chunked():
    given = two(Case(), "forward_kl")
    with pytest.raises(UnavailableError, match=r"float64, the kernels take 16 and 32 bit floats.*backend='chunked'"):
        measured(given, "fused")
    assert torch.equal(measured(given, "auto")["value"], measured(given, "chunked")["value"])


def test_auto_takes_fused_where_it_can_run(caplog):
    contract._log_once.cache_clear()
    given = two(single(Case()), "forward_kl")
    called = mock.patch.object(divergence_chunked, "measured", wraps=divergence_chunked.measured)
    with called as calls, caplog.at_level("INFO", logger="logitless"):
        found = measured(given, "auto")
    assert calls.call_args.kwargs == {"fused": True, "group": None}
    assert torch.equal(found["value"], measured(given, "fused")["value"])
    assert "head backend of two streams: fused" in caplog.text


def test_each_result_may_be_differentiated_alone():
    given = two(single(Case(9, 31, 16, bias=True, softcap=4.0)), "jensen_shannon")
    whole, parts = run(given, "fused"), []
    for name in RESULTS[:3]:
        student = given.student.leaf_copy()
        upstream = {"value": given.grad_value, "logp": student.grad_logp, "entropy": student.grad_entropy}[name]
        parts.append(torch.autograd.grad(scored(given, student, backend="fused")[name], student.hidden, upstream)[0])
    assert_same({"h": sum(parts)}, {"h": whole["grad_hidden"]}, 5e-6)

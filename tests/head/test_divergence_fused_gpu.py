"""What only a GPU can show of the fused backend of two streams: its compiled kernels, real shapes, bits, memory."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from logitless.float32_sums import float32_product
from logitless.head import divergence_chunked, token_divergence
from logitless.head.divergence_reference import value_of
from logitless.head.measure import Measure
from tests.head.cases import Case, assert_same, gradient_error, stored_error, tolerance
from tests.head.two_streams import KINDS, run, truth, two

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ordinary_memory")]

VOCABULARY = 151936
BETAS = {"forward_kl": None, "reverse_kl": None, "jensen_shannon": 0.5, "total_variation": None}
SMALL = [
    Case(67, 131, 33),
    Case(70, 1301, 40, bias=True, softcap=3.0, temperature="per token", scale=0.25, lora=3),
    Case(29, 5003, 24, bias=True, trained=False, lora=2),
]


def on_gpu(given):
    student, teacher = (problem.leaf_copy(device="cuda") for problem in (given.student, given.teacher))
    return replace(given, student=student, teacher=teacher, grad_value=given.grad_value.cuda())


def inputs(rows, width, width_teacher, vocabulary=VOCABULARY, seed=0):
    """Two bfloat16 streams that share nine tenths of the narrower width; logits have a standard deviation of 4 to 5."""
    g = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, device="cuda", generator=g)

    x, w = normal(rows, width), normal(vocabulary, width) * (4 / math.sqrt(width))
    x_teacher, w_teacher = (
        normal(rows, width_teacher),
        normal(vocabulary, width_teacher) * (4 / math.sqrt(width_teacher)),
    )
    common = min(width, width_teacher) * 9 // 10
    x_teacher[:, :common] = x[:, :common]
    w_teacher[:, :common] = w[:, :common]
    target = torch.randint(0, vocabulary, (rows,), device="cuda", generator=g)
    streams = (x.bfloat16().requires_grad_(), w.bfloat16().requires_grad_(), x_teacher.bfloat16(), w_teacher.bfloat16())
    return *streams, target, normal(rows)


def results(*given, **options):
    """The five results, as a tuple."""
    return tuple(vars(token_divergence(*given, backend="fused", **options)).values())


def step(given, kind, budget=None):
    """The five results and the gradients of the divergence by hidden and weight."""
    *streams, target, upstream = given
    found = results(*streams, target, kind=kind, beta=BETAS[kind], memory_budget=budget)
    return [x.detach() for x in (*found, *torch.autograd.grad(found[0], streams[:2], upstream))]


@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("case", SMALL, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_kernels_give_the_truth_on_odd_shapes(kind, case, budget, monkeypatch):
    monkeypatch.setattr(divergence_chunked, "FUSED_COLUMNS", 2304)
    given = on_gpu(two(replace(case, dtype=torch.float32), kind, vocabulary=case.vocabulary + 9))
    for gradient in (given.grad_value, given.student.grad_logp, given.student.grad_entropy):
        gradient[[0, 3, 4, 20]] = 0
    assert_same(run(given, "fused", memory_budget=budget), truth(given), tolerance("fused", "cuda"))


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_gradients_are_within_the_roundings_of_what_is_stored(kind):
    given = on_gpu(two(Case(70, 1301, 64, bias=True, spread=4.0, dtype=torch.bfloat16), kind, width=128))
    found, exact = run(given, "fused"), truth(given)
    for name in ("grad_hidden", "grad_weight", "grad_bias"):
        wanted = exact[name]
        assert float((found[name].double() - wanted).norm() / wanted.norm()) <= gradient_error(given.student), name


@pytest.mark.parametrize("widths", [(896, 2048), (2048, 2048), (2048, 4096), (4096, 4096)])
@pytest.mark.parametrize("kind", BETAS)
def test_errors_against_float64_are_at_most_twice_those_of_float32_logits(kind, widths):
    given = x, w, x_teacher, w_teacher, _, upstream = inputs(128, *widths)
    measure = Measure(kind, BETAS[kind] or 0.5)

    def value(dtype, product):
        z, y = product(x.detach(), w.detach().T), product(x_teacher, w_teacher.T)
        z.requires_grad_()
        found = value_of(z.log_softmax(1), y.log_softmax(1), measure)
        return found.detach().double(), torch.autograd.grad(found, z, upstream.to(dtype))[0].double()

    exact, exact_u = value(torch.float64, lambda a, b: a.double() @ b.double())
    usual, _ = value(torch.float32, float32_product)
    found, *_, of_hidden, of_weight = step(given, kind)
    rounding = 2e-7 * max(1.0, float(exact.max()))  # of the value itself
    # the largest of 128 rows; on an H200 1.6 times that of float32 logits for the reverse KL at 4096/4096
    assert float((found.double() - exact).abs().max()) <= 2 * float((usual - exact).abs().max()) + rounding
    for gradient, wanted in ((of_hidden, exact_u @ w.detach().double()), (of_weight, exact_u.T @ x.detach().double())):
        assert float((gradient.double() - wanted).norm() / wanted.norm()) <= stored_error(torch.bfloat16)


@pytest.mark.parametrize("kind", BETAS)
def test_a_rows_results_have_the_same_bits_in_every_partition_and_under_every_budget(kind):
    *streams, target, _ = inputs(5000, 896, 2048)
    options = {"kind": kind, "beta": BETAS[kind]}
    with torch.no_grad():
        whole = results(*streams, target, **options)
        for begin, end in itertools.pairwise((0, 1, 18, 2047, 2500, 5000)):
            some = streams[0][begin:end], streams[1], streams[2][begin:end], streams[3], target[begin:end]
            part = results(*some, **options, memory_budget=0)
            for value, wanted in zip(part, whole, strict=True):
                assert torch.equal(value, wanted[begin:end])


@pytest.mark.parametrize("kind", BETAS)
def test_equal_streams_are_exactly_0_apart(kind):
    x, w, *_, target, upstream = inputs(300, 896, 896)
    found = step((x, w, x.detach(), w.detach(), target, upstream), kind)
    assert not found[0].any()


@pytest.mark.parametrize("budget", [None, 2**30])
@pytest.mark.parametrize("kind", BETAS)
def test_ten_runs_have_the_same_bits(kind, budget):
    given = inputs(3000, 896, 1024, vocabulary=50304)
    first = step(given, kind, budget)
    for _ in range(9):
        assert all(torch.equal(a, b) for a, b in zip(first, step(given, kind, budget), strict=True))


@pytest.mark.parametrize("kind", BETAS)
def test_what_is_kept_and_what_is_computed_again_give_the_same_gradients(kind):
    given = inputs(3000, 896, 1024, vocabulary=50304)
    kept, again = step(given, kind, 2**36), step(given, kind, 0)
    for a, b in zip(kept[:5], again[:5], strict=True):
        assert torch.equal(a, b)
    for a, b in zip(kept[5:], again[5:], strict=True):
        assert float((a.double() - b.double()).norm() / b.double().norm()) <= stored_error(torch.bfloat16)


@pytest.mark.parametrize("gibibytes", [0, 4, 16])
def test_peak_memory_is_what_the_docstring_says(gibibytes):
    rows, width = 8192, 2048
    given, budget = inputs(rows, width, width), gibibytes * 2**30
    step(given, "reverse_kl", budget)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = step(given, "reverse_kl", budget)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before - sum(x.numel() * x.element_size() for x in found)
    columns = divergence_chunked.FUSED_COLUMNS
    smallest = divergence_chunked.FUSED_BYTES * divergence_chunked.FUSED_ROWS * columns
    assert peak <= 1.05 * (max(budget, smallest) + 10 * rows * width + 4 * columns * width + 400 * rows)

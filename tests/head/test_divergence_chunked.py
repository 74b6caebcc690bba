"""What is the chunked backend's own where it has two streams: bounded memory, bits of a row, no needless work."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from logitless.head import token_divergence
from logitless.head.divergence_chunked import BUFFERS, CPU_ROWS
from tests.head.cases import Case, assert_same
from tests.head.test_chunked import Allocations
from tests.head.two_streams import KINDS, Two, measured, run, scored, truth, two

BUDGETS = [0, BUFFERS * 8 * 97 * 600, BUFFERS * 8 * 40 * 512, 10**9, None]
NUM_ROWS = (1, 2, 31, 63, 64, 65, 130)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("case", [Case(97, 1301, 5), Case(97, 1301, 5, True, 3.0, 0.5, "per token", 3)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_any_memory_budget_gives_the_truth(kind, case, budget):
    given = two(case, kind, vocabulary=1400, bias=True)
    assert_same(run(given, memory_budget=budget), truth(given), 1e-12)


@pytest.mark.parametrize(
    "options", [{}, {"bias": True, "softcap": 3.0, "lora": 2, "temperature": "per token"}], ids=str
)
@pytest.mark.parametrize("grad_enabled", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_stay_within_the_budget(kind, grad_enabled, options):
    given = two(Case(90, 1950, 8, dtype=torch.float32, **options), kind)
    budget = BUFFERS * 4 * 90 * 650
    with Allocations(columns=512) as made, torch.set_grad_enabled(grad_enabled):
        run(given, memory_budget=budget) if grad_enabled else measured(given, memory_budget=budget)
    assert budget // 2 <= made.peak <= budget


def product_keeps_rows(rows: Tensor, weight: Tensor) -> bool:
    """Whether torch multiplies a row into the same bits wherever in a tile it stands, on this processor."""
    products = rows @ weight.T
    return all(torch.equal(rows.roll(by, 0) @ weight.T, products.roll(by, 0)) for by in (1, 2, 3, 5, 17))


@pytest.mark.parametrize("budget", [0, None])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_results_have_the_same_bits_whatever_the_number_of_rows(kind, dtype, budget):
    case = Case(200, 700, 32, bias=True, lora=16, softcap=9.0, temperature="per token", dtype=dtype)
    given = two(case, kind, width=48)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for problem in (given.student, given.teacher):
        rows, weight = problem.hidden.detach()[:CPU_ROWS].to(wide), problem.head.weight.detach().to(wide)
        if not product_keeps_rows(rows, weight):
            pytest.skip("torch's product of this processor depends on where a row stands")
    whole = measured(given, memory_budget=budget)
    for count in NUM_ROWS:
        for begin in (0, 7):
            some = slice(begin, begin + count)
            part = measured(_some(given, some), memory_budget=budget)
            for name, value in whole.items():
                assert torch.equal(part[name], value[some]), (name, count, begin)


def _some(given: Two, rows: slice) -> Two:
    def cut(problem: Any) -> Any:
        fields = {name: getattr(problem, name)[rows] for name in ("hidden", "target", "temperature")}
        return replace(problem, **fields)

    return replace(given, student=cut(given.student), teacher=cut(given.teacher))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_call_gives_the_same_bits(kind):
    given = two(Case(150, 61, 24, bias=True, lora=2, dtype=torch.bfloat16), kind)
    first = run(given)
    for name, value in run(given).items():
        assert torch.equal(value, first[name]), name


@pytest.mark.parametrize("case", [Case(5, 7, 3), Case(5, 7, 3, True, 2.0, 0.7, "per token", 2)], ids=str)
@pytest.mark.parametrize("kind", KINDS[:4])
def test_gradcheck(kind, case):
    given = two(case, kind)
    names = list(given.student.leaves)

    def results(*leaves):
        chosen = dict(zip(names, leaves, strict=True))
        hidden = chosen.pop("hidden")
        student = replace(given.student, hidden=hidden, head=replace(given.student.head, **chosen))
        found = scored(given, student, backend="chunked")
        return found["value"], found["logp"], found["entropy"]

    assert torch.autograd.gradcheck(results, tuple(given.student.leaves.values()))


def test_gradients_of_the_student_alone_form_no_logits_of_the_teacher():
    given = two(Case(40, 201, 16, dtype=torch.float32), "reverse_kl", width=24)
    for name, weights in (("logp", 0), ("divergence", 1)):
        found = token_divergence(
            given.student.hidden, given.student.head, given.teacher.hidden, given.teacher.head,
            given.student.target, kind="reverse_kl", backend="chunked",
        )  # fmt: skip
        with Allocations(columns=201) as made:
            getattr(found, name).sum().backward()
        # The logits of a tile and its probabilities; the teacher's logits are a third.
        assert made.peak == (2 + weights) * 4 * 40 * 201


def test_a_frozen_weight_gets_no_buffer_and_lora_factors_are_never_multiplied_out():
    given = two(Case(40, 201, 16, dtype=torch.float32, trained=False, lora=2, bias=True), "forward_kl", width=24)
    with Allocations() as made:
        measured(given)["value"].sum().backward()
    assert (201, 16) not in made.shapes
    assert (201, 24) not in made.shapes
    assert given.student.head.lora_a.grad is not None
    assert given.student.hidden.grad is not None


def test_rows_without_gradient_enter_no_product_of_the_backward():
    given = two(Case(64, 201, 16, dtype=torch.float32), "reverse_kl")
    value = measured(given)["value"]
    gradient = torch.zeros(64)
    gradient[[3, 60]] = 1.0
    with Allocations() as made:
        value.backward(gradient)
    assert {shape for shape in made.shapes if shape[-1:] == (201,)} == {(2, 201)}


def test_float16_keeps_gradients_of_small_weights():
    # A token weight of 1e-6 puts every gradient of the logits below float16's smallest number.
    given = two(Case(64, 100, 32, dtype=torch.float16, weight_dtype=torch.float32), "forward_kl")
    for gradient in (given.student.grad_logp, given.student.grad_entropy):
        gradient.zero_()
    large, small = run(given), run(replace(given, grad_value=given.grad_value * 2.0**-20))
    torch.testing.assert_close(small["grad_weight"] * 2.0**20, large["grad_weight"], rtol=1e-3, atol=1e-3)

"""The fused head: on the CPU under Triton's interpreter, and the same bodies on a GPU."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from logitless.errors import UnavailableError
from logitless.head import fused
from logitless.types import LMHead
from tests.head.cases import (
    DEVICES,
    Case,
    Problem,
    _with_gradients,
    error,
    gradient_error,
    plain,
    problem,
    score_error,
    truth,
)
from tests.head.interpreter import interpreted
from tests.models.kernels.exact_products import dot_in_float64

pytest.importorskip("triton")

ODD = Case(rows=21, vocabulary=37, width=24, dtype=torch.bfloat16)
EVERYTHING = replace(ODD, bias=True, lora=3, temperature="per token", scale=0.7)
CASES = {
    "plain": ODD,
    "one row": replace(ODD, rows=1),
    "few rows": replace(ODD, rows=7, vocabulary=301, width=16, bias=True, lora=3),
    "one column": replace(ODD, vocabulary=1, rows=5),
    "unaligned": replace(ODD, width=7),
    "everything": EVERYTHING,
    "softcap": replace(EVERYTHING, softcap=3.0),
    "frozen": replace(ODD, trained=False, lora=2),
    "master weights": replace(ODD, weight_dtype=torch.float32),
    "float16": replace(EVERYTHING, dtype=torch.float16),
    "float32": replace(EVERYTHING, dtype=torch.float32),
}


def run(given: Problem, **options: Any) -> dict[str, Tensor]:
    """Scores and every gradient, by the fused head whatever the device."""
    given = given.leaf_copy()
    scores = fused.token_scores(given.hidden, given.head, given.target, temperature=given.temperature, **options)
    return _with_gradients(given, scores.logp, scores.entropy)


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


def bytes_for(rows: int, case: Case) -> int:
    width = 2 if case.dtype == torch.bfloat16 else 4
    return rows * -(-case.vocabulary // 8) * 8 * width


BUDGETS = [
    *((name, "all rows kept") for name in CASES),
    *((name, "some rows kept") for name in ("plain", "few rows", "unaligned", "everything", "float16")),
    *((name, "none kept") for name in ("one row", "few rows", "everything", "softcap", "master weights", "float32")),
]


def assert_gradients(given, exact, common, floor):
    for name in (n for n in exact if n.startswith("grad")):
        assert error(given[name], exact[name]) <= 1.5 * error(common[name], exact[name]) + floor, name


@pytest.mark.parametrize(("name", "budget"), BUDGETS)
def test_fused_is_as_near_to_the_truth_as_float32_logits(name, budget, device):
    case = CASES[name]
    kept = {"all rows kept": None, "some rows kept": bytes_for(min(8, case.rows), case), "none kept": 0}[budget]
    inputs = problem(case, device)
    given, exact, common = run(inputs, memory_budget=kept), truth(inputs), plain(inputs)
    assert given.keys() == exact.keys()
    # On a GPU, float32 operands are multiplied as three tf32 products.
    bound = score_error(inputs) if device == "cpu" else 1e-4
    assert float((given["logp"] - exact["logp"]).abs().max()) < bound
    assert float((given["entropy"] - exact["entropy"]).abs().max()) < bound
    assert_gradients(given, exact, common, gradient_error(inputs) + (0.0 if device == "cpu" else 2e-6))


def test_blocks_of_the_vocabulary_add_up(device, monkeypatch):
    from logitless.head import passes

    monkeypatch.setattr(passes, "BLOCK_BYTES", 1)  # a block is one tile wide
    inputs = problem(EVERYTHING, device)
    given, exact, common = run(inputs, memory_budget=bytes_for(8, EVERYTHING)), truth(inputs), plain(inputs)
    assert_gradients(given, exact, common, gradient_error(inputs))


@pytest.mark.parametrize("rank", [1, 16, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_rows_product_with_lora_a_depends_on_that_row_alone(dtype, rank, device, monkeypatch):
    from logitless.head.kernels import launch, variants

    if interpreted():  # NumPy's products of some processors sum a row by its place in the tile
        from triton.runtime import interpreter

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot_in_float64)
    g = torch.Generator().manual_seed(rank)
    hidden, lora_a = (torch.randn(n, 72, generator=g).to(device, dtype) for n in (130, rank))
    gpu, addends = variants.variant(hidden), 2 if dtype == torch.bfloat16 else 1
    together = launch.low_rows(hidden, lora_a, 0.3, gpu, addends=addends)
    assert together.shape[1] % 8 == 0
    assert not together[:, addends * rank :].any()
    found = sum(together[:, i * rank : (i + 1) * rank].double() for i in range(addends))
    exact = 0.3 * hidden.double() @ lora_a.double().T
    # Two bfloat16 numbers hold 16 bits of one that is below 32.
    assert float((found - exact).abs().max()) < 32 * 2**-16
    for rows in ([3], [129, 5, 64], list(range(100, 20, -1))):
        assert torch.equal(launch.low_rows(hidden[rows], lora_a, 0.3, gpu, addends=addends), together[rows])


def test_a_row_is_bitwise_the_same_alone_in_any_batch_and_without_grad(device):
    inputs = problem(ODD, device)
    whole = run(inputs)["logp"]
    with torch.no_grad():
        part = fused.token_scores(inputs.hidden[5:18].contiguous(), inputs.head, inputs.target[5:18]).logp
    # The interpreter multiplies with NumPy, whose last bit depends on where a row stands.
    torch.testing.assert_close(part, whole[5:18], atol=0 if device == "cuda" else 1e-6, rtol=0)


def test_a_second_backward_recomputes_the_kept_rows(device):
    inputs = problem(replace(ODD), device)
    scores = fused.token_scores(inputs.hidden, inputs.head, inputs.target)
    first = torch.autograd.grad(scores.logp, inputs.hidden, inputs.grad_logp, retain_graph=True)[0]
    second = torch.autograd.grad(scores.logp, inputs.hidden, inputs.grad_logp)[0]
    torch.testing.assert_close(first.float(), second.float(), atol=2e-2, rtol=2e-2)


def test_nothing_is_kept_without_a_gradient(device, monkeypatch):
    from logitless.head.kernels import launch

    monkeypatch.setattr(launch, "kept_rows", lambda *_: pytest.fail("kept exponentials under no_grad"))
    inputs = problem(replace(ODD, rows=5), device)
    with torch.no_grad():
        assert not fused.token_scores(inputs.hidden, inputs.head, inputs.target).logp.requires_grad


@pytest.mark.parametrize("nonzero", [0, 1, 9, 17, 40])
@pytest.mark.parametrize("whole", [True, False])
def test_programs_that_share_a_tile_add_up_to_it_however_few_rows_are_live(nonzero, whole, device):
    from logitless.head.kernels import launch, variants

    g = torch.Generator().manual_seed(nonzero)
    k, w = (torch.randn(n, m, generator=g).bfloat16().to(device) for n, m in ((40, 520), (520, 24)))
    used = variants.variant(w)
    tile = replace(used.hidden, rows=16, columns=16, depth=16)
    few = replace(used, programs=7 if whole else 24, hidden=tile, tma=False)
    sharing = launch.Sharing.of(40, 24, 520, tile, few, whole=whole)
    assert 1 < sharing.most <= 8
    base, factor = (torch.randn(40, n, generator=g).to(device) for n in (24, 1))
    slots = torch.randperm(40, generator=g).to(device)
    out = torch.full((40, 24), 7.0, device=device)
    count = torch.tensor([nonzero], dtype=torch.int32, device=device)
    launch.row_product(k, w, out, count, few, row_of_slot=slots, factor=factor[:, 0], base=base, whole=whole)
    expected = torch.full((40, 24), 7.0, device=device).double()
    expected[slots[:nonzero]] = factor[:nonzero].double() * (
        base[:nonzero].double() + k[:nonzero].double() @ w.double()
    )
    torch.testing.assert_close(out.double(), expected, atol=1e-3, rtol=1e-5)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_compaction_puts_every_live_row_in_one_slot_and_moves_none_twice(nonzero):
    from logitless.head.kernels.launch import compaction

    chosen = compaction(torch.tensor(nonzero))
    taken = int(chosen.taken)
    source = chosen.source[:taken].tolist()
    assert sorted(source) == [row for row, alive in enumerate(nonzero) if alive]
    moved = [(slot, row) for slot, row in enumerate(source) if slot != row]
    assert all(row >= taken and not nonzero[slot] for slot, row in moved)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 5000), st.integers(1, 3000), st.integers(0, 10**7))
def test_a_memory_plan_stays_within_its_budget(rows, vocabulary, budget):
    plan = fused.MemoryPlan.of(rows, vocabulary, torch.bfloat16, memory_budget=budget)
    assert 0 <= plan.kept_rows <= rows
    assert plan.kept_bytes <= budget
    assert plan.kept_bytes >= 2 * vocabulary * plan.kept_rows


@pytest.mark.parametrize("allocated", [0, 60 * 2**30])
def test_the_default_budget_is_the_same_on_a_full_gpu_and_on_an_empty_one(allocated, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=72 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: allocated)
    assert fused.default_budget(torch.device("cuda")) == 12 * 2**30


def test_exponentials_that_do_not_fit_are_an_error_that_names_the_budget(monkeypatch):
    inputs, empty = problem(ODD, "cpu"), torch.empty

    def full(*shape, **options):
        if shape == (21, 40):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", full)
    expected = r"needed 1,680 bytes .* 21 rows.* \(train.head_memory_budget\) below 1680,.* CUDA out of memory"
    with pytest.raises(torch.OutOfMemoryError, match=expected):
        fused.token_scores(inputs.hidden, inputs.head, inputs.target)
    fused.token_scores(inputs.hidden, inputs.head, inputs.target, memory_budget=1679)


def test_what_the_kernels_cannot_take_is_an_error_with_a_remedy():
    with pytest.raises(UnavailableError, match="float64"):
        fused.token_scores(
            torch.zeros(1, 2, dtype=torch.float64), LMHead(torch.zeros(3, 2)), torch.zeros(1, dtype=torch.long)
        )


def test_without_a_gpu_fused_says_why_it_is_not_chosen():
    assert "CUDA" in fused.why_not(torch.zeros(1, 2))

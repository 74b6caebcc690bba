"""What is the chunked backend's own: bounded memory, any chunking, no work that nobody asked for."""

import weakref
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from logitless.head import chunked
from logitless.head.api import token_scores
from logitless.head.blockwise import MIN_COLUMNS, MIN_ROWS, tile
from logitless.head.sharded import is_sharded
from tests.head.cases import DEVICES, Case, _with_gradients, assert_same, problem, run, truth
from tests.head.interpreter import complete_interpreter, interpreted


class Allocations(TorchDispatchMode):
    """Shapes and dtypes of all tensors made inside, and the most bytes alive at once in matrices of many columns."""

    def __init__(self, columns: int = 0) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()
        self.typed: set[tuple[tuple[int, ...], torch.dtype]] = set()
        self.columns, self.alive, self.peak = columns, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        taken = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if self._is_local(x)}
        for value in tree_leaves(result):
            if not self._is_local(value) or value.untyped_storage().data_ptr() in taken:
                continue
            self.shapes.add(tuple(value.shape))
            self.typed.add((tuple(value.shape), value.dtype))
            if value.dim() == 2 and value.shape[1] >= self.columns > 0:
                self._count(value.nbytes)
                weakref.finalize(value, self._count, -value.nbytes)
        return result

    @staticmethod
    def _is_local(value: object) -> bool:
        return isinstance(value, torch.Tensor) and not is_sharded(value)

    def _count(self, num_bytes: int) -> None:
        self.alive += num_bytes
        self.peak = max(self.peak, self.alive)


@settings(max_examples=25, deadline=None)
@drawn(
    rows=st.integers(0, 60),
    vocabulary=st.integers(1, 40) | st.integers(500, 1100),
    width=st.integers(1, 9),
    budget=st.integers(0, 2_000_000),
)
def test_any_shape_under_any_budget_gives_the_reference(rows, vocabulary, width, budget):
    given = problem(Case(rows, vocabulary, width, True, 4.0, 0.5, "per token", 2))
    assert_same(run(given, "chunked", memory_budget=budget), run(given, "reference"), 1e-12)


@drawn(
    rows=st.integers(0, 200_000), vocabulary=st.integers(1, 300_000), budget=st.integers(0, 2**33), double=st.booleans()
)
def test_three_tiles_fit_the_budget_or_are_the_smallest(rows, vocabulary, budget, double):
    dtype = torch.float64 if double else torch.float32
    given = tile(rows, vocabulary, dtype, budget)
    assert 1 <= given.rows <= max(rows, 1)
    assert 1 <= given.columns <= vocabulary
    fits = 3 * dtype.itemsize * given.rows * given.columns <= budget
    assert fits or (given.rows <= MIN_ROWS and given.columns <= MIN_COLUMNS)


def test_rows_are_cut_only_when_they_leave_no_room_for_a_block_of_columns():
    budget = 12 * 2000 * 512
    assert tile(2000, 50_000, torch.float32, budget) == (2000, 512)
    assert tile(2001, 50_000, torch.float32, budget) == (2000, 512)
    assert tile(2000, 400, torch.float32, budget) == (2000, 400)


@pytest.mark.parametrize("grad_enabled", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"bias": True, "softcap": 3.0, "lora": 2, "temperature": "per token"}], ids=str
)
@pytest.mark.parametrize(("rows", "columns"), [(90, 650), (48, 512)])
def test_logits_stay_within_the_budget(options, grad_enabled, rows, columns):
    given = problem(Case(90, 1950, 8, dtype=torch.float32, **options))
    budget = 3 * 4 * rows * columns
    with Allocations(columns=512) as made, torch.set_grad_enabled(grad_enabled):
        options = {"temperature": given.temperature, "backend": "chunked", "memory_budget": budget}
        scores = token_scores(given.hidden, given.head, given.target, **options)
        if grad_enabled:
            _with_gradients(given, scores.logp, scores.entropy)
    assert budget // 2 <= made.peak <= budget
    assert max(n * c for n, c in (shape for shape in made.shapes if len(shape) == 2)) <= rows * columns


def test_the_weights_gradient_needs_no_wider_copy_of_the_whole():
    given = problem(Case(50, 2000, 8, dtype=torch.bfloat16))
    with Allocations() as made:
        run(given, "chunked", memory_budget=3 * 4 * 50 * 512)
    assert ((512, 8), torch.float32) in made.typed
    assert ((2000, 8), torch.float32) not in made.typed


def test_scoring_without_gradient_makes_nothing_of_the_weights_size():
    given = problem(Case(40, 201, 16, dtype=torch.float32))
    with Allocations() as made, torch.no_grad():
        token_scores(given.hidden, given.head, given.target, backend="chunked")
    assert not {(201, 16), (40, 16)} & made.shapes


def test_a_frozen_weight_gets_no_buffer_and_lora_factors_are_never_multiplied_out():
    given = problem(Case(40, 201, 16, dtype=torch.float32, trained=False, lora=2, bias=True))
    with Allocations() as made:
        token_scores(given.hidden, given.head, given.target, backend="chunked").logp.sum().backward()
    assert (201, 16) not in made.shapes
    assert given.head.lora_a.grad is not None
    assert given.hidden.grad is not None


def test_rows_without_gradient_enter_no_product_of_the_backward():
    given = problem(Case(64, 201, 16, dtype=torch.float32))
    given.grad_entropy.zero_()
    given.grad_logp.zero_()[[3, 60]] = 1.0
    scores = token_scores(given.hidden, given.head, given.target, backend="chunked")
    with Allocations() as made:
        scores.logp.backward(given.grad_logp)
    assert {shape for shape in made.shapes if shape[-1:] == (201,)} == {(2, 201)}


def test_the_entropys_gradient_costs_nothing_unless_asked_for():
    given = problem(Case(64, 201, 16, dtype=torch.float32))
    peaks = []
    for name in ("logp", "entropy"):
        score = getattr(token_scores(given.hidden, given.head, given.target, backend="chunked"), name)
        with Allocations(columns=201) as made:
            score.sum().backward()
        peaks.append(made.peak)
    assert peaks == [4 * 64 * 201, 2 * 4 * 64 * 201]


@pytest.mark.parametrize("case", [Case(5, 7, 3), Case(5, 7, 3, True, 2.0, 0.7, "per token", 2)], ids=str)
def test_gradcheck(case):
    given = problem(case)
    names = list(given.leaves)

    def scores(*leaves):
        chosen = dict(zip(names, leaves, strict=True))
        hidden = chosen.pop("hidden")
        result = token_scores(
            hidden, replace(given.head, **chosen), given.target, temperature=given.temperature, backend="chunked"
        )
        return result.logp, result.entropy

    assert torch.autograd.gradcheck(scores, tuple(given.leaves.values()))


@pytest.mark.parametrize("device", DEVICES)
def test_float16_keeps_gradients_of_small_weights(device):
    # A token weight of 1e-6 puts every gradient of the logits below float16's smallest number.
    given = problem(Case(64, 100, 32, dtype=torch.float16, weight_dtype=torch.float32), device)
    given.grad_entropy.zero_()
    large, small = run(given, "chunked"), run(replace(given, grad_logp=given.grad_logp * 2.0**-20), "chunked")
    torch.testing.assert_close(small["grad_weight"] * 2.0**20, large["grad_weight"], rtol=1e-3, atol=1e-3)


ONE_PASS = {
    "plain": Case(9, 700, 12, dtype=torch.float32),
    "everything": Case(9, 700, 12, True, 3.0, 0.5, "per token", 3, dtype=torch.float32),
    "frozen": Case(9, 700, 12, temperature=0.7, trained=False, dtype=torch.float32),
}


@pytest.fixture
def kernels(monkeypatch):
    pytest.importorskip("triton")
    if not interpreted():
        pytest.skip("needs Triton's interpreter")
    complete_interpreter()
    monkeypatch.setattr(chunked, "_has_kernels", lambda device: True)


@pytest.mark.parametrize("name", ONE_PASS)
def test_one_pass_over_a_tile_gives_what_torchs_operations_give(name, kernels):
    given = problem(ONE_PASS[name])
    found = run(given, "chunked", memory_budget=3 * 4 * 9 * 512)  # two blocks of columns
    assert_same(found, truth(given), 5e-6)


def test_one_pass_keeps_masked_columns_and_rows_that_are_no_numbers_apart(kernels):
    given = problem(replace(ONE_PASS["everything"], softcap=None))
    with torch.no_grad():
        given.head.bias[[0, 5, 600]] = float("-inf")
        given.target[2] = 600
    with mock.patch.object(chunked, "_has_kernels", return_value=False):
        expected = run(given, "chunked")
    with torch.no_grad():
        given.hidden[4] = float("nan")
    found = run(given, "chunked")
    rows = [i for i in range(9) if i != 4]
    for name in ("logp", "entropy", "grad_hidden"):
        torch.testing.assert_close(found[name][rows], expected[name][rows], atol=1e-5, rtol=1e-5)
        assert found[name][4].isnan().all()


@pytest.mark.parametrize("entropy", [False, True])
def test_a_tiles_gradient_is_rounded_once_and_wide_where_it_is_asked_for(entropy, kernels):
    from logitless.head.kernels import launch

    z = torch.randn(3, 5000)
    slopes = [torch.rand(3) for _ in range(6)]
    if not entropy:
        slopes[5] = None
    target = torch.tensor([7, 4999, -1])
    p = torch.exp(z - slopes[0][:, None]) * slopes[1][:, None]
    weight = slopes[4][:, None]
    if entropy:
        weight = weight + slopes[5][:, None] * (z - slopes[0][:, None] + slopes[2][:, None])
    expected = p * weight
    expected[[0, 1], target[:2]] = slopes[3][:2]
    product = z.clone()
    narrow = launch.tile_gradient(product, None, target, None, slopes, torch.bfloat16, wide=True)
    torch.testing.assert_close(product, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(narrow, product.bfloat16())
    product = z.clone()
    assert torch.equal(launch.tile_gradient(product, None, target, None, slopes, torch.bfloat16, wide=False), narrow)
    assert torch.equal(product, z)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [896, 4096, 8192])
def test_log_probs_of_16_bit_products_obey_the_accuracy_law(width):
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(256, width, device="cuda", generator=generator).bfloat16()
    weight = (torch.randn(128256, width, device="cuda", generator=generator) * 4 / width**0.5).bfloat16()
    target = torch.randint(0, 128256, (256,), device="cuda", generator=generator)
    logp = token_scores(hidden, weight, target, backend="chunked").logp
    exact = (hidden.double() @ weight.double().T).log_softmax(1).gather(1, target[:, None])[:, 0]
    assert float((logp.double() - exact).abs().max()) <= (1e-4 if width <= 4096 else 2.5e-4)

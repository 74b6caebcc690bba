"""What holds for every backend of the head."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from logitless.errors import InputError, UnavailableError
from logitless.types import LMHead
from tests.head.cases import (
    ANCHORS,
    BACKENDS,
    DEVICES,
    DTYPES,
    TF32X3,
    Case,
    assert_same,
    error,
    gradient_error,
    plain,
    problem,
    run,
    sized,
    token_scores,
    tolerance,
    truth,
    widest,
)

SHAPES = [(1, 1, 1), (1, 2, 1), (2, 1, 3), (3, 17, 1), (13, 31, 7), (64, 128, 16), (67, 131, 33), (129, 257, 65)]
OPTIONS = [
    {"bias": True},
    {"softcap": 3.0},
    {"softcap": 3.0, "temperature": "per token", "scale": 0.25, "bias": True},
    {"scale": 0.0625, "spread": 30.0},
    {"temperature": 0.6},
    {"temperature": "per token"},
    {"trained": False},
    {"lora": 3},
    {"lora": 3, "trained": False, "bias": True, "softcap": 5.0},
    {"lora": 1, "temperature": "per token", "scale": 2.0},
]
ON = [*((name, "cpu") for name in BACKENDS), pytest.param("fused", "cuda", marks=pytest.mark.gpu)]
KEPT = [("reference", None, "cpu"), ("chunked", None, "cpu"), ("chunked", 0, "cpu")]
KEPT += [("fused", rows, "cpu") for rows in (None, 12, 0)]
KEPT += [pytest.param("fused", rows, "cuda", marks=pytest.mark.gpu) for rows in (None, 12, 0)]
"""Backends, how many rows the fused head keeps (0: the least memory), and devices."""
CASES = [Case(*shape) for shape in SHAPES] + [Case(29, 53, 11, **options) for options in OPTIONS]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_and_all_gradients_equal_log_softmax_of_full_logits(backend, case, device):
    given = problem(replace(sized(case, backend, device), dtype=widest(backend)), device)
    assert_same(run(given, backend), truth(given), tolerance(backend, device, given))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spread", [1.0, 8.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_further_from_the_truth_than_the_plain_path_in_the_same_dtype(backend, dtype, spread, device):
    case = Case(61, 211, 48, bias=True, lora=2, softcap=30.0, spread=spread, dtype=dtype)
    given = problem(sized(case, backend, device), device)
    exact, scored, usual = truth(given), run(given, backend), plain(given)
    for name, value in exact.items():
        floor = gradient_error(given)
        if backend == "fused" and device == "cuda" and dtype == torch.float32:
            floor = TF32X3
        if backend == "fused":  # its log-probs are differences of numbers as large as the anchor is off
            floor *= float(exact["logp"].abs().max())
        assert error(scored[name], value) <= 1.5 * error(usual[name], value) + floor, name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_log_probs_of_bfloat16_inputs_are_float32_exact(backend, device):
    given = problem(sized(Case(61, 211, 256, spread=8.0, dtype=torch.bfloat16), backend, device), device)
    exact, scored = truth(given), run(given, backend)
    assert scored["logp"].dtype == scored["entropy"].dtype == torch.float32
    torch.testing.assert_close(scored["logp"].double(), exact["logp"], atol=2e-5, rtol=0)
    torch.testing.assert_close(scored["entropy"].double(), exact["entropy"], atol=2e-5, rtol=0)
    assert error(scored["grad_hidden"], exact["grad_hidden"]) < gradient_error(given)
    assert error(scored["grad_weight"], exact["grad_weight"]) < gradient_error(given)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_float32_weight_is_rounded_for_the_product_and_its_gradient_is_not(backend, device):
    case = Case(61, 97, 24, lora=2, dtype=torch.bfloat16, weight_dtype=torch.float32)
    given = problem(sized(case, backend, device), device)
    exact, scored = truth(given), run(given, backend)
    atol = 2e-5 if backend == "fused" else 1e-5  # hidden @ lora_a.T is multiplied as two bfloat16 numbers
    torch.testing.assert_close(scored["logp"].double(), exact["logp"], atol=atol, rtol=0)
    assert scored["grad_weight"].dtype == torch.float32
    assert scored["grad_hidden"].dtype == torch.bfloat16
    if device == "cpu" and backend != "fused":
        assert error(scored["grad_weight"], exact["grad_weight"]) < 1e-5
        assert error(scored["grad_lora_b"], exact["grad_lora_b"]) < 1e-5
    assert error(scored["grad_weight"], exact["grad_weight"]) < gradient_error(given)


def dtype_on(backend, device):
    return widest(backend) if device == "cpu" else torch.bfloat16


def budget_of(kept, dtype):
    """Bytes for so many rows of 31 columns, which are kept as 32."""
    return kept and kept * 32 * dtype.itemsize


def scored_corner(gap, target, backend, kept, device):
    """Scores and the gradients of logp of logits (gap, 0, 0): ``gap`` times a unit vector by the identity."""
    hidden = torch.zeros(1, 16, device=device)
    hidden[0, 0] = gap
    hidden, weight = hidden.requires_grad_(), torch.eye(3, 16, device=device).requires_grad_()
    scores = token_scores(
        hidden, weight, torch.tensor([target], device=device), backend=backend, memory_budget=kept and kept * 32
    )
    scores.logp.sum().backward()
    return scores.logp.item(), scores.entropy.item(), hidden.grad[0, :3].tolist(), weight.grad[:, 0].tolist()


@pytest.mark.parametrize(("backend", "kept", "device"), KEPT)
def test_a_target_of_probability_nearly_one_still_has_log_prob_entropy_and_gradient(backend, kept, device):
    # logits (16, 0, 0) with s = 2 exp(-16) = 2.3e-7: p_y = 1 / (1 + s), logp = -log1p(s), d logp / d z_y = s / (1 + s).
    # 1 - p = s on two tokens of s/2: entropy = s + s log(2/s) to first order in s.
    s = 2 * math.exp(-16)
    logp, entropy, of_hidden, of_weight = scored_corner(16.0, 0, backend, kept, device)
    assert logp == pytest.approx(-math.log1p(s), rel=1e-5)
    assert of_weight == pytest.approx([16 * s, -8 * s, -8 * s], rel=1e-5)
    if device == "cpu":
        assert entropy == pytest.approx(17 * s, rel=1e-5)
        assert of_hidden == pytest.approx([s, -s / 2, -s / 2], rel=1e-5)


@pytest.mark.parametrize("logp", [-40.0, -90.0, -200.0, -1000.0])
@pytest.mark.parametrize(("backend", "kept", "device"), KEPT)
def test_improbable_targets_have_exact_log_probs_and_gradients(backend, kept, logp, device):
    # logits (a, 0, 0), target 1: logp = -a - log(1 + 2 exp(-a)) = -a here; d logp / d z = (-1, 1, 0).
    found, entropy, of_hidden, of_weight = scored_corner(-logp, 1, backend, kept, device)
    near = {"rel": 1e-6, "abs": 1e-12} if device == "cpu" else {"rel": 1e-4, "abs": 1e-4}
    assert found == pytest.approx(logp, rel=1e-6)
    assert entropy == pytest.approx(0, abs=1e-5 if device == "cuda" else 1e-12 if -logp > 90 else 1e-14)
    assert of_hidden == pytest.approx([-1, 1, 0], **near)
    assert [each / -logp for each in of_weight] == pytest.approx([-1, 1, 0], **near)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_logits_and_ties_are_finite(backend):
    hidden = torch.full((2, 16), 500.0, dtype=widest(backend))
    weight = torch.ones(8, 16, dtype=widest(backend))
    scores = token_scores(hidden, weight, torch.tensor([0, 7]), backend=backend)
    torch.testing.assert_close(scores.logp.double(), torch.full((2,), 8.0).double().log().neg(), atol=1e-6, rtol=0)
    torch.testing.assert_close(scores.entropy.double(), torch.full((2,), 8.0).double().log(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("backend", "device"), ON)
def test_tokens_masked_by_a_bias_of_minus_infinity_do_not_exist(backend, device):
    given = problem(Case(9, 24, 16, bias=True, dtype=widest(backend)), device)
    target = given.target % 13
    masked = torch.where(torch.arange(24, device=device) < 13, given.head.bias.detach(), float("-inf"))
    head = replace(given.head, bias=masked.requires_grad_())
    short = replace(
        given.head, weight=given.head.weight.detach()[:13].clone().requires_grad_(), bias=given.head.bias.detach()[:13]
    )
    results = []
    for chosen in (head, short):
        hidden = given.hidden.detach().clone().requires_grad_()
        scores = token_scores(hidden, chosen, target, backend=backend)
        (scores.logp.sum() + scores.entropy.sum()).backward()
        results.append((scores.logp, scores.entropy, hidden.grad, chosen.weight.grad[:13]))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5 if device == "cpu" else TF32X3, rtol=0)
    assert not head.weight.grad[13:].any()
    assert not head.bias.grad[13:].any()


@pytest.mark.parametrize(("backend", "device"), ON[1:])
def test_a_masked_target_is_impossible_and_leaves_the_entropy(backend, device):
    head = LMHead(torch.zeros(3, 16, device=device), bias=torch.tensor([0.0, float("-inf"), 0.0], device=device))
    hidden = torch.zeros(1, 16, device=device, requires_grad=True)
    scores = token_scores(hidden, head, torch.tensor([1], device=device), backend=backend)
    scores.entropy.sum().backward()
    assert scores.logp.item() == float("-inf")
    assert scores.entropy.item() == pytest.approx(math.log(2))
    assert not hidden.grad.any()


@pytest.mark.parametrize(("backend", "device"), ON)
def test_a_nan_stays_in_its_row(backend, device):
    given = problem(Case(23, 31, 16, dtype=dtype_on(backend, device)), device)
    clean = run(given, backend)
    with torch.no_grad():
        given.hidden[5, 3] = float("nan")
    spoilt = run(given, backend)
    others = torch.arange(23) != 5
    for name in ("logp", "entropy", "grad_hidden"):
        assert spoilt[name][5].isnan().all(), name
        assert torch.equal(spoilt[name][others], clean[name][others]), name


@pytest.mark.parametrize(("backend", "kept", "device"), KEPT[1:])
def test_a_nan_in_rows_without_gradient_reaches_no_gradient(backend, kept, device):
    given = problem(Case(23, 31, 16, dtype=dtype_on(backend, device)), device)
    given.grad_logp[1::4] = given.grad_entropy[1::4] = 0
    clean = run(given, backend, memory_budget=budget_of(kept, given.hidden.dtype))
    with torch.no_grad():
        given.hidden[1::4] = float("nan")
    spoilt = run(given, backend, memory_budget=budget_of(kept, given.hidden.dtype))
    assert not spoilt["grad_hidden"][1::4].any()
    if backend == "fused":
        assert torch.equal(spoilt["grad_weight"], clean["grad_weight"])
    assert_same({"w": spoilt["grad_weight"]}, {"w": clean["grad_weight"]}, 1e-6)


@pytest.mark.parametrize(("backend", "device"), ON)
def test_no_rows_give_empty_scores_and_zero_gradients(backend, device):
    given = problem(Case(0, 31, 16, bias=True, lora=2, dtype=dtype_on(backend, device)), device)
    result = run(given, backend)
    assert result["logp"].shape == result["entropy"].shape == (0,)
    assert result["grad_hidden"].shape == (0, 16)
    for name in ("grad_weight", "grad_bias", "grad_lora_a", "grad_lora_b"):
        assert not result[name].any()


@pytest.mark.parametrize(("backend", "kept", "device"), KEPT)
def test_rows_without_gradient_give_exact_zeros(backend, kept, device):
    given = problem(
        Case(23, 31, 16, bias=True, lora=2, temperature="per token", dtype=dtype_on(backend, device)), device
    )
    given.grad_logp.zero_()
    given.grad_entropy.zero_()
    for name, value in run(given, backend, memory_budget=budget_of(kept, given.hidden.dtype)).items():
        assert name in ("logp", "entropy") or not value.any(), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wrong", [-100, -1, 31, 2**40])
def test_targets_out_of_range_are_an_error(backend, wrong):
    with pytest.raises(InputError, match="range\\(31\\)"):
        token_scores(torch.zeros(2, 16), torch.zeros(31, 16), torch.tensor([0, wrong]), backend=backend)


@pytest.mark.parametrize("shift", [0.0, -500.0, 500.0, "not finite"])
@pytest.mark.parametrize(("backend", "kept", "device"), KEPT)
def test_an_anchor_changes_no_result(backend, kept, shift, device):
    given = problem(Case(21, 31, 16, bias=True, lora=2, temperature="per token", dtype=widest(backend)), device)
    own = (given.hidden @ given.head.weight.T).detach().logsumexp(1)
    anchor = ANCHORS["not finite"].to(own) if shift == "not finite" else own + shift
    found, without = (
        run(given, backend, memory_budget=budget_of(kept, given.hidden.dtype), anchor=hint) for hint in (anchor, None)
    )
    assert_same(found, without, max(tolerance(backend, device), 2e-5 if backend == "fused" else 0))


@pytest.mark.parametrize("hint", ["true", "all zero", "all nonzero", "a third"])
@pytest.mark.parametrize(("backend", "kept", "device"), KEPT)
def test_a_nonzero_hint_changes_no_result_even_when_it_is_wrong(backend, kept, hint, device):
    given = problem(Case(23, 31, 16, dtype=widest(backend)), device)
    moved = (given.grad_logp != 0) | (given.grad_entropy != 0)
    third = torch.arange(23, device=device) % 3 == 1
    hints = {"true": moved, "all zero": moved & False, "all nonzero": moved | True, "a third": third}
    found, without = (
        run(given, backend, memory_budget=budget_of(kept, given.hidden.dtype), nonzero=nonzero)
        for nonzero in (hints[hint], None)
    )
    assert_same(found, without, tolerance(backend, device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 77, 1000])
@pytest.mark.parametrize("backend", BACKENDS)
def test_scoring_and_training_are_bitwise_identical(backend, rows, dtype, device):
    given = problem(sized(Case(rows, 61, 24, dtype=dtype), backend, device), device)
    options = {"backend": backend} if backend == "reference" else {"backend": backend, "memory_budget": 3 * 4 * 61 * 96}
    with torch.no_grad():
        scored = token_scores(given.hidden, given.head, given.target, **options)
    trained = token_scores(given.hidden, given.head, given.target, **options)
    assert trained.logp.requires_grad
    assert not scored.logp.requires_grad
    assert torch.equal(scored.logp, trained.logp)
    assert torch.equal(scored.entropy, trained.entropy)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_inputs_dtype_decides_inside_autocast_too(backend):
    given = problem(Case(23, 31, 16, dtype=torch.float32))
    outside = run(given, backend)
    names = ["logp", "entropy"] if backend == "reference" else list(outside)  # autograd's own backward obeys autocast
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = run(given, backend)
    for name in names:
        assert torch.equal(inside[name], outside[name]), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_activation_checkpointing_changes_nothing(backend):
    given = problem(Case(23, 31, 16, dtype=widest(backend)))

    def loss(hidden, weight):
        scores = token_scores(hidden, weight, given.target, backend=backend)
        return (scores.logp * given.grad_logp + scores.entropy * given.grad_entropy).sum()

    results = []
    for wrapped in (False, True):
        leaves = [leaf.detach().clone().requires_grad_() for leaf in (given.hidden, given.head.weight)]
        (checkpoint(loss, *leaves, use_reentrant=False) if wrapped else loss(*leaves)).backward()
        results.append([leaf.grad for leaf in leaves])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_a_second_derivative_is_refused(backend):
    given = problem(Case(dtype=widest(backend)))
    logp = token_scores(given.hidden, given.head, given.target, backend=backend).logp
    with pytest.raises(UnavailableError, match=rf"create_graph=True.*given backend='{backend}'.*backend='reference'"):
        torch.autograd.grad(logp.sum(), given.hidden, create_graph=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_and_gradients_may_have_any_strides(backend):
    given = problem(Case(9, 31, 16, temperature="per token", dtype=widest(backend)))

    def strided(value):
        return torch.stack([value, torch.zeros_like(value)], dim=1)[:, 0]

    results = []
    for shape in (strided, torch.Tensor.contiguous):
        hidden, weight = (shape(x.detach()).requires_grad_() for x in (given.hidden, given.head.weight))
        options = {"temperature": shape(given.temperature), "anchor": shape(-given.temperature), "backend": backend}
        scores = token_scores(hidden, weight, shape(given.target), **options)
        ones = torch.ones(1, dtype=scores.logp.dtype).expand(9) if shape is strided else torch.ones_like(scores.logp)
        results.append(
            [
                scores.logp,
                scores.entropy,
                *torch.autograd.grad([scores.logp, scores.entropy], [hidden, weight], [2 * ones, ones]),
            ]
        )
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_weight_tied_to_the_embedding_gets_both_gradients(backend):
    given = problem(Case(9, 31, 16, dtype=widest(backend)))
    ids = torch.arange(9)

    def gradient(through_input, through_head):
        weight = given.head.weight.detach().clone().requires_grad_()
        hidden = (weight if through_input else weight.detach())[ids]
        head = weight if through_head else weight.detach()
        return torch.autograd.grad(token_scores(hidden, head, given.target, backend=backend).logp.sum(), weight)[0]

    assert_same({"w": gradient(True, True)}, {"w": gradient(True, False) + gradient(False, True)}, tolerance(backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_one_of_the_two_results_may_be_differentiated(backend):
    given = problem(Case(23, 31, 16, dtype=widest(backend)))
    both = run(given, backend)
    parts = []
    for name, upstream in (("logp", given.grad_logp), ("entropy", given.grad_entropy)):
        copy = given.leaf_copy()
        score = getattr(token_scores(copy.hidden, copy.head, copy.target, backend=backend), name)
        parts.append(torch.autograd.grad(score, copy.hidden, upstream)[0])
    assert_same({"h": parts[0] + parts[1]}, {"h": both["grad_hidden"]}, tolerance(backend))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_come_in_the_dtype_of_what_they_belong_to(backend, dtype):
    if dtype not in DTYPES[backend]:
        pytest.skip(f"{backend} does not take {dtype}")
    weight = torch.ones(5, 16, dtype=dtype, requires_grad=True)
    hidden = torch.ones(3, 16, dtype=dtype, requires_grad=True)
    head = LMHead(weight, bias=torch.zeros(5, requires_grad=True))
    scores = token_scores(hidden, head, torch.tensor([0, 1, 2], dtype=torch.int32), backend=backend)
    scores.logp.sum().backward()
    assert scores.logp.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (hidden.grad.dtype, weight.grad.dtype, head.bias.grad.dtype) == (dtype, dtype, torch.float32)

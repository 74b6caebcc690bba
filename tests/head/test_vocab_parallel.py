"""A vocabulary sharded over processes gives what one process gives."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from logitless.errors import InputError, UnavailableError
from logitless.head import fused, token_divergence
from tests.head import two_streams
from tests.head.cases import ANCHORS, Case, Problem, assert_same, problem, run, token_scores, tolerance, truth, widest
from tests.head.interpreter import complete_interpreter, interpreted
from tests.head.two_streams import KINDS, scored, two, with_gradients
from tests.ranks import DEVICES, run_on_ranks

SHARED = ["chunked", "fused"]

FULL = Case(43, 37, 11, bias=True, softcap=6.0, lora=3, temperature="per token", spread=6.0)


def _shard_of(given: Problem, sizes: tuple[int, ...], rank: int) -> Problem:
    """The rank's columns: of weight, bias and lora_b; all else is replicated."""
    rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    cut = {
        name: value.detach()[rows].clone().requires_grad_(value.requires_grad)
        for name in ("weight", "bias", "lora_b")
        if (value := getattr(given.head, name)) is not None
    }
    return replace(given, head=replace(given.head, **cut))


def _run(rank, case, device, sizes, backend, options):
    options = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    return run(_shard_of(problem(case, device), sizes, rank), backend, group=dist.group.WORLD, **options)


def _check(case, device, sizes, backend, options, bound=None):
    """Every rank's scores and gradients against those of all columns."""
    case = replace(case, dtype=widest(backend))
    whole = truth(problem(case))
    results = run_on_ranks(len(sizes), _run, case, device, sizes, backend, options, device=device)
    for rank, given in enumerate(results):
        rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        sharded = {"grad_weight", "grad_bias", "grad_lora_b"}
        wanted = {name: v[rows] if name in sharded else v for name, v in whole.items()}
        assert_same(given, wanted, max(bound or 0, tolerance(backend, device, problem(case))))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", SHARED)
@pytest.mark.parametrize("sizes", [(19, 18), (36, 1), (12, 12, 13)], ids=str)
@pytest.mark.parametrize("case", [Case(43, 37, 11), FULL, replace(FULL, trained=False)], ids=str)
def test_sharded_equals_whole_in_every_score_and_gradient(case, sizes, backend, device):
    _check(case, device, sizes, backend, {"memory_budget": 5000})


SMALL = Case(21, 37, 16, bias=True, lora=2, temperature="per token", spread=6.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("budget", ["all kept", "half kept", "none kept"])
@pytest.mark.parametrize("case", [SMALL, replace(SMALL, softcap=6.0)], ids=str)
def test_fused_ranks_agree_under_every_budget(case, budget, device):
    bytes_a_rank = {"all kept": None, "half kept": 4 * 24 * 12, "none kept": 0}[budget]
    _check(case, device, (19, 18), "fused", {"memory_budget": bytes_a_rank})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("hint", ANCHORS)
def test_hints_change_nothing_when_ranks_keep_different_rows(hint, device):
    # 24 columns are kept of 19 and 16 of 11: the same budget keeps 12 rows on one rank and all 21 on the other.
    options = {"memory_budget": 4 * 16 * 21, "anchor": ANCHORS[hint], "nonzero": torch.arange(21) % 3 == 1}
    _check(replace(SMALL, vocabulary=30), device, (19, 11), "fused", options, 2e-5)


def _improbable(rank, backend):
    """Logits (a, 0 | 0, 0) on two ranks; targets on either side of the boundary."""
    weight = torch.eye(4, dtype=torch.float32)[2 * rank : 2 * rank + 2].requires_grad_()
    hidden = torch.zeros(4, 4)
    hidden[:, 0] = torch.tensor([40.0, 200.0, 1000.0, 16.811242831518264])
    hidden.requires_grad_()
    scores = token_scores(hidden, weight, torch.tensor([2, 3, 1, 0]), backend=backend, group=dist.group.WORLD)
    scores.logp.sum().backward()
    return scores.logp.detach(), hidden.grad


@pytest.mark.parametrize("backend", SHARED)
def test_no_log_prob_is_too_small_or_too_near_zero_for_a_sum_over_ranks(backend):
    # p_y = 1 / (1 + s) with s = 3 exp(-a) = 1.5e-7 in the last row.
    for logp, gradient in run_on_ranks(2, _improbable, backend):
        assert logp.tolist() == pytest.approx([-40, -200, -1000, -1.5e-7], rel=1e-5)
        assert gradient[1].tolist() == pytest.approx([-1, 0, 0, 1], abs=1e-6)
        assert gradient[3].tolist() == pytest.approx([1.5e-7, -5e-8, -5e-8, -5e-8], rel=1e-5)


def _same_bits(rank, backend, device):
    given = _shard_of(problem(replace(FULL, dtype=torch.float32), device), (19, 18), rank)
    result = run(given, backend, group=dist.group.WORLD)
    return [result[name] for name in ("logp", "entropy", "grad_hidden", "grad_lora_a")]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", SHARED)
def test_all_ranks_are_bitwise_identical(backend, device):
    for one, other in zip(*run_on_ranks(2, _same_bits, backend, device, device=device), strict=True):
        assert torch.equal(one, other)


def _out_of_range(rank, backend):
    weight = torch.zeros(5, 3)
    try:
        token_scores(torch.zeros(1, 3), weight, torch.tensor([10]), backend=backend, group=dist.group.WORLD)
    except InputError as error:
        return str(error)
    return None


@pytest.mark.parametrize("backend", SHARED)
def test_a_target_beyond_the_whole_vocabulary_is_an_error_on_every_rank(backend):
    for message in run_on_ranks(2, _out_of_range, backend):
        assert "targets within the vocabulary that the group shares" in message


def _masked_shard(rank, case, backend):
    given = _shard_of(problem(case), (12, 8), rank)
    if rank == 1:
        given = replace(given, head=replace(given.head, bias=torch.full((8,), float("-inf"), dtype=case.dtype)))
    given = replace(given, target=given.target % 12).leaf_copy()
    result = run(given, backend, group=dist.group.WORLD)
    return {name: result[name] for name in ("logp", "entropy", "grad_hidden")}


@pytest.mark.parametrize("backend", SHARED)
def test_a_shard_of_padding_masked_by_minus_infinity_adds_nothing(backend):
    case = Case(9, 20, 4, bias=True, temperature=0.7, dtype=widest(backend))
    given = problem(case)
    short = replace(given.head, weight=given.head.weight.detach()[:12], bias=given.head.bias.detach()[:12])
    whole = truth(replace(given, head=short, target=given.target % 12).leaf_copy())
    for result in run_on_ranks(2, _masked_shard, case, backend):
        assert_same(result, {name: whole[name] for name in result}, tolerance(backend))


# --- two streams


def _of_rank(rank, given, device, sizes, backend):
    """A rank's results and gradients of two streams; the teacher's last shard has 4 tokens more."""
    student = _shard_of(given.student, sizes, rank).leaf_copy(device=device)
    teacher = _shard_of(given.teacher, (*sizes[:-1], sizes[-1] + 4), rank).leaf_copy(device=device)
    given = replace(given, student=student, teacher=teacher, grad_value=given.grad_value.to(device))
    options = {"backend": backend, "memory_budget": 5000, "group": dist.group.WORLD}
    if device == "cpu" and backend == "fused":
        complete_interpreter()
        with mock.patch.object(fused, "why_not", fused._unsupported):
            return with_gradients(given, student, scored(given, student, **options))
    return with_gradients(given, student, scored(given, student, **options))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("kind", "backend", "sizes"),
    [
        *((kind, "chunked", (12, 1, 24)) for kind in KINDS),
        *((kind, "fused", (19, 18)) for kind in ("reverse_kl", "jensen_shannon")),
    ],
    ids=str,
)
def test_two_streams_sharded_by_vocabulary_are_the_whole_ones_in_every_result_and_gradient(
    kind, sizes, backend, device
):
    if device == "cpu" and backend == "fused" and not interpreted():
        pytest.skip("needs Triton's interpreter")
    given = two(replace(FULL, dtype=widest(backend)), kind, vocabulary=41)
    whole = two_streams.truth(given)
    results = run_on_ranks(len(sizes), _of_rank, given, device, sizes, backend, device=device)
    for rank, found in enumerate(results):
        rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        sharded = {"grad_weight", "grad_bias", "grad_lora_b"}
        wanted = {name: v[rows] if name in sharded else v for name, v in whole.items()}
        assert_same(found, wanted, tolerance(backend, device, given.student))
        for name in whole.keys() - sharded:
            assert torch.equal(found[name], results[0][name]), name


def _refused(rank):
    messages = []
    for ours, theirs, backend in ((4, 5 - rank, "chunked"), (4, 4 + rank, "reference")):
        streams = torch.zeros(2, 3), torch.zeros(ours, 3), torch.zeros(2, 3), torch.zeros(theirs, 3)
        with pytest.raises((InputError, UnavailableError)) as error:
            token_divergence(*streams, kind="reverse_kl", backend=backend, group=dist.group.WORLD)
        messages.append(str(error.value))
    return messages


def test_heads_that_are_cut_at_other_tokens_and_the_reference_are_refused():
    for of_cuts, of_reference in run_on_ranks(2, _refused):
        assert "shards with the same tokens of both heads" in of_cuts
        assert "the vocabulary is sharded over a process group" in of_reference

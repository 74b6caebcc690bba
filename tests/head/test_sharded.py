"""A weight sharded over ranks with different tokens gives what one rank with all tokens gives."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from logitless.errors import InputError, UnavailableError
from logitless.head import sharded, truncated_divergence
from tests.head import two_streams
from tests.head.cases import ANCHORS, Case, Problem, assert_same, problem, run, token_scores, tolerance, truth, widest
from tests.head.test_chunked import Allocations
from tests.head.two_streams import KINDS, RESULTS, scored, two
from tests.ranks import DEVICES, run_on_ranks
from tests.rounding import of_sum

SHARED = ["chunked", "fused"]

FULL = Case(43, 37, 11, bias=True, softcap=6.0, lora=3, temperature="per token")


def _sharded(given: Problem, rows: slice) -> Problem:
    """Some of the tokens, with every weight sharded over all ranks."""
    mesh = init_device_mesh(given.hidden.device.type, (dist.get_world_size(),))
    weights = {
        name: distribute_tensor(value.detach(), mesh, [Shard(0)]).requires_grad_(value.requires_grad)
        for name in ("weight", "bias", "lora_a", "lora_b")
        if (value := getattr(given.head, name)) is not None
    }
    temperature = given.temperature
    return Problem(
        hidden=given.hidden.detach()[rows].clone().requires_grad_(),
        head=replace(given.head, **weights),
        target=given.target[rows],
        temperature=temperature if isinstance(temperature, float) else temperature[rows],
        grad_logp=given.grad_logp[rows],
        grad_entropy=given.grad_entropy[rows],
        leaves={f"grad_{name}": leaf for name, leaf in weights.items() if leaf.requires_grad},
    )


def _run(rank, whole, device, tokens, backend, options):
    options = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    first = sum(tokens[:rank])
    rows = slice(first, first + tokens[rank])
    given = _sharded(whole.leaf_copy(device=device), rows)
    options = {name: value[rows] if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    scores = token_scores(
        given.hidden, given.head, given.target, temperature=given.temperature, backend=backend, **options
    )
    torch.autograd.backward([scores.logp, scores.entropy], [given.grad_logp, given.grad_entropy])
    result = {"logp": scores.logp.detach(), "entropy": scores.entropy.detach(), "grad_hidden": given.hidden.grad}
    for name, leaf in given.leaves.items():
        assert leaf.grad.placements == leaf.placements, name
        result[name] = leaf.grad.full_tensor()
    return result


def _check(given, device, tokens, backend, options, bound=0.0):
    """Every rank's scores and gradients against those of one rank with all tokens."""
    whole = truth(given)
    results = run_on_ranks(len(tokens), _run, given, device, tokens, backend, options, device=device)
    for rank, result in enumerate(results):
        rows = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
        per_token = {"logp", "entropy", "grad_hidden"}
        wanted = {name: v[rows] if name in per_token else v for name, v in whole.items()}
        assert_same(result, wanted, max(bound, tolerance(backend, device, given)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", SHARED)
@pytest.mark.parametrize("tokens", [(20, 23), (43, 0), (7, 20, 16)], ids=str)
@pytest.mark.parametrize("case", [Case(43, 37, 11), FULL, replace(FULL, trained=False), Case(43, 2, 5)], ids=str)
def test_ranks_with_their_own_tokens_and_a_shared_weight_equal_one_rank_with_all(case, tokens, backend, device):
    _check(problem(replace(case, dtype=widest(backend))), device, tokens, backend, {"memory_budget": 5000})


SMALL = Case(21, 37, 16, bias=True, lora=2, temperature="per token", spread=6.0, dtype=torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("hint", ANCHORS)
def test_hints_change_nothing_where_shards_come_by(hint, device):
    options = {"memory_budget": 4 * 48 * 4, "anchor": ANCHORS[hint], "nonzero": torch.arange(21) % 3 == 1}
    _check(problem(SMALL), device, (12, 9), "fused", options, 2e-5)


@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("backend", SHARED)
def test_columns_of_a_later_shard_may_be_any_number_of_nats_above_the_first(backend, budget):
    # Rows whose largest logit grows, or falls, by 100, 200 and 300 nats from shard to shard, or that swing.
    given = problem(Case(12, 40, 16, bias=True, dtype=widest(backend)))
    # A logit of 300 nats is a sum of 16 products and a bias, then a power of 2, in float32: what is left of it in p.
    bound = of_sum(torch.float32, 16 + 4, 300.0) if backend == "fused" else 0.0
    steps = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0], [0, 3, 0, 2], [0, 0, 3, 3]]).repeat(3, 1)
    with torch.no_grad():
        given.hidden[:, :4] = 100.0 * steps
        given.head.weight[:, :4] = torch.eye(4).repeat_interleave(10, 0)
        given.target[:] = torch.arange(12) * 7 % 40
    _check(given, "cpu", (3, 3, 3, 3), backend, {"memory_budget": budget}, bound)


@pytest.mark.parametrize("backend", SHARED)
def test_shards_of_padding_masked_by_minus_infinity_add_nothing(backend):
    given = problem(Case(9, 20, 16, bias=True, dtype=widest(backend)))
    masked = torch.arange(20) < 10
    with torch.no_grad():
        given.head.bias[masked] = -torch.inf
        given.target[:] = 10 + given.target % 10
    z = (given.hidden @ given.head.weight.T + given.head.bias).detach().double()
    logp = z.log_softmax(1).gather(1, given.target[:, None]).squeeze(1)
    for rank, result in enumerate(run_on_ranks(2, _run, given, "cpu", (5, 4), backend, {})):
        rows = slice(5 * rank, 5 + 4 * rank)
        torch.testing.assert_close(result["logp"].double(), logp[rows], atol=1e-5, rtol=0)
        assert not result["grad_weight"][masked].any()
        assert result["grad_weight"][~masked].isfinite().all()


class _Collectives(TorchDispatchMode):
    """The collectives that are called, in order: what they are and how many numbers they take."""

    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace in ("c10d", "_c10d_functional"):
            tensor = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
            self.called.append((function._schema.name.split("::")[1].strip("_"), tensor.numel()))
        return function(*args, **(kwargs or {}))


class _Nothing(torch.autograd.Function):
    """The identity, without a gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


def _order(rank, whole, tokens, backend, hand_back_nothing):
    given = _sharded(whole.leaf_copy(), slice(0, tokens[rank]))
    scores = token_scores(given.hidden, given.head, given.target, temperature=given.temperature, backend=backend)
    after = {name: node.name() for name, (node, _) in zip("xwbal", scores.logp.grad_fn.next_functions, strict=False)}
    results = [scores.logp, scores.entropy]
    if hand_back_nothing and rank == 1:
        results = [_Nothing.apply(x) for x in results]
    with _Collectives() as seen:
        torch.autograd.backward(results, [given.grad_logp, given.grad_entropy])
    return after, seen.called, {name: leaf.grad.placements for name, leaf in given.leaves.items()}


@pytest.mark.parametrize("backend", SHARED)
@pytest.mark.parametrize(("tokens", "hand_back_nothing"), [((20, 23), False), ((43, 0), False), ((20, 23), True)])
def test_every_rank_runs_the_collectives_of_a_backward_in_one_stated_order(tokens, hand_back_nothing, backend):
    # 37 columns of width 11 with a LoRA of rank 3, on two ranks: shards of 19 and 18.
    # The second shard travels while the first is multiplied.
    shards = [("broadcast", 19 * 11), ("broadcast", 18 * 11), ("reduce", 19 * 11), ("reduce", 18 * 11)]
    small = [("allreduce", 37), ("allreduce", 3 * 11), ("allreduce", 37 * 3)]
    given = problem(replace(FULL, dtype=widest(backend)))
    for after, called, placements in run_on_ranks(2, _order, given, tokens, backend, hand_back_nothing):
        assert called == shards + small
        # The head is one node, right after the leaves: there is nothing between them that autograd could order.
        assert set(after.values()) == {"torch::autograd::AccumulateGrad"}, after
        assert set(placements.values()) == {(Shard(0),)}
        assert len(placements) == 4


def _held(rank, given, ahead):
    """Shards that this rank had on their way or in use, each time the head asked for one."""
    sharded.AHEAD = ahead
    under_way, most = [], []
    plain = dist.broadcast

    def broadcast(rows, **options):
        under_way.append(rows)
        return plain(rows, **options)

    dist.broadcast = broadcast
    try:
        for number, _ in enumerate(sharded.shards(_sharded(given, slice(0)).head.weight, torch.float32)):
            most.append(len(under_way) - number)
    finally:
        dist.broadcast, sharded.AHEAD = plain, 1
    return most


def test_one_shard_is_broadcast_while_another_is_multiplied_and_no_more():
    given = problem(Case(4, 37, 11))
    assert run_on_ranks(4, _held, given, 1) == [[2, 2, 2, 1]] * 4
    assert run_on_ranks(4, _held, given, 0) == [[1, 1, 1, 1]] * 4


def _biases(rank, backend):
    """The gradients of one bias, held as float32 and as bfloat16."""
    given = _sharded(problem(Case(40, 64, 16, bias=True, dtype=torch.bfloat16)), slice(20 * rank, 20 * rank + 20))
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        head = replace(given.head, bias=given.head.bias.detach().to(dtype).requires_grad_())
        scores = token_scores(given.hidden.detach(), head, given.target, backend=backend)
        scores.logp.backward(given.grad_logp)
        gradients.append(head.bias.grad.full_tensor())
    return gradients


@pytest.mark.parametrize("backend", SHARED)
def test_the_gradient_of_a_sharded_half_precision_bias_is_rounded_after_the_sum_over_ranks(backend):
    for wide, narrow in run_on_ranks(2, _biases, backend):
        assert torch.equal(narrow, wide.bfloat16())


def _float32_master(rank, backend):
    case = Case(40, 64, 16, dtype=torch.bfloat16, weight_dtype=torch.float32)
    given = _sharded(problem(case), slice(20 * rank, 20 * rank + 20))
    with Allocations() as made:
        scores = token_scores(given.hidden, given.head.weight, given.target, backend=backend, memory_budget=0)
        torch.autograd.backward([scores.logp, scores.entropy], [given.grad_logp, given.grad_entropy])
    gradient = given.leaves["grad_weight"].grad
    return gradient.dtype, gradient.full_tensor(), (64, 16) in made.shapes


@pytest.mark.parametrize("backend", SHARED)
def test_a_sharded_float32_weight_is_never_whole_and_gets_a_float32_gradient(backend):
    given = problem(Case(40, 64, 16, dtype=torch.bfloat16, weight_dtype=torch.float32))
    whole = run(given, "chunked")["grad_weight"]
    tolerance = 1e-5 if backend == "chunked" else 2e-2  # the kernels multiply bfloat16
    for dtype, gradient, was_whole in run_on_ranks(2, _float32_master, backend):
        assert dtype == torch.float32
        assert not was_whole
        torch.testing.assert_close(gradient, whole, atol=tolerance, rtol=tolerance)


def _refused(rank):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    arguments = torch.zeros(2, 4), torch.tensor([0, 1])
    errors = []
    for placement, backend, group in (
        (Shard(1), "chunked", None),
        (Replicate(), "chunked", None),
        (Shard(0), "reference", None),
        (Shard(0), "chunked", dist.group.WORLD),
    ):
        weight = distribute_tensor(torch.zeros(6, 4), mesh, [placement])
        assert isinstance(weight, DTensor)
        try:
            token_scores(arguments[0], weight, arguments[1], backend=backend, group=group)
        except (InputError, UnavailableError) as error:
            errors.append(str(error))
    return errors


def test_a_weight_that_is_sharded_otherwise_is_refused():
    for errors in run_on_ranks(2, _refused):
        assert [error.split(";")[0] for error in errors] == [
            "needed a weight sharded by rows over a mesh of one dimension, or of two: copies and shards",
            "needed a weight sharded by rows over a mesh of one dimension, or of two: copies and shards",
            "needed a machine and tensors on which backend='reference' can run",
            "needed one way of sharding the weight",
        ]


# --- two streams


def _divergence(rank, given, tokens, backend):
    first = sum(tokens[:rank])
    rows = slice(first, first + tokens[rank])
    student, teacher = _sharded(given.student.leaf_copy(), rows), _sharded(given.teacher.leaf_copy(), rows)
    of_rank = replace(given, student=student, teacher=teacher, grad_value=given.grad_value[rows])
    found = scored(of_rank, student, backend=backend)
    upstream = [of_rank.grad_value, student.grad_logp, student.grad_entropy]
    torch.autograd.backward([found[name] for name in RESULTS[:3]], upstream)
    result = {name: value.detach() for name, value in found.items()} | {"grad_hidden": student.hidden.grad}
    for name, leaf in student.leaves.items():
        assert leaf.grad.placements == leaf.placements, name
        result[name] = leaf.grad.full_tensor()
    return result


@pytest.mark.parametrize("tokens", [(20, 23), (43, 0)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_two_sharded_heads_give_each_ranks_tokens_what_whole_ones_give(kind, tokens):
    given = two(FULL, kind)
    whole = two_streams.truth(given)
    for rank, result in enumerate(run_on_ranks(len(tokens), _divergence, given, tokens, "chunked")):
        rows = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
        wanted = {name: v[rows] if name in {*RESULTS, "grad_hidden"} else v for name, v in whole.items()}
        assert_same(result, wanted, tolerance("chunked", "cpu", given.student))


def _truncated(rank, given, ids, logp, tokens):
    first = sum(tokens[:rank])
    rows = slice(first, first + tokens[rank])
    part = _sharded(given.leaf_copy(), rows)
    options = {"temperature": part.temperature, "kind": "reverse_kl"}
    value = truncated_divergence(part.hidden, part.head, ids[rows], logp[rows], **options).divergence
    value.backward(part.grad_logp)
    gradients = {name: leaf.grad.full_tensor() for name, leaf in part.leaves.items()}
    return {"value": value.detach(), "hidden": part.hidden.grad} | gradients


def test_a_truncated_divergence_of_sharded_heads_is_that_of_whole_ones():
    given, tokens = problem(FULL), (43, 0)
    logp, ids = torch.randn(43, 37, dtype=torch.float64).log_softmax(1).topk(4, 1)
    whole = given.leaf_copy()
    options = {"temperature": whole.temperature, "kind": "reverse_kl", "backend": "reference"}
    value = truncated_divergence(whole.hidden, whole.head, ids, logp, **options).divergence
    value.backward(whole.grad_logp)
    gradients = {f"grad_{name}": leaf.grad for name, leaf in whole.leaves.items() if name != "hidden"}
    wanted = {"value": value.detach(), "hidden": whole.hidden.grad} | gradients
    of_none = wanted | {name: wanted[name][:0] for name in ("value", "hidden")}
    for found, of_rank in zip(run_on_ranks(2, _truncated, given, ids, logp, tokens), (wanted, of_none), strict=True):
        assert_same(found, of_rank, 1e-12)

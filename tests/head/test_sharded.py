"""A weight sharded over ranks with different tokens gives what one rank with all tokens gives."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from logitless.errors import InputError, UnavailableError
from logitless.head.api import token_scores
from tests.head.cases import Case, Problem, assert_same, problem, run, truth
from tests.head.test_chunked import Allocations
from tests.ranks import run_on_ranks

FULL = Case(43, 37, 11, bias=True, softcap=6.0, lora=3, temperature="per token")


def _sharded(given: Problem, rows: slice) -> Problem:
    """Some of the tokens, with every weight sharded over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
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


def _run(rank, case, tokens):
    first = sum(tokens[:rank])
    given = _sharded(problem(case), slice(first, first + tokens[rank]))
    scores = token_scores(
        given.hidden, given.head, given.target, temperature=given.temperature, backend="auto", memory_budget=5000
    )
    torch.autograd.backward([scores.logp, scores.entropy], [given.grad_logp, given.grad_entropy])
    result = {"logp": scores.logp.detach(), "entropy": scores.entropy.detach(), "grad_hidden": given.hidden.grad}
    for name, leaf in given.leaves.items():
        assert leaf.grad.placements == leaf.placements, name
        result[name] = leaf.grad.full_tensor()
    return result


@pytest.mark.parametrize("tokens", [(20, 23), (43, 0), (7, 20, 16)], ids=str)
@pytest.mark.parametrize("case", [Case(43, 37, 11), FULL, replace(FULL, trained=False), Case(43, 2, 5)], ids=str)
def test_ranks_with_their_own_tokens_and_a_shared_weight_equal_one_rank_with_all(case, tokens):
    whole = truth(problem(case))
    for rank, given in enumerate(run_on_ranks(len(tokens), _run, case, tokens)):
        rows = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
        per_token = {"logp", "entropy", "grad_hidden"}
        assert_same(given, {name: v[rows] if name in per_token else v for name, v in whole.items()}, 1e-12)


def _float32_master(rank):
    case = Case(40, 64, 16, dtype=torch.bfloat16, weight_dtype=torch.float32)
    given = _sharded(problem(case), slice(20 * rank, 20 * rank + 20))
    with Allocations() as made:
        scores = token_scores(given.hidden, given.head.weight, given.target, backend="chunked")
        torch.autograd.backward([scores.logp, scores.entropy], [given.grad_logp, given.grad_entropy])
    gradient = given.leaves["grad_weight"].grad
    return gradient.dtype, gradient.full_tensor(), (64, 16) in made.shapes


def test_a_sharded_float32_weight_is_never_whole_and_gets_a_float32_gradient():
    given = problem(Case(40, 64, 16, dtype=torch.bfloat16, weight_dtype=torch.float32))
    whole = run(given, "chunked")["grad_weight"]
    for dtype, gradient, was_whole in run_on_ranks(2, _float32_master):
        assert dtype == torch.float32
        assert not was_whole
        torch.testing.assert_close(gradient, whole, atol=1e-5, rtol=1e-5)


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
            "needed a weight sharded by rows over a mesh of one dimension",
            "needed a weight sharded by rows over a mesh of one dimension",
            "needed a machine and tensors on which backend='reference' can run",
            "needed one way of sharding the weight",
        ]

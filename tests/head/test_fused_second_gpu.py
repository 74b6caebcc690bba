"""Another device than the current one: what Triton launches follows the tensors."""

import pytest
import torch

from logitless.head import token_scores
from logitless.types import LMHead
from tests.train.tiny import completed, tiny_recipe

pytestmark = pytest.mark.multi_gpu


def _scores_and_gradients(device, dtype, options):
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(n, 64, generator=generator).to(device, dtype).requires_grad_() for n in (50, 1003)]
    hidden, weight = drawn
    bias = torch.randn(1003, generator=generator).to(device).requires_grad_()
    target = torch.randint(0, 1003, (50,), generator=generator).to(device)
    upstream = torch.randn(2, 50, generator=generator).to(device)
    scores = token_scores(hidden, LMHead(weight, bias), target, backend="fused", **options)
    grads = torch.autograd.grad([scores.logp, scores.entropy], [hidden, weight, bias], list(upstream))
    return [scores.logp.detach(), scores.entropy.detach(), *grads]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", [{}, {"memory_budget": 0}], ids=str)
def test_the_fused_head_of_tensors_on_another_device_than_the_current_one_has_the_same_bits(dtype, options):
    assert torch.cuda.current_device() == 0
    first = _scores_and_gradients("cuda:0", dtype, options)
    second = _scores_and_gradients("cuda:1", dtype, options)
    assert torch.cuda.current_device() == 0
    for a, b in zip(first, second, strict=True):
        assert b.device == torch.device("cuda:1")
        assert torch.equal(a.cpu(), b.cpu())


def test_a_run_on_the_second_device_trains_and_samples_there(tmp_path):
    before = torch.cuda.memory_allocated(0)
    fused = {"train__training_backend": "fused", "train__scoring_backend": "fused"}
    _ = completed(tiny_recipe(tmp_path, model__device="cuda:1", train__blocks=2, **fused))
    assert torch.cuda.memory_allocated(0) == before
    assert torch.cuda.max_memory_allocated(1) > 0

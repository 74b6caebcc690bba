"""Tenants on a GPU, with graphs: shared passes and batches have the bits of each tenant alone."""

import numpy as np
import pytest
import torch

from logitless.models.char_tokenizer import character_tokenizer
from logitless.rollout.sampling import SamplingOptions
from logitless.tinker.adapter import Shape
from logitless.tinker.samples import Request
from logitless.tinker.trainer import Trainer
from logitless.tinker.wire import AdamParams
from tests.rollout.gpu.wide import wide_model
from tests.tinker.test_trainer import batch, tokens_and_logprobs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ordinary_memory")]

SHAPES = [Shape(rank, True, rank % 3 > 0, rank % 2 == 0) for rank in (32, 8, 16, 3, 80, 64, 17, 32)]


def data_of(seed):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 4000, size=n).tolist() for n in rng.integers(20, 300, size=5)]


def requests_of(number, step):
    options = SamplingOptions(max_new_tokens=100, temperature=0.9)
    prompts = data_of(1000 * number + step)
    return [Request(f"{step}-{i}", tuple(ids), 4, options, step) for i, ids in enumerate(prompts)]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_eight_tenants_have_the_weights_gradients_and_tokens_of_running_alone(name):
    trainer = Trainer(wide_model(name), character_tokenizer("abcdefgh"), row_invariant=True, tokens_per_row=16384)
    alone = [trainer.create(shape, seed=seed) for seed, shape in enumerate(SHAPES)]
    mixed = [trainer.create(shape, seed=seed) for seed, shape in enumerate(SHAPES)]
    count = 0
    for step in range(3):
        samples = [trainer.sample([(a, r) for r in requests_of(n, step)]) for n, a in enumerate(alone)]
        at_once = trainer.sample([(a, r) for n, a in enumerate(mixed) for r in requests_of(n, step)])
        for number, of in enumerate(samples):
            own = tokens_and_logprobs(of)
            assert own == tokens_and_logprobs(at_once[5 * number : 5 * number + 5])
            count += sum(len(tokens) for tokens, _ in own)
        work = [batch(data_of(100 * number + step)) for number in range(len(SHAPES))]
        results = [trainer.forward_backward(adapter, each) for adapter, each in zip(alone, work, strict=True)]
        together = trainer.forward_backward_together(list(zip(mixed, work, strict=True)))
        assert trainer.exact
        assert trainer.passes_together == (8 if name == "qwen3" else 1)
        for a, b, one, many in zip(alone, mixed, results, together, strict=True):
            assert all(np.array_equal(x["logprobs"], y["logprobs"]) for x, y in zip(one[0], many[0], strict=True))
            assert all(torch.equal(x.grad, y.grad) for x, y in zip(a.weights, b.weights, strict=True))
            for adapter in (a, b):
                trainer.optim_step(adapter, AdamParams(learning_rate=1e-2))
            assert all(torch.equal(x, y) for x, y in zip(a.weights, b.weights, strict=True))
    assert count > 20_000

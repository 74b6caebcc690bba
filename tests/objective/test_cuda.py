"""The objective on a GPU: the CPU's numbers, bitwise repeatable, without a synchronisation, in O(N) memory."""

import itertools
import statistics
from dataclasses import replace

import pytest
import torch

from logitless.objective.correction import SamplerCorrection
from logitless.objective.diagnostics import step_diagnostics
from logitless.objective.divergence import KLPenalty
from logitless.objective.entropy import EntropyBonus
from logitless.objective.filters import OffPolicy, TopEntropy
from logitless.objective.objective import Objective
from logitless.objective.ratio import TokenRatio
from logitless.objective.surrogate import ClipCov, KlCov
from tests.objective.batches import random_batch
from tests.objective.compositions import RATIOS, SURROGATES

pytestmark = pytest.mark.gpu

NUM_TOKENS = 131072


def objectives():
    for ratio, surrogate in itertools.product(RATIOS, SURROGATES):
        if surrogate.reads == "any" or isinstance(ratio, TokenRatio):
            yield Objective(
                ratio,
                surrogate,
                (OffPolicy(0.1), TopEntropy(0.5)),
                SamplerCorrection(max=2.0),
                KLPenalty("k3"),
                EntropyBonus(0.1),
            )


def evaluate(objective, logp, entropy, batch, statistics):
    logp, entropy = logp.detach().requires_grad_(), entropy.detach().requires_grad_()
    output = objective(logp, entropy, batch, beta=0.1, block=statistics)
    output.loss.backward()
    return output, logp.grad, entropy.grad


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_every_composition_agrees_with_the_cpu_repeats_bitwise_and_never_synchronises():
    logp, entropy, batch = random_batch((300, 0, 1, 17, 1000), seed=3)
    on_gpu = batch.to("cuda")
    scores = [each.detach().cuda() for each in (logp, entropy)]
    for objective in objectives():
        statistics = objective.block_statistics(batch, generator=torch.Generator().manual_seed(0))
        expected, *gradients = evaluate(objective, logp, entropy, batch, statistics)
        narrow = replace(statistics, thresholds={n: t.cuda() for n, t in statistics.thresholds.items()}, selected=None)
        evaluate(objective, *scores, on_gpu, narrow)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            runs = [evaluate(objective, *scores, on_gpu, narrow) for _ in range(2)]
            numbers = step_diagnostics([runs[0][0]])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(runs[0][0].loss.cpu(), expected.loss, rtol=1e-12, atol=1e-13)
        for found, again, truth in zip(runs[0][1:], runs[1][1:], gradients, strict=True):
            assert torch.equal(found, again)
            torch.testing.assert_close(found.cpu(), truth, rtol=1e-12, atol=1e-13)
        for name, value in step_diagnostics([expected]).items():
            torch.testing.assert_close(numbers[name].cpu(), value, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize(
    "objective",
    [
        Objective(filters=(TopEntropy(0.5, scope="micro_batch"),)),
        Objective(surrogate=KlCov(0.1, scope="micro_batch")),
        Objective(surrogate=ClipCov(1.0, low=0.1, scope="micro_batch")),
    ],
    ids=["top_entropy", "kl_cov", "clip_cov"],
)
def test_statistics_of_current_values_agree_with_the_cpu_and_never_synchronise(objective):
    logp, entropy, batch = random_batch((300, 0, 1, 17, 1000), seed=3)
    expected = objective(logp, entropy, batch, generator=torch.Generator())
    on_gpu, generator = batch.to("cuda"), torch.Generator("cuda")
    scores = [each.detach().cuda().requires_grad_() for each in (logp, entropy)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = objective(*scores, on_gpu, generator=generator)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(found.loss.cpu(), expected.loss, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(found.grad_logp.cpu(), expected.grad_logp, rtol=1e-12, atol=1e-13)


def milliseconds(function, repeats=5):
    """The device's time: its queue is filled first, for the checks of shapes under pytest keep the host busy."""
    function()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(100_000_000)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


@pytest.mark.parametrize("longest", [1, 1024, NUM_TOKENS])
def test_131072_tokens_cost_under_two_percent_of_a_head_product(longest):
    logp, entropy, batch = random_batch((longest,) * (NUM_TOKENS // longest), seed=0, dtype=torch.float32)
    batch = batch.to("cuda")
    scores = [each.detach().cuda() for each in (logp, entropy)]
    objective = Objective(
        RATIOS[1], filters=(OffPolicy(0.5),), correction=SamplerCorrection("sequence", max=2.0), kl=KLPenalty("k3")
    )
    rows, width, vocabulary = 16384, 4096, 131072  # an eighth of the tokens, to fit
    hidden = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(vocabulary, width, device="cuda", dtype=torch.bfloat16)
    product = milliseconds(lambda: hidden @ weight.T) * (NUM_TOKENS / rows)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    taken = milliseconds(lambda: evaluate(objective, *scores, batch, None))
    memory = torch.cuda.max_memory_allocated() - before
    print(f"{longest} a sequence: {taken:.2f} of {product:.0f} ms, {memory / NUM_TOKENS:.0f} bytes a token")
    assert taken < 0.02 * product
    assert memory < 1000 * NUM_TOKENS

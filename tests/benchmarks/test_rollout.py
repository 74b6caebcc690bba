import pytest
import torch

from logitless.head import fused
from logitless.models.loading import load_model
from logitless.models.router import router_modules
from logitless.rollout.gpu import steps
from logitless.rollout.sampling import SamplingOptions
from logitless.train.learn.policy import Policy
from rollout_workloads import Ceilings, Cost, Workload, roofline
from tests.models.families import FAMILY
from tests.rollout.gpu.test_engine import model_of
from tests.rollout.gpu.wide import with_random_vectors

pytest.importorskip("triton")


def test_a_workload_is_read_from_its_name_and_lengths_lie_in_its_range():
    work = Workload.parse("4x3-17-2:9")
    assert (work.prompts, work.samples, work.prompt_tokens) == (4, 3, 17)
    lengths = [length for group in work.lengths for length in group]
    assert len(lengths) == 12
    assert 2 <= min(lengths) < max(lengths) <= 9
    assert work.tokens == sum(lengths)
    assert Workload.parse("1x2-3-5").lengths == ((5, 5),)
    assert {len(ids) for ids in work.prompt_ids(100)} == {17}


def test_the_roofline_is_weights_keys_and_prompts_at_the_speed_of_the_device():
    """One prompt of 10 tokens, 2 samples of 3 tokens: two steps after the prompt, which gives the first token."""
    cost, device = Cost(parameters=1000, token_bytes=40), Ceilings(bytes_per_second=100.0, flops_per_second=1e9)
    steps = sum(2000 / 100 + 40 * (10 + 2 * t) / 100 for t in (1, 2))
    assert roofline(cost, Workload(1, 2, 10, 3, 3), device) == pytest.approx(6 / (steps + 2 * 1000 * 10 / 1e9))
    slow = Ceilings(bytes_per_second=1e12, flops_per_second=1000.0)
    assert roofline(cost, Workload(1, 2, 10, 3, 3), slow) == pytest.approx(6 / (2 * 4.0 + 20.0), rel=1e-6)


@pytest.mark.parametrize("name", ["gpu", "transformers"])
def test_every_engine_samples_the_lengths_of_the_workload(name, monkeypatch):
    import rollout_contenders as contenders

    model = model_of(end_bias=-1e4)
    subject = object.__new__(contenders.Subject)
    subject.model, subject.vocabulary = model, 11
    work = Workload.parse("2x2-5-1:6")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    contender = contenders.CONTENDERS[name](subject, work)
    assert contender.sample() == work.tokens
    groups = contender.completions(SamplingOptions(max_new_tokens=6, stop=(contenders.NEVER,)[: contender.stops]))
    assert tuple(tuple(c.length for c in group) for group in groups) == work.lengths
    contender.close()


@pytest.mark.parametrize("name", ["glm4_moe", pytest.param("qwen3_moe", marks=pytest.mark.slow), "qwen3"])
def test_the_law_counts_tokens_and_routes_that_are_sampled_otherwise_than_trained(name, monkeypatch):
    import rollout_contenders as contenders

    class Subject:
        vocabulary = 11

        def __init__(self, _):
            config = FAMILY[name].config | {"vocab_size": 11, "max_position_embeddings": 256}
            self.model = with_random_vectors(load_model(config, random_weights=True, seed=1)).requires_grad_(False)

    monkeypatch.setattr(contenders, "Subject", Subject)
    monkeypatch.setattr(fused, "why_not", fused._unsupported)
    monkeypatch.setattr(steps, "STEPS", 3)
    work, routed = Workload.parse("2x2-5-1:5"), {"qwen3": 0, "qwen3_moe": 2, "glm4_moe": 1}[name]
    (row,) = contenders.law("tiny", work, 1)
    routes = {"routes": row["tokens"] * routed, "mismatched_routes": 0} if routed else {}
    assert row == {"tokens": row["tokens"], "blocks": 1, "mismatched_tokens": 0, **routes}
    assert 4 <= row["tokens"] <= work.tokens
    scores = Policy.scores

    def of_other_routers(self, *arguments, **options):
        for router in router_modules(self.model).values():
            router.weight.copy_(router.weight.flip(0))
        return scores(self, *arguments, **options)

    monkeypatch.setattr(Policy, "scores", of_other_routers)
    (row,) = contenders.law("tiny", work, 1)
    assert bool(row["mismatched_tokens"]) == bool(routed) == bool(row.get("mismatched_routes"))

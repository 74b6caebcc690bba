import pytest
import torch

from logitless.rollout.sampling import SamplingOptions
from rollout_workloads import Ceilings, Cost, Workload, roofline
from tests.rollout.gpu.test_engine import model_of

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

import pytest
import torch

from logitless.rollout.sampling import SamplingOptions
from logitless.rollout.transformers import TransformersEngine
from tests.models.tiny import tiny
from tests.rollout.test_transformers import prompts, tokenizer

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gpt2"])
def test_the_device_samples_what_the_host_samples_in_float32(name):
    torch.use_deterministic_algorithms(False)
    options = SamplingOptions(max_new_tokens=8, top_p=0.9, stop=("ab",))
    host = TransformersEngine(tiny(name), tokenizer()).sample(prompts(3, 9, 1), 4, options, seed=1)
    device = TransformersEngine(tiny(name, device="cuda"), tokenizer()).sample(prompts(3, 9, 1), 4, options, seed=1)
    same = [
        a.token_ids.tolist() == b.token_ids.tolist()
        for x, y in zip(host, device, strict=True)
        for a, b in zip(x, y, strict=True)
    ]
    assert sum(same) >= 11, "rounding may move one boundary"


def test_autocast_samples_with_finite_log_probabilities():
    torch.use_deterministic_algorithms(False)
    engine = TransformersEngine(tiny("qwen3", device="cuda"), tokenizer(), autocast=torch.bfloat16)
    for group in engine.sample(prompts(3, 9), 4, SamplingOptions(max_new_tokens=8), seed=1):
        assert all(torch.tensor(completion.logp_sampler).isfinite().all() for completion in group)

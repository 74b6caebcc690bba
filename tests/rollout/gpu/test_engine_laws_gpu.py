"""The engine on a GPU, with graphs: training's bits over many tokens, while the weights change between blocks."""

import threading

import pytest
import torch

from logitless.data.packing import pack
from logitless.models.char_tokenizer import character_tokenizer
from logitless.models.loading import load_model
from logitless.models.lora import LoraOptions, add_lora
from logitless.rollout.engine import Weights
from logitless.rollout.gpu.engine import GpuEngine
from logitless.rollout.sampling import SamplingOptions
from logitless.train.learn.policy import Policy
from logitless.types import Prompt
from tests.models.tiny import CONFIGS

pytestmark = pytest.mark.gpu
WIDE = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
WIDE |= {"vocab_size": 4000, "max_position_embeddings": 4096, "head_dim": 64, "initializer_range": 0.05}


@pytest.fixture(autouse=True)
def ordinary_memory():
    """Poison is written by a kernel of its own before every launch, which a captured graph would repeat."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize(("lora", "filters"), [(False, {}), (True, {}), (False, {"top_p": 0.95, "min_p": 0.01})])
def test_every_token_has_the_trainers_bits_while_weights_change_between_blocks(lora, filters):
    config = {**CONFIGS["qwen3"], **WIDE}
    model = load_model(config, random_weights=True, seed=1, dtype=torch.bfloat16, device="cuda").eval()
    if lora:
        model = add_lora(model, LoraOptions(rank=8))
    engine = GpuEngine(model, character_tokenizer("abcdefgh"), max_rows=96, prefill_tokens=2000)
    policy, generator = Policy(model), torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 700, (24,), generator=generator).tolist()
    prompts = [
        Prompt(str(i), "", tuple(torch.randint(3, 4000, (n,), generator=generator).tolist()))
        for i, n in enumerate(lengths)
    ]
    options = SamplingOptions(max_new_tokens=150, temperature=0.9, stop_token_ids=tuple(range(3, 20)), **filters)
    for block in range(3):
        groups = engine.sample(prompts, 8, options, seed=block)
        assert engine.exact
        pairs = [(p, c) for p, group in zip(prompts, groups, strict=True) for c in group]
        tokens = 0
        for start in range(0, len(pairs), 24):
            part = pairs[start : start + 24]
            with torch.no_grad():
                scores = policy.scores(pack(part), temperature=0.9, backend="fused")
            assert scores.logp.tolist() == [
                x for _, c in part for x in (c.logp_sampler if c.logp_policy is None else c.logp_policy)
            ]
            assert scores.entropy.tolist() == [x for _, c in part for x in c.entropy_sampler]
            tokens += len(scores.logp)
        assert tokens > 5000
        alone = engine.sample(prompts[5:6], 3, options, seed=block)
        assert alone[0] == groups[5][:3]
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad or not lora:
                    parameter.add_(0.01 * torch.randn_like(parameter))
        engine.load(Weights.of(model), block + 1)


def test_a_first_call_waits_for_no_kernel_in_its_own_thread_and_other_lengths_need_no_new_ones(tmp_path, monkeypatch):
    import triton

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing is known of this machine
    config = {**CONFIGS["qwen2"], **WIDE, "hidden_size": 768, "intermediate_size": 1536, "num_attention_heads": 12}
    model = load_model(config, random_weights=True, seed=1, dtype=torch.bfloat16, device="cuda").eval()
    engine = GpuEngine(model, character_tokenizer("abcdefgh"), max_rows=64)
    compiled: list[tuple[str, bool]] = []  # kernels, and whether the caller's thread waited for them

    def note(*, src, **_):
        compiled.append((src.name, threading.current_thread() is threading.main_thread()))

    def sampled(lengths: list[int], new_tokens: int) -> None:
        prompts = [Prompt(str(i), "", (5,) * n) for i, n in enumerate(lengths)]
        engine.sample(prompts, 6, SamplingOptions(max_new_tokens=new_tokens), seed=0)

    with triton.knobs.cache.scope(), triton.knobs.compilation.scope():
        triton.knobs.cache.dir = str(tmp_path / "triton")
        triton.knobs.compilation.listener = note
        sampled([700, 40, 65], 400)
        assert compiled
        assert not [name for name, waited_for in compiled if waited_for]
        compiled.clear()
        sampled([41, 600, 64, 130], 300)
        sampled([41, 600, 64, 129], 300)
        assert compiled == []

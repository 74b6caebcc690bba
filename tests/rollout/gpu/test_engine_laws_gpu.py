"""The engine on a GPU, with graphs: bitwise identical to training over many tokens, with changing weights."""

import threading

import pytest
import torch

from logitless.models.lora import LoraOptions, add_lora
from logitless.models.row_invariant.coverage import FAMILIES
from logitless.rollout.engine import Weights
from logitless.rollout.sampling import SamplingOptions
from logitless.train.learn.policy import Policy
from logitless.types import Prompt
from tests.rollout.gpu.wide import engine_of, random_prompts, wide_family, wide_model
from tests.rollout.plain_forward import policy_logp, trainers_scores

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ordinary_memory")]


@pytest.mark.parametrize(
    ("lora", "filters", "name"),
    [
        (False, {}, "qwen3"),
        (True, {}, "qwen3"),
        (False, {"top_p": 0.95, "min_p": 0.01}, "qwen3"),
        (False, {}, "qwen3_moe"),
        (True, {}, "qwen3_moe"),
        (True, {}, "qwen3_5"),
        (False, {}, "qwen3_next"),
        (True, {}, "qwen3_5_moe_text"),
        (True, {}, "llama4_text"),
    ],
)
def test_every_token_has_the_trainers_bits_while_weights_change_between_blocks(lora, filters, name):
    model = add_lora(wide_model(name), LoraOptions(rank=8)) if lora else wide_model(name)
    engine, policy = engine_of(model, max_rows=96, prefill_tokens=2000), Policy(model)
    prompts = random_prompts(24, 700, torch.Generator().manual_seed(1))
    options = SamplingOptions(max_new_tokens=150, temperature=0.9, stop_token_ids=tuple(range(3, 20)), **filters)
    for block in range(3):
        groups = engine.sample(prompts, 8, options, seed=block)
        assert engine.exact
        tokens = 0
        for start in range(0, len(prompts), 3):  # 24 completions in a pass
            part = groups[start : start + 3]
            scores = trainers_scores(policy, prompts[start : start + 3], part, temperature=0.9)
            assert scores.logp.tolist() == policy_logp(part)
            assert scores.entropy.tolist() == [x for group in part for c in group for x in c.entropy_sampler]
            tokens += len(scores.logp)
        assert tokens > 5000
        alone = engine.sample(prompts[5:6], 3, options, seed=block)  # the last of them as a single row, for a while
        for one, among_others in zip(alone[0], groups[5], strict=False):
            assert one.token_ids.tolist() == among_others.token_ids.tolist(), block
            assert one == among_others, block
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad or not lora:
                    parameter.add_(0.01 * torch.randn_like(parameter))
        engine.load(Weights.of(model), block + 1)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_exact_family_samples_with_the_trainers_bits(model_type):
    model = wide_family(model_type)
    engine, policy = engine_of(model, max_rows=24, prefill_tokens=200), Policy(model)
    prompts = random_prompts(6, 120, torch.Generator().manual_seed(1))
    groups = engine.sample(prompts, 4, SamplingOptions(max_new_tokens=40, ignore_eos=True), seed=1)
    assert engine.exact
    scores = trainers_scores(policy, prompts, groups, temperature=1.0)
    assert scores.logp.tolist() == policy_logp(groups)
    assert scores.entropy.tolist() == [x for group in groups for c in group for x in c.entropy_sampler]
    assert len(scores.logp) == 6 * 4 * 40


def test_a_first_call_waits_for_no_kernel_in_its_own_thread_and_other_lengths_need_no_new_ones(tmp_path, monkeypatch):
    import triton

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing is known of this machine
    model = wide_model("qwen2", hidden_size=768, intermediate_size=1536, num_attention_heads=12)
    engine = engine_of(model, max_rows=64)
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

"""A model whose layers are sharded over the ranks that sample with it: the bits of the whole model on one rank."""

import pytest
import torch
import torch.distributed as dist

from logitless.distributed.layer_shards import CopyBytes
from logitless.distributed.ranks import Ranks
from logitless.head import fused
from logitless.models.char_tokenizer import character_tokenizer
from logitless.models.loading import load_model
from logitless.models.lora import LoraOptions, add_lora
from logitless.rollout.engine import Weights
from logitless.rollout.sampling import SamplingOptions
from logitless.types import Prompt
from tests.head.interpreter import complete_interpreter
from tests.models.mixtures import MIXTURES
from tests.models.tiny import CONFIGS
from tests.ranks import DEVICES, run_on_ranks

pytest.importorskip("triton")

SMALL = {"num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 11}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
PROMPTS = [Prompt("a", "", (3, 4, 5)), Prompt("b", "", (6,)), Prompt("c", "", tuple(3 + i % 8 for i in range(70)))]
LONG, SHORT = SamplingOptions(max_new_tokens=9), SamplingOptions(max_new_tokens=4)


def _model(name, device="cpu", empty=False, seed=1):
    model = load_model(
        {**(CONFIGS | MIXTURES)[name], **SMALL}, random_weights=True, seed=seed, device=device, empty=empty
    )
    if name == "qwen3":
        model = add_lora(model, LoraOptions(rank=2), seed=seed)
        for parameter in model.parameters():
            if not parameter.is_meta:
                parameter.data.add_(0.01)  # also what an adapter begins with at 0
    return model.eval()


def _engine(name, device):
    from logitless.rollout.gpu.sharded import ShardedGpuEngine

    if device == "cpu":
        complete_interpreter()
        fused.why_not = fused._unsupported
    device = torch.device(device)
    return ShardedGpuEngine(_model(name, empty=True), character_tokenizer("abcdefgh"), device=device)


def _sampled(rank, name, device, calls):
    """What each call gives; rank r makes ``calls[r]`` of them."""
    engine, found = _engine(name, device), []
    engine.share(Ranks(data=dist.group.WORLD) if dist.is_initialized() else Ranks.alone())
    for version in range(2):
        engine.load(Weights.of(_model(name, device, seed=1 + version)), version)
        with engine.together():
            found += [engine.sample(*each, seed=version) for each in calls[rank]]
    shards = engine._shards
    assert shards.num_bytes.total == sum(
        memory.untyped_storage().nbytes()
        for memory in {
            each.untyped_storage()._cdata: each for each in (*engine._shards.parameters.values(), *shards._pieces)
        }.values()
    )
    return found, shards.num_bytes


def _alone(name, device, calls):
    return _sampled(0, name, device, [calls])[0]


CALLS = [(PROMPTS, 2, LONG), (PROMPTS[:1], 1, SHORT)], [(PROMPTS[1:], 1, SHORT)], []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "qwen3_5"])
def test_ranks_with_few_completions_or_none_sample_what_one_rank_with_all_weights_samples(name, device):
    ranks = run_on_ranks(len(CALLS), _sampled, name, device, CALLS, device=device)
    for (found, _), calls in zip(ranks, CALLS, strict=True):
        assert found == _alone(name, device, calls)
    assert ranks[0][0][0] != ranks[0][0][2]  # other weights, other completions

"""A model of real kernels' shapes on a GPU, prompts of its tokens, and an engine: for tests with graphs."""

import torch

from logitless.models.char_tokenizer import character_tokenizer
from logitless.models.loading import load_model
from logitless.rollout.gpu.engine import GpuEngine
from logitless.types import Prompt
from tests.models.mixtures import MIXTURES
from tests.models.tiny import CONFIGS

WIDE = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
WIDE |= {"vocab_size": 4000, "max_position_embeddings": 4096, "head_dim": 64, "initializer_range": 0.05}
MANY_EXPERTS = {"num_experts": 32, "num_local_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256}
MANY_EXPERTS |= {"intermediate_size_mlp": 1024, "attention_chunk_size": 128}


def wide_model(name="qwen3", **sizes):
    config = {**(CONFIGS | MIXTURES)[name], **WIDE, **(MANY_EXPERTS if name in MIXTURES else {}), **sizes}
    return load_model(config, random_weights=True, seed=1, dtype=torch.bfloat16, device="cuda").eval()


def engine_of(model, **options):
    return GpuEngine(model, character_tokenizer("abcdefgh"), **options)


def random_prompts(count, longest, generator):
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    ids = (torch.randint(3, WIDE["vocab_size"], (n,), generator=generator).tolist() for n in lengths)
    return [Prompt(str(i), "", tuple(row)) for i, row in enumerate(ids)]

"""A model of real kernels' shapes on a GPU, prompts of its tokens, and an engine: for tests with graphs."""

import torch

from logitless.models.char_tokenizer import character_tokenizer
from logitless.models.loading import load_model
from logitless.rollout.gpu.engine import GpuEngine
from logitless.types import Prompt
from tests.models.families import FAMILY
from tests.models.mixtures import MIXTURES
from tests.models.tiny import CONFIGS

WIDE = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
WIDE |= {"vocab_size": 4000, "max_position_embeddings": 4096, "head_dim": 64, "initializer_range": 0.05}
MANY_EXPERTS = {"num_experts": 32, "num_local_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256}
MANY_EXPERTS |= {"intermediate_size_mlp": 1024, "attention_chunk_size": 128}


def wide_model(name="qwen3", **sizes):
    config = {**(CONFIGS | MIXTURES)[name], **WIDE, **(MANY_EXPERTS if name in MIXTURES else {}), **sizes}
    return load_model(config, random_weights=True, seed=1, dtype=torch.bfloat16, device="cuda").eval()


def wide_family(model_type):
    """A family that row-invariant layers cover, at these sizes."""
    sizes = WIDE | {"sliding_window": 40, "n_routed_experts": 32, **MANY_EXPERTS}
    config = FAMILY[model_type].config
    config |= {name: size for name, size in sizes.items() if name in config}
    return with_random_vectors(load_model(config, random_weights=True, seed=1, dtype=torch.bfloat16, device="cuda"))


def with_random_vectors(model):
    """The model with norms, biases and sinks that differ, and routers' correction biases, which begin as 0."""
    generator = torch.Generator().manual_seed(2)
    corrections = [each for name, each in model.named_buffers() if name.endswith("correction_bias")]
    with torch.no_grad():
        for vector in (*(each for each in model.parameters() if each.ndim == 1), *corrections):
            vector.add_(0.3 * torch.randn(vector.shape, generator=generator).to(vector))
    return model.eval()


def engine_of(model, **options):
    return GpuEngine(model, character_tokenizer("abcdefgh"), **options)


def random_prompts(count, longest, generator):
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    ids = (torch.randint(3, WIDE["vocab_size"], (n,), generator=generator).tolist() for n in lengths)
    return [Prompt(str(i), "", tuple(row)) for i, row in enumerate(ids)]

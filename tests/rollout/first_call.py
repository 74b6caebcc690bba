"""A program: the first calls of the GPU engine in a process, one with each of the given options.

    python -m tests.rollout.first_call '{"top_p": 0.9}' '{"temperature": 0}'

It fails where a token's log-prob under the policy is not the trainer's, bit for bit.
"""

import json
import sys

import torch

from logitless.data.packing import pack
from logitless.models.char_tokenizer import character_tokenizer
from logitless.models.loading import load_model
from logitless.rollout.gpu.engine import GpuEngine
from logitless.rollout.sampling import SamplingOptions
from logitless.train.learn.policy import Policy
from logitless.types import Prompt
from tests.models.tiny import CONFIGS

SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
SIZES |= {"vocab_size": 4000, "max_position_embeddings": 4096, "head_dim": 64, "initializer_range": 0.05}


def main() -> None:
    """Samples with each of the options, and compares with a forward pass of training."""
    model = load_model({**CONFIGS["qwen3"], **SIZES}, random_weights=True, dtype=torch.bfloat16, device="cuda").eval()
    engine, policy = GpuEngine(model, character_tokenizer("abcdefgh"), max_rows=64), Policy(model)
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 300, (8,), generator=generator).tolist()
    prompts = [
        Prompt(str(i), "", tuple(torch.randint(3, 4000, (n,), generator=generator).tolist()))
        for i, n in enumerate(lengths)
    ]
    for seed, text in enumerate(sys.argv[1:]):
        fields = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(text).items()}
        options = SamplingOptions(max_new_tokens=24, **fields)
        groups = engine.sample(prompts, 4, options, seed=seed)
        pairs = [(p, c) for p, group in zip(prompts, groups, strict=True) for c in group]
        if options.temperature > 0:
            with torch.no_grad():
                scores = policy.scores(pack(pairs), temperature=options.temperature, backend="fused")
            assert scores.logp.tolist() == [
                x for _, c in pairs for x in (c.logp_sampler if c.logp_policy is None else c.logp_policy)
            ], text
        else:
            assert all(x == 0 for _, c in pairs for x in c.logp_sampler), text


if __name__ == "__main__":
    main()

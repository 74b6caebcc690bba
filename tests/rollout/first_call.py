"""A program: the first calls of the GPU engine in a process, one with each of the given options.

    python -m tests.rollout.first_call qwen3 '{"top_p": 0.9}' '{"temperature": 0}'

It fails where a token's log-prob under the policy is not the trainer's, bit for bit.
"""

import faulthandler
import json
import sys

import torch

from logitless.rollout.sampling import SamplingOptions
from logitless.train.learn.policy import Policy
from tests.rollout.gpu.wide import engine_of, random_prompts, wide_model
from tests.rollout.plain_forward import policy_logp, trainers_scores


def main() -> None:
    """Samples with each of the options, and compares with a forward pass of training."""
    faulthandler.dump_traceback_later(300, exit=True)  # a process that hangs ends, and says where
    name, *texts = sys.argv[1:]
    model = wide_model(name)
    engine, policy = engine_of(model, max_rows=64), Policy(model)
    prompts = random_prompts(8, 300, torch.Generator().manual_seed(1))
    for seed, text in enumerate(texts):
        fields = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(text).items()}
        options = SamplingOptions(max_new_tokens=24, **fields)
        groups = engine.sample(prompts, 4, options, seed=seed)
        if options.temperature > 0:
            scores = trainers_scores(policy, prompts, groups, temperature=options.temperature)
            assert scores.logp.tolist() == policy_logp(groups), text
        else:
            assert all(x == 0 for group in groups for c in group for x in c.logp_sampler), text


if __name__ == "__main__":
    main()

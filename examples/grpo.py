"""GRPO in one file: a small language model learns to build palindromes, in about three minutes on a CPU.

    python examples/grpo.py

Read it from top to bottom. After a supervised warm start, each block samples completions, rewards them, packs them end
to end, computes their log-probs under the sampling policy, computes advantages and token weights, and takes optimizer
steps. The trainer (``logitless train recipes/quickstart.yaml``) uses the same functions, and adds checkpoints, KL
control, metrics and more.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from logitless import Completion, PackedBatch, Prompt, TokenBatch, TokenScores, presets, token_scores
from logitless.data.packing import pack
from logitless.data.prompts import load_prompts, without_overlap
from logitless.data.sources import ReasoningGymData
from logitless.models.lm_head import backbone_hidden, lm_head
from logitless.models.loading import load_model, load_tokenizer
from logitless.objective.advantage import AdvantageInputs
from logitless.objective.weighting import Totals
from logitless.rewards.reasoning_gym import ReasoningGym
from logitless.rollout.sampling import SamplingOptions
from logitless.rollout.transformers import TransformersEngine

TASK = "palindrome_generation"
MODEL = {
    "model_type": "qwen3",
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
PROMPTS, SAMPLES = 32, 16  # prompts a block, completions a prompt
SAMPLING = SamplingOptions(max_new_tokens=16, temperature=1.0)
RATE = 7e-4


def main(warm_steps: int = 265, blocks: int = 200, num_held_out: int = 200) -> list[float]:
    """Train; returns the held-out accuracy before, half way and after."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer(Path(__file__).parents[1] / "recipes/quickstart/tokenizer")
    model = load_model(MODEL, random_weights=True, seed=0)
    engine = TransformersEngine(model, tokenizer)
    reward = ReasoningGym(task=TASK, partial_credit=False)  # 1 for a palindrome of the given letters, else 0

    def questions(size: int, seed: int) -> tuple[Prompt, ...]:
        data = ReasoningGymData(task=TASK, size=size, seed=seed)
        return load_prompts(data, tokenizer, max_prompt_tokens=32).prompts

    held_out = questions(num_held_out, seed=100_000)
    training = without_overlap(questions(PROMPTS * max(1, blocks), seed=1), held_out)

    # ---- Warm start: imitate the given answers until a random model answers in the right form.
    def answered(prompt: Prompt) -> tuple[Prompt, Completion]:
        text = prompt.columns["answer"]
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        return prompt, Completion(prompt.id, np.array(ids), text, "stop")

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    examples = without_overlap(questions(128 * max(1, warm_steps), seed=50_000), held_out)
    for step in range(warm_steps):
        batch = pack([answered(prompt) for prompt in part(examples, step, 128)])
        (-scores_of(model, batch).logp.mean()).backward()
        take_step(model, optimizer)

    # ---- Reinforcement learning.
    grpo = presets.grpo()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    accuracy = [evaluate(engine, reward, held_out)]
    print(f"after the warm start: held-out accuracy {accuracy[-1]:.3f}")
    for block in range(blocks):
        # Sample: G completions of each prompt.
        prompts = part(training, block, PROMPTS)
        groups = engine.sample(prompts, SAMPLES, SAMPLING, seed=block)
        pairs = [(p, completion) for p, completions in zip(prompts, groups, strict=True) for completion in completions]

        # Reward: one number a completion.
        rewards = torch.tensor(rewards_of(reward, pairs))

        # Pack: all sequences end to end, without padding; only sampled tokens are targets.
        packed = pack(pairs)
        counts = packed.inputs.source_counts  # sampled tokens of each completion

        # Score: the log-prob of every sampled token under the policy that sampled it.
        with torch.no_grad():
            logp_old = scores_of(model, packed).logp

        # Advantages, and the weight of each token in the loss.
        group = torch.arange(len(prompts)).repeat_interleave(SAMPLES)
        advantages = grpo.advantage(AdvantageInputs(rewards=rewards, group=group, sequence=packed.sequence))
        tokens = TokenBatch(
            sequence=packed.sequence,
            num_sequences=packed.num_sequences,
            advantage=advantages.advantage,
            token_weight=grpo.weighting(counts, Totals.of(counts)),
            logp_old=logp_old,
        )

        # Two optimizer steps: in the second the ratio to logp_old is no longer 1, and the clip bounds it.
        for _ in range(2):
            scores = scores_of(model, packed)
            grpo.objective(scores.logp, scores.entropy, tokens).loss.backward()
            take_step(model, optimizer, rate=RATE * (1 - block / blocks))

        if (block + 1) % max(1, blocks // 10) == 0:
            print(f"block {block + 1:3d}: mean reward {rewards.mean():.3f}")
        if (block + 1) in (blocks // 2, blocks):
            accuracy.append(evaluate(engine, reward, held_out))
    print(f"after {blocks} blocks: held-out accuracy {accuracy[-1]:.3f}")
    return accuracy


def scores_of(model: torch.nn.Module, batch: PackedBatch) -> TokenScores:
    """Log-probability and entropy of every target: the backbone once over all tokens, then the head, without logits."""
    hidden = backbone_hidden(model, batch.inputs)[batch.inputs.source]
    return token_scores(hidden, lm_head(model), batch.target)


def take_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rate: float | None = None) -> None:
    """Clip the gradient's norm at 1 and step."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for parameters in optimizer.param_groups:
        parameters["lr"] = parameters["lr"] if rate is None else rate
    optimizer.step()
    optimizer.zero_grad()


def rewards_of(reward: ReasoningGym, pairs: Sequence[tuple[Prompt, Completion]]) -> list[float]:
    """The reward of each completion; NaN if it could not be scored, which advantages leave out."""
    texts = [completion.text for _, completion in pairs]
    given = reward([prompt.text for prompt, _ in pairs], texts, entry=[prompt.columns["entry"] for prompt, _ in pairs])
    return [float("nan") if score is None else score for score in given]


def evaluate(engine: TransformersEngine, reward: ReasoningGym, prompts: Sequence[Prompt]) -> float:
    """Accuracy on held-out prompts, with one sampled answer each."""
    groups = engine.sample(prompts, 1, SAMPLING, seed=0)
    rewards = rewards_of(reward, [(p, completion) for p, [completion] in zip(prompts, groups, strict=True)])
    return sum(rewards) / len(rewards)


def part(items: Sequence[Prompt], number: int, size: int) -> list[Prompt]:
    """The ``number``-th batch of ``size`` items, starting over at the end."""
    return [items[i % len(items)] for i in range(number * size, (number + 1) * size)]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

"""A run folder as a run of the loop would leave it, with numbers that are made up: input for the report and its kin."""

import math
import random
from pathlib import Path
from statistics import fmean, stdev

from logitless.train.record.run_folder import RunFolder, create_run_folder
from logitless.types import Completion, Group, Prompt, Verdict

CONFIG = """\
name: fake
seed: 3
model: {source: tiny}
kl:
  controller:
    control: {name: proportional, target: 0.05, beta: 0.05}
train: {blocks: 12}
"""


def fake_groups(block: int, num_blocks: int, *, num_prompts: int = 4, num_completions: int = 8) -> list[Group]:
    """Groups whose rewards rise from block to block; some verdicts are not graded; text wants to be markup."""
    draw = random.Random(block)
    skill = block / num_blocks
    groups = []
    for index in range(num_prompts):
        prompt = Prompt(f"{block}-{index}", f"Write <b>word {index}</b> & nothing else:", tuple(range(9)))
        completions, verdicts, rewards = [], [], []
        for number in range(num_completions):
            right, tidy = draw.random() < skill, draw.random() < 0.3 + 0.6 * skill
            length = draw.randint(4, 12) + int(10 * skill)
            text = f"word {index}</td><script>alert({number})</script>" if right else f"wörd {draw.randint(0, 9)}"
            completions.append(
                Completion(prompt.id, tuple(range(length)), text, "stop" if draw.random() < 0.9 else "length")
            )
            detail = [("startend:quotation", tidy), ("punctuation:no_comma", right), ("punctuation:dots", tidy)]
            crashed = draw.random() < 0.05
            style = Verdict(None, "timeout", message="over 2 s") if crashed else Verdict.graded(float(tidy), detail)
            verdicts.append({"exact": Verdict.graded(float(right)), "style": style})
            rewards.append(float(right) + 0.5 * (style.score or 0.0))
        groups.append(Group(prompt, tuple(completions), tuple(verdicts), tuple(rewards)))
    return groups


def fake_block_metrics(groups: list[Group]) -> dict[str, float]:
    """Means over the block, of the kinds that the loop writes with the block's first step."""
    completions = [completion for group in groups for completion in group.completions]
    verdicts = [verdicts for group in groups for verdicts in group.verdicts]
    rewards = [reward or 0.0 for group in groups for reward in group.rewards]
    styles = [v["style"].score for v in verdicts if v["style"].score is not None]
    return {
        "reward/mean": fmean(rewards),
        "reward/std": stdev(rewards),
        "reward/exact/mean": fmean(v["exact"].score or 0.0 for v in verdicts),
        "reward/style/mean": fmean(styles),
        "verdict/style/graded": len(styles),
        "verdict/style/timeout": len(verdicts) - len(styles),
        "group/zero_signal_fraction": fmean(len(set(group.rewards)) == 1 for group in groups),
        "length/mean": fmean(c.length for c in completions),
        "length/max": max(c.length for c in completions),
        "length/truncated_fraction": fmean(c.finish_reason == "length" for c in completions),
    }


def fake_run(root: Path, *, num_blocks: int = 12, steps_per_block: int = 2, seed: int = 0) -> RunFolder:
    """A finished run of ``num_blocks * steps_per_block`` steps."""
    folder = create_run_folder(root, "fake", unique=True)
    folder.write_config(CONFIG)
    draw = random.Random(seed)
    folder.append_metrics({"step": 0, "block": 1, "epoch": 1, "evaluation/accuracy": 0.31, "evaluation/prompts": 200})
    for block in range(1, num_blocks + 1):
        groups = fake_groups(block, num_blocks)
        advantages = [
            [(r or 0.0) - math.fsum(map(float, g.rewards)) / len(g.rewards) for r in g.rewards] for g in groups
        ]
        folder.write_rollouts(block, groups, advantages)
        for step_in_block in range(steps_per_block):
            step = (block - 1) * steps_per_block + step_in_block + 1
            done = step / (num_blocks * steps_per_block)
            record = {"step": step, "block": block, "epoch": 1}
            if step_in_block == 0:
                record |= fake_block_metrics(groups)
                record |= {"throughput/rollout_tokens_per_second": 900 + 100 * draw.random()}
            kl = 0.06 * (1 - math.exp(-4 * done)) * (1 + 0.2 * draw.random())
            record |= {"kl_ref/k3_mean": kl, "kl_ref/k3_p95": 4 * kl, "kl_ref/beta": 0.05 * math.exp(done)}
            record |= {"ratio/min": 0.7, "ratio/mean": 1.0, "ratio/max": 1.4, "kl_old/k3_mean": 1e-3 * draw.random()}
            record |= {
                "entropy/mean": 1.2 * math.exp(-done) + 0.02 * draw.random(),
                "clip/low_fraction": 0.02 * draw.random(),
                "clip/high_fraction": 0.03 * draw.random(),
                "optimizer/grad_norm": 0.5 + draw.random() if step != 5 else math.inf,
                "optimizer/learning_rate": 1e-3 * (1 - done),
                "throughput/training_tokens_per_second": 3000 + 300 * draw.random(),
                "memory/peak_bytes": 4 * 10**8,
                "time/training_seconds": 0.4 + 0.05 * draw.random(),
                "time/elapsed_seconds": 0.9 * step,
            }
            if block % 4 == 0 and step_in_block == steps_per_block - 1:
                record |= {"evaluation/accuracy": 0.9 * done, "evaluation/prompts": 200}
            folder.append_metrics(record)
    seconds = {"rollout": 61.0, "training": 30.5, "evaluation": 4.25}
    folder.write_summary({"seconds": seconds, "peak_memory_bytes": 4 * 10**8})
    return folder

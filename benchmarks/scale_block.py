"""A whole block on several GPUs for ``benchmarks/scale.py``: each has as many prompts as one has alone.

The parts of a run sync weights to the engine (gathered if they are sharded), sample, score, pack and train on a block;
lengths of completions are forced. ``replicate`` samples with ``rollout.engine: gpu``, ``shard`` with transformers'
layers.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import rollout_contenders as contenders
from logitless.distributed.arrangement import Arrangement
from logitless.distributed.ranks import Ranks
from logitless.errors import ConfigurationError
from logitless.models.char_tokenizer import character_tokenizer
from logitless.models.row_invariant.layers import install_row_invariant
from logitless.rewards.reward import Columns, Text, WeightedReward
from logitless.rollout.engine import is_exact
from logitless.rollout.environment import SingleTurn
from logitless.rollout.sampling import SamplingOptions
from logitless.train.assembly.algorithm import algorithm_of
from logitless.train.assembly.stages import learner_of
from logitless.train.block import pack_groups
from logitless.train.collect.collector import GroupSampler
from logitless.train.learn.learner import Learner
from logitless.train.learn.score import sampled_scores
from logitless.train.optim.master_weights import lower_to
from logitless.train.recipe.loading import parse_recipe
from logitless.types import Prompt, Verdict
from rollout_workloads import Workload
from shapes import Shape

PHASES = ("handing_over", "rollout", "scoring", "training")


class _EveryOther:
    """Every other completion is right."""

    name = "every_other"

    def check(self, columns: Columns) -> None:
        """Nothing can be wrong."""

    def verdicts(
        self,
        prompts: Sequence[Text],  # noqa: ARG002
        completions: Sequence[Text],
        columns: Columns,  # noqa: ARG002
        completion_ids: Sequence[Sequence[int]] | None = None,  # noqa: ARG002
    ) -> list[Verdict]:
        """By their places."""
        return [Verdict.graded(float(i % 2)) for i in range(len(completions))]


def block_over_ranks(
    ranks: Ranks,
    shape: Shape,
    layout: str,
    work: Workload,
    device: str,
    *,
    changes: Mapping[str, Any] = {},
    teacher: nn.Module | None = None,
    noted: Callable[[Learner], Mapping[str, Any]] = lambda _: {},
) -> dict[str, Any]:
    """The row of a block, the second of two, the first of which compiles and captures.

    Args:
        ranks: all of them.
        shape: of the model.
        layout: ``replicate`` or ``shard``.
        work: of each rank.
        device: ``cuda`` or ``cpu``.
        changes: sections of the recipe.
        teacher: frozen, of a recipe that has one; with row-invariant layers afterwards where they serve it.
        noted: more of the row, read from the learner after the block.

    Raises:
        ConfigurationError: another layout.
    """
    if layout not in ("replicate", "shard"):
        raise ConfigurationError(
            needed="replicate or shard beside --block", given=layout, remedy="Leave --block out, or name one of them."
        )
    arrangement = Arrangement(**{layout: ranks.world})
    ranks = ranks.arranged(arrangement)
    exact = layout == "replicate" and device == "cuda"
    whole = replace(work, prompts=work.prompts * ranks.data_world)
    model = shape.build(device)
    lower_to(torch.bfloat16, (p for p in model.parameters() if p.requires_grad))
    if exact:
        install_row_invariant(model)
    engine = (contenders.ForcedGpu if exact else contenders.ForcedTransformers)(
        model, character_tokenizer("abcdefgh"), max_rows=2048
    )
    engine.work = whole
    lora = shape.lora_rank is not None
    recipe = parse_recipe(contenders.block_recipe(whole, lora=lora, gpu=exact, ranks=ranks.data_world) | dict(changes))
    rewards = (WeightedReward(_EveryOther(), 1.0),)
    sources = () if recipe.teacher is None or teacher is None else recipe.teacher.models.values()
    teachers = dict.fromkeys(sources, teacher)
    learner, _ = learner_of(recipe, algorithm_of(recipe), model, arrangement, ranks, rewards=rewards, teachers=teachers)
    prompts = [Prompt(str(p), "", ids) for p, ids in enumerate(whole.prompt_ids(shape.vocabulary))]
    options = SamplingOptions(max_new_tokens=work.most, stop=() if exact else (contenders.NEVER,))
    for _ in range(2):
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        marks = [_now(ranks, device)]
        learner.policy.gather()
        engine.load(learner.weights(), learner.version)
        marks.append(_now(ranks, device))
        sampler = GroupSampler(engine, SingleTurn(), rewards, "drop", ranks=ranks)
        groups = sampler(prompts, work.samples, options, seed=0)
        marks.append(_now(ranks, device))
        packed = pack_groups(groups)
        sampled = sampled_scores(groups, options, learner.version, exact=is_exact(engine))
        scored = learner.score(packed, groups, sampled)
        marks.append(_now(ranks, device))
        learner.begin(scored)
        while learner.in_training:
            learner.step()
        marks.append(_now(ranks, device))
    engine.close()
    seconds = dict(zip(PHASES, (b - a for a, b in pairwise(marks)), strict=True))
    return {
        "gpus": ranks.world,
        "model": shape.name,
        "layout": f"block_{layout}",
        "parallel": asdict(arrangement),
        "engine": "gpu" if exact else "transformers",
        "tokens": work.tokens,
        "drawn_tokens": packed.packed.num_tokens,
        "length": work.most,
        "micro_batches": 1,
        "head_budget": None,
        "optimizer_steps": learner.version // 2,
        "tokens_per_second": packed.packed.num_tokens / sum(seconds.values()),
        "seconds": seconds,
        "peak_bytes": ranks.max(torch.cuda.max_memory_allocated() if device == "cuda" else 0),
        **noted(learner),
    }


def _now(ranks: Ranks, device: str) -> float:
    """When all ranks are here."""
    if device == "cuda":
        torch.cuda.synchronize()
    ranks.barrier()
    print(f"a phase ended at {time.strftime('%X')}", file=sys.stderr, flush=True)
    return time.perf_counter()

"""A block on its way to its first step: collected, judged, packed, scored, given advantages, and written down."""

from logitless.train.block import JudgedBlock, ScoredBlock, pack_groups
from logitless.train.collect.collector import Collector
from logitless.train.learn.block_metrics import (
    advantage_metrics,
    advantages_of,
    block_metrics,
    lag_metrics,
    scoring_metrics,
    value_metrics,
)
from logitless.train.learn.learner import Learner
from logitless.train.learn.parity_gate import check_parity, parity_metrics
from logitless.train.learn.score import check_same, check_sampler_logp, sampled_scores
from logitless.train.record.journal import Journal
from logitless.train.record.metrics import Numbers
from logitless.types import TokenScores


def prepare(
    collector: Collector, learner: Learner, journal: Journal
) -> tuple[JudgedBlock, ScoredBlock | None, Numbers]:
    """The next block; its rollouts are in the journal afterwards.

    Args:
        collector: draws and judges it.
        learner: scores it and gives advantages.
        journal: times the phases.

    Returns:
        Everything that was drawn; what is trained on, None without a token; and metrics for the line of its first step.
    """
    done = learner.progress.block
    with journal.phase("rollout") as seconds:
        judged = collector.next(done, length_factor=learner.controllers.length_factor)
    metrics = block_metrics(judged, seconds=seconds[0]) | lag_metrics(judged, version=learner.version)
    if "logp_sampler" in learner.algorithm.objective.needs:
        check_sampler_logp(completion for group in judged.trained for completion in group.completions)
    sampled = sampled_scores(judged.trained, collector.engine, collector.options.sampling, learner.version)
    if learner.ranks.any(sampled is None):  # all ranks make the pass, or none
        sampled = None
    metrics["sampler/exact"] = int(sampled is not None)
    packed = pack_groups(judged.trained, version=learner.version)
    if not packed.packed.num_tokens:
        journal.write_rollouts(done + 1, judged)
        return judged, None, metrics
    if learner.policy.value_head is not None:  # its values need the pass
        sampled = None
    rescore = sampled is not None and done % collector.options.engine.blocks_between_rescores == 0
    with journal.phase("scoring") as seconds:
        scored = learner.score(packed, judged.trained, sampled, rescore=rescore)
    passed = sampled is None or rescore
    if sampled is not None and rescore:
        metrics["sampler/mismatched_tokens"] = check_same(sampled, TokenScores(scored.logp_old, scored.entropy_old))
    if passed and not scored.scores_itself and not collector.options.sampling.filters_distribution:
        found = parity_metrics(scored.packed, scored.logp_old)
        metrics |= found
        check_parity(found, collector.options.parity, journal.message)
    advantages = advantages_of(scored, judged)
    metrics |= scoring_metrics(scored, passed=passed, seconds=seconds[0])
    metrics |= advantage_metrics(advantages, learner.algorithm.advantage) | value_metrics(scored)
    journal.write_rollouts(done + 1, judged, advantages)
    return judged, scored, metrics

"""A block on its way to its first step: collected, judged, packed, scored, given advantages, and written down."""

from dataclasses import dataclass

from logitless.train.block import AdvantagedBlock, JudgedBlock, pack_groups
from logitless.train.block_metrics import (
    advantage_metrics,
    advantages_of,
    block_metrics,
    lag_metrics,
    scoring_metrics,
    value_metrics,
)
from logitless.train.collector import Collector
from logitless.train.journal import Journal
from logitless.train.learner import Learner
from logitless.train.metrics import Numbers


@dataclass(frozen=True)
class Prepared:
    """What came of a round of generation.

    Args:
        judged: everything that was drawn.
        block: what is trained on; None without a token.
        metrics: of the block, for the line of its first step.
    """

    judged: JudgedBlock
    block: AdvantagedBlock | None
    metrics: Numbers


def prepare(collector: Collector, learner: Learner, journal: Journal) -> Prepared:
    """The next block; its rollouts are in the journal afterwards.

    Args:
        collector: draws and judges it.
        learner: scores it and gives advantages.
        journal: times the phases.
    """
    done = learner.progress.block
    with journal.phase("rollout") as seconds:
        judged = collector.next(done, length_factor=learner.controllers.length_factor)
    metrics = block_metrics(judged, seconds=seconds[0]) | lag_metrics(judged, version=learner.version)
    packed = pack_groups(judged.trained)
    if not packed.packed.num_tokens:
        journal.write_rollouts(done + 1, judged)
        return Prepared(judged, None, metrics)
    with journal.phase("scoring") as seconds:
        scored = learner.score(packed)
    block = learner.with_advantages(scored, judged.trained)
    advantages = advantages_of(block, judged)
    metrics |= scoring_metrics(scored, seconds=seconds[0])
    metrics |= advantage_metrics(advantages, learner.algorithm.advantage) | value_metrics(block)
    journal.write_rollouts(done + 1, judged, advantages)
    return Prepared(judged, block, metrics)

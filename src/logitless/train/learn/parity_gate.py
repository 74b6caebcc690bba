"""The parity gate: log-probs of the sampler against those of the trainer, once a block.

With the same weights they differ by rounding only. A larger difference means stale weights, another temperature or
tokenizer, or a fault in one of the two.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from logitless.errors import TrainingError
from logitless.objective.correction import sampler_log_ratio
from logitless.objective.filters import quantile
from logitless.objective.ranges import Ranges
from logitless.train.recipe.rollout import ParitySection, ParityThresholds
from logitless.train.record.metrics import Numbers
from logitless.types import PackedBatch

_MEASURES = {
    "mean": "parity/difference_mean",
    "p95": "parity/difference_p95",
    "max": "parity/difference_max",
    "sequence": "parity/sequence_difference_max",
}


def parity_metrics(packed: PackedBatch, logp_old: Float[Tensor, "N"]) -> Numbers:
    """Differences between log-probs of sampler and trainer, over completions sampled by the current weights.

    Args:
        packed: a block's tokens; completions with lag, which older weights sampled, are left out.
        logp_old: [N] by a pass of the policy: the scoring pass, or that of the block's only step.

    Returns:
        Metrics; none if the sampler gave no log-probs or all completions have lag.
    """
    sampler, sequence = packed.logp_sampler, packed.sequence
    counted = ~sampler.isnan()
    if packed.lag is not None:
        older = torch.zeros(packed.num_sequences, dtype=torch.bool)
        older[sequence[packed.lag > 0]] = True
        counted &= ~older[sequence]
    if not bool(counted.any()):
        return {}
    return parity(sampler_log_ratio(logp_old, sampler), Ranges(sequence, packed.num_sequences, counted))


def parity(log_ratio: Float[Tensor, "N"], sequences: Ranges) -> Numbers:
    """The metrics of the gate.

    Args:
        log_ratio: [N] ``logp_old - logp_sampler``.
        sequences: their counted tokens, at least one.

    Example:
        >>> found = parity(torch.tensor([0.5, -0.25]), Ranges(torch.tensor([0, 0]), 1, torch.tensor([True, True])))
        >>> found["parity/difference_mean"], found["parity/sequence_difference_max"]
        (0.375, 0.25)
    """
    size = log_ratio.abs()
    known: Bool[Tensor, "N"] = sequences.counted
    sums = sequences.sum(log_ratio)[sequences.counts > 0]
    return {
        "parity/difference_mean": float(size[known].double().mean()),
        "parity/difference_p95": float(quantile(size, 0.95, known)),
        "parity/difference_max": float(size[known].max()),
        "parity/sequence_difference_max": float(sums.abs().max()),
        "parity/sequence_ratio_min": float(sums.min().exp()),
        "parity/sequence_ratio_max": float(sums.max().exp()),
    }


def check_parity(found: Numbers, section: ParitySection, say: Callable[[str], None]) -> None:
    """Warn or stop where a threshold is exceeded; NaN exceeds every one.

    Raises:
        TrainingError: a threshold of ``stop`` is exceeded, or there is a threshold and nothing to compare.
    """
    if not found:
        if section.has_threshold:
            raise TrainingError(
                needed="log-probs by the sampler, of the weights in training, for the thresholds of rollout.parity",
                given="none in this block",
                remedy="Record or sample with log-probs (logp_sampler), or leave rollout.parity out.",
            )
        return
    if exceeded := _exceeded(found, section.stop):
        raise TrainingError(
            needed="log-probs of sampler and trainer within rollout.parity.stop",
            given=exceeded,
            remedy="Look into docs/servers.md, under 'the gate'; raise the threshold where rounding explains it.",
        )
    if exceeded := _exceeded(found, section.warn):
        say(f"parity of sampler and trainer: {exceeded}")


def _exceeded(found: Numbers, limits: ParityThresholds) -> str:
    exceeded = []
    for name, metric in _MEASURES.items():
        limit = getattr(limits, name)
        if limit is not None and not found[metric] <= limit:
            exceeded.append(f"{name} {found[metric]:.3g} nats over {limit:g}")
    return ", ".join(exceeded)

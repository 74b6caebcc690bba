"""The closed list of metrics: name, unit and meaning of every number in ``metrics.jsonl``. Other names are refused.

A part in braces (``reward/{function}/mean``) is a placeholder for anything without a slash.
``docs/metrics.md`` is written from this list.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from logitless.data.sources import nearest
from logitless.errors import InputError

Unit = Literal[
    "1", "nat", "reward", "token", "turn", "completion", "group", "prompt", "step", "block", "s", "token/s", "byte"
]  # fmt: skip
Aggregation = Literal["mean", "std", "p95", "min", "max", "sum", "last"]
Over = Literal["token", "completion", "group", "constraint", "step", "block", "run", "evaluation"]

Record: TypeAlias = Mapping[str, float | int | None]
"""The numbers of a step by name; None for one that is not finite."""

Line: TypeAlias = Mapping[str, float | int | Sequence[int] | None]
"""A record that may also have metrics with a number for each rank."""

Numbers: TypeAlias = dict[str, float | int]
"""Metrics while they are collected."""


@dataclass(frozen=True)
class Metric:
    """One number of a run.

    Args:
        name: unique; ``{function}``, ``{constraint}``, ``{family}``, ``{filter}``, ``{set}`` and ``{source}`` stand for
            the name of one.
        unit: ``1`` for fractions and plain numbers.
        aggregation: how many numbers become one; ``last`` is the current value.
        over: what is aggregated: trained tokens of the optimizer step; completions and groups of the block before any
            group is left out; ``run``: everything since its first step.
        description: its meaning, in one clause.

    Example:
        >>> Metric("length/mean", "token", "mean", "completion", "tokens of a completion").unit
        'token'
    """

    name: str
    unit: Unit
    aggregation: Aggregation
    over: Over
    description: str

    @property
    def repeatable(self) -> bool:
        """Whether a resumed or repeated run gives the same number: False for times, speeds and memory."""
        return self.unit not in ("s", "token/s", "byte")

    def matches(self, name: str) -> bool:
        """Whether ``name`` is this metric's name with its placeholders filled in."""
        return _matches(self.name, name)


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(pattern)), name) is not None


_BEFORE_DIVERGENCES = """
step | step | last | run | optimizer steps done, skipped ones included
block | block | last | run | the block that the step belongs to, from 1
epoch | 1 | last | block | the pass over the block, from 1
# Rewards and verdicts
reward/mean | reward | mean | completion | weighted sum of the scores; completions without one left out
reward/std | reward | std | completion | spread of the weighted sum over the block
reward/std_in_group | reward | mean | group | spread of the weighted sum inside a group
reward/unscored | completion | sum | completion | completions without a score
reward/{function}/mean | reward | mean | completion | score of one function, before its weight
reward/{function}/std | reward | std | completion | spread of that score
verdict/{function}/graded, verdict/{function}/ungradable, verdict/{function}/error, verdict/{function}/timeout,
    verdict/{function}/missing | completion | sum | completion | verdicts of that status (docs/glossary.md)
verdict/{function}/failed_fraction | 1 | mean | completion | error and timeout, of what it was asked
constraint/{constraint}/pass_rate | 1 | mean | constraint | checks that passed
constraint/{constraint}/count | 1 | sum | constraint | checks
constraint_family/{family}/pass_rate | 1 | mean | constraint | checks that passed
constraint_family/{family}/count | 1 | sum | constraint | checks
# Groups
group/zero_signal_fraction | 1 | mean | group | groups whose rewards are all equal
group/dropped | group | sum | block | zero-signal groups left out of training
group/refill_rounds | 1 | sum | block | refills of the block
group/trained | group | sum | block | groups trained on
# Advantages
advantage/mean | 1 | mean | completion | of completions trained on, by their first token
advantage/std | 1 | std | completion | its spread
advantage/clipped | 1 | sum | completion | advantages at the clip value or beyond
# Values, where the algorithm has a value head
value/mean | reward | mean | block | the value head's prediction in the scoring pass, over tokens
value/return_mean | reward | mean | block | the return that it is fitted to, over tokens with one
value/explained_variance | 1 | last | block | 1 - Var(return - value) / Var(return), over these tokens
value/clipped_fraction | 1 | mean | token | tokens with a return whose value gradient the clip removes
# A teacher
teacher/divergence | nat | mean | token | the teacher's divergence in the loss, before its weight
teacher/tail, teacher/tail_of_policy | 1 | mean | token | the teacher's, and the policy's, probability of all tokens
    outside teacher.top_k
teacher/log_ratio | nat | mean | block | logp_teacher - logp_sampler, before its coefficient
teacher/graded_fraction | 1 | mean | token | tokens that a teacher grades, under teacher.template
# Age and lengths of completions
rollout/lag_mean | step | mean | completion | optimizer steps since the weights that sampled a block
rollout/lag_max | step | max | completion | the same, of a completion's oldest token
rollout/token_lag_mean | step | mean | token | the same, of each token, in flight
rollout/lag_fraction/{steps} | 1 | mean | token | tokens of this lag, in flight
rollout/mixed_fraction | 1 | mean | completion | whether weights of several versions sampled its tokens
rollout/turns_mean | turn | mean | completion | assistant turns, where an environment answers
rollout/turns_max | turn | max | completion | the same
rollout/environment_tokens_mean | token | mean | completion | tokens that the environment wrote
length/mean | token | mean | completion | its tokens, the stop token and those of an environment included
length/min | token | min | completion | the shortest and the longest
length/max | token | max | completion | the shortest and the longest
length/truncated_fraction | 1 | mean | completion | completions cut at max_new_tokens
length/empty | completion | sum | completion | completions without text
length/prompt_mean | token | mean | completion | tokens of the prompt
"""

_DIVERGENCES = "".join(
    f"kl_{policy}/{estimator}_{aggregation} | nat | {aggregation} | token | {formula}, d = {difference}\n"
    for policy, difference in (("ref", "logp - logp_ref"), ("old", "logp_old - logp"))
    for estimator, formula in {"k1": "d", "k2": "d^2 / 2", "k3": "exp(-d) - 1 + d"}.items()
    for aggregation in ("mean", "p95")
)

_AFTER_DIVERGENCES = """
kl_ref/penalty_mean | nat | mean | token | the KL term of the loss, its correction included, before beta
kl_ref/penalty_p95 | nat | p95 | token | the same
kl_ref/clamped | token | sum | token | tokens whose d was cut at +-20 before exp
kl_ref/beta | 1 | last | run | coefficient of the KL term in this step
kl_ref/controlled | nat | mean | token | the KL that the controller compares with its target
kl_ref/guarded | 1 | sum | run | times the guardrail acted: KL above twice the target
kl_ref/bounded | 1 | sum | run | times beta was held at its bounds
kl_sampler/mean | nat | mean | token | exact KL(sampler || policy), under algorithm.score_centering
# Policy
entropy/mean | nat | mean | token | entropy of the policy's next-token distribution
entropy/bonus_mean | nat | mean | token | the mean that the entropy bonus pays for
entropy/bonus_coefficient | 1 | last | run | coefficient of the entropy bonus in this step
ratio/min | 1 | min | token | exp(logp - logp_old), at the level the objective uses
ratio/mean | 1 | mean | token | the same
ratio/std | 1 | std | token | the same; 0 on a block's first step
ratio/max | 1 | max | token | the same
clip/low_fraction, clip/high_fraction | 1 | mean | token | tokens whose gradient that bound removes or caps
clip/positive_fraction, clip/negative_fraction | 1 | mean | token | the same by either bound, of tokens with that sign
    of advantage
filter/{filter}/dropped_fraction | 1 | mean | token | tokens whose loss a filter set to 0; of several rejections each by
    its level and measure
sampler/logp_difference_mean | nat | mean | token | abs(logp_old - logp_sampler)
sampler/logp_difference_p95 | nat | p95 | token | the same
sampler/logp_difference_max | nat | max | token | the same
sampler/exact | 1 | last | block | 1 where sampled log-probs are bitwise the trainer's (docs/bits.md), else 0
sampler/mismatched_tokens | token | sum | block | tokens whose log-prob or entropy differs from logp_old in a bitwise
    check: 0, or the run ends
parity/difference_mean | nat | mean | block | abs(logp_old - logp_sampler) of completions without lag
parity/difference_p95 | nat | p95 | block | the same
parity/difference_max | nat | max | block | the same
parity/sequence_difference_max | nat | max | block | abs of the sum over a completion of logp_old - logp_sampler
parity/sequence_ratio_min | 1 | min | block | exp of that sum
parity/sequence_ratio_max | 1 | max | block | the same
sampler/missing | token | sum | token | tokens without logp_sampler
sampler/correction_mean | 1 | mean | token | factor of the sampler correction
sampler/correction_effective_fraction | 1 | last | step | (sum c)^2 / (n sum c^2) of that factor c
head/nonzero_gradient_fraction | 1 | mean | token | tokens with a gradient other than 0
# Optimization
loss/total | 1 | sum | step | what is differentiated
loss/observations | nat | mean | token | negative log-likelihood of what tools and environments said (ECHO)
loss/router | 1 | last | step | the load-balancing loss, before its coefficient
loss/value | 1 | mean | token | the value loss of tokens with a return, before its coefficient
optimizer/grad_norm | 1 | last | step | global norm of the model's gradient before clipping, a value head's left out
optimizer/learning_rate | 1 | last | step | learning rate of this step; a value head's is a multiple
optimizer/skipped_steps | step | sum | run | steps not taken because a gradient was not finite
optimizer/tokens | token | sum | step | tokens trained on, zero-advantage ones included
optimizer/sequences | completion | sum | step | completions trained on, zero-advantage ones included
optimizer/read_tokens | token | sum | step | tokens that forward and backward read, prompts included
optimizer/micro_batches | 1 | sum | step | forward and backward passes
optimizer/tokens_per_micro_batch | token | last | step | most tokens read at once: the recipe's, halved where memory was
    short
optimizer/halvings | 1 | sum | run | times that number was halved
# Routers of a mixture of experts, over the tokens that the step read
router/entropy | nat | mean | step | of the softmax of a router's logits
router/load_max, router/load_min | 1 | last | step | tokens of the busiest and idlest expert of a layer, over its mean
router/dropped_fraction | 1 | mean | step | 0: experts have no capacity, so none drops a token
# What a step did not have to compute
saving/zero_advantage_sequences | completion | sum | step | completions left out of forward and backward
saving/zero_advantage_tokens | token | sum | step | tokens that were not read for that, prompts included
saving/shared_tokens | token | sum | step | tokens that were not read again for sequences that begin alike
saving/work_fraction | 1 | last | step | share of forward and backward that both took off
saving/scored_tokens | token | sum | block | tokens whose logp_old needed no pass
parallel/tokens_per_rank | token | sum | step | tokens that each rank trained on, a list by rank; only where there are
    several
# Weights on their way to an engine in another process
weights/pushed_bytes | byte | last | block | sent to each server
weights/push_seconds | s | last | block | until the last server had the weights
weights/changed_fraction | 1 | last | block | weights whose bits changed since the last sync, in its dtype
weights/probe_difference_max | nat | max | block | a fixed prompt's log-probs after the sync, both ways
# Speed and memory
throughput/rollout_tokens_per_second | token/s | mean | block | sampled tokens
throughput/scoring_tokens_per_second | token/s | mean | block | tokens scored, once per policy
throughput/training_tokens_per_second | token/s | mean | step | tokens trained on
time/rollout_seconds | s | sum | block | sampling and verdicts, without compilations
time/scoring_seconds | s | sum | block | logp_old and logp_ref, without compilations
time/training_seconds | s | sum | step | forward, backward and update, without compilations
time/evaluation_seconds | s | sum | evaluation | held-out prompts, without compilations
time/elapsed_seconds | s | last | run | since the run's process began, those before a resume included
memory/peak_bytes | byte | max | run | most memory held: of the GPU, or of the process on a CPU
"""

_HELD_OUT = """
SET/accuracy | 1 | mean | evaluation | held-out completions that count as correct; unscored ones do not; null if all
    are
SET/accuracy/low, SET/accuracy/high | 1 | last | evaluation | 95 % interval over prompts (Wilson)
SET/pass_at/{k} | 1 | mean | evaluation | chance that one of k samples is correct, unbiased; k = 2, 4, ... up to
    samples_per_prompt
SET/pass_at/{k}/low, SET/pass_at/{k}/high | 1 | last | evaluation | 95 % interval over prompts (Wilson)
SET/reward_mean | reward | mean | evaluation | weighted sum of the scores, held out
SET/{function}/mean | reward | mean | evaluation | score of one function, held out
SET/unscored_fraction | 1 | mean | evaluation | completions without a score, which accuracy counts as wrong
SET/length_mean | token | mean | evaluation | sampled tokens
SET/truncated_fraction | 1 | mean | evaluation | completions cut at max_new_tokens
SET/prompts | prompt | sum | evaluation | held-out prompts
"""
"""Metrics of a held-out set: that of the data section, or one of ``evaluation.sets``."""

_SOURCES = """
# Sources, where training has several
source/{source}/prompts | prompt | sum | block | prompts of it, those of refills included
source/{source}/reward_mean | reward | mean | completion | weighted sum of the scores
source/{source}/zero_signal_fraction | 1 | mean | group | groups whose rewards are all equal
source/{source}/length_mean | token | mean | completion | tokens of a completion
source/{source}/truncated_fraction | 1 | mean | completion | completions cut at max_new_tokens
"""


def _listed(*tables: str) -> Iterator[Metric]:
    """Parse lines of names | unit | aggregation | over | description; an indented line continues the last."""
    for line in re.sub(r"\n {4}", " ", "\n".join(tables)).splitlines():
        if line and not line.startswith("#"):
            names, unit, aggregation, over, description = line.split(" | ")
            for name in names.split(", "):
                yield Metric(name, cast(Unit, unit), cast(Aggregation, aggregation), cast(Over, over), description)


METRICS = tuple(
    _listed(
        _BEFORE_DIVERGENCES,
        _DIVERGENCES,
        _AFTER_DIVERGENCES,
        *(_HELD_OUT.replace("SET", start) for start in ("evaluation", "held_out/{set}")),
        _SOURCES,
    )
)

RENAMED = {
    "head/live_fraction": "head/nonzero_gradient_fraction",
    "saving/dead_sequences": "saving/zero_advantage_sequences",
    "saving/dead_tokens": "saving/zero_advantage_tokens",
    "verdict/{function}/spoiled": "verdict/{function}/ungradable",
}
"""Renamed metrics, old to new."""

_EXACT = {metric.name: metric for metric in METRICS if "{" not in metric.name}
_PATTERNS = tuple(metric for metric in METRICS if "{" in metric.name)


def metric_of(name: str) -> Metric:
    """The metric of a name.

    Raises:
        InputError: it is not on the list; the remedy has the nearest name.
    """
    found = _EXACT.get(name) or next((metric for metric in _PATTERNS if metric.matches(name)), None)
    if found is None:
        near = nearest(name, [metric.name for metric in METRICS])
        now = next((new for old, new in RENAMED.items() if _matches(old, name)), None)
        raise InputError(
            needed="a metric of the closed list in logitless.train.record.metrics",
            given=repr(name),
            remedy=f"Did you mean {near!r}?" if now is None else f"It is called {now!r} now.",
        )
    return found


def check_names(record: Iterable[str]) -> None:
    """Refuse a record with a metric that is not on the list.

    Raises:
        InputError: the first unknown name, with the nearest known one.
    """
    for name in record:
        metric_of(name)


def unscored_shares(record: Record) -> dict[str, float]:
    """The share of completions without a score, by set of an evaluation; of ``data.held_out`` under an empty name.

    Example:
        >>> unscored_shares({"evaluation/unscored_fraction": 0.5, "held_out/more/unscored_fraction": 0.0, "step": 3})
        {'': 0.5, 'more': 0.0}
    """
    split = ((name.rpartition("/"), share) for name, share in record.items())
    return {
        where.removeprefix("evaluation").removeprefix("held_out/"): share
        for (where, _, number), share in split
        if number == "unscored_fraction" and share is not None
    }


def without_signal(summary: Mapping[str, Any]) -> bool:
    """Whether blocks were to be learned from rewards, and no token of any had an advantage.

    Args:
        summary: of a run, or of its blocks so far.

    Example:
        >>> without_signal({"blocks_with_signal": 0}), without_signal({"blocks_with_signal": 3}), without_signal({})
        (True, False, False)
    """
    return summary.get("blocks_with_signal") == 0


def not_scored(share: float) -> str:
    """That share in words, to stand behind an accuracy that counts them as wrong; empty where it is none or all.

    Example:
        >>> not_scored(0.4), not_scored(1.0)
        (' (40% not scored)', '')
    """
    return f" ({share:.0%} not scored)" if 0 < share < 1 else ""


def repeatable(record: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a record that a resumed run repeats exactly: all but times, speeds and memory.

    Example:
        >>> repeatable({"step": 1, "time/training_seconds": 0.2})
        {'step': 1}
    """
    return {name: value for name, value in record.items() if metric_of(name).repeatable}

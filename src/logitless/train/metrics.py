"""The closed list of metrics: every number of ``metrics.jsonl`` has its name, unit and meaning here, or is refused.

A part in braces (``reward/{function}/mean``) is free: it stands for anything without a slash.
``docs/metrics.md`` is written from this list.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

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
"""The same with metrics that are a list, one number a rank."""

Numbers: TypeAlias = dict[str, float | int]
"""The same while they are gathered."""


@dataclass(frozen=True)
class Metric:
    """One number of a run.

    Args:
        name: unique; ``{function}``, ``{constraint}``, ``{family}``, ``{filter}``, ``{set}`` and ``{source}`` stand for
            the name of one.
        unit: ``1`` for fractions and plain numbers.
        aggregation: how one number is made of many.
        over: of which: tokens are the trained ones of the optimizer step, completions and groups those of the block
            before any group is left out; ``run`` counts from its first step, and ``last`` is the current value.
        description: what it is, in one clause.

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
        """Whether ``name`` is this metric's, with something in place of its free parts."""
        return re.fullmatch(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(self.name)), name) is not None


_ESTIMATORS = {"k1": "d", "k2": "d^2 / 2", "k3": "exp(-d) - 1 + d"}


def _held_out(start: str) -> tuple[Metric, ...]:
    """What is told of a set of held-out prompts."""
    lower = "lower end of its 95 % interval over prompts (Wilson)"
    correct = "held-out completions that count as correct; unscorable ones do not"
    chance = "chance that one of k samples of a prompt is correct, without bias; k = 2, 4, ... up to samples_per_prompt"
    return (
        Metric(f"{start}/accuracy", "1", "mean", "evaluation", correct),
        Metric(f"{start}/accuracy/low", "1", "last", "evaluation", lower),
        Metric(f"{start}/accuracy/high", "1", "last", "evaluation", "upper end"),
        Metric(f"{start}/pass_at/{{k}}", "1", "mean", "evaluation", chance),
        Metric(f"{start}/pass_at/{{k}}/low", "1", "last", "evaluation", lower),
        Metric(f"{start}/pass_at/{{k}}/high", "1", "last", "evaluation", "upper end"),
        Metric(f"{start}/reward_mean", "reward", "mean", "evaluation", "weighted sum of the functions, held out"),
        Metric(f"{start}/{{function}}/mean", "reward", "mean", "evaluation", "what one function gives, held out"),
        Metric(f"{start}/length_mean", "token", "mean", "evaluation", "sampled tokens"),
        Metric(f"{start}/truncated_fraction", "1", "mean", "evaluation", "completions cut at max_new_tokens"),
        Metric(f"{start}/prompts", "prompt", "sum", "evaluation", "held-out prompts"),
    )


_HELD_OUT = (*_held_out("evaluation"), *_held_out("held_out/{set}"))

METRICS: tuple[Metric, ...] = (
    Metric("step", "step", "last", "run", "optimizer steps done, skipped ones included"),
    Metric("block", "block", "last", "run", "the block that the step belongs to, from 1"),
    Metric("epoch", "1", "last", "block", "the pass over the block, from 1"),
    # Rewards and verdicts
    Metric("reward/mean", "reward", "mean", "completion", "weighted sum of the functions; unscorable ones left out"),
    Metric("reward/std", "reward", "std", "completion", "spread of the weighted sum over the block"),
    Metric("reward/std_in_group", "reward", "mean", "group", "spread of the weighted sum inside a group"),
    Metric("reward/unscored", "completion", "sum", "completion", "completions that no function could judge"),
    Metric("reward/{function}/mean", "reward", "mean", "completion", "what one function gives, before its weight"),
    Metric("reward/{function}/std", "reward", "std", "completion", "spread of that"),
    Metric("verdict/{function}/graded", "completion", "sum", "completion", "verdicts that the function reached"),
    Metric("verdict/{function}/spoiled", "completion", "sum", "completion", "its own text broke a limit; worth 0"),
    Metric("verdict/{function}/error", "completion", "sum", "completion", "the function raised or gave nonsense"),
    Metric("verdict/{function}/timeout", "completion", "sum", "completion", "the function waited past its deadline"),
    Metric("verdict/{function}/missing", "completion", "sum", "completion", "it could not be graded here"),
    Metric("verdict/{function}/failed_fraction", "1", "mean", "completion", "error and timeout, of what it was asked"),
    Metric("constraint/{constraint}/pass_rate", "1", "mean", "constraint", "checks of one constraint that passed"),
    Metric("constraint/{constraint}/count", "1", "sum", "constraint", "checks of one constraint"),
    Metric("constraint_family/{family}/pass_rate", "1", "mean", "constraint", "the same over a family of constraints"),
    Metric("constraint_family/{family}/count", "1", "sum", "constraint", "checks of a family of constraints"),
    # Groups
    Metric("group/zero_signal_fraction", "1", "mean", "group", "groups whose rewards are all equal"),
    Metric("group/dropped", "group", "sum", "block", "zero-signal groups left out of training"),
    Metric("group/refill_rounds", "1", "sum", "block", "further rounds of generation"),
    Metric("group/trained", "group", "sum", "block", "groups trained on"),
    # Advantages
    Metric(
        "advantage/mean",
        "1",
        "mean",
        "completion",
        "advantage of the completions trained on, where it differs from token to token their first one's",
    ),
    Metric("advantage/std", "1", "std", "completion", "its spread"),
    Metric("advantage/clipped", "1", "sum", "completion", "advantages at the clip value or beyond"),
    # Values, where the algorithm has a value head
    Metric("value/mean", "reward", "mean", "block", "the value head's prediction in the scoring pass, over tokens"),
    Metric("value/return_mean", "reward", "mean", "block", "the return that it is fitted to, over tokens with one"),
    Metric(
        "value/explained_variance", "1", "last", "block", "1 - Var(return - value) / Var(return), over these tokens"
    ),
    Metric(
        "value/clipped_fraction", "1", "mean", "token", "tokens with a return whose value gradient the clip removes"
    ),
    # Age and lengths of completions
    Metric("rollout/lag_mean", "step", "mean", "completion", "age in optimizer steps of the weights that drew a block"),
    Metric("rollout/lag_max", "step", "max", "completion", "the same, of a completion's oldest token"),
    Metric(
        "rollout/mixed_fraction",
        "1",
        "mean",
        "completion",
        "whether its tokens were drawn by weights of several versions",
    ),
    Metric("rollout/turns_mean", "turn", "mean", "completion", "assistant turns, where an environment answers"),
    Metric("rollout/turns_max", "turn", "max", "completion", "the same"),
    Metric("rollout/environment_tokens_mean", "token", "mean", "completion", "tokens that the environment wrote"),
    Metric(
        "length/mean",
        "token",
        "mean",
        "completion",
        "its tokens, the stop token and those of an environment included",
    ),
    Metric("length/min", "token", "min", "completion", "the shortest completion"),
    Metric("length/max", "token", "max", "completion", "the longest completion"),
    Metric("length/truncated_fraction", "1", "mean", "completion", "completions cut at max_new_tokens"),
    Metric("length/empty", "completion", "sum", "completion", "completions without text"),
    Metric("length/prompt_mean", "token", "mean", "completion", "tokens of the prompt"),
    # Divergences
    *(
        Metric(f"kl_{policy}/{estimator}_{aggregation}", "nat", aggregation, "token", f"{formula}, d = {difference}")
        for policy, difference in (("ref", "logp - logp_ref"), ("old", "logp_old - logp"))
        for estimator, formula in _ESTIMATORS.items()
        for aggregation in ("mean", "p95")
    ),
    Metric(
        "kl_ref/penalty_mean", "nat", "mean", "token", "the KL term of the loss, its correction included, before beta"
    ),
    Metric("kl_ref/penalty_p95", "nat", "p95", "token", "the same"),
    Metric("kl_ref/clamped", "token", "sum", "token", "tokens whose d was cut at +-20 before exp"),
    Metric("kl_ref/beta", "1", "last", "run", "coefficient of the KL term in this step"),
    Metric("kl_ref/controlled", "nat", "mean", "token", "the KL that the controller compares with its target"),
    Metric("kl_ref/guarded", "1", "sum", "run", "times the guardrail acted: KL above twice the target"),
    Metric("kl_ref/bounded", "1", "sum", "run", "times beta was held at its bounds"),
    # Policy
    Metric("entropy/mean", "nat", "mean", "token", "entropy of the policy's next-token distribution"),
    Metric("entropy/bonus_mean", "nat", "mean", "token", "the mean that the entropy bonus pays for"),
    Metric("entropy/bonus_coefficient", "1", "last", "run", "coefficient of the entropy bonus in this step"),
    Metric("ratio/min", "1", "min", "token", "exp(logp - logp_old), at the level the objective uses"),
    Metric("ratio/mean", "1", "mean", "token", "the same"),
    Metric("ratio/std", "1", "std", "token", "the same; 0 on a block's first step"),
    Metric("ratio/max", "1", "max", "token", "the same"),
    Metric("clip/low_fraction", "1", "mean", "token", "tokens whose gradient the lower bound removes or caps"),
    Metric("clip/high_fraction", "1", "mean", "token", "tokens whose gradient the upper bound removes or caps"),
    Metric("clip/positive_fraction", "1", "mean", "token", "the same by either bound, of tokens with advantage > 0"),
    Metric("clip/negative_fraction", "1", "mean", "token", "the same by either bound, of tokens with advantage < 0"),
    Metric(
        "filter/{filter}/dropped_fraction",
        "1",
        "mean",
        "token",
        "tokens whose loss a filter set to 0; of several rejections each by its level and measure",
    ),
    Metric("sampler/logp_difference_mean", "nat", "mean", "token", "abs(logp_old - logp_sampler)"),
    Metric("sampler/logp_difference_p95", "nat", "p95", "token", "the same"),
    Metric("sampler/logp_difference_max", "nat", "max", "token", "the same"),
    Metric(
        "sampler/exact",
        "1",
        "last",
        "block",
        "1 where the sampler's log-prob of every token, without filters, has the trainer's bits (docs/bits.md), else 0",
    ),
    Metric(
        "sampler/mismatched_tokens",
        "token",
        "sum",
        "block",
        "tokens of a recounted block whose log-prob or entropy has another bit than logp_old: 0, or the run ends",
    ),
    Metric("parity/difference_mean", "nat", "mean", "block", "abs(logp_old - logp_sampler) of completions without lag"),
    Metric("parity/difference_p95", "nat", "p95", "block", "the same"),
    Metric("parity/difference_max", "nat", "max", "block", "the same"),
    Metric(
        "parity/sequence_difference_max",
        "nat",
        "max",
        "block",
        "abs of the sum over a completion of logp_old - logp_sampler",
    ),
    Metric("parity/sequence_ratio_min", "1", "min", "block", "exp of that sum"),
    Metric("parity/sequence_ratio_max", "1", "max", "block", "the same"),
    Metric("sampler/missing", "token", "sum", "token", "tokens without logp_sampler"),
    Metric("sampler/correction_mean", "1", "mean", "token", "factor of the sampler correction"),
    Metric("sampler/correction_effective_fraction", "1", "last", "step", "(sum c)^2 / (n sum c^2) of that factor c"),
    Metric("head/live_fraction", "1", "mean", "token", "tokens with a gradient other than 0"),
    # Optimization
    Metric("loss/total", "1", "sum", "step", "what is differentiated"),
    Metric("loss/value", "1", "mean", "token", "the value loss of tokens with a return, before its coefficient"),
    Metric(
        "optimizer/grad_norm",
        "1",
        "last",
        "step",
        "global norm of the model's gradient before clipping, a value head's left out",
    ),
    Metric("optimizer/learning_rate", "1", "last", "step", "learning rate of this step; a value head's is a multiple"),
    Metric("optimizer/skipped_steps", "step", "sum", "run", "steps not taken because a gradient was not finite"),
    Metric("optimizer/tokens", "token", "sum", "step", "tokens trained on, those of dead sequences included"),
    Metric("optimizer/sequences", "completion", "sum", "step", "completions trained on, dead ones included"),
    Metric("optimizer/read_tokens", "token", "sum", "step", "tokens that forward and backward read, prompts included"),
    Metric("optimizer/micro_batches", "1", "sum", "step", "forward and backward passes"),
    Metric(
        "optimizer/tokens_per_micro_batch",
        "token",
        "last",
        "step",
        "most tokens read at once: the recipe's, halved where memory was short",
    ),
    Metric("optimizer/halvings", "1", "sum", "run", "times that memory was short and that number was halved"),
    # What a step did not have to compute
    Metric(
        "saving/dead_sequences",
        "completion",
        "sum",
        "step",
        "completions left out of forward and backward: they can change no gradient; numbers over tokens count them as "
        "at scoring",
    ),
    Metric("saving/dead_tokens", "token", "sum", "step", "tokens that were not read for that, prompts included"),
    Metric(
        "saving/shared_tokens", "token", "sum", "step", "tokens that were not read again for sequences that begin alike"
    ),
    Metric("saving/work_fraction", "1", "last", "step", "share of forward and backward that both took off"),
    Metric("saving/scored_tokens", "token", "sum", "block", "tokens whose logp_old needed no pass"),
    Metric(
        "parallel/tokens_per_rank",
        "token",
        "sum",
        "step",
        "tokens that each rank trained on, a list by rank; only where there are several",
    ),
    # Weights on their way to an engine in another process
    Metric("weights/pushed_bytes", "byte", "last", "block", "made ready for each server"),
    Metric("weights/push_seconds", "s", "last", "block", "until the last server had the weights"),
    Metric(
        "weights/changed_fraction",
        "1",
        "last",
        "block",
        "weights whose bits, in the dtype that is pushed, are others than in the push before",
    ),
    Metric(
        "weights/probe_difference_max", "nat", "max", "block", "a fixed prompt's log-probs after the push, both ways"
    ),
    # Speed and memory
    Metric("throughput/rollout_tokens_per_second", "token/s", "mean", "block", "sampled tokens"),
    Metric("throughput/scoring_tokens_per_second", "token/s", "mean", "block", "tokens scored, once per policy"),
    Metric("throughput/training_tokens_per_second", "token/s", "mean", "step", "tokens trained on"),
    Metric("time/rollout_seconds", "s", "sum", "block", "sampling and verdicts, without compilations"),
    Metric("time/scoring_seconds", "s", "sum", "block", "logp_old and logp_ref, without compilations"),
    Metric("time/training_seconds", "s", "sum", "step", "forward, backward and update, without compilations"),
    Metric("time/evaluation_seconds", "s", "sum", "evaluation", "held-out prompts, without compilations"),
    Metric("time/elapsed_seconds", "s", "last", "run", "since the run's process began, those before a resume included"),
    Metric("memory/peak_bytes", "byte", "max", "run", "most memory held: of the GPU, or of the process on a CPU"),
    # Held-out prompts: those of the data section, and further sets
    *_HELD_OUT,
    # Sources, where training has several
    Metric("source/{source}/prompts", "prompt", "sum", "block", "prompts drawn of it, those of refills included"),
    Metric("source/{source}/reward_mean", "reward", "mean", "completion", "weighted sum of the functions"),
    Metric("source/{source}/zero_signal_fraction", "1", "mean", "group", "groups whose rewards are all equal"),
    Metric("source/{source}/length_mean", "token", "mean", "completion", "tokens of a completion"),
    Metric("source/{source}/truncated_fraction", "1", "mean", "completion", "completions cut at max_new_tokens"),
)

_EXACT = {metric.name: metric for metric in METRICS if "{" not in metric.name}
_PATTERNS = tuple(metric for metric in METRICS if "{" in metric.name)


def metric_of(name: str) -> Metric:
    """The metric that a name belongs to.

    Raises:
        InputError: it is on no line of the list; the nearest name is given.

    Example:
        >>> metric_of("reward/exact/mean").name
        'reward/{function}/mean'
    """
    found = _EXACT.get(name) or next((metric for metric in _PATTERNS if metric.matches(name)), None)
    if found is None:
        raise InputError(
            needed="a metric of the closed list in logitless.train.metrics",
            given=repr(name),
            remedy=f"Did you mean {nearest(name, [metric.name for metric in METRICS])!r}?",
        )
    return found


def check_names(record: Iterable[str]) -> None:
    """Refuse a record with a metric that is not on the list.

    Raises:
        InputError: the first unknown name, with the nearest known one.

    Example:
        >>> check_names({"step": 1, "reward/mean": 0.5})
    """
    for name in record:
        metric_of(name)


def repeatable(record: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a record that a resumed run repeats exactly: without times, speeds and memory.

    Example:
        >>> repeatable({"step": 1, "time/training_seconds": 0.2})
        {'step': 1}
    """
    return {name: value for name, value in record.items() if metric_of(name).repeatable}


def metrics_page() -> str:
    """``docs/metrics.md``: the list as a table.

    Example:
        >>> metrics_page().splitlines()[0]
        '# Metrics'
    """
    rows = [
        f"| `{metric.name}` | {metric.unit} | {metric.aggregation} over {metric.over} | {metric.description} |"
        for metric in METRICS
    ]
    return "\n".join([_PAGE_HEAD, *rows, ""])


_PAGE_HEAD = """# Metrics

Every number of `metrics.jsonl`, one line an optimizer step. The list is closed: another name is an error. This page is
written from `logitless.train.metrics`.

A part in braces stands for a name: of a reward function, a constraint, a family of constraints, a filter, a held-out
set (`evaluation.sets`) or a source of a mixture. "Over
token" means the trained tokens of the optimizer step; "over completion" and "over group" mean those of the block before
any group is left out; "over run" counts from the first step. A number that a step does not have is absent from its
line; one that is not finite is `null`. Times, speeds (`token/s`) and memory (`byte`) aside, a run that was stopped and
resumed writes the same lines.

`writers` sends the same numbers to TensorBoard, Weights & Biases, trackio or MLflow (extra `mlflow`), each named with
or without options:

```yaml
writers:
  - tensorboard
  - {name: wandb, project: sums, entity: my-team, tags: [grpo]}
  - {name: mlflow, tracking_uri: "http://127.0.0.1:5000", experiment: sums}
```

A run that is resumed goes on in the same run there: `writers.json` in the run folder has its ids. [Every
key](configuration.md#writers).

| Name | Unit | Made by | What it is |
|---|---|---|---|"""

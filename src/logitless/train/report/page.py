"""``report.html``: a self-contained page about a run, finished or not, without scripts or external files.

Each plot has a table of its values. Some sampled groups have a section of their own, opened by its address
(``#block-12-group-3``), with the completions side by side.

Everything is read from the run folder; what a run did not record has no plot. Prompts and completions are escaped.
"""

import html
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import Any, get_args

import yaml

from logitless.train.collect.failures import in_a_line
from logitless.train.record.live_view import duration
from logitless.train.record.metrics import metric_of, unscored_shares
from logitless.train.record.result import ENDS, exported_in_words
from logitless.train.record.rollout_data import turns
from logitless.train.record.run_folder import RunFolder, open_run_folder
from logitless.train.report.cards import Curves, card_of, grid_of, short, table_of, write_document
from logitless.train.report.plots import Line, Number, bar_plot, heat_map
from logitless.types import Verdict, VerdictStatus

_MAX_COMPLETION_CHARACTERS = 1500
_GROUP_CHARACTERS = 6000
_GROUP_BLOCKS, _GROUPS_OF_BLOCK = 5, 4
_HISTOGRAM_BINS = 12


def write_report(run_folder: Path) -> Path:
    """Write ``report.html`` into a run folder, of a run in any state; returns its path.

    Raises:
        ConfigurationError: there is no run in the folder.
        DataError: a damaged line of metrics that is not the last one.

    Example:
        >>> import tempfile
        >>> from logitless.train.record.run_folder import create_run_folder
        >>> folder = create_run_folder(Path(tempfile.mkdtemp()), "toy")
        >>> folder.write_config("name: toy")
        >>> folder.append_metrics({"step": 1, "reward/mean": 0.5})
        >>> write_report(folder.path).name
        'report.html'
    """
    folder = open_run_folder(run_folder)
    write_document(folder.report, folder.path.name, _sections(folder))
    return folder.report


def _sections(folder: RunFolder) -> list[str]:
    run = Recorded.of(folder)
    rollouts = _Rollouts()
    for block, rows in folder.read_rollouts():
        rollouts.add(block, rows)
    config_text = _text(folder.config)
    return [
        _head(run),
        _tiles(run),
        _curves(run),
        _over_blocks(rollouts),
        _cost(run),
        _graders(run, rollouts.failures),
        _samples(rollouts),
        _group_pages(folder, rollouts.blocks),
        f"<section><h2>Recipe</h2><details><summary>config.yaml</summary><pre>{html.escape(config_text)}</pre>"
        "</details></section>",
    ]


@dataclass(frozen=True)
class Recorded:
    """The records of a run, without its completions.

    Args:
        summary: empty if the run has not ended.
    """

    name: str
    config: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]

    @classmethod
    def of(cls, folder: RunFolder) -> "Recorded":
        """Read from its folder."""
        config = _text(folder.config) if folder.config.exists() else ""
        return cls(folder.path.name, _mapping(config), folder.read_metrics(), folder.read_summary())

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return self.records[-1]["step"] if self.records else 0

    @property
    def seconds(self) -> Number | None:
        """Seconds of all phases; None if no step was recorded."""
        phases = self.summary.get("seconds")
        return math.fsum(phases.values()) if isinstance(phases, dict) else self.ends("time/elapsed_seconds")[1]

    @property
    def peak_bytes(self) -> Number | None:
        """Peak memory; None if no step was recorded."""
        return self.summary.get("peak_memory_bytes") or self.ends("memory/peak_bytes")[1]

    @property
    def verdicts(self) -> dict[str, Counter[str]]:
        """Numbers of verdicts by reward and status."""
        totals: dict[str, Counter[str]] = defaultdict(Counter)
        for record in self.records:
            for name, value in record.items():
                if name.startswith("verdict/"):
                    _, function, status = name.split("/")
                    totals[function][status] += round(value or 0)
        return totals

    @property
    def nothing_scored(self) -> bool:
        """Whether there are rewards, and none of them is a number."""
        return any("reward/mean" in record for record in self.records) and self.ends("reward/mean")[1] is None

    def ends(self, metric: str) -> tuple[Number | None, Number | None]:
        """The first and the last value of a metric; (None, None) if it has no value."""
        known = [record[metric] for record in self.records if record.get(metric) is not None]
        return (known[0], known[-1]) if known else (None, None)

    @property
    def results(self) -> dict[str, tuple[str, str]]:
        """Results by label: the first value (empty if there is only one) and the last (empty if unknown)."""
        time = "" if self.seconds is None else duration(self.seconds)
        peak = "" if self.peak_bytes is None else f"{self.peak_bytes / 2**30:.2f} GiB"
        return {
            "held-out accuracy": self._scores("evaluation/accuracy"),
            "held-out completions not scored": ("", self._unscored()),
            "mean reward, first and last block": self._scores("reward/mean"),
            "optimizer steps": ("", str(self.steps)),
            "time": ("", time),
            "peak memory": ("", peak),
        }

    def _scores(self, metric: str) -> tuple[str, str]:
        """First and last value of a metric that is null if nothing was scored."""
        first, last = self.ends(metric)
        if first is None or last is None:
            return "", "not scored" if any(metric in record for record in self.records) else ""
        return f"{first:.3g}", f"{last:.3g}"

    def _unscored(self) -> str:
        """The share of each set at the last evaluation; empty if all of their completions were scored."""
        shares = dict[str, float]()
        for record in self.records:
            shares |= unscored_shares(record)
        return ", ".join(f"{name}: {share:.0%}" if name else f"{share:.0%}" for name, share in shares.items() if share)

    def line(self, metric: str, label: str) -> list[Line]:
        """A metric over the steps, as one line; empty if it has no value."""
        points = [(record["step"], record[metric]) for record in self.records if metric in record]
        known = any(y is not None for _, y in points)
        return [Line(label, tuple(x for x, _ in points), tuple(y for _, y in points))] if known else []

    def lines(self, curves: Curves) -> list[Line]:
        """The lines of a plot, for those of its metrics that the run has."""
        return [line for metric, label in curves.labels.items() for line in self.line(metric, label)]


def _text(path: Path) -> str:
    """A file's text, also of one that was damaged."""
    return path.read_text("utf-8", errors="replace")


def _mapping(text: str) -> dict[str, Any]:
    """YAML as a mapping; empty if it is malformed, for a report of a damaged run is still useful."""
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}


def _imitates(config: Mapping[str, Any]) -> bool:
    """``Recipe.imitates`` of a config that may be damaged."""
    algorithm = config.get("algorithm") or {}
    return (algorithm.get("surrogate") or {}).get("name", algorithm.get("preset")) == "nll"


def _target(config: Mapping[str, Any]) -> Number | None:
    """The KL target of a recipe, anywhere below its key ``kl``."""
    inside = [config.get("kl")]
    while inside:
        part = inside.pop()
        if isinstance(part, dict):
            if isinstance(part.get("target"), int | float):
                return part["target"]
            inside += part.values()
    return None


@dataclass
class _Rollouts:
    """What the report shows of completions: rewards and pass rates by block, first failures, and sample rows."""

    rewards: dict[str, dict[int, list[float]]] = field(default_factory=lambda: defaultdict(dict))
    passed: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    failures: dict[str, str] = field(default_factory=dict)
    blocks: list[int] = field(default_factory=list)
    first: list[dict[str, Any]] = field(default_factory=list)
    last: list[dict[str, Any]] = field(default_factory=list)

    def add(self, block: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add a block."""
        self.blocks.append(block)
        for column in rows[0] if rows else ():
            if column.partition("/")[0] == "reward":
                self.rewards[column][block] = [row[column] for row in rows if row[column] is not None]
        checks: dict[str, list[bool]] = defaultdict(list)
        for row in rows:
            for name, verdict in json.loads(row["verdicts"]).items():
                for constraint, satisfied in verdict["detail"]:
                    checks[constraint].append(satisfied)
                if verdict["status"] in ("error", "timeout"):
                    failed = Verdict(None, verdict["status"], (), verdict["message"], verdict["traceback"])
                    self.failures.setdefault(name, in_a_line(failed))
        for constraint, said in checks.items():
            self.passed[constraint][block] = sum(said) / len(said)
        self.last = _extremes(rows)
        self.first = self.first or self.last


def _extremes(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The best and the worst completion of the first three prompts."""
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["prompt_id"]].append(row)
    shown = []
    for group in list(groups.values())[:3]:
        scored = sorted((row for row in group if row["reward"] is not None), key=lambda row: -row["reward"]) or group
        shown += [dict(row) for row in ([scored[0]] if len(scored) == 1 else [scored[0], scored[-1]])]
    return shown


def _head(run: Recorded) -> str:
    if run.summary:
        state = ENDS.get(run.summary.get("ended_by", ""), "finished")
        state += f": {run.summary['error']}" if "error" in run.summary else ""
    elif run.records:
        state = f"no summary: still going on, or stopped after step {run.steps}"
    else:
        state = "no step recorded"
    if run.nothing_scored and run.summary.get("ended_by") != "unscored":
        state += "; no completion was scored"
    facts = [state, *(f"{key} {run.config[key]}" for key in ("seed",) if key in run.config)]
    if exported := run.summary.get("exported"):
        facts.append(exported_in_words(exported))
    return f"<header><h1>{html.escape(run.name)}</h1><p>{html.escape(' · '.join(facts))}</p></header>"


def _tiles(run: Recorded) -> str:
    tiles = ""
    for label, (before, after) in run.results.items():
        start = f"<small>{before} → </small>" if before else ""
        value = f"<div class=value>{start}{html.escape(after)}</div>"
        tiles += f"<div class=tile>{value}<div>{html.escape(label)}</div></div>" if after else ""
    return f"<section class=tiles>{tiles}</section>"


_LIKELIHOOD = """
Loss | nat per token | loss/total loss | Negative log-likelihood of the texts, and what the recipe adds."""
_CURVES = """
KL to the reference | nat per token | kl_ref/k3_mean mean, kl_ref/k3_p95 95th percentile
    | k3 of each token, mean and 95th percentile, and the controller's target where it has one.
KL coefficient | beta, exact | kl_ref/beta beta | Beta, as the controller moved it.
Divergence from the teacher | nat per token | teacher/divergence divergence | Before its weight.
Log ratio to the teacher | nat per token | teacher/log_ratio mean
    | logp_teacher − logp_sampler of sampled tokens, whose mean under the policy is −KL(policy || teacher).
Beyond a server's likeliest tokens | probability, whole | teacher/tail teacher, teacher/tail_of_policy policy
    | Of all other tokens together, inside which nothing is taught.
Entropy | nat per token | entropy/mean entropy
    | Of the policy's next-token distribution, mean over trained tokens.
Completion length | token | length/mean mean, length/max longest, length/min shortest
    | Sampled tokens, the stop token included.
Truncated and without signal | fraction, whole
    | length/truncated_fraction truncated, group/zero_signal_fraction groups without signal
    | Completions cut at their limit; groups whose rewards are all equal.
Clipped tokens | fraction | clip/low_fraction lower bound, clip/high_fraction upper bound
    | Tokens whose gradient a bound of the ratio removes or caps.
Ratio to the old policy | ratio | ratio/mean mean, ratio/min smallest, ratio/max largest
    | At the level that the objective uses.
Sampler against trainer | nat | sampler/logp_difference_mean mean, sampler/logp_difference_max largest
    | |logp_old − logp_sampler|: how far the two engines disagree about the same weights.
Value loss | reward² | loss/value value loss
    | Of the value head, mean over tokens with a return, before its coefficient.
Value head | reward | value/mean value, value/return_mean return, value/explained_variance explained variance
    | Mean prediction against mean return, and the share of the returns' variance that predictions explain.
Gradient norm | norm | optimizer/grad_norm norm | Before clipping; a gap is a step that was skipped.
Learning rate | learning rate, exact | optimizer/learning_rate learning rate | Of each step.
"""
_THROUGHPUT = """
Throughput | token/s, log | throughput/rollout_tokens_per_second rollout,
    throughput/scoring_tokens_per_second scoring, throughput/training_tokens_per_second training | Tokens a second.
"""


def _curves(run: Recorded) -> str:
    exported, target = run.summary.get("exported"), _target(run.config)
    best = ("best, exported", exported["step"]) if exported is not None and exported["which"] == "best" else None
    names = dict.fromkeys(name for record in run.records for name in record)
    functions = [name for name in names if metric_of(name).name == "reward/{function}/mean"]
    several = functions if len(functions) > 1 else []
    reward = Curves(
        "Reward",
        "Mean over the block of the weighted sum, and of each function before its weight.",
        "reward",
        {"reward/mean": "total"} | {name: name.split("/")[1] for name in several},
    )
    cards = []
    imitated = _LIKELIHOOD if _imitates(run.config) else ""
    for curves in (reward, *_of_sources(names), *_of_held_out(names), *Curves.listed(imitated + _CURVES)):
        level = ("target", target) if target is not None and curves.title == "KL to the reference" else None
        moment = best if curves.title == "Held-out accuracy" else None
        cards.append(curves.card(run.lines(curves), level=level, moment=moment))
    return grid_of("Training", cards)


def _of_sources(names: Iterable[str]) -> Iterator[Curves]:
    """A plot of the reward of each source, if there are several."""
    labels = {name: name.split("/")[1] for name in names if metric_of(name).name == "source/{source}/reward_mean"}
    if labels:
        yield Curves("Reward by source", "Mean over the prompts of each in the block.", "reward", labels)


def _of_held_out(names: Iterable[str]) -> Iterator[Curves]:
    """Plots of the accuracy of held-out sets, and of pass@k if there are several samples a prompt."""
    told = "Held-out completions that count as correct, under the evaluation's sampling settings."
    labels, chances, kinds = {}, {}, frozenset({"whole", "exact"})
    for name in names:
        held_out, _, number = name.removeprefix("evaluation/").removeprefix("held_out/").rpartition("/")
        match metric_of(name).name:
            case "evaluation/accuracy" | "held_out/{set}/accuracy":
                labels[name] = held_out or "accuracy"
            case "evaluation/pass_at/{k}" | "held_out/{set}/pass_at/{k}":
                chances[name] = f"{held_out.removesuffix('pass_at').strip('/')} pass@{number}".strip()
    if labels:
        yield Curves("Held-out accuracy", told, "fraction", labels, kinds)
    if chances:
        told = "Chance that one of k samples is correct, held out."
        yield Curves("pass@k", told, "fraction", chances, kinds)


def _over_blocks(rollouts: _Rollouts) -> str:
    cards = []
    several = len(rollouts.rewards) > 2
    for column, by_block in rollouts.rewards.items():
        if column == "reward" or several:
            title = "Rewards over time" if column == "reward" else f"Scores of {column.partition('/')[2]} over time"
            cards.append(card_of(title, "Each column is the histogram of one block.", _histograms(by_block)))
    if rollouts.passed:
        rates = [[by_block.get(block) for block in rollouts.blocks] for by_block in rollouts.passed.values()]
        names = list(rollouts.passed)
        plot = heat_map(rates, x=rollouts.blocks, y_label="", y_names=names, value_label="pass rate")
        cards.append(card_of("Constraints over time", "Pass rate of each constraint in each block.", plot))
    return grid_of("Blocks", cards)


def _histograms(by_block: Mapping[int, Sequence[float]]) -> str | None:
    scores = [score for of_block in by_block.values() for score in of_block]
    if not scores:
        return None
    low, high = min(scores), max(scores)
    if low == high:
        low, high = low - 0.5, high + 0.5
    width = (high - low) / _HISTOGRAM_BINS
    columns: list[list[float | None]] = []
    for of_block in by_block.values():
        counts = Counter(min(int((score - low) / width), _HISTOGRAM_BINS - 1) for score in of_block)
        columns.append([counts[b] / len(of_block) if of_block else None for b in range(_HISTOGRAM_BINS)])
    return heat_map(
        [list(row) for row in zip(*columns, strict=True)],
        x=list(by_block),
        y_label="reward",
        y_edges=[low + width * edge for edge in range(_HISTOGRAM_BINS + 1)],
        value_label="share of the block",
    )


def _cost(run: Recorded) -> str:
    seconds = run.summary.get("seconds")
    cards = [
        *(curves.card(run.lines(curves)) for curves in Curves.listed(_THROUGHPUT)),
        card_of(
            "Time by phase",
            "Seconds of the whole run, from the start of its process; writing this report is not among them.",
            bar_plot(seconds, x_label="seconds") if isinstance(seconds, dict) and seconds else None,
        ),
    ]
    return grid_of("Cost", cards)


def _graders(run: Recorded, failures: Mapping[str, str]) -> str:
    """A table of verdicts by status; empty if all are ``graded``."""
    totals = run.verdicts
    if not any(count for of_function in totals.values() for status, count in of_function.items() if status != "graded"):
        return ""
    statuses = get_args(VerdictStatus)
    rows = [
        [function, *(str(counts[status]) for status in statuses), failures.get(function, "–")]
        for function, counts in totals.items()
    ]
    return f"<section><h2>Verdicts</h2>{table_of(['function', *statuses, 'first failure'], rows)}</section>"


def _samples(rollouts: _Rollouts) -> str:
    if not rollouts.blocks:
        return ""
    chosen = [*rollouts.first, *(rollouts.last if len(rollouts.blocks) > 1 else [])]
    rows = [
        [
            str(row["block"]),
            row["prompt"],
            _shortened(_as_text(row), _MAX_COMPLETION_CHARACTERS),
            short(row["reward"]),
            short(row["advantage"]),
            f"{row['num_tokens']}" + (" (cut)" if row["finish_reason"] == "length" else ""),
        ]
        for row in chosen
    ]
    table = table_of(["block", "prompt", "completion", "reward", "advantage", "tokens"], rows)
    note = "The best and the worst completion of the first prompts, in the first and in the last block."
    return f"<section class=samples><h2>Samples</h2><p class=note>{note}</p>{table}</section>"


def _as_text(row: Mapping[str, Any]) -> str:
    """A completion as text; several turns with their roles."""
    return "\n\n".join(f"{role}: {text}" if role else text for role, text in turns(row))


def _group_pages(folder: RunFolder, blocks: Sequence[int]) -> str:
    """A list of some groups of a few blocks, and a section for each."""
    if not blocks:
        return ""
    count = min(len(blocks), _GROUP_BLOCKS)
    chosen = [blocks[round((len(blocks) - 1) * number / max(1, count - 1))] for number in range(count)]
    links, pages = [], []
    for block in chosen:
        by_group = groupby(folder.read_block(block), key=lambda row: (row.get("group"), row["prompt_id"]))
        groups = [list(group) for _, group in islice(by_group, _GROUPS_OF_BLOCK)]
        names = [f"block-{block}-group-{number}" for number in range(1, len(groups) + 1)]
        described = (
            f'<a href="#{name}">group {number}, {_rewards_in_words(group)}</a>'
            for number, (name, group) in enumerate(zip(names, groups, strict=True), start=1)
        )
        links.append(f"<li>block {block}: {' · '.join(described)}</li>")
        pages += [_group_page(name, group) for name, group in zip(names, groups, strict=True)]
    note = "Some groups with all their completions; any other: <code>logitless show RUN --block N --group N</code>"
    listed = f"<p class=note>{note}</p><ul class=groups>{''.join(links)}</ul>"
    return f"<section id=groups><h2>Groups</h2>{listed}</section>{''.join(pages)}"


def _rewards_in_words(group: Sequence[Mapping[str, Any]]) -> str:
    rewards = [row["reward"] for row in group if row["reward"] is not None]
    if not rewards:
        return "no reward"
    low, high = min(rewards), max(rewards)
    return f"rewards {short(low)}" if low == high else f"rewards {short(low)} to {short(high)}"


def _group_page(name: str, group: Sequence[Mapping[str, Any]]) -> str:
    """A section with the prompt and all completions, the best first."""
    ranked = sorted(group, key=lambda row: math.inf if row["reward"] is None else -row["reward"])
    cards = []
    for row in ranked:
        facts = [
            f"reward {short(row['reward'])}",
            f"advantage {short(row['advantage'])}",
            f"{row['num_tokens']} tokens",
        ]
        facts += ["cut at the limit"] if row["finish_reason"] == "length" else []
        said = [
            f"{function}: {verdict['status']} {short(verdict['score'])}"
            for function, verdict in json.loads(row["verdicts"]).items()
        ]
        cards.append(
            f"<article><p class=facts>{html.escape(', '.join(facts))}</p>"
            f"{_conversation(row)}"
            f"<p class=note>{html.escape('; '.join(said))}</p></article>"
        )
    title = html.escape(name.replace("-", " ").replace(" group", ", group"))
    prompt = html.escape(group[0]["prompt"] or "(empty)")
    return (
        f'<section class=page id="{name}"><p><a href="#groups">← back to the run</a></p><h2>{title}</h2>'
        f"<pre class=prompt>{prompt}</pre><div class=side>{''.join(cards)}</div></section>"
    )


def _conversation(row: Mapping[str, Any]) -> str:
    """The turns of a completion with their roles; those of the policy are marked."""
    said = []
    for role, text in turns(row):
        shown = f"<pre>{html.escape(_shortened(text, _GROUP_CHARACTERS))}</pre>"
        kind = "policy" if role == "assistant" else "other"
        said.append(f'<div class="turn {kind}"><b>{html.escape(role)}</b>{shown}</div>' if role else shown)
    return "".join(said)


def _shortened(text: str, limit: int) -> str:
    """The beginning and, twice as long, the end of a text of more than ``limit`` characters."""
    if len(text) <= limit:
        return text or "(empty)"
    head = limit // 3
    return f"{text[:head]} […{len(text) - limit} characters…] {text[head - limit :]}"

"""``logitless score``: score a file of responses with a suite of instructions or a reward."""

import argparse
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from logitless.cli.arguments import check_at_least, check_output_file
from logitless.cli.loading import loading
from logitless.errors import ConfigurationError
from logitless.rewards.instructions.suites import SuiteName
from logitless.rewards.wilson import Z_95

if TYPE_CHECKING:
    from logitless.rewards.evaluation import Pairing, Rate, SuiteReport
    from logitless.types import VerdictStatus


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What scores, the two files, and what to write."""
    scorer = parser.add_mutually_exclusive_group(required=True)
    scorer.add_argument("--suite", choices=get_args(SuiteName), help="suite that the prompts' instruction ids are from")
    scorer.add_argument("--reward", metavar="FILE_OR_MODULE:NAME", help="a reward function, or a reward of the library")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON Lines: prompt, instruction_id_list, kwargs")
    parser.add_argument("--column", default="prompt", help="of the prompts in their file (default: prompt)")
    parser.add_argument(
        "--responses",
        type=Path,
        required=True,
        help="JSON Lines: prompt (or key) and response; or what `logitless sample --out` wrote",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the official row of every scored prompt")
    parser.add_argument("--loose", action="store_true", help="loose verdicts in table and rows")
    parser.add_argument("--workers", type=int, default=2, help="processes for a suite (default 2)")
    parser.add_argument("--deadline", type=float, default=10.0, metavar="SECONDS", help="limit on one response")


def run(args: argparse.Namespace) -> int:
    """Score, print, and write what was asked for; 0 also where responses are missing."""
    if args.reward and args.loose:
        raise ConfigurationError(
            needed="--suite with --loose",
            given="--reward",
            remedy="Leave it out: a reward has no loose verdicts.",
        )
    _check(args)
    with loading("score"):
        from logitless.rewards.evaluation import read_pairing
    pairing = read_pairing(args.prompts, args.responses, column=args.column)
    (_score_suite if args.suite else _score_reward)(args, pairing, Console())
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse what would fail after everything was scored."""
    if not (math.isfinite(args.deadline) and args.deadline > 0):
        raise ConfigurationError(
            needed="a finite number of seconds above 0 as --deadline",
            given=str(args.deadline),
            remedy="Give for example --deadline 60.",
        )
    check_at_least("--workers", args.workers, 1)
    check_output_file("--json", args.json)


def _score_suite(args: argparse.Namespace, pairing: "Pairing", console: Console) -> None:
    from logitless.rewards.evaluation import official_rows, score_suite, suite_report, write_rows

    with _progress(pairing) as progress:
        task = progress.add_task("scoring", total=_num_answered(pairing))
        verdicts = score_suite(
            pairing,
            args.suite,
            workers=args.workers,
            deadline_seconds=args.deadline,
            progress=lambda count: progress.advance(task, count),
        )
    report = suite_report(pairing, verdicts)
    console.print(_families_table(report, "loose" if args.loose else "strict", args.suite))
    console.print(_official_table(report))
    _print_counts(console, pairing, [(verdict.status, verdict.message) for verdict in verdicts])
    if args.json:
        write_rows(args.json, official_rows(pairing, verdicts, loose=args.loose))


def _score_reward(args: argparse.Namespace, pairing: "Pairing", console: Console) -> None:
    from logitless.rewards.evaluation import reward_at, score_reward, write_rows

    reward = reward_at(args.reward)
    with _progress(pairing) as progress:
        task = progress.add_task("scoring", total=_num_answered(pairing))
        verdicts = score_reward(pairing, reward, progress=lambda count: progress.advance(task, count))
    scores = [verdict.score for verdict in verdicts if verdict.score is not None]
    table = Table("reward", "scored", "mean", "95 % interval", "std", "min", "max", title=args.reward)
    if scores:
        mean, std = statistics.fmean(scores), statistics.pstdev(scores)
        half = Z_95 * std / math.sqrt(len(scores))
        numbers = (mean, std, min(scores), max(scores))
        shown = [f"{number:.4g}" for number in numbers]
        interval = f"{mean - half:.4g} to {mean + half:.4g}"
        table.add_row(reward.metric_name, str(len(scores)), shown[0], interval, *shown[1:])
    console.print(table)
    _print_counts(console, pairing, [(verdict.status, verdict.message) for verdict in verdicts])
    for trace in [verdict.traceback for verdict in verdicts if verdict.traceback][:1]:
        console.print(f"The first of them:\n{trace.rstrip()}", markup=False, highlight=False, soft_wrap=True)
    if args.json:
        scored = zip(pairing.rows, verdicts, strict=True)
        rows = ({"prompt": row.prompt, "score": verdict.score} for row, verdict in scored if verdict.score is not None)
        write_rows(args.json, rows)


def _progress(pairing: "Pairing") -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal or not pairing.rows)


def _num_answered(pairing: "Pairing") -> int:
    return sum(response is not None for response in pairing.responses)


def _families_table(report: "SuiteReport", kind: str, suite: str) -> Table:
    table = Table("family", "instructions", "passed", kind, "95 % interval", title=f"{suite}: instructions by family")
    for family, rate in _family_rates(report, kind).items():
        table.add_row(family, str(rate.count), str(rate.passed), *_shown(rate))
    return table


def _official_table(report: "SuiteReport") -> Table:
    table = Table("accuracy", "of", "passed", "rate", "95 % interval", title="all")
    for name in ("prompt_strict", "prompt_loose", "instruction_strict", "instruction_loose"):
        rate: Rate = getattr(report, name)
        table.add_row(name.replace("_", "-level "), str(rate.count), str(rate.passed), *_shown(rate))
    return table


def _family_rates(report: "SuiteReport", kind: str) -> "Mapping[str, Rate]":
    return {family: rates["loose"] if kind == "loose" else rates["strict"] for family, rates in report.families.items()}


def _shown(rate: "Rate") -> tuple[str, str]:
    low, high = rate.interval
    return ("-", "-") if not rate.count else (f"{rate.value:.1%}", f"{low:.1%} to {high:.1%}")


def _print_counts(console: Console, pairing: "Pairing", verdicts: "Sequence[tuple[VerdictStatus, str]]") -> None:
    """How many prompts have which status and why, and how many responses were skipped."""
    for (status, message), count in Counter(verdicts).items():
        if status == "graded":
            console.print(f"{count} scored")
        else:
            console.print(f"{count} {status}: {message}", markup=False)
    if pairing.num_skipped:
        console.print(f"{pairing.num_skipped} responses without a prompt skipped")

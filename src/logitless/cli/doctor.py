"""``logitless doctor [RECIPE]``: what this machine can run, time and memory of a recipe on it, and known mistakes.

Without a recipe: versions, devices, backends, engines, attention, sandbox. With a recipe: whether it runs here,
settings that are often a mistake, faster settings, and a forecast of time and memory; exit status 1 if it cannot run,
with the nearest settings that can. Given a run's ``config.yaml``, also which rewards failed in that run.
``--source FOLDER`` reads training code without running it and lists likely mistakes; exit status 0 with or without
findings.
"""

import argparse
import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from logitless.cli.arguments import add_overrides
from logitless.cli.output import program
from logitless.errors import ConfigurationError, LogitlessError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The recipe or the source, and the form of the output."""
    parser.add_argument("recipe", type=Path, nargs="?", help="YAML file; without it the machine is described")
    add_overrides(parser)
    parser.add_argument(
        "--source", type=Path, metavar="FOLDER", help="read training code, and list places worth a look"
    )
    parser.add_argument("--no-measure", action="store_true", help="with a recipe: the plan alone, no measured batch")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print what was found; 1 where a recipe cannot run here."""
    if options.source is not None:
        found, status = _source(options.source), 0
    elif options.recipe is not None:
        if options.recipe.suffix in (".py", ".ipynb"):
            raise ConfigurationError(
                needed="a recipe, a YAML file",
                given=str(options.recipe),
                remedy=f"For training code: {program()} doctor --source {shlex.quote(str(options.recipe))}",
            )
        found, status = _recipe(options.recipe, options.overrides, measure=not options.no_measure)
    else:
        from logitless.doctor.machine import findings

        found, status = findings(), 0
    if options.json:
        print(json.dumps(found, indent=2, default=dataclasses.asdict))
    else:
        print("\n".join(line for section, entries in found.items() for line in _section(section, entries)))
    return status


def _section(title: str, entries: Any) -> Sequence[str]:
    if isinstance(entries, dict):
        width = max([30, *map(len, entries)])
        return [title, *(f"  {name:{width}s} {value}" for name, value in entries.items())]
    if isinstance(entries, str):
        return [title, *(f"  {line}" for line in entries.splitlines())]
    return [title, *(f"  {line}" for entry in entries for line in str(entry).splitlines())]


def _source(folder: Path) -> dict[str, Any]:
    from logitless.doctor.source_audit import NUM_RULES, audit_source

    findings, unread = audit_source(folder)
    found: dict[str, Any] = {}
    if findings:
        found[f"{folder}: worth a look"] = findings
    if unread:
        found["not read"] = unread
    found["done"] = f"{len(findings) or 'nothing'} found by {NUM_RULES} rules; nothing was run"
    return found


def _recipe(path: Path, overrides: Sequence[str], *, measure: bool) -> tuple[dict[str, Any], int]:
    import torch

    from logitless.doctor.forecast import forecast_of
    from logitless.doctor.machine import left_on_the_table
    from logitless.doctor.nearest import fit_of
    from logitless.doctor.recipe_audit import Scored, audit_recipe, audit_scored
    from logitless.train.assembly.stages import read
    from logitless.train.collect.failures import counts_in_words
    from logitless.train.record.memory import size_text

    fit = fit_of(path, overrides)
    found: dict[str, Any] = {}
    if fit.problems:
        found["cannot run here"] = list(fit.problems)
        if fit.changes:
            found["would run with"] = [f"--set '{change}'" for change in fit.changes]
        elif fit.changes is None and fit.plan is not None:
            plan = f"`logitless plan {path} --gpus N`"
            found["would run with"] = (
                f"none of the settings that were tried; {plan} says what each of N GPUs would hold"
            )
    try:
        data = read(fit.recipe).data
    except LogitlessError:
        data = None  # its error is among the problems
    audited = [*audit_recipe(fit.recipe, data), *_of_run(path)]
    found["audit"] = audited or ["nothing found"]
    if fit.plan is None:
        return found, 1
    found["choices"] = list(fit.plan.chosen)
    found["plan"] = {
        **{name: size_text(size) for name, size in fit.plan.memory_bytes.items()},
        "total": size_text(fit.plan.total_bytes),
    }
    host = fit.plan.host
    if torch.cuda.is_available() and host.peak_bytes:
        found["plan"]["memory of the host"] = f"{size_text(host.peak_bytes)}, most while {host.fullest}"
    if fit.changes is not None:
        found["left on the table"] = left_on_the_table(fit.recipe, fit.plan) or ["nothing found"]
    if measure and not fit.problems:
        forecast = forecast_of(fit.recipe, fit.plan)
        found["forecast"] = str(forecast)
        found["verdicts"] = {name: counts_in_words(counts) for name, counts in forecast.verdicts.items()}
        if forecast.failures:
            found["rewards that failed"] = list(forecast.failures)
        measured = forecast.verdicts, forecast.first_failures, forecast.has_signal
        audited += audit_scored(Scored("the measured batch", *measured))
        found["audit"] = audited or ["nothing found"]
    return found, int(bool(fit.problems))


def _of_run(recipe: Path) -> Sequence[Any]:
    """Findings about the run whose ``config.yaml`` is given; none if it is another recipe."""
    from logitless.doctor.recipe_audit import Scored, audit_scored
    from logitless.train.record.metrics import without_signal
    from logitless.train.record.run_folder import RunFolder
    from logitless.train.report.page import Recorded

    folder = RunFolder(recipe.parent)
    if recipe.name != folder.config.name or not folder.metrics.exists():
        return ()
    run = Recorded.of(folder)
    named = (name.partition("first_failure/") for name in run.summary)
    first = {name: run.summary[f"first_failure/{name}"] for _, found, name in named if found}
    return audit_scored(Scored(f"the run {run.name}", run.verdicts, first, not without_signal(run.summary)))

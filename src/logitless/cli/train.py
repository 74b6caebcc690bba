"""``logitless train RECIPE``: check a recipe, run it, continue it."""

import argparse
import json
from pathlib import Path

from logitless.train.callbacks import Callback
from logitless.train.entry import train
from logitless.train.explain import explain
from logitless.train.fork import check_fork, parent_of
from logitless.train.plan import dry_run
from logitless.train.recipe import load_recipe
from logitless.train.result import RunResult
from logitless.train.setup import algorithm_of
from logitless.train.wall_clock import WallClock

STATUS = """exit status:
  0    the run is complete, and model/ is written
  1    the run failed
  2    bad input: arguments, recipe or data
  128+N  signal N stopped the run: 130 Ctrl-C (SIGINT), 143 SIGTERM, 129 SIGHUP. Where it had begun to train, a
       checkpoint was saved, and --resume goes on from it. Under torchrun each process ends with this status."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The recipe and what to do with it."""
    parser.epilog, parser.formatter_class = STATUS, argparse.RawDescriptionHelpFormatter
    parser.add_argument("recipe", type=Path, help="YAML file, see recipes/ and docs/configuration.md")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="replace a value (repeatable)"
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--dry-run", action="store_true", help="check everything, print the plan, train nothing")
    mode.add_argument(
        "--explain", action="store_true", help="print what a batch costs and what each saving takes off; train nothing"
    )
    mode.add_argument("--resume", action="store_true", help="continue the run of this name from its last checkpoint")
    mode.add_argument(
        "--resume-or-start", action="store_true", help="continue the run of this name if there is one, else start it"
    )
    mode.add_argument("--numbered", action="store_true", help="if the name is taken, use name-2, name-3, ...")
    parser.add_argument(
        "--fork",
        metavar="RUN[:CHECKPOINT]",
        help="start from the weights, optimizer state and position of another run's checkpoint (a block's number or a "
        "name; default: its latest at the end of a block), with this recipe's keys",
    )


def run(options: argparse.Namespace) -> int:
    """Train, and end with what came of it."""
    clock = WallClock.of_process()
    recipe = load_recipe(options.recipe, options.overrides)
    if options.fork is not None and (options.dry_run or options.explain):
        check_fork(parent_of(options.fork), recipe, algorithm_of(recipe))
    if options.dry_run:
        print(dry_run(recipe))
        return 0
    if options.explain:
        print(explain(recipe))
        return 0
    result = train(
        recipe,
        resume="auto" if options.resume_or_start else options.resume,
        fork=options.fork,
        numbered=options.numbered,
        callbacks=[_Ending(options.recipe)],
        clock=clock,
    )
    return result.exit_status


class _Ending(Callback):
    """Prints what came of a run and what may come next.

    Args:
        recipe: path of its file.
    """

    def __init__(self, recipe: Path) -> None:
        self.recipe = recipe

    def on_end(self, result: RunResult) -> None:
        """Print it."""
        print(_ending(result, self.recipe))


def _ending(result: RunResult, recipe: Path) -> str:
    folder, complete = result.folder, result.complete
    summary = json.loads(folder.summary.read_text())
    lines = ["", f"{result.words}: {folder.path}"]
    for label, before, after in (
        ("held-out accuracy", "accuracy_before", "accuracy_after"),
        ("mean reward", "reward_first_block", "reward_last_block"),
    ):
        if summary.get(before) is not None and summary.get(after) is not None:
            lines.append(f"  {label:18s} {summary[before]:.3f} -> {summary[after]:.3f}")
    for name in summary:
        _, of_set, held_out = name.partition("accuracy_before/")
        if of_set and summary.get(f"accuracy_after/{held_out}") is not None:
            change = f"{summary[name]:.3f} -> {summary[f'accuracy_after/{held_out}']:.3f}"
            lines.append(f"  {f'{held_out} accuracy':18s} {change}")
    for name, failed in summary.items():
        _, is_failed, function = name.partition("failed_verdicts/")
        if is_failed and failed:
            total = summary[f"verdicts/{function}"]
            lines.append(
                f"  {'failed reward':18s} {function}: {failed:,} of {total:,} completions ({failed / total:.0%})"
            )
    seconds = summary["seconds"]
    phases = ", ".join(f"{phase} {value:.1f}" for phase, value in seconds.items() if value >= 0.05)
    lines.append(f"  {'time':18s} {sum(seconds.values()):.1f} s: {phases}")
    lines.append(f"  {'report':18s} {folder.report}")
    name = folder.path.name
    if complete:
        lines.append(f"next: logitless train {recipe} --set name={name}-hotter --set rollout.sampling.temperature=1.2")
    else:
        lines.append(f"next: logitless train {recipe} --set name={name} --resume")
    return "\n".join(lines)

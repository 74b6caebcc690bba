"""``logitless train RECIPE``: check a recipe, run it, continue it."""

import argparse
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from logitless.cli.arguments import add_overrides
from logitless.cli.loading import cuda_context, import_transformers, loading
from logitless.cli.output import program
from logitless.errors import ConfigurationError
from logitless.train.callbacks import Callback
from logitless.train.recipe.reading import read_mapping

# Torch and transformers are imported by `run`: `--help` and a recipe that cannot be read need not wait for them, and
# one with a wrong key waits for torch alone.
if TYPE_CHECKING:
    from logitless.train.beginning import Resume
    from logitless.train.recipe.config import Recipe
    from logitless.train.record.result import RunResult
    from logitless.train.record.run_folder import RunFolder

STATUS = """exit status:
  0    the run is complete, and model/ is written
  1    the run failed; so has one of which no completion was scored
  2    bad input: arguments, recipe or data
  128+N  signal N stopped the run: 130 Ctrl-C (SIGINT), 143 SIGTERM, 129 SIGHUP. Where it had begun to train, a
       checkpoint was saved, and --resume goes on from it. Under torchrun each process ends with this status."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The recipe and what to do with it."""
    parser.epilog, parser.formatter_class = STATUS, argparse.RawDescriptionHelpFormatter
    parser.add_argument("recipe", type=Path, nargs="?", help="YAML file, see recipes/ and docs/configuration.md")
    add_overrides(parser)
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan, train nothing")
    mode = parser.add_mutually_exclusive_group()
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
    mode.add_argument(
        "--replay",
        metavar="RUN",
        type=Path,
        help="repeat a run that logged its blocks, with its own recipe, and compare every token, metric and checkpoint",
    )


def run(options: argparse.Namespace) -> int:
    """Train, and end with what came of it."""
    _choose_recipe(options)
    resume: Resume = "auto" if options.resume_or_start else options.resume
    with ExitStack() as stack:
        with loading("train"), cuda_context(_device_for(options)):
            from logitless.train.recipe.loading import check_recipe, load_recipe

            given = check_recipe(options.recipe, options.overrides)  # a wrong key need not wait for what follows
            if not (resume or options.numbered or options.dry_run):
                _check_name(given, forks=options.fork is not None)  # nor a name that is taken
            import_transformers()
            from logitless.train.entry import train
            from logitless.train.long_lived import startup_objects_frozen
            from logitless.train.record.wall_clock import WallClock

            # Before garbage is collected again: the first collection would visit all that was imported.
            stack.enter_context(startup_objects_frozen())
        recipe = load_recipe(options.recipe, options.overrides)
        clock = WallClock.of_process()
        if options.dry_run:
            return _planned(recipe, options, resume)
        ending = _Ending(options.recipe, options.overrides, options.replay)
        try:
            return train(
                recipe,
                resume=resume,
                fork=options.fork,
                replay=options.replay,
                numbered=options.numbered,
                callbacks=[ending],
                clock=clock,
            ).exit_status
        except KeyboardInterrupt as interrupt:
            for line in ending.left():
                interrupt.add_note(line)
            raise


def _choose_recipe(options: argparse.Namespace) -> None:
    """Under ``--replay`` take the recipe of the run, and a name beside it.

    Raises:
        ConfigurationError: there is no recipe, or there are two.
    """
    run = options.replay
    if (options.recipe is None) != (run is not None):
        raise ConfigurationError(
            needed="a recipe, or a run to --replay, which has its own",
            given="neither" if run is None else "both",
            remedy="Name a YAML file (`logitless recipes` lists some)."
            if run is None
            else "Change keys of the run's recipe with --set.",
        )
    if run is not None:
        from logitless.train.record.run_folder import open_run_folder

        run = open_run_folder(run).path.resolve()
        options.recipe, options.numbered = run / "config.yaml", True
        options.overrides = [f"output={run.parent}", f"name={run.name}-replay", *options.overrides]


def _device_for(options: argparse.Namespace) -> str:
    """The recipe's ``model.device``, before it is checked; the CPU if nothing is trained."""
    model = read_mapping(options.recipe, options.overrides).get("model")
    if options.dry_run or not isinstance(model, dict):
        return "cpu"
    return str(model.get("device", "auto"))


def _check_name(recipe: "Recipe", *, forks: bool) -> None:
    """Refuse a name that is taken, unless torchrun has restarted the run of this name.

    Several processes look for it together, once they have met: a folder here says nothing about the node that writes.
    """
    from logitless.distributed.ranks import restarted
    from logitless.train.record.run_folder import RunFolder, is_taken, taken

    folder, alone = RunFolder(Path(recipe.output) / recipe.name), os.environ.get("WORLD_SIZE", "1") == "1"
    if alone and is_taken(folder) and not restarted():
        raise taken(folder, forks=forks)


def _planned(recipe: "Recipe", options: argparse.Namespace, resume: "Resume") -> int:
    """Print what a run would be, and whether its start is refused."""
    from logitless.train.plan.run_plan import dry_run

    if options.replay is not None:
        from logitless.train.collect.replay import repeated_on
        from logitless.train.record.run_folder import RunFolder

        recipe = repeated_on(1, RunFolder(options.replay), recipe)
    refused = _refused(recipe, resume=resume, fork=options.fork, numbered=options.numbered)
    print(dry_run(recipe))
    if refused is not None:
        print(f"  a start here is refused: {refused}")
    return 0


def _refused(recipe: "Recipe", *, resume: "Resume", fork: str | None, numbered: bool) -> ConfigurationError | None:
    """The error of a start whose name is taken, which does not keep a recipe from being planned.

    Raises:
        LogitlessError: ``--resume`` or ``--fork`` would be refused.
    """
    from logitless.distributed.ranks import Ranks
    from logitless.train.assembly.algorithm import algorithm_of
    from logitless.train.beginning import check_beginning
    from logitless.train.record.run_folder import RunFolder, is_taken, taken

    needs_name = resume is False and not numbered
    algorithm, folder = algorithm_of(recipe), RunFolder(Path(recipe.output) / recipe.name)
    check_beginning(recipe, algorithm, Ranks.alone(), resume=resume, fork=fork, numbered=numbered or needs_name)
    return taken(folder, forks=fork is not None) if needs_name and is_taken(folder) else None


class _Ending(Callback):
    """Prints the result of a run and the next command.

    Args:
        recipe: path of its file.
        settings: of ``--set``.
        replay: run that this one repeats, which no resumed run does; None for any other.
    """

    def __init__(self, recipe: Path, settings: Sequence[str], replay: Path | None) -> None:
        self.recipe, self.settings, self.replay = recipe, settings, replay
        self._folder: RunFolder | None = None

    def on_start(self, path: Path, recipe: "Recipe") -> None:
        """Remember where the run is."""
        del recipe
        from logitless.train.record.run_folder import RunFolder

        self._folder = RunFolder(path)

    def left(self) -> Sequence[str]:
        """What a run that was stopped without saving has left, and the next command; empty without a checkpoint."""
        from logitless.train.record.result import RunResult
        from logitless.train.store.checkpoint import checkpoints

        if self._folder is None or not (kept := checkpoints(self._folder.checkpoints)):
            return ()
        stopped = RunResult(self._folder, "signal")
        following = _next(stopped, self.recipe, self.settings, self.replay, {}, unrepaired=False)
        return f"  last checkpoint    {kept[-1]}", f"next: {following}"

    def on_end(self, result: "RunResult") -> None:
        """Print it."""
        print(_ending(result, self.recipe, self.settings, self.replay))


OFTEN = 0.1
"""From this share of completions without a score on, a reward should be repaired before the next run."""


WORTH_SAYING = 0.05
"""A phase with this share of a run's time is named at its end; with more of them the line would wrap."""


def _ending(result: "RunResult", recipe: Path, settings: Sequence[str], replay: Path | None) -> str:
    from logitless.train.record.metrics import without_signal

    folder = result.folder
    summary = folder.read_summary()
    failures = [*_failures(summary)]
    rows = [*_scores(summary), *failures]
    if result.ended_by == "unscored" and not failures:
        rows.append(("not scored", "no reward failed: every verdict is missing"))
    if without_signal(summary):
        rows.append(("no signal", "rewards gave no completion an advantage: nothing was learned from them"))
    rows += [("time", _time(summary["seconds"])), ("report", str(folder.report))]
    unrepaired = result.ended_by == "unscored" or (result.complete and _fails_often(summary))
    lines = ["", f"{result.words}: {folder.path}", *(f"  {label:18s} {said}" for label, said in rows)]
    following = _next(result, recipe, settings, replay, summary, unrepaired=unrepaired)
    return "\n".join([*lines, f"next: {following}"])


def _time(seconds: Mapping[str, float]) -> str:
    """A run's seconds and its longest phases, in a line; ``summary.json`` has all phases.

    Example:
        >>> _time({"imports": 5.0, "data": 0.5, "rollout": 30.0, "writing": 0.25, "training": 15.0})
        '50.8 s: rollout 30.0, training 15.0, imports 5.0, other 0.8'
    """
    total = sum(seconds.values())
    long = {name: value for name, value in seconds.items() if value >= WORTH_SAYING * total}
    phases = dict(sorted(long.items(), key=lambda phase: -phase[1])) | {"other": total - sum(long.values())}
    return f"{total:.1f} s: {', '.join(f'{name} {value:.1f}' for name, value in phases.items() if value >= 0.05)}"


def _scores(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Label, first and last value of held-out accuracies and rewards, and of the training reward.

    A held-out reward that equals the accuracy is left out.
    """
    from logitless.train.record.metrics import not_scored

    def change(before: str, after: str) -> str | None:
        if before not in summary or after not in summary:
            return None
        first, last = ("not scored" if (v := summary[name]) is None else f"{v:.3f}" for name in (before, after))
        return first if first == last == "not scored" else f"{first} -> {last}"

    held_out = [f"/{name}" if name else "" for name, _ in _of("accuracy_before", summary)]
    for each in held_out:
        name = each.removeprefix("/") or "held-out"
        accuracy = change(f"accuracy_before{each}", f"accuracy_after{each}")
        reward = change(f"held_out_reward_before{each}", f"held_out_reward_after{each}")
        if accuracy is not None:
            yield f"{name} accuracy", accuracy + not_scored(summary.get(f"unscored_fraction_after{each}") or 0.0)
        if reward is not None and reward != accuracy:
            yield f"{name} reward", reward
    if (reward := change("reward_first_block", "reward_last_block")) is not None:
        yield "mean reward", reward


def _of(name: str, summary: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The entries ``name`` and ``name/X``, as pairs of X (empty without one) and value."""
    for key, value in summary.items():
        start, _, of = key.partition("/")
        if start == name:
            yield of, value


def _failures(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Label and words for each reward that failed at completions, or whose deadline they hit."""
    total = dict(_of("verdicts", summary))
    failed = {name: count for name, count in _of("failed_verdicts", summary) if count}
    first = dict(_of("first_failure", summary))
    for name, count in failed.items():
        cause = f", the first by {first[name]}" if name in first else ""
        yield "failed reward", f"{name}: {_share(count, total[name])}{cause}"
    for name, cause in first.items():
        if name not in failed:
            yield "failed reward", f"{name}: at held-out completions, the first by {cause}"
    for name, count in _of("deadline_hits", summary):
        if count > OFTEN * total[name]:
            yield "deadline hit", f"{name}: {_share(count, total[name])}"


def _share(count: int, total: int) -> str:
    return f"{count:,} of {total:,} completions ({count / total:.0%})"


def _fails_often(summary: Mapping[str, Any]) -> bool:
    """Whether a reward should be repaired before the next run."""
    from logitless.train.collect.failures import MOST_HIT

    total = dict(_of("verdicts", summary))
    unscored = [share for _, share in _of("unscored_fraction_after", summary) if share is not None and share > OFTEN]
    on_purpose = not any(_of("first_failure", summary))  # missing, where nothing has failed
    return (
        any(count > OFTEN * total[name] for name, count in _of("failed_verdicts", summary))
        or any(count > MOST_HIT * total[name] for name, count in _of("deadline_hits", summary))
        or bool(unscored and not on_purpose)
    )


def _next(
    result: "RunResult",
    recipe: Path,
    settings: Sequence[str],
    replay: Path | None,
    summary: Mapping[str, Any],
    *,
    unrepaired: bool,
) -> str:
    """The command to run next.

    Args:
        result, recipe, settings, replay: of the run.
        summary: its ``summary.json``.
        unrepaired: whether a reward must be repaired first.
    """
    from logitless.train.record.metrics import without_signal

    name = result.folder.path.name
    others = [each for each in settings if not each.startswith("name=")]
    if unrepaired:
        return f"{program()} doctor {recipe}{_set(settings)}  # once the reward is repaired: scores one batch with it"
    if result.signal is not None and replay is not None:
        others = [each for each in others if not each.startswith("output=")]
        return f"{_command()} --replay {shlex.quote(str(replay))}{_set(others)}"
    if not result.complete and replay is not None:
        return f"{_command()} {shlex.quote(str(replay / 'config.yaml'))} --resume  # goes on with the repeated run"
    if not result.complete:
        return f"{_command()} {recipe}{_set([f'name={name}', *others])} --resume"
    why = "what it has learned to say"
    if summary.get("accuracy_after") == summary.get("held_out_reward_after") == 0:
        why = "no held-out completion earned a reward: read some"
    elif without_signal(summary):
        why = "no completion had an advantage: read some"
    return f"{program()} show {shlex.quote(str(result.folder.path))} --block {summary['blocks']}  # {why}"


def _command() -> str:
    """How this run was started: by itself, or by torchrun with as many processes a node."""
    processes = os.environ.get("LOCAL_WORLD_SIZE") if "TORCHELASTIC_RUN_ID" in os.environ else None
    return f"{program()} train" if processes is None else f"torchrun --nproc-per-node {processes} -m logitless train"


def _set(settings: Sequence[str]) -> str:
    return "".join(f" --set {shlex.quote(each)}" for each in settings)

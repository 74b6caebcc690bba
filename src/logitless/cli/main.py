"""The command line. Exit status 0: done; 2: bad input (arguments, recipe, data); 1: a run that failed; 128 + N: ended
by signal N, as 130 for Ctrl-C."""

import argparse
import atexit
import difflib
import gc
import importlib
import importlib.metadata
import logging
import os
import signal
import sys
from collections.abc import Sequence

from logitless.cli.loading import loading
from logitless.cli.output import is_first_to_say, patient_output, tell_torchrun
from logitless.errors import LogitlessError, UnavailableError

COMMANDS = {
    "recipes": "list, print and copy the recipes that come with logitless",
    "train": "run a recipe",
    "plan": "forecast memory and messages of a recipe on several GPUs, of this machine or others",
    "report": "write report.html for a run folder",
    "show": "print a sampled group of a run with its verdicts",
    "sample": "complete prompts with a checkpoint of a run",
    "serve-engine": "offer the engine of a recipe or a run to OpenAI clients on this machine",
    "serve-tinker": "offer a model to clients of the Tinker SDK on this machine",
    "export": "write a checkpoint of a run as a folder that other programs load",
    "score": "score a file of responses with a suite or a reward function",
    "parity": "compare losses and gradients between backends and against other libraries",
    "bench": "measure speed, memory and error on this machine",
    "doctor": "say what this machine can run",
}

FIRST = """first:
  logitless recipes copy quickstart           a recipe with its data, into recipes/
  logitless train recipes/quickstart.yaml     minutes on two CPU cores
  logitless doctor                            what this machine can run
  logitless COMMAND --help"""

SHORT_WAITS = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}
"""How long OpenMP's threads (GNU's by turns of a loop, LLVM's by milliseconds) wait for each other before they sleep.

By default they spin so long that, on busy cores, spinning threads keep the working one from running: a small model
then trains many times more slowly. Read when torch is imported.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; every command lives in the module of its name.

    Args:
        arguments: without the program's name; None reads ``sys.argv``.

    Returns:
        The exit status.
    """
    for name, value in SHORT_WAITS.items():
        os.environ.setdefault(name, value)
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="logitless", description=__doc__, epilog=FIRST, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    parser.add_argument("--verbose", action="store_true", help="show a traceback for every error")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((word for word in given if not word.startswith("-")), None)
    if chosen is not None and chosen not in COMMANDS:
        near = difflib.get_close_matches(chosen, COMMANDS, n=1, cutoff=0.7)
        parser.error(f"there is no command {chosen!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    if arguments is None:  # the whole process is ours: skip garbage collection at its end
        atexit.register(gc.freeze)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name == chosen:  # the others' imports take time and are not needed
            with loading(name):
                importlib.import_module(module_of(name)).add_arguments(command)
    if not given:
        parser.print_help(sys.stderr)
        return 2
    options, unknown = parser.parse_known_args(given)
    if unknown:
        command = commands.choices[options.command]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], command._option_string_actions, n=1)
        command.error(f"unknown arguments: {' '.join(unknown)}" + (f"; did you mean {near[0]!r}?" if near else ""))
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for noisy in ("httpx", "urllib3", "filelock", "absl", "torch._subclasses.fake_tensor"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    with patient_output():
        try:
            status = _run(options)
        except LogitlessError as error:
            if options.verbose:
                raise
            tell_torchrun(str(error))
            if is_first_to_say(str(error)):
                print(f"logitless {options.command}: {error}", file=sys.stderr, flush=True)
            return 2 if isinstance(error, ValueError) else 1
        except KeyboardInterrupt as interrupt:
            number = signal.Signals(*(interrupt.args or (signal.SIGINT,)))
            by = "Ctrl-C" if number == signal.SIGINT else number.name
            stopped = f"logitless {options.command}: stopped by {by}"
            print("\n".join([stopped, *getattr(interrupt, "__notes__", ())]), file=sys.stderr)
            return 128 + number
    return status


def _run(options: argparse.Namespace) -> int:
    """Run the chosen command; returns the exit status.

    Raises:
        LogitlessError: of the command, and where a GPU's memory was too small.
    """
    try:
        status: int = importlib.import_module(module_of(options.command)).run(options)
    except RuntimeError as error:
        if "torch" not in sys.modules:
            raise
        from logitless.train.record.memory import is_shortage, shortage_in_words

        if not is_shortage(error):
            raise
        raise UnavailableError(
            needed="memory on the GPU",
            given=shortage_in_words(error),
            remedy="End other processes on it, or hold less: `logitless doctor RECIPE` shows what is large; LoRA, "
            "train.optimizer.moments: host and a lower train.tokens_per_micro_batch make it smaller.",
        ) from error
    return status


class _Version(argparse.Action):
    """Prints the installed version, looked up only when asked for: sources on PYTHONPATH have none."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        try:
            print(f"logitless {importlib.metadata.version('logitless')}")
        except importlib.metadata.PackageNotFoundError:
            parser.exit(1, "logitless: not installed as a package, and so without a version\n")
        parser.exit()


def module_of(command: str) -> str:
    """Where a command lives.

    Example:
        >>> module_of("serve-engine")
        'logitless.cli.serve_engine'
    """
    return f"logitless.cli.{command.replace('-', '_')}"


if __name__ == "__main__":
    sys.exit(main())

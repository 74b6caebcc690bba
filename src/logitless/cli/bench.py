"""``logitless bench WHAT``: which settings are fastest on this machine."""

import argparse

from logitless.bench import settings
from logitless.bench.settings import SettingBenchmark
from logitless.errors import ConfigurationError

_BENCHMARKS: dict[str, tuple[SettingBenchmark, str]] = {
    "attention": (settings.ATTENTION, "kernels of attention, by length and width of a head"),
    "precision": (settings.PRECISION, "dtypes of the products in a training step"),
    "optimizer": (settings.OPTIMIZER, "implementations of AdamW"),
    "compile": (settings.COMPILE, "layers as they are, and compiled"),
    "layers": (settings.LAYERS, "transformers' own layers, row-invariant ones"),
    "sampling": (settings.SAMPLING, "engines, and completions decoded at once"),
}

_OF_THE_REPOSITORY = ("bits", "head", "rollout", "scale", "step")
"""Measure this library on models of its own; not part of an installation."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subcommand a benchmark."""
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="WHAT")
    for name, (benchmark, summary) in _BENCHMARKS.items():
        described = benchmarks.add_parser(name, help=summary, description=settings.__doc__)
        described.formatter_class = argparse.RawDescriptionHelpFormatter
        benchmark.add_arguments(described)
    for name in _OF_THE_REPOSITORY:  # known, to say where they are; no word after them is an option
        benchmarks.add_parser(name, prefix_chars="\0", add_help=False).add_argument("words", nargs="*")


def run(options: argparse.Namespace) -> int:
    """Run the benchmark that was named.

    Raises:
        ConfigurationError: one of this library's own figures.
    """
    if options.benchmark in _OF_THE_REPOSITORY:
        raise ConfigurationError(
            needed=f"a benchmark of {', '.join(_BENCHMARKS)}",
            given=repr(options.benchmark),
            remedy=f"Run `python benchmarks/{options.benchmark}.py` of the repository for this library's own figures; "
            "`logitless doctor RECIPE` measures a block of your recipe, sampling and training.",
        )
    return _BENCHMARKS[options.benchmark][0].run(options)

"""``logitless bench WHAT``: measure speed, memory and error on this machine."""

import argparse
from typing import Protocol

from logitless.bench import bits, head, rollout, scale, settings, step


class Benchmark(Protocol):
    """A module of ``bench/``, or one of its settings."""

    def add_arguments(self, parser: argparse.ArgumentParser, /) -> None:
        """Of the subcommand."""

    def run(self, options: argparse.Namespace, /) -> int:
        """Measure; the exit status."""


_BENCHMARKS: dict[str, tuple[Benchmark, str]] = {
    "attention": (settings.ATTENTION, "kernels of attention, by length and width of a head"),
    "precision": (settings.PRECISION, "dtypes of the products in a training step"),
    "optimizer": (settings.OPTIMIZER, "implementations of AdamW"),
    "compile": (settings.COMPILE, "layers as they are, and compiled"),
    "layers": (settings.LAYERS, "transformers' own layers, Liger's, row-invariant ones"),
    "sampling": (settings.SAMPLING, "engines, and completions decoded at once"),
    "bits": (bits, "the laws and the price of one set of bits"),
    "head": (head, "the LM head against bare products and other libraries"),
    "rollout": (rollout, "sampling by each engine against what the device allows, and a whole block"),
    "scale": (scale, "training steps on several GPUs of this machine"),
    "step": (step, "a whole training step against full logits and TRL's trainer"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subcommand a benchmark."""
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="WHAT")
    for name, (module, summary) in _BENCHMARKS.items():
        described = benchmarks.add_parser(name, help=summary, description=_description(module))
        described.formatter_class = argparse.RawDescriptionHelpFormatter
        module.add_arguments(described)


def run(options: argparse.Namespace) -> int:
    """Run the benchmark that was named."""
    module, _ = _BENCHMARKS[options.benchmark]
    return module.run(options)


def _description(benchmark: Benchmark) -> str | None:
    return settings.__doc__ if isinstance(benchmark, settings.SettingBenchmark) else benchmark.__doc__

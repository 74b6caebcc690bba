"""``logitless bench WHAT``: measure speed, memory and error on this machine."""

import argparse

from logitless.bench import bits, head, rollout, step

_BENCHMARKS = {
    "bits": (bits, "the laws and the price of one set of bits"),
    "head": (head, "the LM head against bare products and other libraries"),
    "rollout": (rollout, "sampling by each engine against what the device allows, and a whole block"),
    "step": (step, "a whole training step against full logits and TRL's trainer"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subcommand a benchmark."""
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="WHAT")
    for name, (module, summary) in _BENCHMARKS.items():
        described = benchmarks.add_parser(name, help=summary, description=module.__doc__)
        described.formatter_class = argparse.RawDescriptionHelpFormatter
        module.add_arguments(described)


def run(options: argparse.Namespace) -> int:
    """Run the benchmark that was named."""
    module, _ = _BENCHMARKS[options.benchmark]
    return module.run(options)

"""``logitless bench WHAT``: measure speed, memory and error on this machine."""

import argparse

from logitless.bench import head


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subcommand a benchmark."""
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="WHAT")
    described = benchmarks.add_parser(
        "head", help="the LM head against bare products and other libraries", description=head.__doc__
    )
    described.formatter_class = argparse.RawDescriptionHelpFormatter
    head.add_arguments(described)


def run(options: argparse.Namespace) -> int:
    """Run the benchmark that was named."""
    return head.run(options)

"""A whole training step: ``python benchmarks/step.py --help``; the same as ``logitless bench step``."""

import argparse
import sys

from logitless.bench import step

parser = argparse.ArgumentParser(description=step.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
step.add_arguments(parser)
sys.exit(step.run(parser.parse_args()))

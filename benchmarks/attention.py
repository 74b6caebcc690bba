"""Attention of one layer: ``python benchmarks/attention.py --help``."""

import argparse
import sys

from logitless.bench import attention

parser = argparse.ArgumentParser(description=attention.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
attention.add_arguments(parser)
sys.exit(attention.run(parser.parse_args()))

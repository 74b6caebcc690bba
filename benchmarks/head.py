"""Time, memory and error of the LM head: ``python benchmarks/head.py --help``; the same as ``logitless bench head``."""

import argparse
import sys

from logitless.bench import head

parser = argparse.ArgumentParser(description=head.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
head.add_arguments(parser)
sys.exit(head.run(parser.parse_args()))

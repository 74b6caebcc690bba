"""Collectives of a run."""

from logitless.distributed.gather import gather_over_group
from logitless.distributed.ranks import Ranks, ranks_of_environment
from logitless.distributed.sums import sum_over_group

__all__ = ["Ranks", "gather_over_group", "ranks_of_environment", "sum_over_group"]

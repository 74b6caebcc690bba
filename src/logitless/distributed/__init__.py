"""Collectives of a run."""

from logitless.distributed.collectives import gather_over_group, sum_over_group
from logitless.distributed.ranks import Ranks, ranks_of_environment

__all__ = ["Ranks", "gather_over_group", "ranks_of_environment", "sum_over_group"]

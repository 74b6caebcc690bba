"""Collectives: sums over ranks and the rows of all ranks."""

from logitless.distributed.gather import gather_over_group
from logitless.distributed.sums import sum_over_group

__all__ = ["gather_over_group", "sum_over_group"]

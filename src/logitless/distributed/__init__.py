"""Collectives: sums over ranks."""

from logitless.distributed.sums import sum_over_group

__all__ = ["sum_over_group"]

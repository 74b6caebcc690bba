"""Collectives: sums over ranks."""

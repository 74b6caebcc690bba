"""Rewards of a completion's text alone."""

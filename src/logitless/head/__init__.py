"""The head: hidden states to exact log-probabilities; the only place an [n, V] block may exist."""

from logitless.head.api import token_scores

__all__ = ["token_scores"]

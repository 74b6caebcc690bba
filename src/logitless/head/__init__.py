"""The head: hidden states to exact log-probabilities; the only place an [n, V] block may exist."""

from logitless.head.api import token_scores
from logitless.head.divergence import score_centering, token_divergence
from logitless.head.likeliest import likeliest_tokens
from logitless.head.truncated import truncated_divergence

__all__ = ["likeliest_tokens", "score_centering", "token_divergence", "token_scores", "truncated_divergence"]

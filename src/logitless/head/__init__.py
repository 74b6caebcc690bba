"""The head: hidden states to exact log-probabilities; the only place an [n, V] block may exist."""

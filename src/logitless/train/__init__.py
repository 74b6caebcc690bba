"""The training loop and what it writes."""

"""Memory, traffic and time of a run, before it starts."""

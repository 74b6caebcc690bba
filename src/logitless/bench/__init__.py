"""What `logitless bench` runs."""

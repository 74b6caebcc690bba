"""What a run records: its folder, metrics, rollouts, live view and writers to services."""

"""Pages about runs: one run, several compared, plots."""

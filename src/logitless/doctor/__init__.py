"""What ``logitless doctor`` checks: this machine, a recipe on it, a recipe's settings, somebody's training code."""

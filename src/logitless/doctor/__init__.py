"""What ``logitless doctor`` says: of this machine, of a recipe on it, of a recipe's settings, of someone's code."""

"""Leaves out the module that only verifiers can import."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("verifiers") else ["taskset_of_sums.py"]

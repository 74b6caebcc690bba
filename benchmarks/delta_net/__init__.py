"""A trial of gated delta nets in chunks whose rows a decoding step computes with the same bits.

Kernels with their tests and measurements (``benchmarks/delta.py``), which no layer uses yet.
"""

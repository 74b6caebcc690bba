"""Triton kernels of the optimizer."""

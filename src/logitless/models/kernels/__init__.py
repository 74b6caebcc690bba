"""Triton kernels of a decoder whose rows keep their bits, a file an operation."""

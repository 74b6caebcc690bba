"""Triton kernels of drawing."""

"""Triton kernels of the fused head."""

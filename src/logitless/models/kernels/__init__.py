"""Triton kernels of a model's layers: each row's result depends on that row, and on what it attends to, alone."""

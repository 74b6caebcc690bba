"""Kernels run under Triton's interpreter where there is no GPU, with sums that a tile's shape does not show in."""

from tests.head.interpreter import complete_interpreter, interpreted
from tests.models.kernels.exact_products import sum_products_in_float64

if interpreted():
    complete_interpreter()
    sum_products_in_float64()

"""Kernels run under Triton's interpreter without a GPU, with sums that do not depend on the shape of a tile."""

from tests.head.interpreter import complete_interpreter, interpreted
from tests.models.kernels.exact_products import sum_products_in_float64

if interpreted():
    complete_interpreter()
    sum_products_in_float64()

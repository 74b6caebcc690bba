"""How far rounding alone may take a number: what tests compare with, in place of what one processor gave.

``u = eps / 2`` is the largest relative error of one rounding. A sum of n terms is within ``n u sum |terms|`` of the
exact one in any order of addition (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2), and a product
of n factors within ``n u``. Real errors are about the square root of n times u, so that these bounds leave room for
other processors' kernels; what is measured should stay below a third of them.
"""

import torch


def of_sum(dtype: torch.dtype, terms: int, magnitude: float = 1.0) -> float:
    """Bound of the error of a sum of so many terms, whose absolute values add up to ``magnitude``."""
    return terms * torch.finfo(dtype).eps / 2 * magnitude


def of_roundings(dtype: torch.dtype, count: int) -> float:
    """Bound of the relative error of numbers that were rounded so many times."""
    return of_sum(dtype, count)

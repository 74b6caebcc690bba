"""Backward passes that cannot be differentiated themselves say so.

Autograd records what a backward does with plain torch and nothing of what it does otherwise: in kernels, or with
gradients that were made before. A second derivative through such a node would lack that part without a word.
"""

import torch

from logitless.errors import UnavailableError


def refuse_second_derivative(needed: str, *, given: str, remedy: str) -> None:
    """Raise in a backward whose own graph is asked for (``create_graph=True``).

    Args:
        needed: what would have to be differentiable twice.
        given: what is here instead.
        remedy: what to use for second derivatives.

    Raises:
        UnavailableError: the backward runs under ``create_graph=True``.

    Example:
        >>> with torch.no_grad():
        ...     refuse_second_derivative("a head", given="backend='chunked'", remedy="Use backend='reference'.")
    """
    if torch.is_grad_enabled():
        raise UnavailableError(
            needed=f"{needed} that can be differentiated twice (create_graph=True)", given=given, remedy=remedy
        )

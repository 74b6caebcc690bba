"""Refuse second derivatives through backward passes that cannot be differentiated.

Autograd records what a backward does in plain torch, and nothing that it does in kernels or with stored gradients. A
second derivative would silently lack that part.
"""

import torch

from logitless.errors import UnavailableError


def refuse_second_derivative(needed: str, *, given: str, remedy: str) -> None:
    """Raise if the backward that calls this runs under ``create_graph=True``.

    Args:
        needed: what would have to be differentiable twice; ``given`` and ``remedy``: the rest of the error.

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

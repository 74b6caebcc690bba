"""The load-balancing loss of a mixture of experts, over all tokens of an optimizer step."""

from jaxtyping import Float
from torch import Tensor

from logitless.objective.inputs import shaped


@shaped
def load_balancing_loss(
    chosen: Float[Tensor, "E"], probability: Float[Tensor, "E"], *, experts_per_token: int
) -> Float[Tensor, ""]:
    """transformers' load-balancing loss of an optimizer step, or one part's share of it.

    ``E * sum_e (chosen_e / R) * (probability_e / R)`` with ``R = sum_e chosen_e / experts_per_token``, the tokens of
    the step times the layers with a router. An even load gives the minimum, ``experts_per_token``.

    It is linear in ``probability``: if ``chosen`` is that of the whole step, the losses of its parts add up to the loss
    of the step, and so do their gradients.

    Gradient: through ``probability`` only.

    Args:
        chosen: number of tokens of the whole step that chose each expert, summed over layers.
        probability: the router's probability of each expert, summed over layers and the tokens of the step or a part.
        experts_per_token: experts that each token chooses.

    Source: Switch Transformer, arXiv:2101.03961 eqs. 4-6, with all layers' tokens in one sum, like
    ``load_balancing_loss_func`` of transformers.

    Example:
        >>> import torch
        >>> even, uneven = torch.tensor([2.0, 2.0]), torch.tensor([4.0, 0.0])
        >>> float(load_balancing_loss(even, even, experts_per_token=1))
        1.0
        >>> float(load_balancing_loss(uneven, torch.tensor([3.0, 1.0]), experts_per_token=1))
        1.5
    """
    tokens = chosen.sum() / experts_per_token
    weight = len(chosen) * chosen / tokens.square()
    return (weight.to(probability.dtype) * probability).sum()

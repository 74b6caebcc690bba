"""Optional tensors made obligatory: the one place that says which tensor is missing and where it comes from."""

from torch import Tensor

from logitless.errors import InputError

_REMEDIES = {
    "logp_old": "Score the batch with the policy that it was drawn from and set TokenBatch.logp_old",
    "logp_ref": "Score the batch with the reference policy and set TokenBatch.logp_ref",
    "logp_sampler": "Keep the log-probabilities of the engine that sampled and set TokenBatch.logp_sampler",
    "entropy": "Pass the entropy that the head gives beside logp",
    "entropy_old": "Keep the entropy of the scoring pass and set TokenBatch.entropy_old",
    "entropy_weight": "Set TokenBatch.entropy_weight to the step's Objective.entropy_weight(...)",
    "turn": "Set TokenBatch.turn",
    "selected": "Attach the block's selection with Objective.block_statistics(block).attach(block)",
}


def required(value: Tensor | None, name: str) -> Tensor:
    """The tensor, or an error that names what is missing.

    Raises:
        InputError: the value is None.

    Example:
        >>> import torch
        >>> required(torch.ones(1), "logp_old")
        tensor([1.])
    """
    if value is None:
        raise InputError(
            needed=f"{name} for every token",
            given="None",
            remedy=f"{_REMEDIES[name]}, or choose an objective without it.",
        )
    return value

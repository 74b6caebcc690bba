"""The head's public function: it checks arguments and picks a backend."""

from typing import Any, Literal

from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from logitless.distributed.sharding import is_sharded
from logitless.head import chunked, reference
from logitless.head.contract import Backend, checked, chosen_backend, without_autocast
from logitless.types import LMHead, TokenScores


def token_scores(
    hidden: Float[Tensor, "N D"],
    head: LMHead | Float[Tensor, "V D"],
    target: Int[Tensor, "N"],
    *,
    temperature: float | Float[Tensor, "N"] = 1.0,
    backend: Literal["auto", "reference", "chunked", "fused"] = "auto",
    memory_budget: int | None = None,
    anchor: Float[Tensor, "N"] | None = None,
    nonzero: Bool[Tensor, "N"] | None = None,
    group: ProcessGroup | None = None,
) -> TokenScores:
    """Log-probability of each target and entropy of each next-token distribution, without holding the logits.

        z = softcap * tanh(scale * (hidden @ weight.T + bias + LoRA) / softcap) / temperature
        logp = log softmax(z)[target];   entropy = -sum_v softmax(z)_v log softmax(z)_v

    Gradient: of both results, to hidden, weight, bias and LoRA factors that require grad; exactly 0 from rows whose
    incoming gradient is 0. None to the temperature.

    Args:
        hidden: [N, D], the hidden state that predicts each target; its dtype is that of the products, inside autocast
            too.
        head: the LM head, or its weight [V, D]. The weight may be an FSDP2 shard (a DTensor sharded by rows); all ranks
            then call together, each with its own tokens.
        target: [N] integers in range(V).
        temperature: divides the logits; a positive number, or one per row.
        backend: ``auto`` takes the fused kernels where they can run, else ``chunked``, and logs which and why; a name
            runs or raises.
        memory_budget: bytes for values of size rows x V; None takes the backend's default.
        anchor: [N] a hint for speed, near each row's log-sum-exp, such as z_y - logp_old; never changes a result.
        nonzero: [N] a hint for speed: False where the gradient is known to be zero; never changes a result.
        group: the process group over which ``head.weight`` is sharded by vocabulary, every rank holding contiguous rows
            in rank order; hidden and target are the same on all ranks.

    Returns:
        float32 vectors of length N (float64 for float64 hidden states).

    Raises:
        InputError: arguments that do not fit together; a target out of range (on CUDA: a device-side assertion).
        UnavailableError: a named backend that cannot run here.

    Example:
        >>> import torch
        >>> scores = token_scores(torch.zeros(1, 3), torch.zeros(4, 3), torch.tensor([2]), backend="chunked")
        >>> scores.logp, scores.entropy
        (tensor([-1.3863]), tensor([1.3863]))
    """
    hints: dict[str, Any] = {"anchor": anchor, "nonzero": nonzero}
    options: dict[str, Any] = {"temperature": temperature, "memory_budget": memory_budget}
    lm_head, target, options["temperature"] = checked(hidden, head, target, **options, **hints, group=group)
    name = chosen_backend(backend, lambda each: why_not(each, hidden, lm_head, group), "head backend")
    with without_autocast(hidden.device):
        if name == "reference":
            return reference.token_scores(hidden, lm_head, target, **options)
        if name == "chunked":
            return chunked.token_scores(hidden, lm_head, target, **options, group=group)
        from logitless.head import fused

        return fused.token_scores(hidden, lm_head, target, **options, **hints, group=group)


def why_not(backend: Backend, hidden: Tensor, head: LMHead | Tensor, group: ProcessGroup | None = None) -> str | None:
    """Why this backend cannot score these tensors on this machine, or None when it can."""
    if backend == "chunked":
        return None
    head = LMHead(weight=head) if isinstance(head, Tensor) else head
    if backend == "reference":
        if group is not None:
            return "the vocabulary is sharded over a process group"
        return "the weight is sharded (DTensor)" if is_sharded(head.weight) else None
    try:
        from logitless.head import fused
    except ImportError as error:
        return f"its kernels cannot be imported ({error})"
    return fused.why_not(hidden)

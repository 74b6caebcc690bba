"""Samples tokens on the device: no step waits for the host, and a token depends on its own row alone.

A token follows from its row of logits and from (seed, prompt id, sample, position): see ``kernels/sample.py`` for how.
What is in the other rows, and how many there are, changes no bit of it.
"""

import hashlib
import math
from typing import Any, NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor

from logitless.errors import UnavailableError
from logitless.rollout.sampling import History, SamplingOptions, penalized


class Sampled(NamedTuple):
    """One token a row.

    Args:
        token: a valid index, whatever the row holds.
        logp: of the distribution that was sampled from, where it is not the model's softmax at this temperature; None
            where it is, for then the head gives it from the hidden states.
        finite: whether there was a distribution to sample from.
    """

    token: Int[Tensor, "R"]
    logp: Float[Tensor, "R"] | None
    finite: Bool[Tensor, "R"]


def key_of(seed: int, prompt_id: str, sample: int) -> int:
    """What a completion's randomness comes from, together with the position of each token; 64 bits.

    Example:
        >>> key_of(0, "7", 0) == key_of(0, "7", 0), key_of(0, "7", 0) == key_of(0, "7", 1)
        (True, False)
    """
    digest = hashlib.blake2b(f"{seed}/{sample}/{prompt_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def sample_tokens(
    logits: Float[Tensor, "R V"],
    key: Int[Tensor, "R"],
    position: Int[Tensor, "R"],
    options: SamplingOptions,
    history: History | None = None,
) -> Sampled:
    """A token a row from ``sampling_logp(logits, options, history)``, at temperature 0 the most likely one.

    At temperature 0 the lowest of equally likely tokens is taken. Tokens as likely as the last one that top-p keeps are
    all kept, as with top-k. Nothing waits for the device, so that it can be captured in a graph.

    Args:
        logits: float32, on CUDA (on the CPU under Triton's interpreter alone).
        key: int64, of each row's completion.
        position: int32; with the key it settles the noise. A row at position -1 is empty: anything comes of it.
        options: the same for all rows.
        history: of the rows, where the options need it.

    Raises:
        UnavailableError: there is no Triton.
    """
    kernels = _kernels()
    logits = penalized(logits, options, history)
    lowest = log_normaliser = None
    temperature = options.temperature or 1.0
    if options.filters_distribution and options.temperature > 0:
        lowest, log_normaliser = kernels.filter_rows(
            logits,
            temperature=temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            log_min_p=math.log(options.min_p) if options.min_p > 0 else None,
        )
    token, logp, finite = kernels.sample_rows(
        logits,
        key,
        position,
        temperature=temperature,
        noise=options.temperature > 0,
        lowest=lowest,
        log_normaliser=log_normaliser,
    )
    return Sampled(token, logp, finite)


def _kernels() -> Any:
    try:
        from logitless.rollout.gpu.kernels import sample
    except ImportError as error:
        raise UnavailableError(
            needed="Triton, for sampling on the device",
            given=str(error),
            remedy="Install logitless[triton], or sample with rollout.engine: {name: transformers}.",
        ) from error
    return sample

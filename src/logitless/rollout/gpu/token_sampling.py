"""Token sampling on the device, without waiting for the host.

A token depends on its row of logits and on (seed, prompt id, sample, position) alone, not on the other rows: see
``kernels/sample.py``.
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
        token: a valid index, even for a row of NaN.
        logp: in the distribution that was sampled from; None if that is the model's softmax at this temperature, which
            the head computes from the hidden states.
        finite: whether the row's logits were finite.
    """

    token: Int[Tensor, "R"]
    logp: Float[Tensor, "R"] | None
    finite: Bool[Tensor, "R"]


def key_of(seed: int, prompt_id: str, sample: int) -> int:
    """The 64-bit key of a completion's random numbers; the position of a token is the counter.

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
    """A token a row from ``sampling_logp(logits, options, history)``; at temperature 0 the most likely one.

    Ties: at temperature 0 the lowest token is taken; top-k and top-p keep all tokens as likely as the last one kept.
    Nothing waits for the device, so that the call can be captured in a CUDA graph.

    Args:
        logits: float32, on CUDA (on the CPU under Triton's interpreter alone).
        key: int64, of each row's completion.
        position: int32, of each row's token; -1 for an empty row, whose result is undefined.
        options: the same for all rows.
        history: if ``options.needs_history``.

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

"""Held-out success with its uncertainty: pass@k without bias, and an interval over prompts."""

import math
from collections.abc import Mapping, Sequence

from logitless.rewards.wilson import wilson_interval


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The probability that one of k samples of a prompt is correct, without bias from n samples of which c are.

    ``pass@k = 1 - C(n - c, k) / C(n, k)``

    Args:
        num_samples: n, at least k.
        num_correct: c.
        k: at least 1.

    Source: Chen et al. 2021, Evaluating Large Language Models Trained on Code, arXiv:2107.03374, eq. 1.

    Example:
        >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
        (0.25, 0.5, 1.0)
    """
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def success_metrics(num_correct: Sequence[int], num_samples: int) -> Mapping[str, float]:
    """Accuracy and pass@k for k = 2, 4, 8, ... and all samples, each with its interval over prompts.

    Args:
        num_correct: of the samples of each prompt; at least one prompt.
        num_samples: of every prompt.

    Example:
        >>> found = success_metrics([1, 0], 2)
        >>> found["accuracy"], found["pass_at/2"]
        (0.25, 0.5)
    """
    ks = sorted({2**power for power in range(num_samples.bit_length())} | {num_samples})
    found: dict[str, float] = {}
    for k in ks:
        name = "accuracy" if k == 1 else f"pass_at/{k}"
        mean = math.fsum(pass_at_k(num_samples, c, k) for c in num_correct) / len(num_correct)
        low, high = wilson_interval(mean, len(num_correct))
        found |= {name: mean, f"{name}/low": low, f"{name}/high": high}
    return found

"""Workloads of ``benchmarks/rollout.py``, and the least time in which a device could do them."""

import random
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from logitless.errors import ConfigurationError
from script import milliseconds


@dataclass(frozen=True)
class Workload:
    """Prompts, samples and lengths.

    Args:
        prompts, samples: P and G.
        prompt_tokens: of every prompt.
        least, most: new tokens of a completion; uniform between them.

    Example:
        >>> Workload.parse("2x3-5-4:6").lengths
        ((5, 4, 5), (6, 4, 4))
    """

    prompts: int
    samples: int
    prompt_tokens: int
    least: int
    most: int

    @classmethod
    def parse(cls, name: str) -> "Workload":
        """Of its name.

        Raises:
            ConfigurationError: it has another form.
        """
        found = re.fullmatch(r"(\d+)x(\d+)-(\d+)-(?:(\d+):)?(\d+)", name)
        if found is None or not all(int(x) for x in found.groups() if x is not None):
            raise ConfigurationError(
                needed="a workload such as 64x8-512-64:512: prompts x samples, prompt tokens, new tokens",
                given=repr(name),
                remedy="Write it so; the range may be one number.",
            )
        prompts, samples, prompt, least, most = found.groups()
        return cls(int(prompts), int(samples), int(prompt), int(least or most), int(most))

    @cached_property
    def lengths(self) -> tuple[tuple[int, ...], ...]:
        """New tokens by prompt and sample."""
        chance = random.Random(7)
        return tuple(
            tuple(chance.randint(self.least, self.most) for _ in range(self.samples)) for _ in range(self.prompts)
        )

    @property
    def tokens(self) -> int:
        """New tokens of all."""
        return sum(map(sum, self.lengths))

    def prompt_ids(self, vocabulary: int) -> list[tuple[int, ...]]:
        """Random tokens, the first eight left out."""
        chance = random.Random(8)
        return [tuple(chance.randrange(8, vocabulary) for _ in range(self.prompt_tokens)) for _ in range(self.prompts)]


@dataclass(frozen=True)
class Ceilings:
    """What a device does at best.

    Args:
        bytes_per_second: read and written, by a large copy.
        flops_per_second: of a large bfloat16 product of random numbers.
    """

    bytes_per_second: float
    flops_per_second: float

    @classmethod
    def measured(cls) -> "Ceilings":
        """On the current CUDA device."""
        source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_()
        target = torch.empty_like(source)
        seconds = _seconds(lambda: target.copy_(source))
        a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        return cls(2 * source.nbytes / seconds, 2 * 8192**3 / _seconds(lambda: a @ b))


def _seconds(call: Callable[[], object]) -> float:
    return statistics.median([milliseconds(call, "cuda", pause=0) / 1000 for _ in range(12)][2:])


@dataclass(frozen=True)
class Cost:
    """What a model asks of a device.

    Args:
        parameters: that a step multiplies with; of an embedding that is not the head's, one row is read.
        token_bytes: keys and values of a token.
    """

    parameters: int
    token_bytes: int


def roofline(cost: Cost, work: Workload, ceilings: Ceilings) -> float:
    """Tokens a second where each step reads weights and keys once, with all rows in it.

        sum_t max(2 n / bandwidth, 2 n rows_t / flops) + kv (groups_t prompt + rows_t t) / bandwidth  +  prompts once

    where n is the number of parameters in bfloat16, and a prompt's keys are read once for its live samples.

    Example:
        >>> round(roofline(Cost(10**9, 10**5), Workload(1, 1, 1, 11, 11), Ceilings(2e12, 1e15)))
        1099
    """
    lengths = [length for group in work.lengths for length in group]
    weights, seconds = 2 * cost.parameters / ceilings.bytes_per_second, 0.0
    for t in range(1, max(lengths)):
        rows = sum(length > t for length in lengths)
        groups = sum(max(group) > t for group in work.lengths)
        keys = cost.token_bytes * (groups * work.prompt_tokens + rows * t) / ceilings.bytes_per_second
        seconds += max(weights, 2 * cost.parameters * rows / ceilings.flops_per_second) + keys
    seconds += 2 * cost.parameters * work.prompts * work.prompt_tokens / ceilings.flops_per_second
    return work.tokens / seconds

"""What a training loop needs of anything that samples."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import nn

from logitless.rollout.sampling import SamplingOptions
from logitless.types import Completion, Prompt


@runtime_checkable
class Engine(Protocol):
    """Samples completions with some version of the policy's weights."""

    @property
    def version(self) -> int:
        """Of the weights that the next completions come from."""
        ...

    def sample(
        self, prompts: Sequence[Prompt], num_samples: int, options: SamplingOptions, *, seed: int
    ) -> list[list[Completion]]:
        """Exactly ``num_samples`` completions of each prompt, in the prompts' order."""
        ...

    def update_weights(self, model: nn.Module, *, version: int) -> None:
        """From now on sample with the weights of ``model``."""
        ...

"""What a training loop needs of anything that samples, and what it hands over after training."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from logitless.models.export import adapter_tensors, checkpoint_tensors
from logitless.rollout.sampling import SamplingOptions
from logitless.types import Completion, Prompt

NamedTensors: TypeAlias = Callable[[], Iterator[tuple[str, Tensor]]]
"""Tensors with their names, made one after the other while they are asked for, so that no second model is held."""

Score: TypeAlias = Callable[[Sequence[int], Sequence[int], float], list[float]]
"""(prompt, completion, temperature) -> log-probs of the completion's tokens."""


@dataclass(frozen=True)
class Weights:
    """The weights of a policy, in each of the forms that an engine may want; nothing is computed before it is read.

    An engine in this process may keep ``module``, which goes on being trained. Any other must be through with the
    tensors when its ``load`` returns: the next optimizer step changes them in place.

    Args:
        module: the model itself, PEFT-wrapped or not.
        tensors: every weight as checkpoint files name it, adapters merged, tied weights once.
        adapter: the adapter's weights alone, under the names of PEFT's files; None where there is no adapter.
        score: of a few tokens, by all ranks that hold the weights together; None where ``module`` can say it.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> weights = Weights.of(GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=11)))
        >>> next(name for name, _ in weights.tensors()), weights.adapter
        ('transformer.wte.weight', None)
    """

    module: nn.Module
    tensors: NamedTensors
    adapter: NamedTensors | None = None
    score: Score | None = None

    @classmethod
    def of(cls, module: nn.Module, *, dtype: torch.dtype | None = None, score: Score | None = None) -> "Weights":
        """Of a model.

        Args:
            module: whole in this process, or sharded: then all ranks read the tensors, each of which is made whole in
                turn, and ``module`` can sample only while its weights are gathered.
            dtype: that tensors are rounded to; None: each in its own.
            score: of a sharded module, a collective too.
        """
        tensors = partial(checkpoint_tensors, module, dtype=dtype)
        adapter = partial(adapter_tensors, module) if hasattr(module, "peft_config") else None
        return cls(module, tensors, adapter, score)


@runtime_checkable
class Engine(Protocol):
    """Samples completions with the weights that it was last given."""

    def sample(
        self, prompts: Sequence[Prompt], num_samples: int, options: SamplingOptions, *, seed: int
    ) -> list[list[Completion]]:
        """Exactly ``num_samples`` completions of each prompt, in the prompts' order.

        Each carries the version of the weights that it was drawn with.
        """
        ...

    def load(self, weights: Weights, version: int) -> None:
        """From now on sample with these weights.

        Args:
            weights: of the policy.
            version: optimizer steps that they have seen.
        """
        ...

    def close(self) -> None:
        """Give back what the engine holds (processes, memory); it is not used afterwards."""
        ...


@runtime_checkable
class ExactEngine(Engine, Protocol):
    """An engine that may have the bits of training: where it has, its log-probs stand for a scoring pass."""

    @property
    def exact(self) -> bool:
        """Whether log-probs and entropies in the model's own softmax are the trainer's in every bit.

        They are ``logp_policy`` where filters or penalties were used and ``logp_sampler`` elsewhere, and
        ``entropy_sampler``.
        """
        ...


@runtime_checkable
class ConcurrentEngine(Engine, Protocol):
    """An engine that several threads may ask at once, each of which gets its completions as soon as they are there."""

    @property
    def prompts_at_once(self) -> int:
        """Prompts that it works on at the same time; 1: one call waits for the other."""
        ...


@runtime_checkable
class PushingEngine(Engine, Protocol):
    """An engine that pushes weights to another process, and says what that took."""

    @property
    def transfer_numbers(self) -> Mapping[str, float | int]:
        """Numbers of the last ``load``, by metric."""
        ...

"""The interface of a sampling engine, its optional abilities, and the weights that training gives it."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from logitless.distributed.ranks import Ranks
from logitless.rollout.sampling import SamplingOptions
from logitless.types import Completion, Prompt

NamedTensors: TypeAlias = Callable[[], Iterator[tuple[str, Tensor]]]
"""Makes (name, tensor) pairs one at a time, so that no second model is held in memory."""

Score: TypeAlias = Callable[[Sequence[int], Sequence[int], float], list[float]]
"""(prompt, completion, temperature) -> log-probs of the completion's tokens."""


@dataclass(frozen=True)
class Weights:
    """The weights of a policy in every form that an engine may want, each computed when it is read.

    An engine in this process may keep ``module``, whose training continues. Any other engine must have read the tensors
    when its ``load`` returns: the next optimizer step changes them in place.

    Args:
        module: the model itself, PEFT-wrapped or not.
        tensors: every weight as checkpoint files name it, adapters merged, tied weights once.
        adapter: the adapter's weights alone, under the names of PEFT's files; None without an adapter.
        score: log-probs of a few tokens, computed by all ranks together; None if ``module`` is whole.

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
        """The weights of a model.

        Args:
            module: whole in this process, or sharded. If sharded, all ranks must read the tensors, which are gathered
                one by one, and ``module`` can sample only while its weights are gathered.
            dtype: tensors are rounded to it; None keeps each tensor's own.
            score: for a sharded module; all ranks must call it.
        """
        # Here: reading a recipe imports this module, and would wait seconds for transformers.
        from logitless.models.export import adapter_tensors, checkpoint_tensors

        tensors = partial(checkpoint_tensors, module, dtype=dtype)
        adapter = partial(adapter_tensors, module) if hasattr(module, "peft_config") else None
        return cls(module, tensors, adapter, score)


@runtime_checkable
class Engine(Protocol):
    """Samples completions with the weights of the last ``load``."""

    def sample(
        self, prompts: Sequence[Prompt], num_samples: int, options: SamplingOptions, *, seed: int
    ) -> list[list[Completion]]:
        """Exactly ``num_samples`` completions of each prompt, in the prompts' order.

        Each carries the version of the weights that sampled it.
        """

    def load(self, weights: Weights, version: int) -> None:
        """Sample with these weights from now on.

        Args:
            weights: of the policy.
            version: number of optimizer steps behind them.
        """

    def close(self) -> None:
        """Free processes and memory; the engine is not used afterwards."""


@runtime_checkable
class ExactEngine(Engine, Protocol):
    """An engine whose log-probs may be bitwise identical to training's, which makes the scoring pass unnecessary."""

    @property
    def exact(self) -> bool:
        """Whether log-probs and entropies of the model's softmax are bitwise identical to the trainer's.

        Those of the last call of ``sample``; before the first call, whether they may be. They are in
        ``entropy_sampler`` and in ``logp_sampler``, or ``logp_policy`` if filters or penalties are used.
        """


def is_exact(engine: Engine) -> bool:
    """``ExactEngine.exact``; False for any other engine."""
    return isinstance(engine, ExactEngine) and engine.exact


class Updates(Protocol):
    """Weights that arrive while completions are under way; an engine asks for them between two decoding steps."""

    @property
    def recompute(self) -> bool:
        """Whether new weights recompute the keys and values of all tokens so far, or those of older weights stay."""

    def version(self, prompt_id: str, sample: int, token: int) -> int | None:
        """The version of the weights that must sample this token (counted from 0); None for whichever is loaded.

        A completion whose later tokens have a version has one for token 0 too.
        """

    def due(self, needed: Callable[[], Collection[int | None]]) -> bool:
        """Whether to load other weights before the next step.

        Args:
            needed: the versions that must sample the next tokens of the completions under way, or the first tokens of
                those that begin next if none is under way.
        """

    def load(self) -> None:
        """Give the engine the weights that are due, by its own ``load``."""


@runtime_checkable
class InFlightEngine(Engine, Protocol):
    """An engine that can load other weights between two decoding steps.

    A token's ``logp_sampler`` is of the weights in ``token_versions``. If keys and values are recomputed, it is what
    these weights give for the prompt and the completion so far. If they are kept, it is of no single model: these
    weights read keys and values of older ones. Those of a prompt are always of the weights that sampled the first
    token.
    """

    updates: Updates | None
    """Asked in every call of ``sample``; None: weights stay."""


@runtime_checkable
class VersionedEngine(ExactEngine, Protocol):
    """An engine that samples with a chosen version of the weights that it was given, while others are trained."""

    def use(self, version: int) -> None:
        """Sample with the weights of this version from now on, and forget older ones."""

    def forget(self, version: int) -> None:
        """Free weights older than this version, which nothing will use."""


@runtime_checkable
class ConcurrentEngine(Engine, Protocol):
    """An engine that several threads may call at once."""

    @property
    def prompts_at_once(self) -> int:
        """Prompts that it samples at the same time; 1 means that calls wait for each other."""


@runtime_checkable
class SharedEngine(Engine, Protocol):
    """An engine with its own copy of the weights, sharded over ranks that must sample together."""

    def share(self, ranks: Ranks) -> None:
        """Shard the copy over these ranks; called before anything else."""

    def receive(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """``load`` for weights by name that another rank sends, whole and one after the other."""

    def together(self) -> AbstractContextManager[None]:
        """Inside, each rank may call ``sample`` any number of times, or never. A collective at the end."""


def together(engine: Engine) -> AbstractContextManager[None]:
    """``SharedEngine.together``; nothing for any other engine."""
    return engine.together() if isinstance(engine, SharedEngine) else nullcontext()


@runtime_checkable
class PushingEngine(Engine, Protocol):
    """An engine that transfers weights to another process, with metrics of the transfer."""

    @property
    def transfer_numbers(self) -> Mapping[str, float | int]:
        """Metrics of the last ``load``, by name."""

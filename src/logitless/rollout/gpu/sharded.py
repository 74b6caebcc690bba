"""The GPU engine on a copy of the policy for sampling, whose layers are sharded over ranks.

``GpuEngine`` runs on the copy; ``distributed/layer_shards.py`` gathers its layers, so that tokens and log-probs are
those of ``GpuEngine`` on the whole model, bit for bit. Sharded layers run without CUDA graphs.

Not supported: weights that arrive while completions are under way, and weights in four bits.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from logitless.distributed.layer_shards import LayerShards
from logitless.distributed.ranks import Ranks
from logitless.distributed.sharding import whole
from logitless.errors import LostRankError
from logitless.models.lm_head import backbone
from logitless.models.row_invariant.layers import install_row_invariant
from logitless.models.units import decoder_layers
from logitless.rollout.engine import Weights
from logitless.rollout.gpu.engine import GpuEngine
from logitless.rollout.sampling import SamplingOptions
from logitless.types import Completion, Prompt


class ShardedGpuEngine:
    """A ``SharedEngine`` of several ranks that each sample for their own prompts, with weights that they share.

    Args:
        copy: the policy's architecture, on ``meta``; becomes the model that samples.
        tokenizer, options: of ``GpuEngine``.
        device: that samples.
        exact: whether training's log-probs are bitwise those of sampling; they are not under FSDP2, which shards
            layers and head.

    Raises:
        UnavailableError: row-invariant layers do not cover the model.

    Memory: ``CopyBytes``, and while weights are loaded the largest one of them.
    """

    def __init__(
        self,
        copy: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        device: torch.device,
        exact: bool = False,
        **options: Any,
    ) -> None:
        install_row_invariant(copy)
        self.inner = GpuEngine(copy, tokenizer, **options)
        self.copy, self._device, self._exact = copy, device, exact
        self._shards: LayerShards | None = None
        self._has_frozen = False

    @property
    def shards(self) -> LayerShards:
        """The copy's shards, after ``share``."""
        assert self._shards is not None, "shared"
        return self._shards

    @property
    def exact(self) -> bool:
        return self._exact and self.inner.exact

    def share(self, ranks: Ranks) -> None:
        self._shards = LayerShards(self.copy, decoder_layers(self.copy), ranks, self._device)
        if ranks.world > 1:
            decoder: Any = backbone(self.copy)
            decoder.row_invariant.shards = self._shards

    def load(self, weights: Weights, version: int) -> None:
        """Copy the trained weights, the first time all of them. With FSDP2 a collective, which gathers one at a
        time.
        """
        named = dict(weights.module.named_parameters())
        if self._has_frozen:
            named = {name: p for name, p in named.items() if p.requires_grad}
        kept, self._has_frozen = self.shards.parameters, True
        self.receive(((name, whole(p.detach().to(kept[name].dtype))) for name, p in named.items()), version)

    def receive(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy whole weights by name, one at a time; of a layer's weights this rank keeps its piece."""
        self.shards.load(tensors)
        self.inner.load(Weights.of(self.copy), version)

    def sample(
        self, prompts: Sequence[Prompt], num_samples: int, options: SamplingOptions, *, seed: int
    ) -> list[list[Completion]]:
        """Exactly ``num_samples`` completions of each prompt; with several ranks inside ``together``."""
        return self.inner.sample(prompts, num_samples, options, seed=seed)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, ranks sample; at the end each serves layers until all have ended, even if it failed.

        Raises:
            LostRankError: another rank is gone.
        """
        try:
            yield
        except LostRankError:
            raise
        except BaseException:
            self.shards.serve()
            raise
        self.shards.serve()

    def close(self) -> None:
        """Free the copy."""
        self.inner.close()
        self._shards = None

"""The GPU engine on a copy of the policy for sampling, whose layers are sharded over ranks.

For weights that FSDP2 shards in training. ``GpuEngine`` runs on the copy; ``distributed/layer_shards.py`` gathers its
layers, so that tokens and log-probs are those of ``GpuEngine`` on the whole model, bit for bit. Sharded layers run
without CUDA graphs. Training has other layers and a sharded LM head, so a scoring pass gives ``logp_old``.

Not supported: weights that arrive while completions are under way.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
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
    """An ``Engine`` of several ranks that each sample for their own prompts, with weights that they share.

    ``load`` and ``together`` are collectives. Ranks call ``sample`` inside ``together``, as often as each needs.

    Args:
        copy: the policy's architecture, on ``meta``; becomes the model that samples.
        tokenizer, options: of ``GpuEngine``.
        device: that samples.

    Raises:
        UnavailableError: row-invariant layers do not cover the model.

    Memory: ``CopyBytes``, and while weights are loaded the largest one of them.
    """

    def __init__(
        self, copy: nn.Module, tokenizer: PreTrainedTokenizerBase, *, device: torch.device, **options: Any
    ) -> None:
        install_row_invariant(copy)
        self.inner = GpuEngine(copy, tokenizer, **options)
        self._copy, self._device, self._ranks = copy, device, Ranks.alone()
        self._shards: LayerShards | None = None

    def share(self, ranks: Ranks) -> None:
        """Shard the copy over these ranks; before the first ``load``."""
        self._ranks = ranks

    def load(self, weights: Weights, version: int) -> None:
        """Copy the trained weights: one is whole at a time, and of a layer's each rank keeps its piece."""
        named = dict(weights.module.named_parameters())
        if self._shards is None:
            self._shards = LayerShards(self._copy, decoder_layers(self._copy), self._ranks, self._device)
            if self._ranks.world > 1:
                decoder: Any = backbone(self._copy)
                decoder.row_invariant.shards = self._shards
        else:  # frozen ones are there
            named = {name: p for name, p in named.items() if p.requires_grad}
        kept = self._shards.parameters
        self._shards.load((name, whole(p.detach().to(kept[name].dtype))) for name, p in named.items())
        self.inner.load(Weights.of(self._copy), version)

    def sample(
        self, prompts: Sequence[Prompt], num_samples: int, options: SamplingOptions, *, seed: int
    ) -> list[list[Completion]]:
        """Exactly ``num_samples`` completions of each prompt; with several ranks inside ``together``."""
        return self.inner.sample(prompts, num_samples, options, seed=seed)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, ranks sample; at the end each serves the others until all have ended, also where it failed.

        Raises:
            LostRankError: another rank is gone.
        """
        assert self._shards is not None, "loaded"
        try:
            yield
        except LostRankError:
            raise
        except BaseException:
            self._shards.serve()
            raise
        self._shards.serve()

    def close(self) -> None:
        """Free the copy."""
        self.inner.close()
        self._shards = None

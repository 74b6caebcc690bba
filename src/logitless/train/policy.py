"""A causal language model as the loop sees it: packed tokens in, log-probabilities of the targets out, no logits.

The reference is another ``Policy`` around a frozen copy, or ``AdaptersOff`` under LoRA. Both score through the same
code, the same packing and the same head.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from logitless.data.packing import share_prompts as with_shared_prompts
from logitless.head import token_scores
from logitless.head.contract import logits_dtype
from logitless.models.lm_head import backbone_hidden, lm_head, why_unshared
from logitless.models.lora import adapters_off, save_adapters
from logitless.models.repeated_rows import RepeatedRows
from logitless.models.value_head import ValueHead
from logitless.rollout.engine import Weights
from logitless.train.config import Backend
from logitless.train.masters import master_of, round_masters
from logitless.types import LMHead, PackedBatch, SharedInputs, TokenScores


@runtime_checkable
class Scorer(Protocol):
    """Anything that gives the log-probability of a batch's targets."""

    def scores(self, batch: PackedBatch, *, temperature: float, backend: Backend) -> TokenScores:
        """logp and entropy [N], float32."""
        ...


class Policy:
    """The model that is trained.

    Args:
        model: a transformers causal LM, PEFT-wrapped or not, on its device, dropout off.
        autocast: dtype of the products, or None for those of the weights.
        memory_budget: bytes the head may spend on logits-like blocks; None lets the head choose.
        value_head: predicts returns from the same hidden states, for algorithms with a value loss; or None.
        share_prompts: read a prompt once for the sequences that lie side by side and begin with it, where the model's
            attention can (``why_unshared``).

    Attributes:
        shares_prompts: whether it does.
        unshared_because: what the model has that keeps it from it; None where there is nothing, or nobody asked.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        autocast: torch.dtype | None = None,
        memory_budget: int | None = None,
        value_head: ValueHead | None = None,
        share_prompts: bool = True,
    ) -> None:
        self.model, self.autocast, self.memory_budget = model, autocast, memory_budget
        self.value_head = value_head
        self.device = next(model.parameters()).device
        self.is_adapter = hasattr(model, "peft_config")
        self.unshared_because = why_unshared(model) if share_prompts else None
        self.shares_prompts = share_prompts and self.unshared_because is None

    def scores(self, batch: PackedBatch, *, temperature: float, backend: Backend) -> TokenScores:
        """logp, entropy and, with a value head, value [N] of the batch's targets, from one pass of the backbone.

        Differentiable unless called under ``torch.no_grad``.

        Args:
            batch: on the CPU, best; what is read of it is moved to the model's device.
            temperature: divides the logits, as in sampling.
            backend: of the head.
        """
        if not batch.num_tokens:
            return self._no_scores()
        inputs = with_shared_prompts(batch.inputs.to("cpu")) if self.shares_prompts else batch.inputs
        with self._autocast():
            hidden = backbone_hidden(self.model, inputs.to(self.device))
        if isinstance(inputs, SharedInputs):  # the first targets of a group have a row in common
            rows = RepeatedRows.of(inputs.source).to(self.device).take(hidden)
        else:
            rows = hidden.index_select(0, inputs.source.to(self.device))
        scores = token_scores(
            rows if self.autocast is None else rows.to(self.autocast),
            self.head(),
            batch.target.to(self.device),
            temperature=temperature,
            backend=backend,
            memory_budget=self.memory_budget,
        )
        return scores if self.value_head is None else replace(scores, value=self.value_head(rows))

    def head(self) -> LMHead:
        """The LM head, read from the model now: its LoRA factors are absent while adapters are off."""
        return lm_head(self.model)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Of the model and, under ``value_head.``, of the value head; some are frozen under LoRA."""
        named = dict(self.model.named_parameters())
        if self.value_head is not None:
            named |= {f"value_head.{name}": p for name, p in self.value_head.named_parameters()}
        return named

    def held(self) -> dict[str, nn.Parameter]:
        """What the optimizer updates and checkpoints hold, by the same names: masters where there are some."""
        return {name: master_of(p) for name, p in self.named_parameters().items()}

    def round_masters(self) -> None:
        """Write masters that were set from outside, rounded, into the model."""
        round_masters(self.named_parameters().values())

    def weights(self) -> Weights:
        """What an engine samples with; the value head is no part of it."""
        return Weights.of(self.model)

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write the weights (under LoRA the adapter) and the tokenizer in Hugging Face format, as safetensors.

        A value head is not part of the language model: ``save_value_head`` writes it to a file of its own.
        """
        if self.is_adapter:
            save_adapters(self.model, folder)
        else:
            self.model.save_pretrained(str(folder))  # type: ignore[operator]
        tokenizer.save_pretrained(str(folder))

    def _no_scores(self) -> TokenScores:
        """The scores of a micro-batch without tokens: a rank has such ones where others have more sequences."""
        dtype = logits_dtype(self.head().weight.dtype)
        none = torch.zeros(0, dtype=dtype, device=self.device, requires_grad=torch.is_grad_enabled())
        return TokenScores(none, none, None if self.value_head is None else none)

    def _autocast(self) -> AbstractContextManager[object]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.autocast)


class AdaptersOff:
    """The reference of a LoRA policy: the same model without its adapters; no second copy."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def scores(self, batch: PackedBatch, *, temperature: float, backend: Backend) -> TokenScores:
        """logp and entropy [N] under the base model, which has no value head."""
        with adapters_off(self.policy.model):
            return replace(self.policy.scores(batch, temperature=temperature, backend=backend), value=None)

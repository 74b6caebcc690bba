"""``LigerFusedLinearGRPOLoss`` with logitless behind it: same arguments, same results, one import to change.

    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss        # before
    from logitless.integrations.liger import LigerFusedLinearGRPOLoss     # after

Liger is not imported: the loss is that of ``presets.trl``, the head ``token_scores``. Two things that Liger accepts
raise here: a KL without a reference (Liger: 0), and a sampler ratio of whole sequences with VESPO. ``cispo`` with a
ceiling below 1 gives a warning. With ``luspo`` at the token level Liger averages over padded columns; here a
sequence's trained tokens are summed.
"""

from dataclasses import replace
from math import inf
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from logitless.errors import InputError
from logitless.head.api import token_scores
from logitless.integrations.padded import Places, from_padded
from logitless.objective.algorithm import Algorithm
from logitless.objective.correction import SamplerCorrection
from logitless.objective.objective import ObjectiveOutput
from logitless.objective.presets import trl
from logitless.objective.surrogate import Cispo, Clip
from logitless.objective.weighting import Totals
from logitless.types import LMHead, TokenBatch


class LigerFusedLinearGRPOLoss(nn.Module):
    """The GRPO family from hidden states, without logits, under Liger's names.

    ``loss = sum_t w_t (c_t l_t + beta kl_t)``, as ``presets.trl`` composes it for ``loss_type`` and the rest.

    Args:
        beta: coefficient of the KL to the reference.
        compiled, chunk_size: accepted for Liger's signature, and not used; they change no result.
        use_ref_model: whether a reference is given in the call; without it beta must be 0.
        epsilon_low, epsilon_high: distances from 1; under ``cispo`` epsilon_high is the ceiling itself.
        loss_type: ``grpo``, ``bnpo``, ``dr_grpo``, ``dapo``, ``cispo``, ``sapo``, ``luspo`` or ``vespo``.
        max_completion_length: divides under ``dr_grpo``, obligatory there.
        importance_sampling_level: ``token`` or ``sequence``.
        sapo_temperature_pos, sapo_temperature_neg: of ``sapo``.
        temperature: divides the logits.
        delta: upper bound of the ratio for negative advantages too.
        use_bias_correction_kl: multiply the KL by the ratio.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: of ``vespo``.
        backend: of the head; not an argument of Liger.

    Raises:
        ConfigurationError: what ``presets.trl`` raises.
        InputError: a KL and ``use_ref_model=False``; ``dr_grpo`` without a length.

    Example:
        >>> loss_of = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False)
        >>> hidden, weight = torch.zeros(1, 2, 3, requires_grad=True), torch.zeros(5, 3)
        >>> ids, mask = torch.tensor([[1, 4]]), torch.tensor([[1, 1]])
        >>> loss, (clip_fraction,) = loss_of(hidden, weight, ids, mask, torch.tensor([2.0]))
        >>> loss.item(), clip_fraction.item()
        (-2.0, 0.0)
    """

    def __init__(
        self,
        beta: float = 0.04,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
        *,
        backend: Literal["auto", "reference", "chunked", "fused"] = "auto",
    ) -> None:
        super().__init__()
        del compiled, chunk_size
        if beta != 0 and not use_ref_model:
            raise InputError(
                needed="a reference for the KL to be measured from",
                given=f"beta={beta}, use_ref_model=False",
                remedy="Set beta=0.0 (Liger's KL is 0 in this case), or use_ref_model=True.",
            )
        if loss_type == "dr_grpo" and max_completion_length is None:
            raise InputError(
                needed="the length that every sequence is divided by with loss_type='dr_grpo'",
                given="max_completion_length=None",
                remedy="Set max_completion_length.",
            )
        self.temperature = temperature
        # CISPO has no lower bound, and epsilon_high is its upper bound, not a distance from 1.
        self.clip_range = (-inf, epsilon_high) if loss_type == "cispo" else (1 - epsilon_low, 1 + epsilon_high)
        self.backend: Literal["auto", "reference", "chunked", "fused"] = backend
        self.algorithm: Algorithm = trl(
            beta=beta,
            epsilon=epsilon_low,
            epsilon_high=epsilon_high,
            loss_type=loss_type,
            max_completion_length=max_completion_length,
            importance_sampling_level=importance_sampling_level,
            sapo_temperature_pos=sapo_temperature_pos,
            sapo_temperature_neg=sapo_temperature_neg,
            delta=delta,
            use_bias_correction_kl=use_bias_correction_kl,
            vespo_k_pos=vespo_k_pos,
            vespo_lambda_pos=vespo_lambda_pos,
            vespo_k_neg=vespo_k_neg,
            vespo_lambda_neg=vespo_lambda_neg,
        )

    def forward(self, *call: Any, **options: Any) -> tuple[Float[Tensor, ""], tuple[Float[Tensor, ""], ...]]:
        """The loss of a padded batch and its metrics: the mean KL (with beta only) and the clipped fraction.

        Takes the arguments of ``evaluate``, which are those of Liger's ``forward``.
        """
        _, output = self.evaluate(*call, **options)
        return output.loss, self._metrics(output)

    def evaluate(
        self,
        _input: Float[Tensor, "B T D"],
        lin_weight: Float[Tensor, "V D"],
        selected_token_ids: Int[Tensor, "B T"],
        attention_mask: Bool[Tensor, "B T"] | Int[Tensor, "B T"] | Float[Tensor, "B T"],
        advantages: Float[Tensor, "B"],
        bias: Float[Tensor, "V"] | None = None,
        ref_per_token_logps: Float[Tensor, "B T"] | None = None,
        old_per_token_logps: Float[Tensor, "B T"] | None = None,
        ref_input: Float[Tensor, "B T D"] | None = None,
        ref_weight: Float[Tensor, "V D"] | None = None,
        ref_bias: Float[Tensor, "V"] | None = None,
        vllm_is_ratio: Float[Tensor, "B T"] | Float[Tensor, "B 1"] | Float[Tensor, "B"] | None = None,
        num_items_in_batch: float | Float[Tensor, ""] | Int[Tensor, ""] | None = None,
    ) -> tuple[TokenBatch, ObjectiveOutput]:
        """The packed batch with its weights, and every token's part in the loss.

        Gradient: to ``_input``, ``lin_weight`` and ``bias``.

        Args:
            _input: [B, T, D] hidden states that predict the tokens.
            lin_weight, bias: of the LM head.
            selected_token_ids: [B, T] the tokens.
            attention_mask: [B, T] 1 on trained tokens; other positions are ignored.
            advantages: [B].
            ref_per_token_logps: [B, T], or ``ref_input`` with ``ref_weight`` to take them from.
            old_per_token_logps: [B, T]; None takes the current ones.
            ref_input, ref_weight, ref_bias: hidden states and head of the reference.
            vllm_is_ratio: [B, T], or [B, 1] or [B] for one a sequence: importance weight of the old policy to the
                sampler, already bounded.
            num_items_in_batch: trained tokens of the whole step over all ranks, which ``dapo``, ``cispo`` and ``vespo``
                divide by, at least one a rank; it may be fractional. None: the tokens of this call over all ranks.

        Raises:
            InputError: no reference for the KL; a ratio of another shape, or of whole sequences under ``vespo``.
        """
        mask = attention_mask.bool()
        batch, places = from_padded(
            mask,
            advantages,
            lambda counts: self._weight(counts, num_items_in_batch, mask.device),
            logp_old=old_per_token_logps,
            logp_ref=ref_per_token_logps if self.algorithm.objective.kl is not None else None,
        )
        tokens = places.taken_from(selected_token_ids)
        logp = self._logp(places.taken_from(_input), LMHead(lin_weight, bias), tokens)
        if batch.logp_old is None:
            batch = replace(batch, logp_old=logp.detach())
        if self.algorithm.objective.kl is not None and batch.logp_ref is None:
            if ref_input is None or ref_weight is None:
                raise InputError(
                    needed="the reference's log-probabilities, or its hidden states and head",
                    given="neither",
                    remedy="Give ref_per_token_logps, or ref_input and ref_weight, or set beta=0.0.",
                )
            with torch.no_grad():
                logp_ref = self._logp(places.taken_from(ref_input), LMHead(ref_weight, ref_bias), tokens)
            batch = replace(batch, logp_ref=logp_ref)
        objective = self.algorithm.objective
        if vllm_is_ratio is not None:
            objective = replace(objective, correction=SamplerCorrection(mode="mask"))
            batch = replace(batch, logp_sampler=places.taken_from(self._sampler(batch, places, vllm_is_ratio)))
        control = self.algorithm.kl_control
        output = objective(logp, None, batch, beta=0.0 if control is None else control.beta)
        return batch, output

    def _logp(self, hidden: Tensor, head: LMHead, target: Tensor) -> Tensor:
        return token_scores(hidden, head, target, temperature=self.temperature, backend=self.backend).logp

    def _weight(
        self, counts: tuple[int, ...], num_items: float | Tensor | None, device: torch.device
    ) -> Float[Tensor, "N"]:
        """Token weights of this call. A token mean divides by the tokens of all ranks, and is multiplied by their
        number, because gradients are averaged over ranks."""
        totals = Totals.of(counts)
        if self.algorithm.weighting.spans_block:
            ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
            num_ranks = torch.distributed.get_world_size() if ranks else 1
            if num_items is None:
                num_items = torch.tensor(totals.num_tokens, device=device)
                if ranks:
                    torch.distributed.all_reduce(num_items)
            # Totals take whole tokens, so a divisor that may be fractional goes in as a share of a step.
            share = max(totals.num_tokens, 1) / max(float(num_items), float(num_ranks))
            totals = replace(totals, num_steps=num_ranks * share)
        return self.algorithm.weighting(counts, totals)

    def _sampler(self, batch: TokenBatch, places: Places, ratio: Tensor) -> Float[Tensor, "B T"]:
        """The sampler's log-probs that give this importance ratio."""
        assert batch.logp_old is not None
        logp_old = places.scatter_back(batch.logp_old)
        column = ratio[:, None] if ratio.dim() == 1 else ratio
        per_token_only = self.algorithm.objective.surrogate.uses_correction
        allowed = (logp_old.shape,) if per_token_only else (logp_old.shape, (len(logp_old), 1))
        if column.shape not in allowed:
            raise InputError(
                needed=f"vllm_is_ratio of {tuple(logp_old.shape)}"
                + (
                    ": loss_type='vespo' makes the sequence's weight of each token's"
                    if per_token_only
                    else f", ({len(logp_old)}, 1) or ({len(logp_old)},)"
                ),
                given=f"shape {tuple(ratio.shape)}",
                remedy="Give a ratio per token as [B, T]" + ("." if per_token_only else ", or per sequence as [B]."),
            )
        return logp_old - column.to(logp_old.dtype).log()

    def _metrics(self, output: ObjectiveOutput) -> tuple[Tensor, ...]:
        """The mean KL, with one, and the fraction of tokens outside of Liger's bounds, which are those before delta."""
        num_tokens = output.trained.sum().clamp(min=1)
        clipped, ratio = torch.zeros_like(output.trained), output.log_ratio
        if isinstance(self.algorithm.objective.surrogate, Clip | Cispo) and ratio is not None:
            low, high = self.clip_range
            clipped = ((output.advantage < 0) & (ratio.exp() < low)) | ((output.advantage > 0) & (ratio.exp() > high))
        fraction = clipped.sum() / num_tokens
        return (fraction,) if output.kl is None else (output.kl.sum() / num_tokens, fraction)

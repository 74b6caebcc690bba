"""Liger's installed ``LigerFusedLinearGRPOLoss`` against a module of the same call signature, in float32.

Both get the same padded hidden states, head and masks; gradients are those of hidden states, weight and bias.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from logitless.bench.parity import FLOAT32, Measured, Row, row
from logitless.installed import optional

LENGTHS = (5, 2, 7, 3, 1, 6)
SHAPE = (len(LENGTHS), max(LENGTHS))
WIDTH, VOCABULARY = 12, 53


@dataclass(frozen=True)
class Case:
    """One configuration.

    Args:
        options: of the constructor; beta is 0 and no reference is used unless they say so.
        given: names of optional tensors in the call.
        padded: False: all completions have the same length.
        note: about Liger's loss.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    given: tuple[str, ...] = ("old_per_token_logps",)
    padded: bool = True
    note: str = ""


def _cases() -> Iterator[Case]:
    old = ("old_per_token_logps",)
    needs: dict[str, dict[str, Any]] = {"dr_grpo": {"max_completion_length": 9}, "cispo": {"epsilon_high": 5.0}}
    for loss in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo"):
        yield Case(f"{loss}, token ratio", {"loss_type": loss, **needs.get(loss, {})})
    yield Case(
        "luspo, token ratio, no padding",
        {"loss_type": "luspo"},
        padded=False,
        note="under padding Liger averages over padded columns and trains on them: compared without padding",
    )
    for loss in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):
        options = {"loss_type": loss, "importance_sampling_level": "sequence", **needs.get(loss, {})}
        note = "Liger's LUSPO at this level sums trained tokens only without a KL or a ratio per token"
        yield Case(f"{loss}, sequence ratio", options, note=note if loss == "luspo" else "")
    kl = {"beta": 0.3, "use_ref_model": True}
    for level in ("token", "sequence"):
        for corrected in (True, False):
            options = {**kl, "use_bias_correction_kl": corrected, "importance_sampling_level": level}
            name = f"kl {'bias-corrected' if corrected else 'uncorrected'}, {level} ratio"
            yield Case(name, options, (*old, "ref_per_token_logps"))
    yield Case("kl from the reference's hidden states", kl, (*old, "ref_input", "ref_weight", "ref_bias"))
    for level in ("token", "sequence"):
        yield Case(f"delta, {level} ratio", {"delta": 1.3, "importance_sampling_level": level})
    yield Case("sampler ratio", {}, (*old, "vllm_is_ratio"))
    yield Case("sampler ratio of sequences", {"loss_type": "grpo"}, (*old, "vllm_is_ratio_of_sequences"))
    yield Case(
        "sampler ratio, vespo",
        {"loss_type": "vespo"},
        (*old, "vllm_is_ratio"),
        note="Liger multiplies in the ratio of padded positions: compared with 1 there",
    )
    for loss in ("dapo", "cispo", "vespo"):
        options = {"loss_type": loss, **needs.get(loss, {})}
        yield Case(f"num_items_in_batch, {loss}", options, (*old, "num_items_in_batch"))
    yield Case("without old log-probabilities", given=())
    yield Case("bias", given=(*old, "bias"))
    yield Case("temperature", {"temperature": 0.7})
    yield Case("epsilons", {"epsilon_low": 0.1, "epsilon_high": 0.4})
    yield Case("chunks of two", {"chunk_size": 2})
    everything = {**kl, "loss_type": "grpo", "importance_sampling_level": "sequence", "delta": 1.5, "temperature": 0.7}
    yield Case("everything at once", everything, (*old, "bias", "ref_per_token_logps", "vllm_is_ratio"))


CASES = tuple(_cases())
"""Every option of Liger that changes a result."""


def against_liger(drop_in: Callable[..., Any], *, quick: bool = False) -> Iterator[Row]:
    """A row for every case, or for every fifth if ``quick``.

    Args:
        drop_in: a module with Liger's arguments, and ``evaluate`` beside ``forward``.

    Raises:
        UnavailableError: Liger is not installed.
    """
    losses = optional("liger_kernel.chunked_loss", extra="liger", needed="Liger to compare with")
    for case in CASES[::5] if quick else CASES:
        options = {"beta": 0.0, "use_ref_model": False, "compiled": False, **case.options}
        theirs, ours = (_measured(module(**options), case) for module in (losses.LigerFusedLinearGRPOLoss, drop_in))
        yield row(case.name, "liger", theirs, ours, FLOAT32, case.note)


def _measured(module: Any, case: Case) -> Measured:
    """Loss and gradients of one call; of a module with ``evaluate`` also the scale of the loss."""
    tensors = _tensors(case)
    trained = [tensors[name].requires_grad_() for name in ("_input", "lin_weight", "bias") if name in tensors]
    loss, _metrics = module(**tensors)
    gradients = torch.autograd.grad(loss, trained)
    if not hasattr(module, "evaluate"):
        return Measured((loss.item(),), gradients)
    batch, output = module.evaluate(**tensors)
    return Measured((loss.item(),), gradients, (float((batch.token_weight * output.token_loss).abs().sum()),))


def _tensors(case: Case) -> dict[str, Any]:
    """The arguments of the call."""
    generator = torch.Generator().manual_seed(31)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    target = torch.randint(VOCABULARY, SHAPE, generator=generator)
    hidden, weight, bias = normal(*SHAPE, WIDTH), normal(VOCABULARY, WIDTH) * 0.3, normal(VOCABULARY) * 0.3
    logits = (hidden @ weight.T + (bias if "bias" in case.given else 0.0)) / case.options.get("temperature", 1.0)
    logp = logits.log_softmax(-1).gather(-1, target[..., None]).squeeze(-1)
    sampler = (0.2 * normal(*SHAPE)).exp()
    lengths = torch.tensor(LENGTHS) if case.padded else torch.full((SHAPE[0],), SHAPE[1])
    mask = torch.arange(SHAPE[1]) < lengths[:, None]
    if case.options.get("loss_type") == "vespo":
        sampler = torch.where(mask, sampler, 1.0)
    optional = {
        "bias": bias,
        "old_per_token_logps": logp + 0.5 * normal(*SHAPE),
        "ref_per_token_logps": logp + 0.5 * normal(*SHAPE),
        "ref_input": hidden + 0.3 * normal(*SHAPE, WIDTH),
        "ref_weight": weight + 0.1 * normal(VOCABULARY, WIDTH),
        "ref_bias": bias,
        "vllm_is_ratio": sampler,
        "vllm_is_ratio_of_sequences": (0.2 * normal(SHAPE[0], 1)).exp(),
        "num_items_in_batch": torch.tensor(80.0),
    }
    return {
        "_input": hidden,
        "lin_weight": weight,
        "selected_token_ids": target,
        "attention_mask": mask.long(),
        "advantages": torch.tensor([1.0, -0.5, 0.25, -1.5, 0.5, -1.0]),
        **{name.removesuffix("_of_sequences"): optional[name] for name in case.given},
    }

"""What ``logitless parity`` runs: one batch through two implementations, and the differences of loss and gradients.

This file compares every backend of the head with ``reference`` over a grid of objectives. ``parity_trl`` and
``parity_liger`` run the installed code of those packages.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from logitless.head.api import token_scores, why_not
from logitless.objective.correction import SamplerCorrection
from logitless.objective.divergence import KLPenalty
from logitless.objective.entropy import EntropyBonus
from logitless.objective.filters import OffPolicy, SamplerRejection, TopEntropy
from logitless.objective.objective import Objective
from logitless.objective.presets import PRESETS, algorithm
from logitless.objective.ratio import SequenceRatio, TurnRatio
from logitless.objective.surrogate import Clip
from logitless.objective.weighting import TokenMean, Totals, Weighting
from logitless.types import LMHead, TokenBatch

FLOAT64 = 1e-9
"""Tolerance where both sides compute in float64."""

FLOAT32 = 1e-5
"""Tolerance where one side computes in float32."""


@dataclass(frozen=True)
class Row:
    """Two implementations of one loss on one batch.

    Args:
        name: what was computed.
        against: ``trl``, ``liger`` or a backend of the head.
        loss_rel: ``|a - b| / sum |w l|``, the largest of the optimizer steps (centred advantages make a loss itself 0).
        grad_rel: ``|ga - gb| / |ga|`` over everything that has a gradient, ga the other implementation's.
        tolerance: of both.
        note: about the other implementation; may be empty.

    Example:
        >>> Row("grpo", "chunked", 1e-12, 2e-12, 1e-9).ok
        True
        >>> Row("grpo", "chunked", math.nan, 2e-12, 1e-9).ok
        False
    """

    name: str
    against: str
    loss_rel: float
    grad_rel: float
    tolerance: float
    note: str = ""

    @property
    def ok(self) -> bool:
        """Both within tolerance."""
        return self.loss_rel <= self.tolerance and self.grad_rel <= self.tolerance

    def as_json(self) -> dict[str, str | float | bool | None]:
        """The row for JSON; a difference that is not finite is None."""
        names = ("name", "against", "loss_rel", "grad_rel", "tolerance", "ok", "note")
        values = {name: getattr(self, name) for name in names}
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }


@dataclass(frozen=True)
class Measured:
    """Losses and gradients of one implementation.

    Args:
        losses: one an optimizer step.
        scales: ``sum |w l|`` of each step; needed from one side only.
    """

    losses: tuple[float, ...]
    gradients: tuple[Tensor, ...]
    scales: tuple[float, ...] = ()


def row(name: str, against: str, theirs: Measured, ours: Measured, tolerance: float, note: str = "") -> Row:
    """The differences of two measurements.

    Example:
        >>> theirs = Measured((0.0,), (torch.tensor([3.0, 4.0]),))
        >>> ours = Measured((0.5,), (torch.tensor([3.0, 4.5]),), scales=(2.0,))
        >>> found = row("grpo", "trl", theirs, ours, 1e-9)
        >>> found.loss_rel, found.grad_rel
        (0.25, 0.1)
    """
    losses = zip(theirs.losses, ours.losses, ours.scales, strict=True)
    loss_rel = max(_relative(abs(a - b), scale) for a, b, scale in losses)
    ga, gb = (torch.cat([each.double().flatten() for each in side.gradients]) for side in (theirs, ours))
    return Row(name, against, loss_rel, _relative(float((ga - gb).norm()), float(ga.norm())), tolerance, note)


def _relative(difference: float, scale: float) -> float:
    if difference == 0:
        return 0.0
    return difference / scale if scale else math.inf


# --- backends ---------------------------------------------------------------------------------------------------------

LENGTHS = (5, 0, 9, 1, 7)
WIDTH, VOCABULARY = 16, 67


def objectives() -> dict[str, tuple[Objective, Weighting]]:
    """Objectives to compare: every preset, and a clipped loss with each optional part."""
    algorithms = {name: preset() for name, preset in PRESETS.items()}
    algorithms["dr_grpo"] = algorithm("dr_grpo", {"max_new_tokens": max(LENGTHS)})
    grid = {name: (each.objective, each.weighting) for name, each in algorithms.items()}
    parts: dict[str, Objective] = {
        "ratio=turn": Objective(TurnRatio()),
        "clip with ratio_cap and dual": Objective(surrogate=Clip(ratio_cap=4.0, dual=3.0)),
        "kl=k1 corrected": Objective(kl=KLPenalty("k1", ratio_corrected="token")),
        "kl=k2": Objective(kl=KLPenalty("k2")),
        "kl=k3 corrected by the sequence's ratio": Objective(
            SequenceRatio(), kl=KLPenalty("k3", ratio_corrected="surrogate")
        ),
        "filters": Objective(filters=(OffPolicy(0.1), TopEntropy(0.5, scope="micro_batch"))),
        "filter of the block": Objective(filters=(TopEntropy(0.5),)),
        "sampler correction": Objective(correction=SamplerCorrection(max=1.2)),
        "sampler mask of sequences": Objective(correction=SamplerCorrection("sequence", "mask", min=0.5, max=2.0)),
        "rejection of tokens and of sequences": Objective(
            filters=(SamplerRejection(0.3, min=-0.3), SamplerRejection(0.1, "k2", "sequence_max"))
        ),
        "entropy bonus": Objective(entropy_bonus=EntropyBonus(0.1)),
    }
    return grid | {name: (objective, TokenMean()) for name, objective in parts.items()}


def heads(dtype: torch.dtype) -> dict[str, LMHead]:
    """Plain, with bias, scale and softcap, and with LoRA."""
    draw = _draw(11, dtype)
    weight = draw(VOCABULARY, WIDTH)
    plain = LMHead(weight)
    return {
        "": plain,
        "bias, scale and softcap": replace(plain, bias=draw(VOCABULARY), scale=0.5, softcap=3.0),
        "LoRA": replace(plain, lora_a=draw(3, WIDTH), lora_b=draw(VOCABULARY, 3), lora_scale=0.5),
    }


def against_reference(*, quick: bool = False) -> Iterator[Row]:
    """A row for every backend that can run here, every objective and every kind of head.

    Both sides compute in float64, or in float32 if the backend takes no float64.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for backend in ("chunked", "fused"):
        probe = torch.zeros(1, WIDTH, dtype=torch.float64, device=device)
        dtype = torch.float64
        if why_not(backend, probe, LMHead(probe)) is not None:
            dtype = torch.float32
            if why_not(backend, probe.float(), LMHead(probe.float())) is not None:
                continue
        tolerance = FLOAT64 if dtype == torch.float64 else FLOAT32
        for head_name, head in heads(dtype).items():
            grid = objectives()
            chosen = grid if not (head_name or quick) else {name: grid[name] for name in ("dapo", "gspo", "sapo")}
            for name, (objective, weighting) in chosen.items():
                theirs, ours = (
                    _through_head(each, objective, weighting, head, dtype, device) for each in ("reference", backend)
                )
                yield row(f"{name}, {head_name}" if head_name else name, backend, theirs, ours, tolerance)


def _through_head(
    backend: str, objective: Objective, weighting: Weighting, head: LMHead, dtype: torch.dtype, device: str
) -> Measured:
    """Loss and gradients of hidden states and of the head's tensors."""
    draw = _draw(12, dtype)
    hidden = draw(sum(LENGTHS), WIDTH).to(device).requires_grad_()
    names = [name for name in ("weight", "bias", "lora_a", "lora_b") if getattr(head, name) is not None]
    leaves = {name: getattr(head, name).detach().to(device).requires_grad_() for name in names}
    generator = torch.Generator().manual_seed(13)
    target = torch.randint(VOCABULARY, (sum(LENGTHS),), generator=generator).to(device)
    scores = token_scores(
        hidden,
        replace(head, **leaves),
        target,
        temperature=0.8,
        backend=backend,  # type: ignore[arg-type]
    )
    batch = _random_batch(objective, weighting, dtype)
    statistics = objective.block_statistics(batch, generator=generator)
    if statistics is not None:
        batch = statistics.attach(batch)
    if objective.entropy_bonus is not None:
        batch = replace(batch, entropy_weight=objective.entropy_weight(batch, block=statistics))
    output = objective(
        scores.logp,
        scores.entropy,
        batch.to(device),
        beta=0.3 if objective.kl is not None else 0.0,
        block=statistics,
        generator=generator,
    )
    gradients = torch.autograd.grad(output.loss, [hidden, *leaves.values()])
    return Measured((output.loss.item(),), gradients, (_scale(batch.token_weight, output.token_loss),))


def _random_batch(objective: Objective, weighting: Weighting, dtype: torch.dtype) -> TokenBatch:
    """A batch so far off-policy that every bound has an effect."""
    draw, counts = _draw(14, dtype), torch.tensor(LENGTHS)
    total = sum(LENGTHS)
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), counts)
    logp_old = -draw(total).abs() * 2 - 3
    advantage = torch.tensor([1.0, 0.5, -1.5, 0.25, -0.5], dtype=dtype)[sequence]
    position = torch.arange(total) - (counts.cumsum(0) - counts)[sequence]
    return TokenBatch(
        sequence=sequence,
        num_sequences=len(LENGTHS),
        advantage=advantage,
        token_weight=weighting(LENGTHS, Totals.of(LENGTHS), dtype=dtype),
        logp_old=logp_old,
        logp_sampler=logp_old + draw(total) * 0.3,
        logp_ref=logp_old + draw(total) * 0.3,
        entropy_old=draw(total).abs(),
        turn=position // 3 if "turn" in objective.needs else None,
        lag=position % 4 if "lag" in objective.needs else None,
    )


def _scale(weight: Tensor, token_loss: Tensor) -> float:
    return float((weight.to(token_loss) * token_loss).abs().sum())


def _draw(seed: int, dtype: torch.dtype) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def worst(rows: Sequence[Row]) -> Mapping[str, Row]:
    """For each ``against`` the row with the largest difference, relative to its tolerance.

    Example:
        >>> rows = [Row("a", "trl", 0.0, 0.0, 1e-9), Row("b", "trl", 0.0, 1e-12, 1e-9)]
        >>> worst(rows)["trl"].name
        'b'
    """
    found: dict[str, Row] = {}
    for each in rows:
        if each.against not in found or _badness(each) > _badness(found[each.against]):
            found[each.against] = each
    return found


def _badness(each: Row) -> float:
    values = [each.loss_rel / each.tolerance, each.grad_rel / each.tolerance]
    return math.inf if any(math.isnan(value) for value in values) else max(values)

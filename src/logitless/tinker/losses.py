"""Tinker's losses as sums over given targets, made of the objective's equations.

A loss is ``sum_n l_n``, without a mean; r is the ratio ``exp(logp - logprobs)``, A are the advantages.

    cross_entropy        -weights logp
    importance_sampling  -r A
    ppo                  -min(r A, clip(r, low, high) A)
    cispo                -sg(clip(r, low, high)) A logp
    dro                  -(A logp - beta/2 (logp - logprobs)^2)
    gspo                 ppo with r = sg(exp(mean over sequence_ratio_mask of (logp - logprobs))) exp(logp - sg(logp))

Source: tinker-docs.thinkingmachines.ai/tinker/losses. Defaults are in ``DEFAULTS``.
"""

from collections.abc import Mapping, Sequence
from math import inf, isnan

import torch
from jaxtyping import Float
from torch import Tensor

from logitless.errors import InputError
from logitless.objective.surrogate.cispo import cispo_loss
from logitless.objective.surrogate.clip import clip_loss
from logitless.objective.surrogate.unclipped import dro_loss, importance_loss

_SAMPLED = ("logprobs", "advantages")

INPUTS: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("weights",),
    **dict.fromkeys(("importance_sampling", "ppo", "cispo", "dro"), _SAMPLED),
    "gspo": (*_SAMPLED, "sequence_ratio_mask"),
}
"""What each loss reads beside ``target_tokens``, one number a target."""

DEFAULTS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
    "gspo": {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
}
"""The values of ``loss_fn_config`` that a request may leave out."""


def checked_config(name: str, config: Mapping[str, float | str]) -> dict[str, float]:
    """``loss_fn_config`` with defaults.

    Raises:
        InputError: an unknown loss, an unknown key, a value that is no number, or clipping from high to low.
    """
    if name not in INPUTS:
        raise InputError(
            needed=f"a loss_fn from {', '.join(INPUTS)}",
            given=repr(name),
            remedy="Compute another one, whose formula is known, with forward_backward_custom.",
        )
    wrong = [k for k, v in config.items() if k not in DEFAULTS[name] or isinstance(v, str) or isnan(v)]
    found = DEFAULTS[name] | {key: float(value) for key, value in config.items() if key not in wrong}
    if not wrong and found.get("clip_low_threshold", 0.0) > found.get("clip_high_threshold", inf):
        wrong = list(config)
    if wrong:
        raise InputError(
            needed=f"numbers for {', '.join(DEFAULTS[name]) or 'nothing'} in loss_fn_config of {name}, low <= high",
            given=", ".join(f"{key}: {config[key]!r}" for key in wrong),
            remedy="Leave the others out.",
        )
    return found


def token_losses(
    name: str,
    config: Mapping[str, float],
    logp: Float[Tensor, "N"],
    inputs: Mapping[str, Tensor],
    lengths: Sequence[int],
) -> Float[Tensor, "N"]:
    """The loss of each target, to be summed.

    Gradient: through ``logp``.

    Args:
        name: of the loss.
        config: of ``checked_config``.
        logp: [N] nats, of the targets.
        inputs: [N] each, those of ``INPUTS[name]``.
        lengths: targets of each sequence; they sum to N.

    Example:
        >>> token_losses("cross_entropy", {}, torch.tensor([-2.0, -1.0]), {"weights": torch.tensor([0.5, 0.0])}, [2])
        tensor([1., 0.])
    """
    if name == "cross_entropy":
        return -inputs["weights"] * logp
    advantage, log_ratio = inputs["advantages"], logp - inputs["logprobs"]
    if name == "gspo":
        log_ratio = _sequence_log_ratio(logp, log_ratio, inputs["sequence_ratio_mask"] != 0, list(lengths))
    if name == "dro":
        return dro_loss(logp, log_ratio, advantage, beta=config["beta"])
    # Clients put 0 as log-prob of prompt tokens, which have no advantage: no ratio, which could overflow.
    log_ratio = torch.where(advantage == 0, 0.0, log_ratio)
    if name == "importance_sampling":
        return importance_loss(log_ratio, advantage)
    bounds = {"ratio_min": config["clip_low_threshold"], "ratio_max": config["clip_high_threshold"]}
    if name == "cispo":
        return cispo_loss(logp, log_ratio, advantage, **bounds)
    return clip_loss(log_ratio, advantage, **bounds)


def _sequence_log_ratio(logp: Tensor, log_ratio: Tensor, counted: Tensor, lengths: list[int]) -> Tensor:
    """The mean log ratio of each sequence at each of its tokens, with the gradient of the token's own ``logp``."""
    parts = zip(*(torch.split(each, lengths) for each in (log_ratio.detach(), counted)), strict=True)
    means = [part[of_ratio].sum() / of_ratio.sum().clamp(min=1) for part, of_ratio in parts]
    sizes = torch.tensor(lengths, device=logp.device)
    return torch.repeat_interleave(torch.stack(means), sizes, output_size=len(logp)) + (logp - logp.detach())

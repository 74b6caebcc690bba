"""What one optimizer step did, from the vectors that its losses were made of: no second pass, no synchronisation.

Every number is a plain mean (or quantile, or count) over the trained tokens of the step, whatever the weights were:
nats a token stay nats a token. The caller stacks the values and reads them once.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from logitless.objective.divergence import k1, k2, k3
from logitless.objective.filters import quantile
from logitless.objective.inputs import shaped
from logitless.objective.objective import ObjectiveOutput
from logitless.objective.over_ranks import GatherOverRanks, one_rank


@shaped
def effective_fraction(weight: Float[Tensor, "N"], counted: Bool[Tensor, "N"]) -> Float[Tensor, ""]:
    """``(sum c)^2 / (n sum c^2)``: effective sample size of importance weights as a fraction of the n counted tokens.

    Source: Kish 1965.

    Example:
        >>> effective_fraction(torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.ones(4, dtype=torch.bool))
        tensor(0.5000, dtype=torch.float64)
    """
    weight = torch.where(counted, weight, 0.0).double()
    return weight.sum().square() / (counted.sum() * weight.square().sum()).clamp(min=torch.finfo(torch.float64).tiny)


def step_diagnostics(
    outputs: Sequence[ObjectiveOutput], *, gather: GatherOverRanks = one_rank
) -> dict[str, Float[Tensor, ""]]:
    """The numbers of an optimizer step.

    Args:
        outputs: of every micro-batch of the step on this rank, at least one, all of the same objective.
        gather: over all ranks; every rank then gets the numbers of the whole step.

    Returns:
        float64 scalars on the outputs' device. A number whose vectors the objective does not have is left out:

        - ``loss``; ``num_tokens``, trained tokens.
        - ``clip_fraction_low``, ``_high``: tokens whose gradient the lower or upper bound cuts; ``_positive``,
          ``_negative``: tokens cut by either, as a fraction of those with A > 0 or A < 0.
        - ``ratio_min``, ``ratio_mean``, ``ratio_std``, ``ratio_max``: at the configured level; the deviation is the
          root of the mean square.
        - ``old_k1_mean``, ``old_k1_p95``, ... ``old_k3_p95``: KL(old || policy); tokens are drawn from the old policy,
          so that d is ``logp_old - logp`` here.
        - ``ref_k1_mean`` ... ``ref_k3_p95``: KL(policy || reference), d unclamped; ``kl_mean``, ``kl_p95``: the term
          that is in the loss, before beta, with its correction; ``num_kl_clamped``.
        - ``entropy_mean``; ``entropy_bonus``: the mean that the bonus pays for.
        - ``sampler_difference_mean``, ``_p95``, ``_max``: ``|logp_old - logp_sampler|``; ``num_missing_sampler``.
        - ``correction_mean``, ``correction_effective_fraction``.
        - ``dropped_<filter>``: fraction that each filter drops.
        - ``live_fraction``: tokens with a gradient other than 0.

    Example:
        >>> from logitless.objective.objective import Objective
        >>> from logitless.types import TokenBatch
        >>> batch = TokenBatch(
        ...     sequence=torch.tensor([0, 0]), num_sequences=1, advantage=torch.tensor([1.0, 1.0]),
        ...     token_weight=torch.tensor([0.5, 0.5]), logp_old=torch.tensor([-1.0, -1.0]))
        >>> output = Objective()(torch.tensor([-0.5, -1.0], requires_grad=True), None, batch)
        >>> numbers = step_diagnostics([output])
        >>> numbers["clip/high_fraction"].item(), numbers["head/live_fraction"].item()
        (0.5, 0.5)
    """

    vectors = _whole_step(outputs, gather)
    trained, advantage = vectors["trained"], vectors["advantage"]

    def mean(values: Tensor, among: Tensor) -> Tensor:
        return torch.where(among, values, 0.0).double().sum() / among.sum().clamp(min=1)

    def p95(values: Tensor) -> Tensor:
        return quantile(values, 0.95, trained)

    def largest(values: Tensor) -> Tensor:
        return torch.cat([torch.where(trained, values, -torch.inf), values.new_full((1,), -torch.inf)]).max()

    numbers = {"loss/total": _total([each.loss for each in outputs], gather), "optimizer/tokens": trained.sum()}
    if "clipped_low" in vectors:
        low, high = vectors["clipped_low"], vectors["clipped_high"]
        numbers["clip/low_fraction"] = mean(low, trained)
        numbers["clip/high_fraction"] = mean(high, trained)
        numbers["clip/positive_fraction"] = mean(low | high, trained & (advantage > 0))
        numbers["clip/negative_fraction"] = mean(low | high, trained & (advantage < 0))
    if (log_ratio := vectors.get("log_ratio")) is not None:
        numbers["ratio/min"] = (-largest(-log_ratio)).exp()
        numbers["ratio/mean"] = mean(log_ratio.exp(), trained)
        numbers["ratio/std"] = mean((log_ratio.exp() - numbers["ratio/mean"]).square(), trained).sqrt()
        numbers["ratio/max"] = largest(log_ratio).exp()
    differences = {"old": vectors.get("token_log_ratio"), "ref": vectors.get("log_ratio_ref")}
    for policy, difference in differences.items():
        if difference is not None:
            for name, estimator in {"k1": k1, "k2": k2, "k3": k3}.items():
                values = estimator(-difference if policy == "old" else difference)
                numbers[f"kl_{policy}/{name}_mean"] = mean(values, trained)
                numbers[f"kl_{policy}/{name}_p95"] = p95(values)
    if (kl := vectors.get("kl")) is not None:
        numbers["kl_ref/penalty_mean"], numbers["kl_ref/penalty_p95"] = mean(kl, trained), p95(kl)
    if (clamped := vectors.get("kl_clamped")) is not None:
        numbers["kl_ref/clamped"] = clamped.sum()
    if (entropy := vectors.get("entropy")) is not None:
        numbers["entropy/mean"] = mean(entropy, trained)
    bonuses = [each.entropy_bonus for each in outputs if each.entropy_bonus is not None]
    if bonuses:
        numbers["entropy/bonus_mean"] = _total(bonuses, gather)
    if (sampler := vectors.get("sampler_log_ratio")) is not None:
        size = sampler.abs()
        numbers["sampler/logp_difference_mean"], numbers["sampler/logp_difference_p95"] = mean(size, trained), p95(size)
        numbers["sampler/logp_difference_max"] = largest(size)
    if (missing := vectors.get("missing_sampler")) is not None:
        numbers["sampler/missing"] = missing.sum()
    if (correction := vectors.get("correction")) is not None:
        numbers["sampler/correction_mean"] = mean(correction, trained)
        numbers["sampler/correction_effective_fraction"] = effective_fraction(correction, trained)
    for name in outputs[0].dropped:
        numbers[f"filter/{name}/dropped_fraction"] = mean(vectors[f"dropped_{name}"], trained)
    if (gradient := vectors.get("grad_logp")) is not None:
        numbers["head/live_fraction"] = mean(gradient != 0, trained)
    return {name: value.double() for name, value in numbers.items()}


_VECTORS = (
    "trained",
    "advantage",
    "clipped_low",
    "clipped_high",
    "log_ratio",
    "token_log_ratio",
    "log_ratio_ref",
    "kl",
    "kl_clamped",
    "entropy",
    "sampler_log_ratio",
    "missing_sampler",
    "correction",
    "grad_logp",
)


def _whole_step(outputs: Sequence[ObjectiveOutput], gather: GatherOverRanks) -> dict[str, Tensor]:
    """The vectors that there are, over micro-batches and ranks, in one exchange."""
    parts = {name: [getattr(each, name) for each in outputs] for name in _VECTORS}
    parts |= {f"dropped_{name}": [each.dropped[name] for each in outputs] for name in outputs[0].dropped}
    vectors = {name: torch.cat(part) for name, part in parts.items() if part[0] is not None}
    if gather is one_rank:
        return vectors
    everyone = gather(torch.stack([each.double() for each in vectors.values()], dim=1))
    return {name: everyone[:, column].to(each.dtype) for column, (name, each) in enumerate(vectors.items())}


def _total(parts: Sequence[Tensor], gather: GatherOverRanks) -> Float[Tensor, ""]:
    return gather(torch.stack([each.detach() for each in parts])).double().sum()

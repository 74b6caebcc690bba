"""Metrics of an optimizer step, from its ``ObjectiveOutput``: no second pass, no synchronization.

Each is a plain mean, quantile or count over the step's trained tokens, without the loss's weights.
"""

from collections.abc import Mapping, Sequence

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
    """``(sum c)^2 / (n sum c^2)``: effective sample size as a fraction of the n counted tokens.

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
    """The metrics of an optimizer step.

    Args:
        outputs: of every micro-batch of the step on this rank, at least one, all of the same objective.
        gather: over all ranks; every rank gets the metrics of the whole step.

    Returns:
        float64 scalars on the outputs' device, by their names in docs/metrics.md; those that the objective has no
        vectors for are left out.

    Example:
        >>> from logitless.objective.objective import Objective
        >>> from logitless.types import TokenBatch
        >>> batch = TokenBatch(
        ...     sequence=torch.tensor([0, 0]), num_sequences=1, advantage=torch.tensor([1.0, 1.0]),
        ...     token_weight=torch.tensor([0.5, 0.5]), logp_old=torch.tensor([-1.0, -1.0]))
        >>> output = Objective()(torch.tensor([-0.5, -1.0], requires_grad=True), None, batch)
        >>> numbers = step_diagnostics([output])
        >>> numbers["clip/high_fraction"].item(), numbers["head/nonzero_gradient_fraction"].item()
        (0.5, 0.5)
    """
    vectors = _whole_step(outputs, gather)
    trained = vectors["trained"]
    numbers = {"loss/total": _total([each.loss for each in outputs], gather), "optimizer/tokens": trained.sum()}
    numbers |= _of_ratio(vectors) | _of_divergences(vectors)
    if (entropy := vectors.get("entropy")) is not None:
        numbers["entropy/mean"] = _mean(entropy, trained)
    bonuses = [each.entropy_bonus for each in outputs if each.entropy_bonus is not None]
    if bonuses:
        numbers["entropy/bonus_mean"] = _total(bonuses, gather)
    numbers |= _of_sampler(vectors)
    for name in outputs[0].dropped:
        numbers[f"filter/{name}/dropped_fraction"] = _mean(vectors[f"dropped_{name}"], trained)
    if (gradient := vectors.get("grad_logp")) is not None:
        numbers["head/nonzero_gradient_fraction"] = _mean(gradient != 0, trained)
    return {name: value.double() for name, value in numbers.items()}


def _of_ratio(vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Clipped fractions by bound and by the sign of the advantage; the ratio at the configured level."""
    numbers, trained, advantage = {}, vectors["trained"], vectors["advantage"]
    if "clipped_low" in vectors:
        low, high = vectors["clipped_low"], vectors["clipped_high"]
        numbers["clip/low_fraction"] = _mean(low, trained)
        numbers["clip/high_fraction"] = _mean(high, trained)
        numbers["clip/positive_fraction"] = _mean(low | high, trained & (advantage > 0))
        numbers["clip/negative_fraction"] = _mean(low | high, trained & (advantage < 0))
    if (log_ratio := vectors.get("log_ratio")) is not None:
        numbers["ratio/min"] = (-_largest(-log_ratio, trained)).exp()
        numbers["ratio/mean"] = _mean(log_ratio.exp(), trained)
        numbers["ratio/std"] = _mean((log_ratio.exp() - numbers["ratio/mean"]).square(), trained).sqrt()
        numbers["ratio/max"] = _largest(log_ratio, trained).exp()
    return numbers


def _of_divergences(vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """KL(old || policy), with ``d = logp_old - logp``; KL(policy || reference), d unclamped; the loss's KL term."""
    numbers, trained = {}, vectors["trained"]
    differences = {"old": vectors.get("token_log_ratio"), "ref": vectors.get("log_ratio_ref")}
    for policy, difference in differences.items():
        if difference is not None:
            for name, estimator in {"k1": k1, "k2": k2, "k3": k3}.items():
                values = estimator(-difference if policy == "old" else difference)
                numbers[f"kl_{policy}/{name}_mean"] = _mean(values, trained)
                numbers[f"kl_{policy}/{name}_p95"] = quantile(values, 0.95, trained)
    if (kl := vectors.get("kl")) is not None:
        numbers["kl_ref/penalty_mean"] = _mean(kl, trained)
        numbers["kl_ref/penalty_p95"] = quantile(kl, 0.95, trained)
        numbers["kl_ref/clamped"] = vectors["kl_clamped"].sum()
    return numbers


def _of_sampler(vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    numbers, trained = {}, vectors["trained"]
    if (sampler := vectors.get("sampler_log_ratio")) is not None:
        size = sampler.abs()
        numbers["sampler/logp_difference_mean"] = _mean(size, trained)
        numbers["sampler/logp_difference_p95"] = quantile(size, 0.95, trained)
        numbers["sampler/logp_difference_max"] = _largest(size, trained)
        numbers["sampler/missing"] = vectors["missing_sampler"].sum()
    if (correction := vectors.get("correction")) is not None:
        numbers["sampler/correction_mean"] = _mean(correction, trained)
        numbers["sampler/correction_effective_fraction"] = effective_fraction(correction, trained)
    return numbers


def _mean(values: Tensor, among: Tensor) -> Tensor:
    return torch.where(among, values, 0.0).double().sum() / among.sum().clamp(min=1)


def _largest(values: Tensor, among: Tensor) -> Tensor:
    return torch.cat([torch.where(among, values, -torch.inf), values.new_full((1,), -torch.inf)]).max()


_VECTORS = (
    *("trained", "advantage", "clipped_low", "clipped_high", "log_ratio", "token_log_ratio", "log_ratio_ref"),
    *("kl", "kl_clamped", "entropy", "sampler_log_ratio", "missing_sampler", "correction", "grad_logp"),
)


def _whole_step(outputs: Sequence[ObjectiveOutput], gather: GatherOverRanks) -> dict[str, Tensor]:
    """The outputs' vectors, concatenated over micro-batches and gathered over ranks in one collective."""
    parts = {name: [getattr(each, name) for each in outputs] for name in _VECTORS}
    parts |= {f"dropped_{name}": [each.dropped[name] for each in outputs] for name in outputs[0].dropped}
    vectors = {name: torch.cat(part) for name, part in parts.items() if part[0] is not None}
    if gather is one_rank:
        return vectors
    everyone = gather(torch.stack([each.double() for each in vectors.values()], dim=1))
    return {name: everyone[:, column].to(each.dtype) for column, (name, each) in enumerate(vectors.items())}


def _total(parts: Sequence[Tensor], gather: GatherOverRanks) -> Float[Tensor, ""]:
    return gather(torch.stack([each.detach() for each in parts])).double().sum()

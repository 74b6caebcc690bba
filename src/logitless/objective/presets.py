"""Presets: the name of a paper, its own parameters, and the composition that it stands for.

A preset is a plain function that returns an ``Algorithm``; ``PRESETS`` lists them. A paper's epsilon is a distance from
1 and becomes an absolute bound here. A preset can be taken apart and changed with ``dataclasses.replace``.
"""

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

from logitless.errors import ConfigurationError
from logitless.objective.advantage import Gae, GroupCentered, GroupStandardized, LeaveOneOut, Raw, ReinforcePP
from logitless.objective.algorithm import Algorithm
from logitless.objective.objective import Objective
from logitless.objective.ratio import SequenceRatio, SequenceTokenRatio
from logitless.objective.surrogate import (
    Cispo,
    Clip,
    ClipCov,
    Dppo,
    Dro,
    Gmpo,
    KlCov,
    Nll,
    Reinforce,
    Sapo,
    Vespo,
)
from logitless.objective.trl_configuration import trl
from logitless.objective.value import ValueLoss
from logitless.objective.weighting import (
    ConstantLength,
    MicroBatchTokenMean,
    SequenceMean,
    SequenceSum,
    TokenMean,
)

__all__ = ["PRESETS", "Algorithm", "algorithm", "trl"]


def grpo(epsilon: float = 0.2) -> Algorithm:
    """GRPO: token ratio, clip 0.8-1.2, group-standardised, every sequence alike.

    Source: DeepSeekMath, arXiv:2402.03300.

    Example:
        >>> grpo().objective.surrogate.ratio_max
        1.2
    """
    return Algorithm(Objective(surrogate=_clip(epsilon, epsilon)), GroupStandardized(), SequenceMean())


def dr_grpo(epsilon: float = 0.2, max_new_tokens: int | None = None) -> Algorithm:
    """Dr. GRPO: rewards only centred, every sequence divided by the same length.

    Source: arXiv:2503.20783.

    Example:
        >>> dr_grpo(max_new_tokens=512).weighting.max_new_tokens
        512
    """
    return Algorithm(Objective(surrogate=_clip(epsilon, epsilon)), GroupCentered(), ConstantLength(max_new_tokens))


def dapo(epsilon_low: float = 0.2, epsilon_high: float = 0.28) -> Algorithm:
    """DAPO: clip-higher and the token mean.

    Source: arXiv:2503.14476.

    Example:
        >>> dapo().objective.surrogate.ratio_max
        1.28
    """
    return Algorithm(Objective(surrogate=_clip(epsilon_low, epsilon_high)), GroupStandardized(), TokenMean())


def bnpo(epsilon: float = 0.2) -> Algorithm:
    """What TRL calls ``bnpo``: GRPO with the token mean of each micro-batch (the paper's BNPO normalises rewards).

    Source: TRL's ``loss_type="bnpo"``; the name is that of arXiv:2506.02864.

    Example:
        >>> bnpo().weighting
        MicroBatchTokenMean(name='micro_batch_token_mean')
    """
    return Algorithm(Objective(surrogate=_clip(epsilon, epsilon)), GroupStandardized(), MicroBatchTokenMean())


def gspo(epsilon_low: float = 3e-4, epsilon_high: float = 4e-4) -> Algorithm:
    """GSPO: one ratio a sequence.

    Source: arXiv:2507.18071.

    Example:
        >>> gspo().objective.ratio.name
        'sequence'
    """
    objective = Objective(SequenceRatio(), _clip(epsilon_low, epsilon_high))
    return Algorithm(objective, GroupStandardized(), SequenceMean())


def gspo_token(epsilon_low: float = 3e-4, epsilon_high: float = 4e-4) -> Algorithm:
    """GSPO-token: the sequence's ratio with each token's gradient.

    Source: arXiv:2507.18071, section 4.3.

    Example:
        >>> gspo_token().objective.ratio.name
        'sequence_token'
    """
    objective = Objective(SequenceTokenRatio(), _clip(epsilon_low, epsilon_high))
    return Algorithm(objective, GroupStandardized(), SequenceMean())


def luspo(epsilon_low: float = 2e-3, epsilon_high: float = 2.5e-3) -> Algorithm:
    """LUSPO: GSPO, each sequence in proportion to its length.

    Source: arXiv:2602.05261.

    Example:
        >>> luspo().weighting
        SequenceSum(scope='step', name='sequence_sum')
    """
    objective = Objective(SequenceRatio(), _clip(epsilon_low, epsilon_high))
    return Algorithm(objective, GroupStandardized(), SequenceSum())


def cispo(epsilon_max: float = 5.0) -> Algorithm:
    """CISPO: a detached, truncated weight on the log-likelihood; epsilon_max is a ceiling, not a distance from 1.

    Source: MiniMax-M1, arXiv:2506.13585; ScaleRL, arXiv:2510.13786.

    Example:
        >>> cispo().objective.surrogate.ratio_max
        5.0
    """
    return Algorithm(Objective(surrogate=Cispo(epsilon_max)), GroupStandardized(), TokenMean())


def sapo(tau_positive: float = 1.0, tau_negative: float = 1.05) -> Algorithm:
    """SAPO: a sigmoid gate in place of the clip.

    Source: arXiv:2511.20347.

    Example:
        >>> sapo().objective.surrogate.temperature_negative
        1.05
    """
    return Algorithm(Objective(surrogate=Sapo(tau_positive, tau_negative)), GroupStandardized(), SequenceMean())


def vespo(
    k_positive: float = 2.0, lambda_positive: float = 3.0, k_negative: float = 3.0, lambda_negative: float = 2.0
) -> Algorithm:
    """VESPO: a soft weight of the whole sequence's ratio.

    Source: arXiv:2602.10693.

    Example:
        >>> vespo().objective.surrogate.k_negative
        3.0
    """
    surrogate = Vespo(k_positive, lambda_positive, k_negative, lambda_negative)
    return Algorithm(Objective(surrogate=surrogate), GroupStandardized(), TokenMean())


def gmpo(epsilon: float = 0.4) -> Algorithm:
    """GMPO: the geometric mean of clipped token ratios; epsilon bounds the log ratio.

    Source: arXiv:2507.20673.

    Example:
        >>> gmpo().objective.surrogate.log_ratio_min
        -0.4
    """
    return Algorithm(Objective(surrogate=Gmpo(-epsilon, epsilon)), GroupStandardized(), SequenceMean())


def dppo(divergence: Literal["tv", "kl"] = "tv", delta: float | None = None) -> Algorithm:
    """DPPO: a trust region in probability; delta is 0.15 for ``tv`` and 0.05 for ``kl``.

    Source: arXiv:2602.04879.

    Example:
        >>> dppo("kl").objective.surrogate.max_high
        0.05
    """
    return Algorithm(Objective(surrogate=Dppo(divergence, delta, delta)), GroupStandardized(), TokenMean())


def clip_cov(r: float = 2e-4, omega_low: float = 1.0, omega_high: float = 5.0) -> Algorithm:
    """Clip-Cov: a random few of the tokens with a large covariance are not trained on.

    Source: arXiv:2505.22617.

    Example:
        >>> clip_cov().objective.surrogate.fraction
        0.0002
    """
    return Algorithm(Objective(surrogate=ClipCov(r, omega_low, omega_high)), GroupStandardized(), TokenMean())


def kl_cov(k: float = 2e-4, beta: float = 1.0) -> Algorithm:
    """KL-Cov: the tokens with the largest covariance are held back.

    Source: arXiv:2505.22617.

    Example:
        >>> kl_cov().objective.surrogate.coefficient
        1.0
    """
    return Algorithm(Objective(surrogate=KlCov(k, beta)), GroupStandardized(), TokenMean())


def dro(beta: float = 0.1) -> Algorithm:
    """DRO: a squared log ratio in place of the clip.

    Source: arXiv:2405.19107, as verl's ``dro``.

    Example:
        >>> dro().objective.surrogate.beta
        0.1
    """
    return Algorithm(Objective(surrogate=Dro(beta)), GroupStandardized(), TokenMean())


def ppo(epsilon: float = 0.2, gamma: float = 1.0, lambda_: float = 0.95, value_coefficient: float = 0.5) -> Algorithm:
    """PPO: generalised advantages from a value head that is trained beside the policy.

    Source: arXiv:1707.06347.

    Example:
        >>> ppo().value_loss.coefficient
        0.5
    """
    return Algorithm(
        Objective(surrogate=_clip(epsilon, epsilon)),
        Gae(gamma, lambda_),
        TokenMean(),
        value_loss=ValueLoss(value_coefficient),
    )


def reinforce() -> Algorithm:
    """REINFORCE: the reward itself, no ratio.

    Source: Williams 1992.

    Example:
        >>> sorted(reinforce().objective.needs)
        []
    """
    return Algorithm(Objective(surrogate=Reinforce()), Raw(), TokenMean())


def rloo() -> Algorithm:
    """RLOO: REINFORCE on whole sequences against the mean of the others.

    Source: arXiv:2402.14740.

    Example:
        >>> rloo().advantage.name
        'leave_one_out'
    """
    return Algorithm(Objective(surrogate=Reinforce()), LeaveOneOut(), SequenceSum())


def reinforce_pp(epsilon: float = 0.2, gamma: float = 1.0) -> Algorithm:
    """REINFORCE++: clipped, with token returns whitened over the batch.

    Source: arXiv:2501.03262.

    Example:
        >>> reinforce_pp().advantage.name
        'reinforce_pp'
    """
    return Algorithm(Objective(surrogate=_clip(epsilon, epsilon)), ReinforcePP(gamma), TokenMean())


def nll() -> Algorithm:
    """Supervised: the negative log-likelihood, token mean.

    Example:
        >>> nll().advantage is None
        True
    """
    return Algorithm(Objective(surrogate=Nll()), None, TokenMean())


PRESETS: Mapping[str, Callable[..., Algorithm]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "bnpo": bnpo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "luspo": luspo,
    "cispo": cispo,
    "sapo": sapo,
    "vespo": vespo,
    "gmpo": gmpo,
    "dppo": dppo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dro": dro,
    "ppo": ppo,
    "reinforce": reinforce,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "nll": nll,
}
"""Every preset by its name; each can be called without arguments."""


def algorithm(name: str, parameters: Mapping[str, Any] | None = None) -> Algorithm:
    """The preset of this name with these parameters, in its paper's terms.

    Raises:
        ConfigurationError: no such preset or parameter; the message names the nearest.

    Example:
        >>> algorithm("dapo", {"epsilon_high": 0.3}).objective.surrogate.ratio_max
        1.3
    """
    preset = PRESETS[_known(name, PRESETS, "preset")]
    chosen = dict(parameters or {})
    for parameter in chosen:
        _known(parameter, inspect.signature(preset).parameters, f"parameter of {name!r}")
    return preset(**chosen)


def _known(name: str, names: Mapping[str, Any], what: str) -> str:
    if name not in names:
        near = difflib.get_close_matches(name, names)
        raise ConfigurationError(
            needed=f"a {what}",
            given=repr(name),
            remedy=f"Did you mean {near[0]!r}?" if near else f"Choose from {', '.join(names) or 'none'}.",
        )
    return name


def _clip(epsilon_low: float, epsilon_high: float) -> Clip:
    return Clip(1 - epsilon_low, 1 + epsilon_high)

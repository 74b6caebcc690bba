"""Presets: functions named after a method, with its paper's parameters, that return an ``Algorithm``.

``PRESETS`` lists them. A paper's epsilon is a distance from 1 and becomes an absolute bound here. Change a preset with
``dataclasses.replace``. ``docs/objectives.md`` shows the docstrings: what other libraries call a preset, and how they
differ from the paper.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from logitless.objective.advantage import (
    Gae,
    Gpg,
    GroupCentered,
    GroupStandardized,
    Hierarchical,
    LeaveOneOut,
    LengthWeighted,
    OptimalToken,
    OptimalValue,
    PassAtK,
    Rae,
    Raw,
    ReinforcePP,
    Remax,
)
from logitless.objective.algorithm import Algorithm
from logitless.objective.filters import AdvantageOutliers
from logitless.objective.inputs import known
from logitless.objective.objective import Objective
from logitless.objective.observations import Observations
from logitless.objective.ratio import SequenceRatio, SequenceTokenRatio
from logitless.objective.surrogate import (
    A2po,
    Cispo,
    Clip,
    ClipCov,
    Dppo,
    Dro,
    Gmpo,
    Ipo,
    KlCov,
    KPop,
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

    Elsewhere:
        TRL: ``loss_type="grpo"``
        verl: ``adv_estimator: grpo``, ``loss_mode: vanilla``, ``loss_agg_mode: seq-mean-token-mean``
        Fast-LLM: ``policy_loss: grpo``
        Liger: ``LigerFusedLinearGRPOLoss(loss_type="grpo")``

    Notes:
        - TRL averages over micro-batches, which is the same while they hold as many sequences.
        - verl's default aggregation is ``token-mean``: DAPO's loss.
        - Fast-LLM divides by tokens, or by documents with ``normalize_by_documents``.

    Example:
        >>> grpo().objective.surrogate.ratio_max
        1.2
    """
    return Algorithm(Objective(surrogate=_clip(epsilon, epsilon)), GroupStandardized(), SequenceMean())


def dr_grpo(epsilon: float = 0.2, max_new_tokens: int | None = None) -> Algorithm:
    """Dr. GRPO: rewards only centred, every sequence divided by the same length.

    Source: arXiv:2503.20783.

    Elsewhere:
        TRL: ``loss_type="dr_grpo"``, ``scale_rewards="none"``
        verl: ``norm_adv_by_std_in_grpo: false``, ``loss_agg_mode: seq-mean-token-sum-norm``
        Liger: ``LigerFusedLinearGRPOLoss(loss_type="dr_grpo")``

    Notes:
        - verl divides by ``loss_scale_factor``, or by the padded width of the micro-batch.

    Example:
        >>> dr_grpo(max_new_tokens=512).weighting.max_new_tokens
        512
    """
    return Algorithm(Objective(surrogate=_clip(epsilon, epsilon)), GroupCentered(), ConstantLength(max_new_tokens))


def dapo(epsilon_low: float = 0.2, epsilon_high: float = 0.28) -> Algorithm:
    """DAPO: clip-higher and the token mean.

    Source: arXiv:2503.14476.

    Elsewhere:
        TRL: ``loss_type="dapo"`` (its default), ``epsilon_high=0.28``
        verl: ``loss_mode: vanilla``, ``clip_ratio_high: 0.28``, ``loss_agg_mode: token-mean``
        Liger: ``LigerFusedLinearGRPOLoss(loss_type="dapo")``

    Notes:
        - TRL's default for ``epsilon_high`` is ``epsilon``, 0.2.
        - TRL divides by the tokens of the generation batch: ``token_mean(scope=block)``.
        - Its dynamic sampling is `rollout.zero_signal: refill`, its overlong penalty the reward `overlong`.

    Example:
        >>> dapo().objective.surrogate.ratio_max
        1.28
    """
    return Algorithm(Objective(surrogate=_clip(epsilon_low, epsilon_high)), GroupStandardized(), TokenMean())


def bnpo(epsilon: float = 0.2) -> Algorithm:
    """What TRL calls ``bnpo``: GRPO with the token mean of each micro-batch.

    Source: TRL; arXiv:2506.02864 uses the name for a Beta normalisation of rewards.

    Elsewhere:
        TRL: ``loss_type="bnpo"``
        Liger: ``LigerFusedLinearGRPOLoss(loss_type="bnpo")``

    Notes:
        - The only preset that depends on the micro-batch.

    Example:
        >>> bnpo().weighting
        MicroBatchTokenMean(name='micro_batch_token_mean')
    """
    return Algorithm(Objective(surrogate=_clip(epsilon, epsilon)), GroupStandardized(), MicroBatchTokenMean())


def gspo(epsilon_low: float = 3e-4, epsilon_high: float = 4e-4) -> Algorithm:
    """GSPO: one ratio a sequence.

    Source: arXiv:2507.18071, eq. 7.

    Elsewhere:
        TRL: ``loss_type="grpo"``, ``importance_sampling_level="sequence"``, ``epsilon=3e-4``, ``epsilon_high=4e-4``
        verl: ``loss_mode: gspo`` (the gradient of ``gspo_token``)
        Fast-LLM: ``policy_loss: gspo``
        Liger: ``LigerFusedLinearGRPOLoss(loss_type="grpo", importance_sampling_level="sequence")``

    Notes:
        - TRL's default ``dapo`` at the sequence level, and Fast-LLM's GSPO, count a sequence by its length.
    """
    objective = Objective(SequenceRatio(), _clip(epsilon_low, epsilon_high))
    return Algorithm(objective, GroupStandardized(), SequenceMean())


def gspo_token(epsilon_low: float = 3e-4, epsilon_high: float = 4e-4) -> Algorithm:
    """GSPO-token: the sequence's ratio with each token's gradient.

    Source: arXiv:2507.18071, section 4.3.

    Elsewhere:
        verl: ``loss_mode: gspo``

    Notes:
        - Equal to ``gspo`` where weight, advantage, filter and correction are constant in a sequence.
        - verl bounds the log ratio by 10 from above.
    """
    objective = Objective(SequenceTokenRatio(), _clip(epsilon_low, epsilon_high))
    return Algorithm(objective, GroupStandardized(), SequenceMean())


def luspo(epsilon_low: float = 2e-3, epsilon_high: float = 2.5e-3) -> Algorithm:
    """LUSPO: GSPO, each sequence in proportion to its length.

    Source: arXiv:2602.05261.

    Elsewhere:
        TRL: ``loss_type="luspo"``, ``importance_sampling_level="sequence"``
        Liger: ``LigerFusedLinearGRPOLoss(loss_type="luspo", importance_sampling_level="sequence")``

    Notes:
        - Liger multiplies by the length and averages over padded columns.
    """
    objective = Objective(SequenceRatio(), _clip(epsilon_low, epsilon_high))
    return Algorithm(objective, GroupStandardized(), SequenceSum())


def cispo(epsilon_max: float = 5.0) -> Algorithm:
    """CISPO: a detached, truncated weight on the log-likelihood; epsilon_max is a ceiling, not a distance from 1.

    Source: MiniMax-M1, arXiv:2506.13585; ceiling from ScaleRL, arXiv:2510.13786.

    Elsewhere:
        TRL: ``loss_type="cispo"``, ``epsilon_high=5.0``
        verl: ``loss_mode: cispo``
        Liger: ``LigerFusedLinearGRPOLoss(loss_type="cispo", epsilon_high=5.0)``

    Notes:
        - TRL's and Liger's ``epsilon_high`` is the ceiling itself, verl's ``clip_ratio_high`` a distance from 1. TRL's
          default of 0.2 as a ceiling scales every gradient by at most 0.2.
        - verl also bounds the weight from below, by ``1 - clip_ratio_low``: here ``ratio_min``.

    Example:
        >>> cispo().objective.surrogate.ratio_max
        5.0
    """
    return Algorithm(Objective(surrogate=Cispo(epsilon_max)), GroupStandardized(), TokenMean())


def sapo(tau_positive: float = 1.0, tau_negative: float = 1.05) -> Algorithm:
    """SAPO: a sigmoid gate in place of the clip.

    Source: arXiv:2511.20347.

    Elsewhere:
        TRL: ``loss_type="sapo"``
        verl: ``loss_mode: sapo``, ``tau_pos``, ``tau_neg``
        Liger: ``LigerFusedLinearGRPOLoss(loss_type="sapo")``

    Notes:
        - Liger has it for ratios of tokens only.
    """
    return Algorithm(Objective(surrogate=Sapo(tau_positive, tau_negative)), GroupStandardized(), SequenceMean())


def vespo(
    k_positive: float = 2.0, lambda_positive: float = 3.0, k_negative: float = 3.0, lambda_negative: float = 2.0
) -> Algorithm:
    """VESPO: a soft weight of the whole sequence's ratio.

    Source: arXiv:2602.10693, in TRL's form.

    Elsewhere:
        TRL: ``loss_type="vespo"``
        Liger: ``LigerFusedLinearGRPOLoss(loss_type="vespo")``

    Notes:
        - The sampler correction, bounded and per token, is part of w and not multiplied in again.
    """
    surrogate = Vespo(k_positive, lambda_positive, k_negative, lambda_negative)
    return Algorithm(Objective(surrogate=surrogate), GroupStandardized(), TokenMean())


def gmpo(epsilon: float = 0.4) -> Algorithm:
    """GMPO: the geometric mean of clipped token ratios; epsilon bounds the log ratio.

    Source: arXiv:2507.20673.

    Elsewhere:
        TRL: ``experimental.gmpo.GMPOTrainer``
        verl: ``loss_mode: geo_mean``

    Notes:
        - Bounds are of the log ratio, as TRL's ``epsilon`` and verl's ``clip_ratio`` are here: 0.67 to 1.49. verl's
          default of 0.2 is not the paper's.
        - verl averages over the sequences of a micro-batch, whatever ``loss_agg_mode`` says.

    Example:
        >>> gmpo().objective.surrogate.log_ratio_min
        -0.4
    """
    return Algorithm(Objective(surrogate=Gmpo(-epsilon, epsilon)), GroupStandardized(), SequenceMean())


def dppo(divergence: Literal["tv", "kl"] = "tv", delta: float | None = None) -> Algorithm:
    """DPPO: a trust region in probability; delta is 0.15 for ``tv`` and 0.05 for ``kl``.

    Source: arXiv:2602.04879.

    Elsewhere:
        verl: ``loss_mode: dppo_tv`` or ``dppo_kl``

    Notes:
        - verl's ``clip_ratio`` is the threshold of the divergence, ``clip_ratio_c`` the cap of the ratio.

    Example:
        >>> dppo("kl").objective.surrogate.max_high
        0.05
    """
    return Algorithm(Objective(surrogate=Dppo(divergence, delta, delta)), GroupStandardized(), TokenMean())


def ipo(threshold: float = 0.1, kl_tau: float = 1e-3, sides: Literal["both", "advantage"] = "both") -> Algorithm:
    """IPO: tokens whose probability moved too far either way are masked, and all pay for their squared log ratio.

    Source: prime-rl, with the penalty of Kimi K2.5, arXiv:2602.02276.

    Elsewhere:
        prime-rl: ``loss.type: ipo``

    Notes:
        - prime-rl's ``default`` loss is ``sides: advantage``, ``threshold: 0.2``: DPPO's mask.
        - Its ratios are to the sampler.

    Example:
        >>> ipo().objective.surrogate.max_change
        0.1
    """
    return Algorithm(Objective(surrogate=Ipo(threshold, kl_tau, sides)), GroupCentered(), TokenMean())


def kpop(threshold: float = 0.1, kl_tau: float = 1e-3) -> Algorithm:
    """KPop: IPO whose region is bounded by the divergence of the token against all others, wider for rare tokens.

    Source: prime-rl's branch feat/kpop-loss, after ringtech.notion.site/kpop.

    Elsewhere:
        prime-rl: ``loss.type: kpop``

    Example:
        >>> kpop().objective.surrogate.max_divergence
        0.1
    """
    return Algorithm(Objective(surrogate=KPop(threshold, kl_tau)), GroupCentered(), TokenMean())


def clip_cov(r: float = 2e-4, omega_low: float = 1.0, omega_high: float = 5.0) -> Algorithm:
    """Clip-Cov: a random few of the tokens with a large covariance are not trained on.

    Source: arXiv:2505.22617.

    Elsewhere:
        verl: ``loss_mode: clip_cov``

    Notes:
        - verl takes means and choice from each micro-batch (``scope: micro_batch``), by default here once a block.
    """
    return Algorithm(Objective(surrogate=ClipCov(r, omega_low, omega_high)), GroupStandardized(), TokenMean())


def kl_cov(k: float = 2e-4, beta: float = 1.0) -> Algorithm:
    """KL-Cov: the tokens with the largest covariance are held back.

    Source: arXiv:2505.22617.

    Elsewhere:
        verl: ``loss_mode: kl_cov``

    Notes:
        - The penalty has no gradient on the first step after scoring.
    """
    return Algorithm(Objective(surrogate=KlCov(k, beta)), GroupStandardized(), TokenMean())


def dro(beta: float = 0.1) -> Algorithm:
    """DRO: a squared log ratio in place of the clip.

    Source: arXiv:2405.19107, in verl's form.

    Elsewhere:
        verl: ``loss_mode: dro``

    Notes:
        - The paper fits a value function; this form takes any advantage.
    """
    return Algorithm(Objective(surrogate=Dro(beta)), GroupStandardized(), TokenMean())


def ppo(epsilon: float = 0.2, gamma: float = 1.0, lambda_: float = 0.95, value_coefficient: float = 0.5) -> Algorithm:
    """PPO: generalised advantages from a value head that is trained beside the policy.

    Source: arXiv:1707.06347, eq. 7; GAE arXiv:1506.02438.

    Elsewhere:
        verl: ``adv_estimator: gae``, ``loss_mode: vanilla``

    Notes:
        - V is one linear layer, from 0, on the policy's last hidden states. verl trains a second model as the critic.
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

    Elsewhere:
        verl: ``loss_mode: gpg``

    Notes:
        - No ratio: meant for one optimizer step on each block.
    """
    return Algorithm(Objective(surrogate=Reinforce()), Raw(), TokenMean())


def remax() -> Algorithm:
    """ReMax: REINFORCE on whole sequences against the reward of a greedy completion.

    Source: arXiv:2310.10505.

    Elsewhere:
        verl: ``adv_estimator: remax`` (the advantage only)
    """
    return Algorithm(Objective(surrogate=Reinforce()), Remax(), SequenceSum())


def rloo() -> Algorithm:
    """RLOO: REINFORCE on whole sequences against the mean of the others.

    Source: arXiv:2402.14740.

    Elsewhere:
        TRL: ``RLOOTrainer`` (another loss)
        verl: ``adv_estimator: rloo`` (the advantage only)

    Notes:
        - TRL's trainer clips one ratio a sequence, the product over its tokens (no mean); here there is no ratio.
    """
    return Algorithm(Objective(surrogate=Reinforce()), LeaveOneOut(), SequenceSum())


def opo() -> Algorithm:
    """OPO: REINFORCE against the length-weighted mean of the group.

    Source: arXiv:2505.23585.

    Elsewhere:
        verl: ``adv_estimator: opo`` (the advantage only)

    Notes:
        - Meant for one optimizer step on each block, without a KL or an entropy bonus.
    """
    return Algorithm(Objective(surrogate=Reinforce()), LengthWeighted(), TokenMean())


def gpg() -> Algorithm:
    """GPG: REINFORCE against the mean of the group, scaled up where groups have no signal.

    Source: arXiv:2504.02546.

    Elsewhere:
        verl: ``adv_estimator: gpg``, ``loss_mode: gpg``

    Notes:
        - verl counts completions with a reward of 0 in place of groups without a signal.
        - The authors' code averages each sequence: ``sequence_mean``.
        - With ``zero_signal: drop`` alpha is 1, and no denominator counts the dropped groups.
    """
    return Algorithm(Objective(surrogate=Reinforce()), Gpg(), TokenMean())


def pass_at_k(k: int = 4, epsilon: float = 0.2) -> Algorithm:
    """Pass@k training: a completion is worth what it adds to sets of k, one of which must pass.

    Source: arXiv:2508.10751, its analytical advantage.
    """
    return Algorithm(Objective(surrogate=_clip(epsilon, epsilon)), PassAtK(k), TokenMean())


def otb(epsilon: float = 0.2) -> Algorithm:
    """OTB: each token against the optimal baseline at its place.

    Source: https://richardli.xyz/optimal-token-baseline, in verl's form.

    Elsewhere:
        verl: ``adv_estimator: tir_optimal_token_baseline``
    """
    return Algorithm(Objective(surrogate=_clip(epsilon, epsilon)), OptimalToken(), TokenMean())


def rae(decay: float = 0.95, epsilon: float = 0.2) -> Algorithm:
    """RAE: each role against a moving average of its own rewards, as in games of a policy with itself.

    Source: SPIRAL, arXiv:2506.24119, as in its code and prime-rl's.

    Elsewhere:
        prime-rl: ``algo.type: rae``

    Notes:
        - Column ``role`` of the data names a completion's role.
    """
    return Algorithm(Objective(surrogate=_clip(epsilon, epsilon)), Rae(decay=decay), TokenMean())


def hierarchical_grpo(epsilon: float = 0.2) -> Algorithm:
    """Hierarchical GRPO: solvers are compared within a proposed problem, proposers within a task.

    Source: prime-rl's ``hierarchical_grpo``, with GRPO's loss.

    Elsewhere:
        prime-rl: ``algo.type: hierarchical_grpo``
    """
    return Algorithm(Objective(surrogate=_clip(epsilon, epsilon)), Hierarchical(), TokenMean())


def echo(alpha: float = 0.1, epsilon: float = 0.2) -> Algorithm:
    """ECHO: GRPO, and the likelihood of what tools and the environment say.

    Source: arXiv:2605.24517, with prime-rl's weight; the paper's is 0.05.

    Elsewhere:
        prime-rl: ``algo.type: echo``

    Notes:
        - Adds ``alpha`` times the mean of ``-logp`` over the step's tokens that tools and environments wrote, the chat
          template's among them; prime-rl leaves those out.
    """
    return replace(grpo(epsilon), observations=Observations(alpha))


def a2po(beta1: float = 0.5, beta2: float = 1e-3) -> Algorithm:
    """A2PO (A*-PO): the log ratio to the reference is fitted to the reward minus the optimal value.

    Source: arXiv:2505.20686, in TRL's form.

    Elsewhere:
        TRL: ``experimental.a2po.A2POTrainer``

    Notes:
        - Sample the reference before the run, and put the rewards into column ``reference_rewards``; leave out rows
          where all are 0.
    """
    return Algorithm(Objective(surrogate=A2po(beta2)), OptimalValue(beta=beta1), SequenceMean())


def reinforce_pp(epsilon: float = 0.2, gamma: float = 1.0) -> Algorithm:
    """REINFORCE++: clipped, with token returns whitened over the batch.

    Source: arXiv:2501.03262.

    Elsewhere:
        verl: ``adv_estimator: reinforce_plus_plus``

    Notes:
        - With several completions a prompt use the advantage ``reinforce_pp_baseline`` (verl:
          ``reinforce_plus_plus_baseline``; OpenRLHF: ``reinforce_baseline``).
    """
    return Algorithm(Objective(surrogate=_clip(epsilon, epsilon)), ReinforcePP(gamma), TokenMean())


def stable_reinforce(epsilon: float = 0.2, gamma: float = 1.0, max_deviations: float = 3.0) -> Algorithm:
    """StableReinforce: REINFORCE++ with a ceiling on the ratio, and without its largest advantages.

    Source: arXiv:2505.02835, and its authors' code.

    Notes:
        - The authors' code holds ratios above 0.001 too, and lays both bounds around the mean before whitening.

    Example:
        >>> stable_reinforce().objective.filters
        (AdvantageOutliers(max=3.0, name='advantage_outliers'),)
    """
    surrogate = replace(_clip(epsilon, epsilon), ratio_cap=1000.0)
    objective = Objective(surrogate=surrogate, filters=(AdvantageOutliers(max_deviations),))
    return Algorithm(objective, ReinforcePP(gamma), SequenceMean())


def nll() -> Algorithm:
    """Supervised: the negative log-likelihood, token mean.

    Source: supervised warm start, and VAPO's term for right answers (arXiv:2504.05118).

    Elsewhere:
        TRL: ``SFTTrainer``, ``loss_type="nll"``
        Fast-LLM: the loss ``label``
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
    "ipo": ipo,
    "kpop": kpop,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dro": dro,
    "ppo": ppo,
    "reinforce": reinforce,
    "remax": remax,
    "rloo": rloo,
    "opo": opo,
    "gpg": gpg,
    "pass_at_k": pass_at_k,
    "otb": otb,
    "rae": rae,
    "hierarchical_grpo": hierarchical_grpo,
    "a2po": a2po,
    "echo": echo,
    "reinforce_pp": reinforce_pp,
    "stable_reinforce": stable_reinforce,
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
    preset = PRESETS[known(name, PRESETS, "preset")]
    chosen = dict(parameters or {})
    for parameter in chosen:
        known(parameter, inspect.signature(preset).parameters, f"parameter of {name!r}")
    return preset(**chosen)


def _clip(epsilon_low: float, epsilon_high: float) -> Clip:
    return Clip(1 - epsilon_low, 1 + epsilon_high)

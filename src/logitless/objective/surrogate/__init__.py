"""Policy-gradient losses, one pure function per equation, and the configuration of each; a file a family.

Every function takes vectors of length N and returns the loss per token, to be minimized. ``objective`` adds weights,
filters, sampler correction and KL. r is ``exp(log_ratio)``. Bounds are absolute, not distances from 1.
"""

from logitless.objective.surrogate.a2po import A2po, a2po_loss
from logitless.objective.surrogate.cispo import Cispo, cispo_loss
from logitless.objective.surrogate.clip import Clip, clip_loss, clip_sides
from logitless.objective.surrogate.covariance_selected import ClipCov, KlCov, kl_cov_loss
from logitless.objective.surrogate.dppo import Dppo, bernoulli_kl, dppo_loss, dppo_mask
from logitless.objective.surrogate.gmpo import Gmpo, gmpo_loss
from logitless.objective.surrogate.ipo import Ipo, KPop, ipo_loss, ipo_mask, kpop_mask
from logitless.objective.surrogate.policy_loss import PolicyLoss, SelectionInputs, SurrogateInputs, SurrogateTerms
from logitless.objective.surrogate.sapo import Sapo, sapo_loss
from logitless.objective.surrogate.unclipped import (
    Dro,
    Importance,
    Nll,
    Reinforce,
    dro_loss,
    importance_loss,
    nll_loss,
    reinforce_loss,
)
from logitless.objective.surrogate.vespo import Vespo, vespo_weight

Surrogate = (
    # held back where the policy has moved far
    Clip
    | Cispo
    | Sapo
    | Vespo
    | Gmpo
    | Dppo
    | Ipo
    | KPop
    | ClipCov
    | KlCov
    | Dro
    # unbounded
    | A2po
    | Reinforce
    | Importance
    | Nll
)

__all__ = [
    "A2po",
    "Cispo",
    "Clip",
    "ClipCov",
    "Dppo",
    "Dro",
    "Gmpo",
    "Importance",
    "Ipo",
    "KPop",
    "KlCov",
    "Nll",
    "PolicyLoss",
    "Reinforce",
    "Sapo",
    "SelectionInputs",
    "Surrogate",
    "SurrogateInputs",
    "SurrogateTerms",
    "Vespo",
    "a2po_loss",
    "bernoulli_kl",
    "cispo_loss",
    "clip_loss",
    "clip_sides",
    "dppo_loss",
    "dppo_mask",
    "dro_loss",
    "gmpo_loss",
    "importance_loss",
    "ipo_loss",
    "ipo_mask",
    "kl_cov_loss",
    "kpop_mask",
    "nll_loss",
    "reinforce_loss",
    "sapo_loss",
    "vespo_weight",
]

"""Policy-gradient losses, a file a family: one pure function per equation, and its configuration, exported here.

Every function takes vectors of length N and returns the loss per token, to be minimized. ``objective`` adds weights,
filters, sampler correction and KL. r is ``exp(log_ratio)``. Bounds are absolute, not distances from 1.
"""

from logitless.objective.surrogate.a2po import A2po
from logitless.objective.surrogate.cispo import Cispo
from logitless.objective.surrogate.clip import Clip
from logitless.objective.surrogate.covariance_selected import ClipCov, KlCov
from logitless.objective.surrogate.dppo import Dppo
from logitless.objective.surrogate.gmpo import Gmpo
from logitless.objective.surrogate.ipo import Ipo, KPop
from logitless.objective.surrogate.policy_loss import PolicyLoss, SelectionInputs, SurrogateInputs, SurrogateTerms
from logitless.objective.surrogate.sapo import Sapo
from logitless.objective.surrogate.unclipped import Dro, Importance, Nll, Reinforce
from logitless.objective.surrogate.vespo import Vespo

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
]

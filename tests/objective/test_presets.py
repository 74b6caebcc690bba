"""Presets against the table of the papers."""

import pytest

from logitless.errors import ConfigurationError
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
from logitless.objective.presets import PRESETS, algorithm
from logitless.objective.ratio import SequenceRatio, SequenceTokenRatio, TokenRatio
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
from logitless.objective.value import ValueLoss
from logitless.objective.weighting import ConstantLength, MicroBatchTokenMean, SequenceMean, SequenceSum, TokenMean

STANDARDIZED = GroupStandardized()
TABLE = {
    "grpo": (TokenRatio(), Clip(0.8, 1.2), STANDARDIZED, SequenceMean()),
    "dr_grpo": (TokenRatio(), Clip(0.8, 1.2), GroupCentered(), ConstantLength()),
    "dapo": (TokenRatio(), Clip(0.8, 1.28), STANDARDIZED, TokenMean()),
    "bnpo": (TokenRatio(), Clip(0.8, 1.2), STANDARDIZED, MicroBatchTokenMean()),
    "gspo": (SequenceRatio(), Clip(1 - 3e-4, 1 + 4e-4), STANDARDIZED, SequenceMean()),
    "gspo_token": (SequenceTokenRatio(), Clip(1 - 3e-4, 1 + 4e-4), STANDARDIZED, SequenceMean()),
    "luspo": (SequenceRatio(), Clip(1 - 2e-3, 1 + 2.5e-3), STANDARDIZED, SequenceSum()),
    "cispo": (TokenRatio(), Cispo(5.0), STANDARDIZED, TokenMean()),
    "sapo": (TokenRatio(), Sapo(1.0, 1.05), STANDARDIZED, SequenceMean()),
    "vespo": (TokenRatio(), Vespo(2.0, 3.0, 3.0, 2.0), STANDARDIZED, TokenMean()),
    "gmpo": (TokenRatio(), Gmpo(-0.4, 0.4), STANDARDIZED, SequenceMean()),
    "dppo": (TokenRatio(), Dppo("tv", 0.15, 0.15, 20.0), STANDARDIZED, TokenMean()),
    "ipo": (TokenRatio(), Ipo(0.1, 1e-3, "both"), GroupCentered(), TokenMean()),
    "kpop": (TokenRatio(), KPop(0.1, 1e-3), GroupCentered(), TokenMean()),
    "clip_cov": (TokenRatio(), ClipCov(2e-4, 1.0, 5.0), STANDARDIZED, TokenMean()),
    "kl_cov": (TokenRatio(), KlCov(2e-4, 1.0), STANDARDIZED, TokenMean()),
    "dro": (TokenRatio(), Dro(0.1), STANDARDIZED, TokenMean()),
    "ppo": (TokenRatio(), Clip(0.8, 1.2), Gae(1.0, 0.95), TokenMean()),
    "reinforce": (TokenRatio(), Reinforce(), Raw(), TokenMean()),
    "remax": (TokenRatio(), Reinforce(), Remax(), SequenceSum()),
    "rloo": (TokenRatio(), Reinforce(), LeaveOneOut(), SequenceSum()),
    "opo": (TokenRatio(), Reinforce(), LengthWeighted(), TokenMean()),
    "gpg": (TokenRatio(), Reinforce(), Gpg(), TokenMean()),
    "otb": (TokenRatio(), Clip(0.8, 1.2), OptimalToken(), TokenMean()),
    "pass_at_k": (TokenRatio(), Clip(0.8, 1.2), PassAtK(4), TokenMean()),
    "rae": (TokenRatio(), Clip(0.8, 1.2), Rae(("role",), 0.95), TokenMean()),
    "hierarchical_grpo": (TokenRatio(), Clip(0.8, 1.2), Hierarchical(), TokenMean()),
    "echo": (TokenRatio(), Clip(0.8, 1.2), STANDARDIZED, SequenceMean()),
    "a2po": (TokenRatio(), A2po(1e-3), OptimalValue(beta=0.5), SequenceMean()),
    "reinforce_pp": (TokenRatio(), Clip(0.8, 1.2), ReinforcePP(), TokenMean()),
    "nll": (TokenRatio(), Nll(), None, TokenMean()),
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_what_the_table_says(name):
    preset = PRESETS[name]()
    objective = preset.objective
    assert (objective.ratio, objective.surrogate, preset.advantage, preset.weighting) == TABLE[name]
    assert (objective.filters, objective.correction, objective.kl, objective.entropy_bonus) == ((), None, None, None)
    assert preset.value_loss == (ValueLoss(0.5) if name == "ppo" else None)
    assert (preset.kl_control, preset.drop_truncated, preset.notes) == (None, False, ())


@pytest.mark.parametrize(
    ("name", "parameters", "surrogate"),
    [
        ("grpo", {"epsilon": 0.1}, Clip(0.9, 1.1)),
        ("dapo", {"epsilon_low": 0.1, "epsilon_high": 0.3}, Clip(0.9, 1.3)),
        ("cispo", {"epsilon_max": 4.0}, Cispo(4.0)),
        ("gmpo", {"epsilon": 0.2}, Gmpo(-0.2, 0.2)),
        ("dppo", {"divergence": "kl"}, Dppo("kl", 0.05, 0.05)),
        ("dppo", {"delta": 0.1}, Dppo("tv", 0.1, 0.1)),
        ("ipo", {"threshold": 0.2, "kl_tau": 0.0, "sides": "advantage"}, Ipo(0.2, 0.0, "advantage")),
        ("kpop", {"threshold": 2.0, "kl_tau": 0.0}, KPop(2.0, 0.0)),
        ("clip_cov", {"r": 1e-3, "omega_low": 2.0, "omega_high": 3.0}, ClipCov(1e-3, 2.0, 3.0)),
        ("kl_cov", {"k": 1e-3, "beta": 2.0}, KlCov(1e-3, 2.0)),
        ("sapo", {"tau_negative": 2.0}, Sapo(1.0, 2.0)),
    ],
)
def test_parameters_are_the_papers(name, parameters, surrogate):
    assert algorithm(name, parameters).objective.surrogate == surrogate


def test_an_unknown_preset_or_parameter_names_the_nearest():
    with pytest.raises(ConfigurationError, match="mean 'dr_grpo'"):
        algorithm("drgrpo")
    with pytest.raises(ConfigurationError, match="mean 'epsilon'"):
        algorithm("grpo", {"epsilonn": 0.2})
    with pytest.raises(ConfigurationError, match="Choose from none"):
        algorithm("nll", {"epsilon": 0.2})

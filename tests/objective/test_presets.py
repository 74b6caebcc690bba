"""Presets against the table of the papers."""

import pytest
import torch

from logitless.errors import ConfigurationError
from logitless.objective.advantage import (
    AdvantageInputs,
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
from logitless.objective.filters import AdvantageOutliers
from logitless.objective.observations import Observations
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
from logitless.objective.weighting import (
    ConstantLength,
    MicroBatchTokenMean,
    SequenceMean,
    SequenceSum,
    TokenMean,
    Totals,
)
from logitless.types import TokenBatch
from tests.objective.batches import double

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
    "stable_reinforce": (TokenRatio(), Clip(0.8, 1.2, ratio_cap=1000.0), ReinforcePP(), SequenceMean()),
    "nll": (TokenRatio(), Nll(), None, TokenMean()),
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_what_the_table_says(name):
    preset = PRESETS[name]()
    objective = preset.objective
    assert (objective.ratio, objective.surrogate, preset.advantage, preset.weighting) == TABLE[name]
    assert objective.filters == ((AdvantageOutliers(3.0),) if name == "stable_reinforce" else ())
    assert (objective.correction, objective.kl, objective.entropy_bonus) == (None, None, None)
    assert preset.value_loss == (ValueLoss(0.5) if name == "ppo" else None)
    assert preset.observations == (Observations(0.1) if name == "echo" else None)
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


def test_stable_reinforce_is_its_authors_in_their_own_numbers():
    # yfzhang114/r1_reward 176aba8: NaiveReplayBuffer.normalize of these returns, which sum to 0, then PolicyLoss(0.2).
    lengths, rewards = (1, 2, *[1] * 10), double(11, *[-1] * 10, 0)
    of_theirs = double(0, *[-0.3138229472304239] * 11, 1e-8)
    log_ratio = double(0.1, 0.3, -0.4, 0, 0.5, -0.2, 7.5, 0.1, -0.1, 0.2, -0.3, 0.05, 0.7)
    loss, gradient = 26.40362608753101, [0, 0.017650694555768624, 0, 0.026151912269201993, 0.04311721402771698]
    gradient += [0.02141137482659306, 0, 0.028902332891987764, 0.02366322877436766, 0.0319420177767661, 0]
    gradient += [0.027492749483573577, 0]

    preset, sequence = algorithm("stable_reinforce"), torch.arange(12).repeat_interleave(torch.tensor(lengths))
    advantage = preset.advantage(AdvantageInputs(rewards, torch.zeros(12, dtype=torch.long), sequence)).advantage
    assert (advantage.abs() > 3).tolist() == [True] + [False] * 12
    # their deviation is over 13 tokens, in float32 and of 1e-8 less; ours over 12, and 1e-4 more
    theirs = of_theirs[1:] * (132 / 13) ** 0.5 / (11**0.5 + 1e-4)
    torch.testing.assert_close(advantage[1:], theirs, rtol=1e-6, atol=2e-8)

    logp = (log_ratio - 2).requires_grad_()
    weight = preset.weighting(lengths, Totals.of(lengths), None, torch.float64)
    taken = torch.cat([advantage[:1], of_theirs[1:]])
    batch = TokenBatch(sequence, 12, taken, weight, logp_old=torch.full_like(taken, -2))
    found = preset.objective(logp, None, batch).loss
    assert found.item() == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(torch.autograd.grad(found, logp)[0], double(*gradient), rtol=1e-12, atol=1e-15)

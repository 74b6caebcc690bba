"""Objectives drawn from the whole family, for laws that hold for every one of them."""

from typing import get_args

from hypothesis import reject
from hypothesis import strategies as st

from logitless.errors import ConfigurationError
from logitless.objective import surrogate as sur
from logitless.objective.correction import SamplerCorrection
from logitless.objective.divergence import KLPenalty
from logitless.objective.entropy import AdaptiveEntropy, EntropyBonus
from logitless.objective.filters import (
    AdvantageOutliers,
    OffPolicy,
    SamplerRejection,
    SecondMoment,
    Stale,
    TopEntropy,
)
from logitless.objective.objective import Objective
from logitless.objective.ratio import SequenceRatio, SequenceTokenRatio, TokenRatio, TurnRatio

RATIOS = [
    TokenRatio(),
    SequenceRatio(),
    SequenceRatio("mean"),
    SequenceRatio("multiply"),
    SequenceTokenRatio(),
    TurnRatio(max_turns=512),
]
SURROGATES = [
    sur.Clip(),
    sur.Clip(0.8, 1.28, ratio_cap=3.0),
    sur.Clip(0.8, 1.2, dual=3.0),
    sur.Cispo(2.0, ratio_min=0.5),
    sur.Sapo(),
    sur.Vespo(),
    sur.Gmpo(),
    sur.Dppo(),
    sur.Dppo("kl"),
    sur.Ipo(),
    sur.Ipo(0.05, sides="advantage"),
    sur.ClipCov(),
    sur.KlCov(),
    sur.Dro(0.1),
    sur.Reinforce(),
    sur.Importance(),
    sur.Nll(),
]
SURROGATES += [kind() for kind in get_args(sur.Surrogate) if kind not in map(type, SURROGATES)]  # those to come
FILTERS = [
    (),
    (OffPolicy(0.1),),
    (TopEntropy(0.5),),
    (OffPolicy(0.1), TopEntropy(0.5)),
    (SamplerRejection(0.5, min=-0.5),),
    (SamplerRejection(0.05, "k3", "sequence_mean"), SecondMoment(0.2)),
    (SamplerRejection(0.3, "tv", "sequence_max"),),
    (SamplerRejection(0.7, min=-0.7), SamplerRejection(0.2, "k2", "sequence_max"), Stale(2)),
    (Stale(1), AdvantageOutliers(1.0)),
    (Stale(2, "sequence"), OffPolicy(0.1)),
]
CORRECTIONS = [
    None,
    SamplerCorrection(max=1.2),
    SamplerCorrection("token", "mask", min=0.5, max=2.0),
    SamplerCorrection("sequence", max=2.0),
    SamplerCorrection("geometric", "mask", min=0.5, max=2.0),
    SamplerCorrection(max=1.2, normalized=True),
    SamplerCorrection("sequence", max=2.0, normalized=True),
]
PENALTIES = [
    None,
    KLPenalty("k1", "token"),
    KLPenalty("k2"),
    KLPenalty("k2", "surrogate"),
    KLPenalty("k3"),
    KLPenalty("k3", "surrogate"),
    KLPenalty("k3", "token", clamp=0.5),
]
BONUSES = [None, EntropyBonus(0.1), EntropyBonus(0.1, AdaptiveEntropy())]


def parts() -> st.SearchStrategy[tuple]:
    """The parts of any objective whose result may not depend on how a step is cut, for ``composed``."""
    of_the_ratio = [each for each in SURROGATES if each.reads == "any"]
    first = st.one_of(
        st.tuples(st.sampled_from(RATIOS), st.sampled_from(of_the_ratio)),
        st.tuples(st.just(TokenRatio()), st.sampled_from(SURROGATES)),
    )
    others = st.tuples(*(st.sampled_from(choices) for choices in (FILTERS, CORRECTIONS, PENALTIES, BONUSES)))
    return st.tuples(first, others).map(lambda both: both[0] + both[1])


def composed(chosen: tuple) -> Objective:
    """The objective of these parts; ends a test's example where they exclude each other.

    Not part of the strategy: type checks draw random numbers, which hypothesis forbids there.
    """
    try:
        return Objective(*chosen)
    except ConfigurationError:
        reject()


def options_of(objective: Objective) -> dict[str, float]:
    """The coefficients that its call asks for."""
    options = {} if objective.kl is None else {"beta": 0.3}
    if objective.entropy_bonus is not None and objective.entropy_bonus.adaptive is not None:
        options["entropy_coefficient"] = 0.2
    return options

"""An algorithm's parts state what they are, and are refused where they do not go together."""

from typing import get_args

import pytest

from logitless.errors import ConfigurationError
from logitless.objective import advantage as adv
from logitless.objective.algorithm import Algorithm
from logitless.objective.divergence import KLPenalty
from logitless.objective.kl_control import FixedKL
from logitless.objective.objective import Objective
from logitless.objective.presets import PRESETS
from logitless.objective.ratio import SequenceRatio, SequenceTokenRatio, TokenRatio, TurnRatio
from logitless.objective.surrogate import Clip, Gmpo, Nll, Reinforce
from logitless.objective.value import ValueLoss
from logitless.objective.weighting import TokenMean


def algorithm(advantage, ratio=None, surrogate=None, **more):
    parts = {"ratio": ratio or TokenRatio(), "surrogate": surrogate or Clip()}
    if "kl" in more:
        parts["kl"] = more.pop("kl")
    if advantage is not None and advantage.needs_values:
        more = {"value_loss": ValueLoss(), **more}
    return Algorithm(Objective(**parts), advantage, TokenMean(), **more)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"advantage": None}, r"an advantage for 'clip' to read"),
        ({"advantage": adv.Gae(), "value_loss": None}, r"a value loss beside gae.*preset: ppo"),
        ({"advantage": adv.Raw(), "value_loss": ValueLoss()}, r"reads values beside a value loss; given raw"),
        ({"advantage": None, "surrogate": Nll(), "value_loss": ValueLoss()}, r"reads values.*given none"),
        ({"advantage": adv.Raw(), "kl": KLPenalty("k3"), "kl_in_reward": True}, r"the KL in one place"),
        ({"advantage": adv.Raw(), "kl_control": FixedKL(0.1)}, r"a KL for kl_control to steer"),
        ({"advantage": adv.Gdpo(), "kl_in_reward": True}, r"given gdpo.*kl\.placement: loss"),
        ({"advantage": None, "surrogate": Nll(), "kl_in_reward": True}, r"given none.*kl\.placement: loss"),
    ],
)
def test_parts_that_need_something_of_each_other_say_so(parts, message):
    with pytest.raises(ConfigurationError, match=message):
        algorithm(**parts)


SEQUENCE_GRAINED, TURN_GRAINED, TOKEN_GRAINED = adv.GroupCentered(), adv.Gae(action="turn"), adv.Gae()


@pytest.mark.parametrize(
    ("ratio", "surrogate", "allowed"),
    [
        (TokenRatio(), Clip(), (SEQUENCE_GRAINED, TURN_GRAINED, TOKEN_GRAINED)),
        (SequenceTokenRatio(), Clip(), (SEQUENCE_GRAINED, TURN_GRAINED, TOKEN_GRAINED)),
        (TurnRatio(), Clip(), (SEQUENCE_GRAINED, TURN_GRAINED)),
        (SequenceRatio(), Clip(), (SEQUENCE_GRAINED,)),
        (SequenceRatio("mean"), Clip(), (SEQUENCE_GRAINED, TURN_GRAINED, TOKEN_GRAINED)),
        (TokenRatio(), Gmpo(), (SEQUENCE_GRAINED,)),
        (TokenRatio(), Reinforce(), (SEQUENCE_GRAINED, TURN_GRAINED, TOKEN_GRAINED)),
    ],
)
def test_an_advantage_must_not_be_finer_than_what_shares_it(ratio, surrogate, allowed):
    for advantage in (SEQUENCE_GRAINED, TURN_GRAINED, TOKEN_GRAINED):
        if advantage in allowed:
            assert algorithm(advantage, ratio, surrogate).advantage is advantage
        else:
            with pytest.raises(ConfigurationError, match=f"given {advantage.name}, an advantage a t"):
                algorithm(advantage, ratio, surrogate)


def test_a_ratio_that_only_the_kl_reads_shares_no_advantage():
    kl = KLPenalty("k3", ratio_corrected="surrogate")
    assert algorithm(adv.Gae(), SequenceRatio(), Reinforce(), kl=kl).objective.ratio == SequenceRatio()


def test_token_returns_differ_inside_a_sequence_once_they_are_discounted_or_pay_a_kl():
    assert adv.ReinforcePP().level(kl_in_reward=False) == "sequence"
    assert adv.ReinforcePP().level(kl_in_reward=True) == "token"
    assert adv.ReinforcePP(gamma=0.9).level(kl_in_reward=False) == "token"
    assert algorithm(adv.ReinforcePP(), SequenceRatio()).advantage == adv.ReinforcePP()
    with pytest.raises(ConfigurationError, match="reinforce_pp, an advantage a token"):
        algorithm(adv.ReinforcePP(), SequenceRatio(), kl_in_reward=True)


def test_a_group_of_one_is_refused_where_completions_are_compared():
    alone = (adv.Raw, adv.ReinforcePP, adv.Gae)
    for kind in get_args(adv.Advantage):
        found = algorithm(kind(50.0) if kind is adv.Percentile else kind())
        found.check_completions(2)
        if kind in alone:
            found.check_completions(1)
        else:
            with pytest.raises(ConfigurationError, match=r"two completions.*completions_per_prompt=1"):
                found.check_completions(1)
    algorithm(None, surrogate=Nll()).check_completions(1)


def test_a_kl_is_steered_wherever_it_is():
    in_loss = algorithm(adv.Raw(), kl=KLPenalty("k3"), kl_control=FixedKL(0.1))
    in_reward = algorithm(adv.Raw(), kl_in_reward=True, kl_control=FixedKL(0.1))
    assert (in_loss.kl_in_loss, in_reward.kl_in_loss) == (True, False)
    assert not any(preset().kl_in_loss or preset().kl_in_reward for preset in PRESETS.values())

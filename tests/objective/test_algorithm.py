"""An algorithm's parts state what they are, and are refused where they do not go together."""

from dataclasses import replace
from typing import get_args

import pytest
import torch

from logitless.errors import ConfigurationError
from logitless.objective import advantage as adv
from logitless.objective.advantage import GroupCentered
from logitless.objective.algorithm import Algorithm, is_silent_without_advantage
from logitless.objective.correction import SamplerCorrection
from logitless.objective.divergence import KLPenalty
from logitless.objective.entropy import EntropyBonus
from logitless.objective.filters import OffPolicy, TopEntropy
from logitless.objective.kl_control import FixedKL
from logitless.objective.objective import Objective
from logitless.objective.presets import PRESETS, algorithm
from logitless.objective.ratio import SequenceRatio, SequenceTokenRatio, TokenRatio, TurnRatio
from logitless.objective.surrogate import Cispo, Clip, ClipCov, Dppo, Dro, Gmpo, Ipo, KlCov, Nll, Reinforce, Sapo, Vespo
from logitless.objective.value import ValueLoss
from logitless.objective.weighting import MicroBatchTokenMean, TokenMean
from tests.objective.batches import double, random_batch


def composed(advantage, ratio=None, surrogate=None, **more):
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
        ({"advantage": adv.Gae(), "value_loss": None}, r"a value loss with gae.*preset: ppo"),
        ({"advantage": adv.Raw(), "value_loss": ValueLoss()}, r"reads values, with a value loss; given raw"),
        ({"advantage": None, "surrogate": Nll(), "value_loss": ValueLoss()}, r"reads values.*given none"),
        ({"advantage": adv.Raw(), "kl": KLPenalty("k3"), "kl_in_reward": True}, r"the KL in one place"),
        ({"advantage": adv.Raw(), "kl_control": FixedKL(0.1)}, r"a KL for kl_control to steer"),
        ({"advantage": adv.Gdpo(), "kl_in_reward": True}, r"given gdpo.*kl\.placement: loss"),
        ({"advantage": None, "surrogate": Nll(), "kl_in_reward": True}, r"given none.*kl\.placement: loss"),
    ],
)
def test_parts_that_need_something_of_each_other_say_so(parts, message):
    with pytest.raises(ConfigurationError, match=message):
        composed(**parts)


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
            assert composed(advantage, ratio, surrogate).advantage is advantage
        else:
            with pytest.raises(ConfigurationError, match=f"given {advantage.name}, an advantage a t"):
                composed(advantage, ratio, surrogate)


def test_a_ratio_that_only_the_kl_reads_shares_no_advantage():
    kl = KLPenalty("k3", ratio_corrected="surrogate")
    assert composed(adv.Gae(), SequenceRatio(), Reinforce(), kl=kl).objective.ratio == SequenceRatio()


def test_token_returns_differ_inside_a_sequence_once_they_are_discounted_or_pay_a_kl():
    assert adv.ReinforcePP().level(kl_in_reward=False) == "sequence"
    assert adv.ReinforcePP().level(kl_in_reward=True) == "token"
    assert adv.ReinforcePP(gamma=0.9).level(kl_in_reward=False) == "token"
    assert composed(adv.ReinforcePP(), SequenceRatio()).advantage == adv.ReinforcePP()
    with pytest.raises(ConfigurationError, match="reinforce_pp, an advantage a token"):
        composed(adv.ReinforcePP(), SequenceRatio(), kl_in_reward=True)


def test_a_group_of_one_is_refused_where_completions_are_compared():
    alone = (adv.Raw, adv.Remax, adv.ReinforcePP, adv.Gae, adv.Rae, adv.Hierarchical, adv.OptimalValue)
    for kind in get_args(adv.Advantage):
        found = composed(kind(**{adv.Percentile: {"q": 50.0}, adv.PassAtK: {"k": 1}}.get(kind, {})))
        found.check_completions(2)
        if kind in alone:
            found.check_completions(1)
        else:
            with pytest.raises(ConfigurationError, match=r"two completions.*completions_per_prompt=1"):
                found.check_completions(1)
    composed(None, surrogate=Nll()).check_completions(1)


def test_sets_of_k_need_k_completions_a_prompt():
    composed(adv.PassAtK(4)).check_completions(4)
    with pytest.raises(ConfigurationError, match=r"at least 4 completions a prompt for 'pass_at_k'.*prompt=3"):
        composed(adv.PassAtK(4)).check_completions(3)


@pytest.mark.parametrize("advantage", [adv.PassAtK(2), adv.Gdpo()], ids=lambda each: each.name)
def test_a_kl_is_not_subtracted_from_what_is_no_sum_of_rewards(advantage):
    with pytest.raises(ConfigurationError, match=f"a KL can be subtracted; given {advantage.name}"):
        composed(advantage, kl_in_reward=True)


def test_a_kl_is_steered_wherever_it_is():
    in_loss = composed(adv.Raw(), kl=KLPenalty("k3"), kl_control=FixedKL(0.1))
    in_reward = composed(adv.Raw(), kl_in_reward=True, kl_control=FixedKL(0.1))
    assert (in_loss.kl_in_loss, in_reward.kl_in_loss) == (True, False)
    assert not any(preset().kl_in_loss or preset().kl_in_reward for preset in PRESETS.values())


SURROGATES = (Clip(), Clip(dual=3.0), Cispo(), Sapo(), Vespo(), Gmpo(), Dppo(), Reinforce(), ClipCov())
SILENT = [
    *(Objective(surrogate=each) for each in SURROGATES),
    Objective(ratio=SequenceRatio()),
    Objective(correction=SamplerCorrection(max=2.0)),
    *(Objective(filters=(each,)) for each in (OffPolicy(0.5), TopEntropy(0.3))),
]
HEARD = [
    Objective(kl=KLPenalty("k3")),
    Objective(entropy_bonus=EntropyBonus(0.01)),
    *(Objective(surrogate=each) for each in (Nll(), Dro(beta=0.1), Ipo(), KlCov(), ClipCov(scope="micro_batch"))),
    Objective(filters=(TopEntropy(0.3, scope="micro_batch"),)),
]


@pytest.mark.parametrize("objective", SILENT, ids=str)
def test_these_are_silent_and_the_gradient_of_the_others_is_the_same_without_a_dead_sequence(objective):
    assert is_silent_without_advantage(objective)
    logp, entropy, batch = random_batch((10, 10, 10), seed=3)
    batch = replace(batch, advantage=double(1, 0, -2).repeat_interleave(10))
    statistics = objective.block_statistics(batch, generator=torch.Generator().manual_seed(3))
    batch = batch if statistics is None else statistics.attach(batch)

    def gradient(sequences: list[int]) -> torch.Tensor:
        rows = torch.isin(batch.sequence, torch.tensor(sequences))
        leaf = logp.detach()[rows].requires_grad_()
        return objective(leaf, entropy[rows], batch.take(sequences), block=statistics).grad_logp

    whole, live = gradient([0, 1, 2]), gradient([0, 2])
    assert whole[10:20].count_nonzero() == 0
    assert torch.equal(torch.cat([whole[:10], whole[20:]]), live)
    assert live.count_nonzero()


@pytest.mark.parametrize("objective", HEARD, ids=str)
def test_these_speak_of_every_token_or_look_at_other_sequences(objective):
    assert not is_silent_without_advantage(objective)


def test_an_algorithm_is_silent_unless_its_weighting_kl_or_value_loss_is_not():
    plain = Algorithm(Objective(), GroupCentered(), TokenMean())
    assert plain.silent_without_advantage
    assert not replace(plain, weighting=MicroBatchTokenMean()).silent_without_advantage
    assert not replace(plain, kl_in_reward=True).silent_without_advantage
    assert not algorithm("ppo").silent_without_advantage


def test_only_choices_of_the_block_read_the_scoring_pass():
    assert not Objective().reads_scoring_pass
    assert Objective(surrogate=KlCov()).reads_scoring_pass
    assert Objective(filters=(TopEntropy(0.3),)).reads_scoring_pass
    assert not Objective(filters=(TopEntropy(0.3, scope="micro_batch"),)).reads_scoring_pass

"""Which compositions leave no trace of a sequence without advantage: against gradients with and without it."""

from dataclasses import replace

import pytest
import torch

from logitless.objective.advantage import GroupCentered
from logitless.objective.algorithm import Algorithm
from logitless.objective.correction import SamplerCorrection
from logitless.objective.dead import silent_without_advantage
from logitless.objective.divergence import KLPenalty
from logitless.objective.entropy import EntropyBonus
from logitless.objective.filters import OffPolicy, TopEntropy
from logitless.objective.objective import Objective
from logitless.objective.presets import algorithm
from logitless.objective.ratio import SequenceRatio
from logitless.objective.surrogate import Cispo, Clip, ClipCov, Dppo, Dro, Gmpo, KlCov, Nll, Reinforce, Sapo, Vespo
from logitless.objective.weighting import MicroBatchTokenMean, TokenMean
from logitless.types import TokenBatch

SILENT = [
    Objective(),
    Objective(surrogate=Clip(dual=3.0)),
    Objective(surrogate=Cispo()),
    Objective(surrogate=Sapo()),
    Objective(surrogate=Vespo()),
    Objective(surrogate=Gmpo()),
    Objective(surrogate=Dppo()),
    Objective(surrogate=Reinforce()),
    Objective(surrogate=ClipCov()),
    Objective(ratio=SequenceRatio()),
    Objective(correction=SamplerCorrection(max=2.0)),
    Objective(filters=(OffPolicy(0.5),)),
    Objective(filters=(TopEntropy(0.3),)),
]
HEARD = [
    Objective(kl=KLPenalty("k3")),
    Objective(entropy_bonus=EntropyBonus(0.01)),
    Objective(surrogate=Nll()),
    Objective(surrogate=Dro(beta=0.1)),
    Objective(surrogate=KlCov()),
    Objective(surrogate=ClipCov(scope="micro_batch")),
    Objective(filters=(TopEntropy(0.3, scope="micro_batch"),)),
]


@pytest.mark.parametrize("objective", SILENT, ids=str)
def test_these_are_silent_and_the_gradient_of_the_others_is_the_same_without_a_dead_sequence(objective):
    assert silent_without_advantage(objective)
    generator = torch.Generator().manual_seed(3)

    def normal(count: int = 30) -> torch.Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64)

    advantage = torch.tensor([1.0, 0.0, -2.0], dtype=torch.float64).repeat_interleave(10)
    logp_old = normal() - 4
    batch = TokenBatch(
        torch.arange(3).repeat_interleave(10), 3, advantage, torch.full_like(advantage, 1 / 30),
        logp_old=logp_old, logp_sampler=logp_old + 0.1 * normal(), entropy_old=normal().abs(),
        turn=torch.zeros(30).long(), lag=torch.arange(30) % 3,
    )  # fmt: skip
    statistics = objective.block_statistics(batch, generator=generator)
    batch = batch if statistics is None else statistics.attach(batch)
    logp, entropy = logp_old + 0.3 * normal(), normal().abs()

    def gradient(sequences: list[int]) -> torch.Tensor:
        rows = torch.isin(batch.sequence, torch.tensor(sequences))
        leaf = logp[rows].clone().requires_grad_()
        return objective(leaf, entropy[rows], batch.take(sequences), block=statistics).grad_logp

    whole, live = gradient([0, 1, 2]), gradient([0, 2])
    assert whole[10:20].count_nonzero() == 0
    assert torch.equal(torch.cat([whole[:10], whole[20:]]), live)
    assert live.count_nonzero()


@pytest.mark.parametrize("objective", HEARD, ids=str)
def test_these_speak_of_every_token_or_look_at_other_sequences(objective):
    assert not silent_without_advantage(objective)


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

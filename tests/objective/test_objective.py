"""The composition: its order by hand, its errors, its configuration."""

import math
from dataclasses import fields, replace

import pytest
import torch

from logitless.errors import ConfigurationError, InputError, UnavailableError
from logitless.objective import surrogate as sur
from logitless.objective.correction import SamplerCorrection
from logitless.objective.divergence import KLPenalty
from logitless.objective.entropy import AdaptiveEntropy, EntropyBonus
from logitless.objective.filters import OffPolicy, TopEntropy
from logitless.objective.objective import BlockStatistics, Objective
from logitless.objective.ratio import SequenceRatio, SequenceTokenRatio, TokenRatio, TurnRatio
from logitless.objective.surrogate import Clip, ClipCov, Dppo, Dro, Gmpo, Importance, KlCov, Nll, Reinforce, Vespo
from tests.objective.batches import batch_of, double, random_batch
from tests.objective.counted import Counted


def run(objective, batch, logp, entropy=None, **options):
    logp = double(*logp).requires_grad_()
    entropy = None if entropy is None else double(*entropy).requires_grad_()
    output = objective(logp, entropy, batch, **options)
    output.loss.backward()
    return output, logp.grad.tolist(), None if entropy is None else entropy.grad.tolist()


# --- the equation -----------------------------------------------------------------------------------------------------


def test_weight_filter_correction_and_kl_come_in_this_order():
    # A = -2, r = 1: l = 2 each.  Off-policy: drift logp_sampler - logp = 1 and 0 -> mean 0.5 > 0.4: both dropped.
    # KL k2: d = 1 -> 1/2, times beta 10 = 5, neither filtered nor corrected.  loss = 0.25 * 5 + 0.75 * 5 = 5
    objective = Objective(
        surrogate=Importance(), filters=(OffPolicy(0.4),), correction=SamplerCorrection(max=2.0), kl=KLPenalty("k2")
    )
    batch = batch_of(2, advantage=[-2, -2], token_weight=[0.25, 0.75], logp_sampler=[0, -1], logp_ref=[-2, -2])
    output, gradient, _ = run(objective, batch, [-1, -1], beta=10.0)
    assert output.loss.item() == pytest.approx(5)
    assert output.token_loss.tolist() == pytest.approx([5, 5])
    assert gradient == pytest.approx([2.5, 7.5])  # w * beta * d
    assert output.dropped["off_policy"].tolist() == [True, True]
    # Without the filter: c = exp(-1 - 0) and exp(-1 + 1) -> l c = 2 e^-1 and 2.
    output, gradient, _ = run(replace(objective, filters=()), batch, [-1, -1], beta=10.0)
    assert output.token_loss.tolist() == pytest.approx([5 + 2 / math.e, 7])
    assert output.correction.tolist() == pytest.approx([1 / math.e, 1])
    assert gradient == pytest.approx([0.25 * (10 + 2 / math.e), 0.75 * 12])


def test_a_filtered_token_keeps_its_weight_in_the_denominator():
    # entropies 1 and 3, top half: threshold 2; the first token's loss is dropped, the second keeps its 1/2
    objective = Objective(surrogate=Reinforce(), filters=(TopEntropy(0.5, scope="micro_batch"),))
    output, gradient, entropy_gradient = run(objective, batch_of(2, token_weight=[0.5, 0.5]), [-1, -1], [1, 3])
    assert output.loss.item() == 0.5
    assert gradient == [0, -0.5]
    assert entropy_gradient == [0, 0]


def test_a_token_on_the_threshold_of_its_micro_batch_is_kept():
    # entropies 1, 2, 4: the median is 2
    objective = Objective(surrogate=Reinforce(), filters=(TopEntropy(0.5, scope="micro_batch"),))
    output, _, _ = run(objective, batch_of(3), [-1] * 3, [1, 2, 4])
    assert output.dropped["top_entropy"].tolist() == [True, False, False]


def test_a_block_threshold_is_compared_with_the_entropy_of_the_scoring_pass():
    objective = Objective(surrogate=Reinforce(), filters=(TopEntropy(0.5),))
    block = batch_of(4, entropy_old=[1, 2, 3, 4])
    statistics = objective.block_statistics(block)
    assert statistics.thresholds["top_entropy"].item() == 2.5
    output, _, _ = run(objective, block, [-1] * 4, [9, 9, 0, 0], block=statistics)
    assert output.dropped["top_entropy"].tolist() == [True, True, False, False]


def test_off_policy_drift_is_from_the_old_policy_where_the_sampler_is_unknown():
    # drift logp_old - logp = 1 > 0.4; from the sampler it would be 0
    objective = Objective(surrogate=Reinforce(), filters=(OffPolicy(0.4),))
    batch = batch_of(1, advantage=[-1], logp_old=[-1])
    assert run(objective, batch, [-2])[0].dropped["off_policy"].tolist() == [True]
    known = replace(batch, logp_sampler=double(-2))
    assert run(objective, known, [-2])[0].dropped["off_policy"].tolist() == [False]


def test_a_likelihood_term_on_positive_examples_is_a_second_objective_with_weights_of_its_own():
    # Policy: A = 1, -1 at ratio 1, weights 1/2: -1/2 + 1/2 = 0.  NLL (VAPO) with mu 0.1 on the one token with A > 0,
    # weight 0.1 / 1: 0.1 * 2.  Gradients -1/2 - 0.1 and 1/2.
    batch = batch_of(2, advantage=[1, -1], token_weight=[0.5, 0.5], logp_old=[-2, -1])
    positive = replace(batch, token_weight=double(0.1, 0))
    logp = double(-2, -1).requires_grad_()
    loss = Objective()(logp, None, batch).loss + Objective(surrogate=Nll())(logp, None, positive).loss
    loss.backward()
    assert loss.item() == pytest.approx(0.2)
    assert logp.grad.tolist() == pytest.approx([-0.6, 0.5])


def test_vespo_takes_the_correction_into_its_weight_and_not_beside_it():
    # lr = 0, c = 2: w = 2, phi = exp(3 + 2 log 2 - 6) = 4 e^-3; loss -phi A logp = phi, not c phi
    objective = Objective(surrogate=Vespo(), correction=SamplerCorrection(max=2.0))
    output, gradient, _ = run(objective, batch_of(1, logp_sampler=[-9]), [-1])
    assert output.loss.item() == pytest.approx(4 * math.exp(-3))
    assert gradient == pytest.approx([-4 * math.exp(-3)])


def test_the_entropy_bonus_has_its_own_weights_and_skips_what_top_entropy_drops():
    # bonus = 0.1 * (3 / 4) on the kept token; the policy loss keeps 1/2 of it: 0.5 - 0.075
    objective = Objective(
        surrogate=Reinforce(), filters=(TopEntropy(0.5, scope="micro_batch"),), entropy_bonus=EntropyBonus(0.1)
    )
    batch = batch_of(2, token_weight=[0.5, 0.5], entropy_weight=[0.25, 0.25])
    output, _, entropy_gradient = run(objective, batch, [-1, -1], [1, 3])
    assert output.loss.item() == pytest.approx(0.5 - 0.1 * 0.75)
    assert output.entropy_bonus.item() == pytest.approx(0.75)
    assert entropy_gradient == pytest.approx([0, -0.1 * 0.25])
    of_micro_batch = replace(objective, entropy_bonus=EntropyBonus(0.1, scope="micro_batch"))
    output, _, entropy_gradient = run(of_micro_batch, batch, [-1, -1], [1, 3])
    assert output.loss.item() == pytest.approx(0.5 - 0.1 * 1.5)  # mean 3 of the kept, times half of the step
    assert entropy_gradient == pytest.approx([0, -0.1 * 0.5])


def test_the_entropy_bonus_does_not_skip_what_the_off_policy_filter_drops():
    objective = Objective(surrogate=Reinforce(), filters=(OffPolicy(0.1),), entropy_bonus=EntropyBonus(0.1))
    batch = batch_of(1, advantage=[-1], logp_sampler=[0], entropy_weight=[1])
    output, gradient, entropy_gradient = run(objective, batch, [-1], [2])
    assert output.loss.item() == pytest.approx(-0.2)
    assert (gradient, entropy_gradient) == ([0], [-0.1])


def test_entropy_weights_are_one_over_the_kept_tokens_of_the_step():
    objective = Objective(entropy_bonus=EntropyBonus(0.1), filters=(TopEntropy(0.5),))
    step = batch_of(4, token_weight=[1, 1, 0, 1], entropy_old=[1, 2, 9, 4])
    statistics = objective.block_statistics(step)  # of 1, 2 and 4 the median: 2
    weights = objective.entropy_weight(step, block=statistics)
    assert weights.tolist() == [0, 0.5, 0, 0.5]
    both_ranks = objective.entropy_weight(step, block=statistics, sum_over_ranks=lambda number: 2 * number)
    assert both_ranks.tolist() == [0, 0.25, 0, 0.25]
    assert Objective(entropy_bonus=EntropyBonus(0.1)).entropy_weight(step).tolist() == pytest.approx(
        [1 / 3, 1 / 3, 0, 1 / 3]
    )


def test_entropy_weights_of_a_step_with_one_token_or_none():
    objective = Objective(entropy_bonus=EntropyBonus(0.1))
    assert objective.entropy_weight(batch_of(2, token_weight=[0, 3])).tolist() == [0, 1]
    assert objective.entropy_weight(batch_of(2, token_weight=[0, 0])).tolist() == [0, 0]


def test_filters_that_are_not_settled_once_a_block_leave_the_entropy_weights_alone():
    filters = (OffPolicy(0.1), TopEntropy(0.5, scope="micro_batch"))
    objective = Objective(entropy_bonus=EntropyBonus(0.1, scope="micro_batch"), filters=filters)
    assert objective.entropy_weight(batch_of(4)).tolist() == [0.25] * 4


def test_an_adaptive_bonus_takes_its_coefficient_from_the_call():
    objective = Objective(surrogate=Reinforce(), entropy_bonus=EntropyBonus(0.1, AdaptiveEntropy()))
    output, _, _ = run(objective, batch_of(1, entropy_weight=[1]), [-1], [2], entropy_coefficient=0.5)
    assert output.loss.item() == pytest.approx(1 - 0.5 * 2)


def test_beta_may_be_a_tensor():
    objective = Objective(surrogate=Reinforce(), kl=KLPenalty("k2"))
    batch = batch_of(1, logp_ref=[-3])
    expected, _, _ = run(objective, batch, [-1], beta=0.5)
    output, _, _ = run(objective, batch, [-1], beta=double(0.5)[0])
    assert output.loss.item() == expected.loss.item() == 1 + 0.5 * 2


# --- sequences and turns ----------------------------------------------------------------------------------------------


def test_a_sequence_ratio_sends_its_gradient_through_every_token_of_the_sequence():
    # weights 1 and 3, A = 1, lr = 0: d loss / d logp_u = -(1 + 3) / 2 each; per token it would be -1 and -3
    batch = batch_of(2, token_weight=[1, 3])
    _, shared, _ = run(Objective(SequenceRatio(), Importance()), batch, [-1, -1])
    _, own, _ = run(Objective(SequenceTokenRatio(), Importance()), batch, [-1, -1])
    assert shared == [-2, -2]
    assert own == [-1, -3]


def test_a_turn_ratio_is_a_sequence_ratio_inside_the_turn():
    # turns of tokens (0, 1) and (2): ratios e^{0.5} and e^{-1}
    batch = batch_of(3, turn=[0, 0, 4])
    output, gradient, _ = run(Objective(TurnRatio(), Importance()), batch, [0, -1, -2])
    assert output.log_ratio.tolist() == [0.5, 0.5, -1]
    assert gradient == pytest.approx([-math.exp(0.5), -math.exp(0.5), -math.exp(-1)])


def test_advantages_that_differ_under_a_shared_ratio_are_an_error_unless_asked_for():
    # A = 1 and 3, ratio e^0 for both. mean: -2 each; multiply: -1 and -3
    batch = batch_of(2, advantage=[1, 3])
    with pytest.raises(InputError, match=r"'sequence_token' .*'mean' or 'multiply'"):
        run(Objective(SequenceRatio(), Importance()), batch, [-1, -1])
    averaged, _, _ = run(Objective(SequenceRatio("mean"), Importance()), batch, [-1, -1])
    assert averaged.token_loss.tolist() == [-2, -2]
    multiplied, _, _ = run(Objective(SequenceRatio("multiply"), Importance()), batch, [-1, -1])
    assert multiplied.token_loss.tolist() == [-1, -3]
    with pytest.raises(InputError, match="one advantage a turn"):
        run(Objective(TurnRatio(), Importance()), replace(batch, turn=torch.tensor([0, 0])), [-1, -1])
    run(Objective(TurnRatio(), Importance()), replace(batch, turn=torch.tensor([0, 1])), [-1, -1])
    with pytest.raises(InputError, match="one advantage a sequence"):
        run(Objective(SequenceRatio(), Importance()), batch_of([0, 1, 1], advantage=[5, 1, 3]), [-1, -1, -1])
    with pytest.raises(InputError, match="one advantage a sequence"):
        run(Objective(surrogate=Gmpo()), batch, [-1, -1])


def test_a_ratio_that_the_kl_alone_reads_leaves_the_advantages_as_they_are():
    # REINFORCE with A = 1 and 3, logp = -1; d = 0
    batch = batch_of(2, advantage=[1, 3], logp_ref=[-1, -1], turn=[0, 0])
    for ratio in (SequenceRatio(), TurnRatio()):
        objective = Objective(ratio, Reinforce(), kl=KLPenalty("k3", "surrogate"))
        assert run(objective, batch, [-1, -1], beta=0.1)[0].token_loss.tolist() == [1, 3]
    with pytest.raises(ConfigurationError, match="no advantage_within_sequence"):
        Objective(SequenceRatio("mean"), Reinforce(), kl=KLPenalty("k3", "surrogate"))


def test_a_dropped_token_is_out_whatever_its_correction():
    # c overflows to infinity: times a loss of 0 it would be NaN
    objective = Objective(surrogate=Reinforce(), filters=(OffPolicy(0.1),), correction=SamplerCorrection(mode="mask"))
    batch = batch_of(1, advantage=[-1], logp_old=[-1], logp_sampler=[-1000])
    output, gradient, _ = run(objective, batch, [-2000])
    assert (output.loss.item(), gradient) == (0, [0])


# --- covariance losses ------------------------------------------------------------------------------------------------


def test_kl_cov_selects_once_a_block_from_the_scoring_pass():
    # A centred +-1, logp_old centred (1.5, 0.5, -0.5, -1.5): covariances 1.5, -0.5, -0.5, 1.5 -> top half 0 and 3
    objective = Objective(surrogate=KlCov(fraction=0.5))
    block = batch_of(4, advantage=[1, -1, 1, -1], logp_old=[-1, -2, -3, -4])
    attached = objective.block_statistics(block).attach(block)
    assert attached.selected.tolist() == [True, False, False, True]
    assert attached.take([0]).selected.tolist() == [True, False, False, True]
    with pytest.raises(InputError, match="attach"):
        run(objective, block, [-1, -2, -3, -4])


def test_kl_cov_of_a_micro_batch_selects_from_current_values():
    objective = Objective(surrogate=KlCov(fraction=0.25, coefficient=10.0, scope="micro_batch"))
    batch = batch_of(4, advantage=[1, -1, 1, -1], logp_old=[-1, -2, -3, -4])
    output, _, _ = run(objective, batch, [-1, -2, -3, -9])  # covariance is largest at the last token now
    assert output.token_loss.tolist() == pytest.approx([-1, 1, -1, math.exp(-5) + 50])


def test_clip_cov_leaves_out_tokens_that_are_clipped_already():
    # means over the five trained: A -0.2, logp -3.2; covariances 2.64, -0.96, -, 0.24, 0.64, 2.24. The band has 0 and
    # 5, clipped already (r = e with A > 0; r = 1 / e with A < 0), and 4, which alone can be chosen
    objective = Objective(surrogate=ClipCov(fraction=0.2, low=0.5, high=9.0, scope="micro_batch"))
    batch = batch_of(
        6, advantage=[1, -1, 1, 1, -1, -1], token_weight=[1, 1, 0, 1, 1, 1], logp_old=[-2, -2, -2, -3, -4, -5]
    )
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        output, _, _ = run(objective, batch, [-1, -2, -2, -3, -4, -6], generator=generator)
        assert output.token_loss.tolist() == pytest.approx([-1.2, 1, 0, -1, 0, 0.8])
    with pytest.raises(InputError, match="generator"):
        run(objective, batch, [-1, -2, -2, -3, -4, -6])


def test_clip_cov_selects_once_a_block_with_a_generator():
    objective = Objective(surrogate=ClipCov(fraction=0.25, low=1.0, high=9.0))
    block = batch_of(4, advantage=[1, -1, 1, -1], logp_old=[-1, -2, -3, -4])
    selections = {
        tuple(objective.block_statistics(block, generator=torch.Generator().manual_seed(s)).selected.tolist())
        for s in range(20)
    }
    assert selections == {(True, False, False, False), (False, False, False, True)}
    with pytest.raises(InputError, match="generator"):
        objective.block_statistics(block)


def test_nothing_is_settled_once_a_block_unless_a_part_says_so():
    block = batch_of(2)
    assert Objective().block_statistics(block) is None
    assert Objective(filters=(TopEntropy(0.2, scope="micro_batch"),)).block_statistics(block) is None
    assert BlockStatistics({"top_entropy": torch.tensor(1.0)}).attach(block) is block


# --- what is refused --------------------------------------------------------------------------------------------------


CLAMPED = SamplerCorrection(max=2.0)
ENTROPY_NOW = (TopEntropy(0.2, scope="micro_batch"),)


@pytest.mark.parametrize(
    ("objective", "needs"),
    [
        (Objective(), {"logp_old"}),
        (Objective(surrogate=Reinforce()), set()),
        (Objective(surrogate=Reinforce(), correction=CLAMPED), {"logp_old", "logp_sampler"}),
        (Objective(surrogate=Nll(), kl=KLPenalty("k3")), {"logp_ref"}),
        (Objective(surrogate=Nll(), kl=KLPenalty("k3", "token")), {"logp_ref", "logp_old"}),
        (Objective(TurnRatio()), {"logp_old", "turn"}),
        (Objective(filters=(TopEntropy(0.2),)), {"logp_old", "entropy_old"}),
        (Objective(filters=ENTROPY_NOW), {"logp_old"}),
        (Objective(entropy_bonus=EntropyBonus(0.1)), {"logp_old", "entropy_weight"}),
        (Objective(surrogate=ClipCov()), {"logp_old", "selected"}),
        (Objective(surrogate=KlCov()), {"logp_old", "selected"}),
        (Objective(surrogate=KlCov(scope="micro_batch")), {"logp_old"}),
    ],
)
def test_needs_names_what_the_batch_must_hold_and_what_is_missing_of_it_is_an_error(objective, needs):
    assert objective.needs == needs
    there = {"logp_sampler": [-1], "logp_ref": [-1], "entropy_old": [1], "entropy_weight": [1], "turn": [0]}
    there |= {"selected": [False]}
    for missing in needs:
        with pytest.raises(InputError, match=missing):
            run(objective, batch_of(1, **there | {missing: None}), [-1], [1])


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        (Objective(filters=(TopEntropy(0.2),)), "block=objective.block_statistics"),
        (Objective(surrogate=Reinforce(), filters=(OffPolicy(0.5),)), "logp_old"),
        (Objective(filters=ENTROPY_NOW), "entropy"),
        (Objective(entropy_bonus=EntropyBonus(0.1)), "entropy"),
    ],
)
def test_what_a_filter_or_a_bonus_reads_is_asked_for(objective, said):
    with pytest.raises(InputError, match=said):
        run(objective, batch_of(1, entropy_old=[1], logp_old=None if said == "logp_old" else [-1]), [-1])


@pytest.mark.parametrize(
    ("objective", "options", "message"),
    [
        (Objective(), {"beta": 0.1}, "KL term for beta"),
        (Objective(), {"beta": torch.tensor(0.0)}, "KL term for beta"),
        (Objective(), {"entropy_coefficient": 0.1}, "exactly when the entropy bonus is adaptive"),
        (Objective(entropy_bonus=EntropyBonus(0.1)), {"entropy_coefficient": 0.1}, "exactly when"),
        (Objective(entropy_bonus=EntropyBonus(0.1, AdaptiveEntropy())), {}, r"EntropyController\.applied"),
    ],
)
def test_a_coefficient_without_its_part_is_refused(objective, options, message):
    with pytest.raises(InputError, match=message):
        run(objective, batch_of(1, entropy_weight=[1]), [-1], [1], **options)


@pytest.mark.parametrize(("logp", "entropy"), [([-1], None), ([-1, -1], [1]), ([-1], [1, 1]), ([-1] * 3, [1] * 3)])
def test_scores_of_another_number_of_tokens_are_refused(logp, entropy, without_shape_checks):
    with pytest.raises(InputError, match="the batch's 2 tokens"):
        run(Objective(), batch_of(2), logp, entropy)


@pytest.mark.parametrize("ratio", [SequenceRatio(), SequenceTokenRatio(), TurnRatio()], ids=lambda ratio: ratio.name)
@pytest.mark.parametrize(
    "surrogate", [Vespo(), Gmpo(), Dppo(), Dro(0.1), Reinforce(), Nll()], ids=lambda surrogate: surrogate.name
)
def test_a_ratio_level_that_nothing_reads_is_refused(ratio, surrogate):
    with pytest.raises(ConfigurationError, match="reads no other"):
        Objective(ratio, surrogate)
    with pytest.raises(ConfigurationError, match="reads no other"):
        Objective(ratio, surrogate, kl=KLPenalty("k3", "token"))
    Objective(ratio, surrogate, kl=KLPenalty("k3", "surrogate"))


@pytest.mark.parametrize(
    "surrogate",
    [Clip(), sur.Cispo(), sur.Sapo(), ClipCov(), KlCov(), Importance()],
    ids=lambda surrogate: surrogate.name,
)
def test_a_surrogate_of_the_ratio_takes_every_level(surrogate):
    for ratio in (TokenRatio(), SequenceRatio(), SequenceTokenRatio(), TurnRatio()):
        Objective(ratio, surrogate)


def test_vespo_with_a_correction_of_sequences_is_refused():
    for level in ("sequence", "geometric"):
        with pytest.raises(ConfigurationError, match="token-level"):
            Objective(surrogate=Vespo(), correction=SamplerCorrection(level, max=2.0))


def test_a_filter_given_twice_is_refused():
    with pytest.raises(ConfigurationError, match="at most once"):
        Objective(filters=(OffPolicy(0.1), OffPolicy(0.2)))


# --- gradients, dtypes ------------------------------------------------------------------------------------------------


def test_no_gradient_is_taken_where_none_is_asked_for():
    logp, entropy, batch = random_batch((2, 3), seed=0)
    with torch.no_grad():
        without = Objective()(logp, entropy, batch)
    detached = Objective()(logp.detach(), entropy.detach(), batch)
    assert without.grad_logp is None
    assert detached.grad_logp is None
    assert not detached.loss.requires_grad
    assert without.loss.item() == Objective()(logp, entropy, batch).loss.item()


def test_one_of_the_scores_may_come_without_a_gradient_and_is_left_as_it_is():
    logp, entropy, batch = random_batch((2, 3), seed=0)
    objective = Objective(entropy_bonus=EntropyBonus(0.1))
    for wanted, other in ((0, 1), (1, 0)):
        scores = [logp.detach(), entropy.detach()]
        scores[wanted].requires_grad_()
        output = objective(*scores, batch)
        output.loss.backward()
        assert output.grad_logp is not None
        assert scores[wanted].grad.any()
        assert not scores[other].requires_grad


def test_everything_that_an_output_holds_beside_the_loss_is_detached():
    logp, entropy, batch = random_batch((2, 3), seed=0)
    objective = Objective(
        filters=(OffPolicy(0.1), TopEntropy(0.5, scope="micro_batch")),
        correction=SamplerCorrection(max=2.0),
        kl=KLPenalty("k3", "token"),
        entropy_bonus=EntropyBonus(0.1),
    )
    output = objective(logp, entropy, batch, beta=0.1)
    held = {each.name: getattr(output, each.name) for each in fields(output)}
    dropped = held.pop("dropped")
    assert None not in held.values()
    assert {name for name, value in (held | dropped).items() if value.requires_grad} == {"loss"}


def test_the_gradient_scales_with_what_is_done_to_the_loss():
    logp, entropy, batch = random_batch((2, 3), seed=0)
    output = Objective()(logp * 1.0, entropy, batch)
    (3 * output.loss).backward()
    torch.testing.assert_close(logp.grad, 3 * output.grad_logp)


def test_the_gradient_is_that_of_the_loss_by_finite_differences():
    logp, entropy, batch = random_batch((2, 3), seed=1)
    batch = replace(batch, token_weight=batch.token_weight * double(1, 2, 3, 4, 5))
    objective = Objective(
        SequenceRatio(),
        sur.Sapo(),
        correction=SamplerCorrection("geometric", max=3.0),
        kl=KLPenalty("k3", "surrogate"),
        entropy_bonus=EntropyBonus(0.1),
    )
    assert torch.autograd.gradcheck(
        lambda logp, entropy: objective(logp, entropy, batch, beta=0.3).loss, (logp, entropy)
    )


def test_a_second_derivative_is_refused():
    logp, entropy, batch = random_batch((2, 3), seed=1)
    output = Objective()(logp, entropy, batch)
    with pytest.raises(UnavailableError, match="differentiated twice"):
        torch.autograd.grad(output.loss, logp, create_graph=True)


def test_results_are_float32_for_lower_inputs_and_float64_for_float64():
    for given, worked in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        logp, entropy, batch = random_batch((2, 3), seed=0, dtype=given)
        output = Objective(SequenceRatio(), kl=KLPenalty("k3"))(logp, entropy, batch, beta=0.1)
        assert output.loss.dtype == output.log_ratio.dtype == output.kl.dtype == worked
        output.loss.backward()
        assert logp.grad.dtype == given


def test_the_work_grows_with_the_tokens_and_not_with_the_sequences():
    """A loop over sequences would be seen in the operations, a matrix of sequences by tokens in their results."""
    small, large = (_work((1,) * half + (7,) * half) for half in (2, 1024))
    assert large.operations == small.operations > 0
    assert large.elements < 2 * 512 * small.elements


def _work(lengths):
    logp, entropy, batch = random_batch(lengths, seed=0, dtype=torch.float32)
    batch = replace(batch, token_weight=batch.token_weight.float())
    objective = Objective(
        SequenceRatio(),
        filters=(OffPolicy(0.5),),
        correction=SamplerCorrection("sequence", max=2.0),
        kl=KLPenalty("k3"),
    )
    with Counted() as counted:
        objective(logp, entropy, batch, beta=0.1).loss.backward()
    return counted

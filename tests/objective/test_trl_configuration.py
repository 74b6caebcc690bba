"""TRL's configurations, translated: each field, what is refused and what is noted."""

from dataclasses import MISSING, dataclass, fields, replace

import pytest
import torch

from logitless.errors import ConfigurationError
from logitless.objective.advantage import BatchStandardized, Gdpo, GroupCentered, GroupStandardized
from logitless.objective.correction import SamplerCorrection
from logitless.objective.divergence import KLPenalty
from logitless.objective.entropy import AdaptiveEntropy, EntropyBonus
from logitless.objective.filters import OffPolicy, TopEntropy
from logitless.objective.kl_control import FixedKL
from logitless.objective.presets import trl
from logitless.objective.ratio import SequenceRatio, TokenRatio
from logitless.objective.surrogate import Cispo, Clip, Sapo, Vespo
from logitless.objective.surrogate.clip import clip_loss
from logitless.objective.trl_configuration import DEFAULTS
from logitless.objective.weighting import ConstantLength, MicroBatchTokenMean, SequenceMean, SequenceSum, TokenMean


def test_trls_defaults_are_dapo_over_the_generation_batch():
    found = trl()
    assert found.objective.surrogate == Clip(0.8, 1.2)
    assert (found.objective.ratio, found.advantage, found.weighting) == (
        TokenRatio(),
        GroupStandardized(),
        TokenMean(scope="block"),
    )
    assert (found.objective.kl, found.objective.correction, found.objective.filters) == (None, None, ())
    assert (found.objective.entropy_bonus, found.notes) == (None, ())


@pytest.mark.parametrize(
    ("fields", "surrogate", "weighting"),
    [
        ({"loss_type": "grpo"}, Clip(0.8, 1.2), SequenceMean()),
        ({"loss_type": "bnpo"}, Clip(0.8, 1.2), MicroBatchTokenMean()),
        ({"loss_type": "dr_grpo", "max_completion_length": 99}, Clip(0.8, 1.2), ConstantLength(99)),
        ({"loss_type": "luspo"}, Clip(0.8, 1.2), SequenceSum()),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, Cispo(5.0), TokenMean("block")),
        ({"loss_type": "cispo", "epsilon_high": 1.0}, Cispo(1.0), TokenMean("block")),
        ({"loss_type": "sapo", "sapo_temperature_neg": 2.0}, Sapo(1.0, 2.0), SequenceMean()),
        ({"loss_type": "vespo", "vespo_k_pos": 1.0}, Vespo(1.0, 3.0, 3.0, 2.0), TokenMean("block")),
        ({"epsilon": 0.1, "epsilon_high": 0.3, "delta": 4.0}, Clip(0.9, 1.3, ratio_cap=4.0), TokenMean("block")),
    ],
)
def test_each_loss_type_of_trl(fields, surrogate, weighting):
    found = trl(**fields)
    assert (found.objective.surrogate, found.weighting) == (surrogate, weighting)


def test_trls_float32_temperatures_are_kept():
    assert trl(loss_type="sapo").objective.surrogate.temperature_negative == torch.tensor(1.05).item()


def test_the_remaining_fields_of_trl():
    found = trl(
        importance_sampling_level="sequence",
        loss_type="grpo",
        beta=0.04,
        off_policy_mask_threshold=0.5,
        top_entropy_quantile=0.2,
        entropy_coef=0.01,
        use_adaptive_entropy=True,
        entropy_target=0.4,
        use_vllm=True,
        vllm_importance_sampling_clip_min=0.1,
        mask_truncated_completions=True,
        scale_rewards="batch",
    )
    assert found.objective.ratio == SequenceRatio("multiply")
    assert found.objective.kl == KLPenalty("k3", "surrogate", clamp=None)
    assert found.kl_control == FixedKL(0.04)
    assert found.objective.filters == (OffPolicy(0.5), TopEntropy(0.2, scope="micro_batch"))
    assert found.objective.entropy_bonus == EntropyBonus(
        0.01, AdaptiveEntropy(0.4, 0.005, 0.0, 1.0), scope="micro_batch"
    )
    assert found.objective.correction == SamplerCorrection(
        "sequence", "mask", min=0.1, max=3.0, filtered_sampling="accept"
    )
    assert found.drop_truncated
    assert found.advantage == BatchStandardized()


@pytest.mark.parametrize(
    ("fields", "advantage"),
    [
        ({"scale_rewards": True}, GroupStandardized()),
        ({"scale_rewards": False}, GroupCentered()),
        ({"scale_rewards": "none"}, GroupCentered()),
        ({"multi_objective_aggregation": "normalize_then_sum"}, Gdpo()),
    ],
)
def test_reward_scaling_becomes_an_advantage(fields, advantage):
    assert trl(**fields).advantage == advantage


def test_the_correction_needs_both_switches_and_knows_the_old_name_of_its_bound():
    assert trl(use_vllm=True, vllm_importance_sampling_correction=False).objective.correction is None
    assert trl(use_bias_correction_kl=False, beta=0.1).objective.kl == KLPenalty("k3", clamp=None)
    capped = trl(use_vllm=True, vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_cap=2.0)
    assert capped.objective.correction == SamplerCorrection(max=2.0, filtered_sampling="accept")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_type": "dappo"}, "mean 'dapo'"),
        ({"importance_sampling_level": "sequence_token"}, "importance_sampling_level"),
        ({"scale_rewards": "groups"}, "mean 'group'"),
        ({"multi_objective_aggregation": "sum"}, "multi_objective_aggregation"),
        ({"vllm_importance_sampling_mode": "token"}, "vllm_importance_sampling_mode"),
        ({"delta": 0.5}, "a delta above 0.8"),
        ({"epsilon": 0.5, "delta": 0.5}, "a delta above 0.5"),
        ({"top_entropy_quantile": 1.5}, "at most 1, as top_entropy_quantile; given 1.5"),
        ({"router_aux_loss_coef": 0.001}, "router"),
        ({"sync_ref_model": True}, "frozen reference"),
        ({"loss_type": "vespo", "use_vllm": True}, "'token_truncate' or 'token_mask'"),
        ({"epsilonn": 0.2}, "mean 'epsilon'"),
        ({"learning_rate": 1e-6}, "a field"),
    ],
)
def test_traps_and_what_cannot_be_expressed_are_errors(fields, message):
    with pytest.raises(ConfigurationError, match=message):
        trl(**fields)


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        ({"multi_objective_aggregation": "normalize_then_sum"}, "scale_rewards='group' has no effect"),
        ({"loss_type": "sapo", "epsilon": 0.3}, "epsilon=0.3 has no effect"),
        ({"loss_type": "vespo", "epsilon": 0.3}, "epsilon=0.3 has no effect"),
        ({"loss_type": "sapo", "epsilon_high": 0.3}, "epsilon_high=0.3 has no effect"),
        ({"loss_type": "cispo", "epsilon_high": 5.0, "epsilon": 0.1}, "epsilon=0.1 has no effect"),
        ({"loss_type": "cispo", "epsilon_high": 5.0, "delta": 2.0}, "delta=2.0 has no effect"),
        ({"epsilon_high": 1.28}, "epsilon_high=1.28 is a distance: ratios are clipped at 2.28"),
        ({"loss_type": "sapo", "delta": 2.0}, "delta=2.0 has no effect"),
        ({"loss_type": "vespo", "delta": 2.0}, "delta=2.0 has no effect"),
        ({"delta": 1.1}, "below 1 + epsilon_high"),
        ({"sapo_temperature_pos": 2.0}, "sapo_temperature_pos=2.0 has no effect"),
        ({"vespo_k_neg": 1.0}, "vespo_k_neg=1.0 has no effect"),
        ({"top_entropy_quantile": 0.2}, "threshold from each micro-batch"),
        ({"loss_type": "bnpo"}, "averages over each micro-batch"),
        ({"entropy_coef": 0.1}, "entropy bonus averages over each micro-batch"),
        ({"loss_type": "luspo"}, "meant for importance_sampling_level='sequence'"),
        ({"importance_sampling_level": "sequence"}, "by its length"),
        ({"loss_type": "vespo", "importance_sampling_level": "sequence"}, "'sequence' has no effect"),
        ({"reward_weights": [1.0, 2.0]}, "belong to the rewards"),
        ({"use_vllm": True, "top_p": 0.9}, "top_p: the sampler correction compares"),
        ({"use_vllm": True, "top_k": 1}, "top_k: the sampler correction compares"),
        ({"off_policy_mask_threshold": 0.5}, "leave logp_sampler out"),
    ],
)
def test_what_trl_does_in_silence_is_noted(fields, note):
    assert any(note in each for each in trl(**fields).notes)


def test_a_delta_at_the_upper_bound_changes_nothing_and_is_not_noted():
    assert not any("delta" in note for note in trl(epsilon=0.5, delta=1.5).notes)


@pytest.mark.parametrize("fields", [{}, {"epsilon_high": 0.28}])
def test_a_ceiling_of_cispo_below_one_is_trls_with_a_warning(fields):
    """The default of TRL, which is not what anyone wants, trains there."""
    with pytest.warns(UserWarning, match="the paper's runs set epsilon_high=5.0") as warned:
        found = trl(loss_type="cispo", **fields)
    assert [warning.filename for warning in warned] == [__file__]
    assert found.objective.surrogate == Cispo(fields.get("epsilon_high", 0.2), ceiling_below_one="accept")


def test_an_epsilon_above_one_leaves_the_ratio_without_a_lower_bound():
    assert trl(epsilon=1.5, epsilon_high=0.2).objective.surrogate == Clip(0.0, 1.2)


@pytest.mark.parametrize("delta", [0.9, 1.0, 1.1, 1.2, 1.5])
def test_delta_on_either_side_of_the_upper_bound_has_trls_loss_and_gradient(delta):
    """TRL: ``-min(min(r, delta) A, clamp(r, 0.8, 1.2) A)``."""
    ratio = torch.tensor([0.5, 0.85, 1.0, 1.05, 1.15, 1.3, 1.7], dtype=torch.float64).repeat(2)
    advantage = torch.tensor([1.0, -2.0], dtype=torch.float64).repeat_interleave(7)
    surrogate, found = trl(delta=delta).objective.surrogate, []
    bounds = {"ratio_min": surrogate.ratio_min, "ratio_max": surrogate.ratio_max, "ratio_cap": surrogate.ratio_cap}

    def trls(log_ratio):
        r = log_ratio.exp()
        return -torch.min(r.clamp(max=delta) * advantage, r.clamp(0.8, 1.2) * advantage)

    for loss_of in (trls, lambda log_ratio: clip_loss(log_ratio, advantage, **bounds)):
        log_ratio = ratio.log().requires_grad_()
        loss = loss_of(log_ratio)
        found.append((loss.detach(), *torch.autograd.grad(loss.sum(), log_ratio)))
    torch.testing.assert_close(*found, rtol=1e-13, atol=1e-13)


def test_a_quiet_configuration_has_no_notes():
    assert trl(loss_type="grpo", beta=0.04, use_vllm=True, top_k=0).notes == ()
    assert trl(loss_type="cispo", epsilon_high=5.0).notes == ()


def test_nothing_is_noted_of_a_knob_of_another_loss_at_its_default():
    for loss in ("sapo", "vespo"):
        assert trl(loss_type=loss).notes == ()


def test_vespo_with_a_corrected_kl_keeps_the_sequence_ratio_for_it():
    found = trl(loss_type="vespo", importance_sampling_level="sequence", beta=0.1)
    assert found.objective.ratio == SequenceRatio()


@dataclass(frozen=True)
class Configuration:
    loss_type: str = "grpo"
    epsilon: float = 0.3
    learning_rate: float = 1e-6


def test_a_configuration_object_is_read_by_attribute_and_overridden_by_name():
    assert trl(Configuration()).objective.surrogate == Clip(0.7, 1.3)
    assert trl(Configuration(), epsilon=0.1).objective.surrogate == Clip(0.9, 1.1)
    assert trl(replace(Configuration(), loss_type="luspo")).weighting == SequenceSum()


def test_the_defaults_are_those_of_the_installed_trl():
    trl_package = pytest.importorskip("trl")
    theirs = {each.name: each.default for each in fields(trl_package.GRPOConfig) if each.default is not MISSING}
    assert {name: theirs[name] for name in DEFAULTS} == dict(DEFAULTS)

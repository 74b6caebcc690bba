"""A TRL ``GRPOConfig`` as an ``Algorithm`` with the same loss.

TRL is not imported; defaults and meaning are those of TRL 1.16. Settings that TRL ignores, or that depend on the
micro-batch, become notes; likely mistakes become warnings. A router loss and a moving reference are errors here
(``logitless.integrations.trl`` handles both).
"""

import struct
import sys
import warnings
from collections.abc import Mapping
from types import FrameType
from typing import Any

from logitless.errors import ConfigurationError
from logitless.objective.advantage import Advantage, BatchStandardized, Gdpo, GroupCentered, GroupStandardized
from logitless.objective.algorithm import Algorithm
from logitless.objective.correction import Level, Mode, SamplerCorrection
from logitless.objective.divergence import KLPenalty
from logitless.objective.entropy import AdaptiveEntropy, EntropyBonus
from logitless.objective.filters import Filter, OffPolicy, TopEntropy
from logitless.objective.inputs import known
from logitless.objective.kl_control import FixedKL
from logitless.objective.objective import Objective
from logitless.objective.ratio import Ratio, SequenceRatio, TokenRatio
from logitless.objective.surrogate import Cispo, Clip, Sapo, Surrogate, Vespo
from logitless.objective.weighting import (
    ConstantLength,
    MicroBatchTokenMean,
    SequenceMean,
    SequenceSum,
    TokenMean,
    Weighting,
)

DEFAULTS: Mapping[str, Any] = {
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "epsilon": 0.2,
    "epsilon_high": None,
    "delta": None,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "beta": 0.0,
    "use_bias_correction_kl": True,
    "sync_ref_model": False,
    "scale_rewards": "group",
    "multi_objective_aggregation": "sum_then_normalize",
    "reward_weights": None,
    "max_completion_length": 512,
    "mask_truncated_completions": False,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "entropy_coef_min": 0.0,
    "entropy_coef_max": 1.0,
    "entropy_coef_delta": 0.005,
    "entropy_target": 0.2,
    "use_vllm": False,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
    "vllm_importance_sampling_cap": None,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "router_aux_loss_coef": None,
}
"""The fields of ``GRPOConfig`` that an objective depends on, with TRL's defaults."""

_CLIPPED = ("grpo", "dr_grpo", "dapo", "bnpo", "luspo")
_LOSSES = (*_CLIPPED, "cispo", "sapo", "vespo")
_MODES: Mapping[str, tuple[Level, Mode]] = {
    "token_truncate": ("token", "truncate"),
    "token_mask": ("token", "mask"),
    "sequence_truncate": ("sequence", "truncate"),
    "sequence_mask": ("sequence", "mask"),
}
_READ_ONLY_BY: Mapping[str, tuple[str, ...]] = {
    "epsilon": _CLIPPED,
    "epsilon_high": (*_CLIPPED, "cispo"),
    "sapo_temperature_pos": ("sapo",),
    "sapo_temperature_neg": ("sapo",),
    "vespo_k_pos": ("vespo",),
    "vespo_lambda_pos": ("vespo",),
    "vespo_k_neg": ("vespo",),
    "vespo_lambda_neg": ("vespo",),
}


def trl(config: object | None = None, **fields: Any) -> Algorithm:
    """The algorithm that a TRL configuration describes.

    Args:
        config: a ``GRPOConfig``, or anything with its attributes; missing fields have TRL's defaults.
        fields: the same by name; they take precedence.

    Returns:
        An algorithm with TRL's loss and gradient. A weighting with ``scope="block"`` takes ``Totals`` of the generation
        batch with ``num_steps=steps_per_generation / gradient_accumulation_steps``.

    Raises:
        ConfigurationError: an unknown field or value; a router loss; a moving reference; VESPO with a correction that
            is not per token; a delta of at most ``1 - epsilon``; a fraction above 1.

    Warns:
        UserWarning: ``cispo`` with an ``epsilon_high`` below 1 (TRL's default is 0.2), which in TRL is the ceiling.

    Example:
        >>> algorithm = trl(loss_type="dapo", epsilon_high=0.28, beta=0.04)
        >>> algorithm.objective.surrogate.ratio_max, algorithm.objective.kl.ratio_corrected, algorithm.kl_control.beta
        (1.28, 'surrogate', 0.04)
    """
    for name in fields:
        _choice("field", name, DEFAULTS)
    values = {name: fields.get(name, getattr(config, name, default)) for name, default in DEFAULTS.items()}
    if values["loss_type"] == "gspo":  # whose nearest name, sapo, is another method
        raise ConfigurationError(
            needed="a loss_type of TRL's, which GSPO is not",
            given="'gspo'",
            remedy="Set loss_type='grpo' and importance_sampling_level='sequence'.",
        )
    loss = _choice("loss_type", values["loss_type"], _LOSSES)
    _choice("vllm_importance_sampling_mode", values["vllm_importance_sampling_mode"], _MODES)
    if refused := refusals(values):
        raise next(iter(refused.values()))
    notes = _notes(values)
    kl = None
    if values["beta"] != 0:
        kl = KLPenalty("k3", ratio_corrected="surrogate" if values["use_bias_correction_kl"] else None, clamp=None)
    objective = Objective(
        ratio=_ratio(values, kl, notes),
        surrogate=_surrogate(values),
        filters=_filters(values),
        correction=_correction(values, notes),
        kl=kl,
        entropy_bonus=_entropy_bonus(values),
    )
    return Algorithm(
        objective,
        advantage=_advantage(values),
        weighting=_weighting(loss, values["max_completion_length"]),
        kl_control=None if kl is None else FixedKL(values["beta"]),
        drop_truncated=values["mask_truncated_completions"],
        notes=tuple(notes),
    )


def _choice(what: str, value: Any, choices: Any) -> Any:
    return known(value, choices, f"{what} that an objective of TRL's knows")


def refusals(fields: Mapping[str, Any]) -> dict[str, ConfigurationError]:
    """The settings that no objective can express, each with its error; empty if there are none."""
    values = {**DEFAULTS, **fields}
    loss, delta, found = values["loss_type"], values["delta"], {}
    if values["router_aux_loss_coef"]:
        found["router_aux_loss_coef"] = ConfigurationError(
            needed="a loss of log-probabilities",
            given=f"router_aux_loss_coef={values['router_aux_loss_coef']}",
            remedy="Set it to 0, or train with logitless.integrations.trl.GRPOTrainer, which adds the router loss.",
        )
    if values["sync_ref_model"]:
        found["sync_ref_model"] = ConfigurationError(
            needed="a frozen reference",
            given="sync_ref_model=True",
            remedy="Moving references are not supported: set sync_ref_model=False, or stay with TRL for this run.",
        )
    per_token = values["vllm_importance_sampling_mode"] in ("token_truncate", "token_mask")
    if loss == "vespo" and _corrects(values) and not per_token:
        found["vllm_importance_sampling_mode"] = ConfigurationError(
            needed="a token-level sampler correction with loss_type='vespo', whose weight is a sequence's already",
            given=f"vllm_importance_sampling_mode={values['vllm_importance_sampling_mode']!r}",
            remedy="Set it to 'token_truncate' or 'token_mask'.",
        )
    if delta is not None and loss in _CLIPPED and delta <= 1 - values["epsilon"]:
        found["delta"] = ConfigurationError(
            needed=f"a delta above {1 - values['epsilon']}, the lower bound of the ratio",
            given=f"delta={delta}",
            remedy="Set delta above 1 + epsilon_high, or leave it out.",
        )
    if values["top_entropy_quantile"] > 1:  # which TRL takes for 1
        found["top_entropy_quantile"] = ConfigurationError(
            needed="a fraction of tokens to keep, at most 1, as top_entropy_quantile",
            given=str(values["top_entropy_quantile"]),
            remedy="Use 1 to keep all tokens, or 0.2 for the fifth with the highest entropy.",
        )
    return found


def _corrects(values: Mapping[str, Any]) -> bool:
    return values["use_vllm"] and values["vllm_importance_sampling_correction"]


def _epsilon_high(values: Mapping[str, Any]) -> float:
    return values["epsilon"] if values["epsilon_high"] is None else values["epsilon_high"]


def _notes(values: Mapping[str, Any]) -> list[str]:
    loss, level = values["loss_type"], values["importance_sampling_level"]
    notes = []
    if values["multi_objective_aggregation"] == "normalize_then_sum":
        notes.append(f"scale_rewards={values['scale_rewards']!r} has no effect under normalize_then_sum")
    for name, losses in _READ_ONLY_BY.items():
        if loss not in losses and values[name] != DEFAULTS[name]:
            notes.append(f"{name}={values[name]} has no effect with loss_type={loss!r}")
    if values["top_entropy_quantile"] < 1:
        notes.append("top_entropy_quantile takes its threshold from each micro-batch: the result depends on its size")
    if loss == "bnpo":
        notes.append("loss_type='bnpo' averages over each micro-batch: the result depends on its size")
    if values["entropy_coef"] != 0 or values["use_adaptive_entropy"]:
        notes.append("the entropy bonus averages over each micro-batch: the result depends on its size")
    if values["delta"] is not None and loss not in _CLIPPED:
        notes.append(f"delta={values['delta']} has no effect with loss_type={loss!r}")
    elif values["delta"] is not None and values["delta"] < 1 + _epsilon_high(values):
        notes.append(f"delta={values['delta']} is below 1 + epsilon_high and bounds the ratio of positive advantages")
    if loss in _CLIPPED and _epsilon_high(values) >= 1:
        notes.append(
            f"epsilon_high={_epsilon_high(values)} is a distance: ratios are clipped at {1 + _epsilon_high(values):g}"
        )
    if loss == "luspo" and level != "sequence":
        notes.append("loss_type='luspo' is meant for importance_sampling_level='sequence'")
    if level == "sequence" and loss in ("bnpo", "dr_grpo", "dapo", "cispo"):
        notes.append(f"loss_type={loss!r} weights the ratio of a sequence by its length; GSPO is 'grpo' at this level")
    if values["reward_weights"] is not None:
        notes.append(f"reward_weights={values['reward_weights']} belong to the rewards")
    if values["off_policy_mask_threshold"] is not None and not values["use_vllm"]:
        notes.append("TRL measures off-policy drift from logp_old here: leave logp_sampler out of the batch")
    return notes


def _ratio(values: Mapping[str, Any], kl: KLPenalty | None, notes: list[str]) -> Ratio:
    if _choice("importance_sampling_level", values["importance_sampling_level"], ("token", "sequence")) == "token":
        return TokenRatio()
    if values["loss_type"] == "vespo" and (kl is None or kl.ratio_corrected is None):
        notes.append("importance_sampling_level='sequence' has no effect with loss_type='vespo' and no corrected KL")
        return TokenRatio()
    return SequenceRatio(None if values["loss_type"] == "vespo" else "multiply")


def _surrogate(values: Mapping[str, Any]) -> Surrogate:
    match values["loss_type"]:
        case "cispo":
            ceiling = _epsilon_high(values)
            if ceiling < 1:
                warnings.warn(
                    f"with loss_type='cispo' TRL takes epsilon_high for the ceiling itself: {ceiling} scales every"
                    " gradient by it; the paper's runs set epsilon_high=5.0",
                    stacklevel=_calls_within_logitless() + 1,
                )
            return Cispo(ratio_max=ceiling, ceiling_below_one="accept" if ceiling < 1 else "refuse")
        case "sapo":
            return Sapo(*(_float32(values[f"sapo_temperature_{sign}"]) for sign in ("pos", "neg")))
        case "vespo":
            return Vespo(
                *(_float32(values[f"vespo_{name}"]) for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg"))
            )
        case _:
            lower, upper, delta = max(0.0, 1 - values["epsilon"]), 1 + _epsilon_high(values), values["delta"]
            if delta is None:
                return Clip(lower, upper)
            return Clip(lower, min(upper, delta), ratio_cap=max(upper, delta))


def _calls_within_logitless() -> int:
    """How many calls of this package lie between the caller and the user's code, the caller's included.

    ``warnings.warn`` has ``skip_file_prefixes`` for this since Python 3.12.
    """
    frame: FrameType | None = sys._getframe(1)
    calls = 0
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "logitless":
        frame, calls = frame.f_back, calls + 1
    return calls


def _float32(value: float) -> float:
    """Rounded to float32: TRL selects these numbers in a float32 tensor, also for a float64 loss."""
    return struct.unpack("f", struct.pack("f", value))[0]


def _filters(values: Mapping[str, Any]) -> tuple[Filter, ...]:
    filters: list[Filter] = []
    if values["off_policy_mask_threshold"] is not None:
        filters.append(OffPolicy(values["off_policy_mask_threshold"]))
    if values["top_entropy_quantile"] < 1:
        filters.append(TopEntropy(values["top_entropy_quantile"], scope="micro_batch"))
    return tuple(filters)


def _correction(values: Mapping[str, Any], notes: list[str]) -> SamplerCorrection | None:
    if not _corrects(values):
        return None
    cap = values["vllm_importance_sampling_cap"]
    filtering = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    used = [name for name, off in filtering.items() if (values[name] or off) != off]
    if used:
        notes.append(f"{', '.join(used)}: the sampler correction compares two different distributions")
    return SamplerCorrection(
        *_MODES[values["vllm_importance_sampling_mode"]],
        min=values["vllm_importance_sampling_clip_min"],
        max=values["vllm_importance_sampling_clip_max"] if cap is None else cap,
        filtered_sampling="accept",
    )


def _entropy_bonus(values: Mapping[str, Any]) -> EntropyBonus | None:
    if values["use_adaptive_entropy"]:
        adaptive = AdaptiveEntropy(
            target=values["entropy_target"],
            delta=values["entropy_coef_delta"],
            coefficient_min=values["entropy_coef_min"],
            coefficient_max=values["entropy_coef_max"],
        )
        return EntropyBonus(values["entropy_coef"], adaptive, scope="micro_batch")
    return EntropyBonus(values["entropy_coef"], scope="micro_batch") if values["entropy_coef"] != 0 else None


def _advantage(values: Mapping[str, Any]) -> Advantage:
    aggregation = values["multi_objective_aggregation"]
    _choice("multi_objective_aggregation", aggregation, ("sum_then_normalize", "normalize_then_sum"))
    if aggregation == "normalize_then_sum":
        return Gdpo()
    scale = {True: "group", False: "none"}.get(values["scale_rewards"], values["scale_rewards"])
    scaled: dict[str, Advantage] = {
        "group": GroupStandardized(),
        "batch": BatchStandardized(),
        "none": GroupCentered(),
    }
    return scaled[_choice("scale_rewards", scale, scaled)]


def _weighting(loss: str, max_completion_length: int | None) -> Weighting:
    match loss:
        case "grpo" | "sapo":
            return SequenceMean()
        case "bnpo":
            return MicroBatchTokenMean()
        case "dr_grpo":
            return ConstantLength(max_completion_length)
        case "luspo":
            return SequenceSum()
        case _:
            return TokenMean(scope="block")

"""docs/objectives.md and its pictures, made from the presets: compositions are read from them, gradients evaluated.

``python -m logitless.bench.objectives_document`` writes; with ``--check`` it says whether what is there is current.
Words (papers, other libraries' names, differences) stand here, by preset; a preset without words is an error.
"""

import dataclasses
import hashlib
import inspect
import io
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure

from logitless import pages
from logitless.errors import ConfigurationError
from logitless.objective.algorithm import Algorithm
from logitless.objective.presets import PRESETS
from logitless.types import TokenBatch

DOCS = Path(__file__).parents[3] / "docs"
COST = DOCS.parent / "benchmarks" / "results" / "objective.json"
MODULE = "logitless.bench.objectives_document"
TOLERANCE = 1e-6
NUM_POINTS = 120
POSITIVE, NEGATIVE = "A = +1", "A = -1"

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "logitless",
    "font.size": 8.0,
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e2e8f0",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "legend.columnspacing": 1.0,
}
_LINES: Mapping[str, dict[str, Any]] = {
    POSITIVE: {"color": "#2563eb", "linewidth": 2.6},
    NEGATIVE: {"color": "#ea580c", "linewidth": 1.5},
}


@dataclass(frozen=True)
class Words:
    """What the code cannot say of a preset.

    Args:
        title: the name in its paper.
        paper: where it comes from.
        names: library -> what it is called there; one that is not listed does not have it, or is not known to.
        differences: from those libraries, and from the paper.
        ratio: ends of the picture's axis, such that no bound falls on a point of ``ratios``.
        probability_old: of the token in the picture; only a trust region in probability reads it.
    """

    title: str
    paper: str
    names: Mapping[str, str]
    differences: tuple[str, ...]
    ratio: tuple[float, float] = (0.0, 2.0)
    probability_old: float = 0.1


_LIGER = "`LigerFusedLinearGRPOLoss({})`"
_VERL_CLIP = "verl's `vanilla` always adds a dual clip, `clip_ratio_c=3.0`: here `clip(dual=3.0)`."
_COVARIANCE_SCOPE = (
    "verl takes means and choice from each micro-batch of current values (`scope: micro_batch`); by default "
    "here they are taken once a block, so that the result does not depend on how a step is cut."
)

WORDS: Mapping[str, Words] = {
    "grpo": Words(
        "GRPO",
        "DeepSeekMath, arXiv:2402.03300",
        {
            "TRL": '`loss_type="grpo"`',
            "verl": "`adv_estimator: grpo`, `loss_mode: vanilla`, `loss_agg_mode: seq-mean-token-mean`",
            "Fast-LLM": "`policy_loss: grpo`",
            "Liger": _LIGER.format('loss_type="grpo"'),
        },
        (
            "TRL averages over the sequences of a micro-batch, and over micro-batches. That is the same while all "
            "micro-batches hold as many sequences.",
            _VERL_CLIP,
            "verl's default aggregation is `token-mean`, so its GRPO is DAPO's loss unless told otherwise.",
            "Fast-LLM divides by tokens, or by documents with `normalize_by_documents`.",
        ),
    ),
    "dr_grpo": Words(
        "Dr. GRPO",
        "arXiv:2503.20783",
        {
            "TRL": '`loss_type="dr_grpo"`, `scale_rewards="none"`',
            "verl": "`norm_adv_by_std_in_grpo: false`, `loss_agg_mode: seq-mean-token-sum-norm`",
            "Liger": _LIGER.format('loss_type="dr_grpo"'),
        },
        (
            '`loss_type="dr_grpo"` alone leaves TRL dividing rewards by their standard deviation.',
            "verl divides by `loss_scale_factor`, or else by the padded width of the micro-batch. Here "
            "`max_new_tokens` is one number for the run.",
        ),
    ),
    "dapo": Words(
        "DAPO",
        "arXiv:2503.14476",
        {
            "TRL": '`loss_type="dapo"` (its default), `epsilon_high=0.28`',
            "verl": "`loss_mode: vanilla`, `clip_ratio_high: 0.28`, `loss_agg_mode: token-mean`",
            "Liger": _LIGER.format('loss_type="dapo"'),
        },
        (
            "TRL's default for `epsilon_high` is `epsilon`, 0.2.",
            "TRL divides by the tokens of the generation batch, spread over its steps: `token_mean(scope=block)`.",
            _VERL_CLIP,
            "This is the loss only. DAPO's dynamic sampling and overlong penalty belong to data and rewards.",
        ),
    ),
    "bnpo": Words(
        "BNPO, as TRL has it",
        "none: arXiv:2506.02864 uses the name for a Beta normalisation of rewards",
        {"TRL": '`loss_type="bnpo"`', "Liger": _LIGER.format('loss_type="bnpo"')},
        ("The only preset that depends on how a step is cut into micro-batches. It is here to compare with.",),
    ),
    "gspo": Words(
        "GSPO",
        "arXiv:2507.18071, eq. 7",
        {
            "TRL": '`loss_type="grpo"`, `importance_sampling_level="sequence"`, `epsilon=3e-4`, `epsilon_high=4e-4`',
            "verl": "`loss_mode: gspo` (the gradient of `gspo_token`)",
            "Fast-LLM": "`policy_loss: gspo`",
            "Liger": _LIGER.format('loss_type="grpo", importance_sampling_level="sequence"'),
        },
        (
            "With TRL's default `dapo` at the sequence level the ratio of a sequence counts in proportion to its "
            "length.",
            "Advantages that differ inside a sequence are an error here; TRL multiplies "
            "(`advantage_within_sequence: multiply`), Fast-LLM averages (`mean`).",
            "Fast-LLM's GSPO counts a sequence in proportion to its length, as `sequence_sum` does.",
        ),
        ratio=(0.9985, 1.0015),
    ),
    "gspo_token": Words(
        "GSPO-token",
        "arXiv:2507.18071, section 4.3",
        {"verl": "`loss_mode: gspo`"},
        (
            "Equal to `gspo` token by token where weight, advantage, filter and correction are constant in a sequence; "
            "otherwise only the sums over the sequence are equal.",
            "verl bounds the log ratio by 10 from above.",
            "TRL 1.16 has no such level.",
        ),
        ratio=(0.9985, 1.0015),
    ),
    "luspo": Words(
        "LUSPO",
        "arXiv:2602.05261",
        {
            "TRL": '`loss_type="luspo"`, `importance_sampling_level="sequence"`',
            "Liger": _LIGER.format('loss_type="luspo", importance_sampling_level="sequence"'),
        },
        (
            "Three losses bear this name under padding: TRL 1.16 sums the trained tokens, as here; earlier releases of "
            "TRL, and Liger, multiply by the length and average over padded columns. They agree at the sequence "
            "level without a KL or a correction per token.",
            "TRL's default level is `token`, which is not LUSPO.",
        ),
        ratio=(0.99, 1.01),
    ),
    "cispo": Words(
        "CISPO",
        "MiniMax-M1, arXiv:2506.13585; ceiling from ScaleRL, arXiv:2510.13786",
        {
            "TRL": '`loss_type="cispo"`, `epsilon_high=5.0`',
            "verl": "`loss_mode: cispo`",
            "Liger": _LIGER.format('loss_type="cispo", epsilon_high=5.0'),
        },
        (
            "TRL's and Liger's `epsilon_high` is the ceiling itself, verl's `clip_ratio_high` a distance from 1. TRL's "
            "default of 0.2 as a ceiling scales every gradient by at most 0.2.",
            "verl also bounds the weight from below, by `1 - clip_ratio_low`: here `ratio_min`.",
        ),
        ratio=(0.0, 8.0),
    ),
    "sapo": Words(
        "SAPO",
        "arXiv:2511.20347",
        {
            "TRL": '`loss_type="sapo"`',
            "verl": "`loss_mode: sapo`, `tau_pos`, `tau_neg`",
            "Liger": _LIGER.format('loss_type="sapo"'),
        },
        (
            "There is no clip, so TRL's `epsilon` and `delta` have no effect.",
            "Liger has it for ratios of tokens only.",
        ),
        ratio=(0.0, 4.0),
    ),
    "vespo": Words(
        "VESPO",
        "arXiv:2602.10693, in TRL's form",
        {"TRL": '`loss_type="vespo"`', "Liger": _LIGER.format('loss_type="vespo"')},
        (
            "The sampler correction is part of w, after its truncation, and is not multiplied in again. It must "
            "be per token.",
            "Liger multiplies in the correction of padded positions too: it must be 1 there.",
            "w is a product over the whole sequence: in a long one it soon is so far from 1 that phi is near 0.",
        ),
        ratio=(0.0, 4.0),
    ),
    "gmpo": Words(
        "GMPO",
        "arXiv:2507.20673",
        {"TRL": "`experimental.gmpo.GMPOTrainer`", "verl": "`loss_mode: geo_mean`"},
        (
            "Bounds are of the log ratio: exp(-0.4) to exp(0.4) is 0.67 to 1.49. So are TRL's `epsilon` and verl's "
            "`clip_ratio` here, though of the ratio elsewhere; verl's default of 0.2 is not the paper's.",
            "verl averages over the sequences of a micro-batch, whatever `loss_agg_mode` says.",
            "With a token-level sampler correction each token's loss is multiplied by its own weight, a sequence's so "
            "by their arithmetic mean; verl takes their geometric mean. `level: geometric` is the geometric mean of "
            "the sequence's ratio, bounded afterwards.",
            "The picture is of a sequence of one token.",
        ),
        ratio=(0.0, 2.4),
    ),
    "dppo": Words(
        "DPPO (binary)",
        "arXiv:2602.04879",
        {"verl": "`loss_mode: dppo_tv` or `dppo_kl`"},
        (
            "verl's `clip_ratio` is the threshold of the divergence here. `clip_ratio_c` is the cap of the ratio: "
            "20 only where that key is absent, and its actor sets it to 3 for the dual clip.",
            "The region is one of probability: rare tokens may move by a large ratio, likely ones by a small one. In "
            "the picture the token had a probability of 0.3.",
        ),
        ratio=(0.0, 3.0),
        probability_old=0.3,
    ),
    "clip_cov": Words(
        "Clip-Cov",
        "arXiv:2505.22617",
        {"verl": "`loss_mode: clip_cov`"},
        (_COVARIANCE_SCOPE, "Dashed: a token that was chosen."),
    ),
    "kl_cov": Words(
        "KL-Cov",
        "arXiv:2505.22617",
        {"verl": "`loss_mode: kl_cov`"},
        (
            _COVARIANCE_SCOPE,
            "|lr| has no slope at a ratio of exactly 1: on the first step after scoring the penalty does nothing.",
            "Dashed: a token that was chosen.",
        ),
    ),
    "dro": Words(
        "DRO",
        "arXiv:2405.19107, in verl's form",
        {"verl": "`loss_mode: dro`"},
        ("The paper fits a value function; this form takes any advantage.",),
        ratio=(0.0, 4.0),
    ),
    "ppo": Words(
        "PPO",
        "arXiv:1707.06347, eq. 7; GAE arXiv:1506.02438",
        {"verl": "`adv_estimator: gae`, `loss_mode: vanilla`"},
        (
            _VERL_CLIP,
            "V is one linear layer, from 0, on the hidden states that the LM head reads: one backbone for policy and "
            "values, trained by both losses. verl trains a second model as the critic.",
            "TRL 1.16 has no PPO trainer.",
        ),
    ),
    "reinforce": Words(
        "REINFORCE",
        "Williams 1992",
        {"verl": "`loss_mode: gpg` has this loss, with its own advantages"},
        ("No ratio: meant for one optimizer step on each block.",),
    ),
    "rloo": Words(
        "RLOO",
        "arXiv:2402.14740",
        {"TRL": "`RLOOTrainer` (another loss)", "verl": "`adv_estimator: rloo` (the advantage only)"},
        (
            "TRL's trainer clips one ratio a sequence, the product over its tokens (no mean); here there is no ratio.",
            "verl keeps the policy loss it is configured with, by default PPO's.",
        ),
    ),
    "reinforce_pp": Words(
        "REINFORCE++",
        "arXiv:2501.03262",
        {"verl": "`adv_estimator: reinforce_plus_plus`"},
        (
            "With several completions a prompt the baseline variant is the advantage `reinforce_pp_baseline` "
            "(verl: `reinforce_plus_plus_baseline`; OpenRLHF: `reinforce_baseline`). Like theirs and the paper's it is "
            "whitened over tokens, so that a long completion counts more; `whiten_over: completions` counts each once.",
            _VERL_CLIP,
        ),
    ),
    "nll": Words(
        "Negative log-likelihood",
        "none: supervised warm start, and VAPO's term for right answers (arXiv:2504.05118)",
        {"TRL": '`SFTTrainer`, `loss_type="nll"`', "Fast-LLM": "the loss `label`"},
        ("The advantage plays no part: both curves are one.",),
    ),
}

_RATIOS: Mapping[str, str] = {
    "token": "log r_t = lr_t",
    "sequence": "log r_t = mean_{u in S(t)} lr_u",
    "sequence_token": "log r_t = sg(mean_{u in S(t)} lr_u) + lr_t - sg(lr_t)",
}
_SURROGATES: Mapping[str, str] = {
    "clip": "l_t = -min( r_t A_t, clip(r_t, ratio_min, ratio_max) A_t )",
    "cispo": "l_t = -sg(min(r_t, ratio_max)) A_t logp_t",
    "sapo": "l_t = -(4 / tau) sigmoid(tau (r_t - 1)) A_t\n"
    "tau = temperature_positive where A_t > 0, else temperature_negative",
    "vespo": "l_t = -phi A_t logp_t\n"
    "phi = sg(exp(lambda + k log w - lambda w))\n"
    "log w = clamp( sum_{u in S(t)} [clamp(lr_u, -20, 20) + clamp(log c_u, log 1e-8, 20)], log 1e-8, 20 )\n"
    "k, lambda = k_positive, lambda_positive where A_t >= 0, else k_negative, lambda_negative",
    "gmpo": "l_t = -A exp( mean_{u in S(t)} sgn(A) min( sgn(A) lr_u, sgn(A) clipped_u ) )\n"
    "clipped_u = clip(lr_u, log_ratio_min, log_ratio_max)",
    "dppo": "l_t = -A_t sg(min(exp(lr_t), ratio_cap)) logp_t m_t\n"
    "m_t = 0 where A_t > 0 and p_t - p_old_t > max_high, or A_t <= 0 and p_t - p_old_t < -max_low; else 1\n"
    "divergence=kl: KL(Bernoulli(p_old_t) || Bernoulli(p_t)) against the same bounds, where p_t moved that way",
    "clip_cov": "l_t = -min( r_t A_t, clip(r_t, ratio_min, ratio_max) A_t ), but 0 for the chosen\n"
    "chosen: max(1, floor(fraction N)) at random of the tokens with low < cov_t < high\n"
    "cov_t = (A_t - mean A)(logp_t - mean logp)",
    "kl_cov": "l_t = -r_t A_t, and + coefficient |lr_t| for the chosen\n"
    "chosen: the max(1, floor(fraction N)) tokens with the largest cov_t\n"
    "cov_t = (A_t - mean A)(logp_t - mean logp)",
    "dro": "l_t = -(A_t logp_t - beta/2 lr_t^2)",
    "reinforce": "l_t = -A_t logp_t",
    "nll": "l_t = -logp_t",
}
_ADVANTAGES: Mapping[str, str] = {
    "group_standardized": "A = (reward - mean_group) / (std_group + 1e-4)",
    "group_centered": "A = reward - mean_group",
    "leave_one_out": "A = reward - mean of the others of its group",
    "raw": "A = reward",
    "reinforce_pp": "A_t = whiten( sum_{u >= t in S(t)} gamma^(u-t) reward_u )",
    "group_turns": "A = (G - mean_group G) / (std_group G + 1e-4), G being what a turn and those after it earn",
    "gae": "A_t = whiten( sum_{u >= t in S(t)} (gamma lambda_)^(u-t) (reward_u + gamma V_{u+1} - V_u) )",
}
_WEIGHTINGS: Mapping[str, str] = {
    "token_mean": "w_t = 1 / N_all",
    "sequence_mean": "w_t = 1 / (B_all |S(t)|)",
    "constant_length": "w_t = 1 / (B_all max_new_tokens)",
    "sequence_sum": "w_t = 1 / B_all",
    "turn_mean": "w_t = 1 / (K_all |turn(t)|)",
    "micro_batch_token_mean": "w_t = 1 / (num_micro_batches N_micro)",
}

_OPENING = f"""# Objectives

<!-- Made by `python -m {MODULE}`: change the words there, the numbers in the presets. -->

Every objective is one composition, `logitless.objective.objective.Objective`, over packed vectors of N tokens:

    loss = sum_t w_t (c_t kept_t l_t + beta kl_t)  -  coefficient * mean entropy of the kept tokens

`l_t` is the surrogate, `w_t` the weighting, `c_t` the sampler correction, `kept_t` the filters; a value loss comes with its own weights. A preset
is a name for a ratio, a surrogate, an advantage and a weighting; filters, correction, KL and entropy bonus can be added to any.
Its keys in a recipe are in [configuration](configuration.md). A surrogate or an advantage of your own stands in
[a file beside the recipe](extending.md#a-surrogate-or-an-advantage-by-its-path).

- `lr_t = logp_t - logp_old_t`, the trained policy against the one that drew the batch. `p = exp(logp)`.
- `S(t)` is the sequence of token t and `|S(t)|` its trained tokens; `sg` stops the gradient.
- `N_all`, `B_all` count trained tokens and completions of the optimizer step, over every rank and micro-batch.
- Ratios follow the formula: verl holds `lr` within ±20 before `exp` in `vanilla`, `sapo` and `cispo`, beyond which its ratio is
  constant and has no gradient. Here nothing is held unless a bound says so.
- Bounds are absolute: where a paper says epsilon = 0.2, the bounds are 0.8 and 1.2.
- Names of other libraries are those of TRL 1.16, Liger 0.8, and verl and Fast-LLM at the time of writing. One that is not listed has
  no such loss, or none that we know of. `logitless parity --against trl --against liger` runs their code against this one.

The pictures show `d loss / d logp_t` of one token, alone in its sequence, with weight 1 and advantage +1 or -1, against its ratio
`exp(lr_t)`: what the objective returns as `grad_logp`. Below 0, a step raises the token's probability. The numbers are in
[gradients.json](objectives/gradients.json).
"""  # noqa: E501

_PARTS = """## Ratios

| name | log ratio | gradient |
|---|---|---|
| `token` | `lr_t` | through the token |
| `sequence` | the mean of `lr` over the sequence | `1 / length` through every token of it |
| `sequence_token` | the same value | through the token only |
| `turn` | the mean of `lr` over one assistant turn | through every token of the turn |

Advantages that differ between tokens need `token` or `sequence_token` (or `turn`, between turns). Besides the surrogates of the presets there
is `importance`, `l_t = -r_t A_t` without a clip.

## KL to the reference

`d = logp - logp_ref`, on tokens that the policy drew. As a *value*, k1 and k3 estimate KL(pi || ref) without bias. In a loss, what counts
is the expected *gradient*, and that is another matter:

| in the loss | per token | expected gradient |
|---|---|---|
| k1, `ratio_corrected` | `exp(lr) d` | KL(pi \\|\\| ref) |
| k2, `ratio_corrected` | `sg(exp(lr)) d^2 / 2` | KL(pi \\|\\| ref) |
| k3, `ratio_corrected` | `exp(lr) (exp(-d) - 1 + d)` | KL(pi \\|\\| ref) |
| k2 | `d^2 / 2` | KL(pi \\|\\| ref), on-policy only |
| k3 | `exp(-d) - 1 + d` | KL(ref \\|\\| pi), on-policy only: what most libraries train |
| k1 | `d` | 0 on-policy: refused |

- `ratio_corrected: token` multiplies by the ratio of the token, and the gradient passes through it (k1, k3). `surrogate` takes the surrogate's
  ratio: TRL's choice under a sequence ratio, where the table no longer holds.
- In the reward, the KL is `sg(logp_old - logp_ref)`: per token in token returns, summed over the sequence and subtracted before
  group statistics otherwise.
- `mse` is k2 and `low_var_kl` is k3 (verl's names). verl also clamps k3's value to ±10, beyond which it has no gradient. Here `d` is clamped to ±20
  and the clamped tokens are counted; TRL does not clamp (`clamp: null`).
- `kl.control: ziegler` is verl's `AdaptiveKLController` with `guardrail: null` only. By default beta becomes `1.5 * beta` where the KL
  exceeds twice its target, which verl's never does.

## Sampler correction

For tokens drawn by another engine: `c = exp(D)`, without gradient, times `l_t` and not the KL.

| `level` | D | TRL's mode |
|---|---|---|
| `token` | `logp_old - logp_sampler` | `token_truncate`, `token_mask` |
| `sequence` | its sum over the sequence | `sequence_truncate`, `sequence_mask` |
| `geometric` | its mean over the sequence | – |

`truncate` clips c to [min, max], `mask` drops what is outside. Where the sampler gave no value, D is 0 and the token is counted. Sampling
with top-p, top-k, min-p or a penalty makes the two log-probs those of different distributions: refused unless `filtered_sampling: accept`.
`normalized: true` divides c, bounded, by its mean over the block's tokens (above the token level: its completions), as verl's
`rollout_is_batch_normalize` does.

## Filters

0 or 1 a token, without gradient. A filtered token keeps its weight in every denominator.

| name | keeps | source |
|---|---|---|
| `off_policy(threshold)` | A >= 0, or the sequence's mean of `logp_sampler - logp` at most the threshold (`logp_old` where there is no sampler's) | DeepSeek-V3.2, arXiv:2512.02556 |
| `top_entropy(quantile)` | tokens whose entropy is among the highest `quantile` of the trained ones | arXiv:2506.01939 |
| `sampler_rejection(measure, over, max, min)` | tokens whose measure is within the bounds; or all tokens of a sequence whose sum, mean or largest is | verl's rollout correction (`rollout_rs`) |
| `second_moment(max_mean)` | the tokens of the block with the smallest D^2, as many as have a mean of at most `max_mean` | M2PO (Zheng et al. 2025) |
| `stale(max_lag)` | tokens whose weights were at most so many optimizer steps behind those of `logp_old`; over a sequence: all of its tokens | AReaL, arXiv:2505.24298; PipelineRL, arXiv:2509.19128 |

`sampler_rejection` measures `k1 = -D`, `k2 = D^2 / 2`, `k3 = exp(D) - 1 - D` or `tv = |p_old - p_sampler|` of the sampled token, D as above. It
rejects without reweighting; a sampler correction beside it weighs what is kept. Several may stand
beside each other, such as one of tokens and one of sequences (verl: `rollout_rs: token_k1,seq_max_k2`): a token must pass all of
them, and each goes by all tokens. verl takes rejected tokens out of the denominator too.

`top_entropy` takes its threshold from the scoring pass, once a block. TRL takes it from each micro-batch (`scope: micro_batch`), and then the result depends
on the size of one.

## Weightings

| name | `w_t` | who |
|---|---|---|
| `token_mean` | `1 / N_all` | DAPO, CISPO, VESPO; verl `token-mean` |
| `sequence_mean` | `1 / (B_all length)` | GRPO, GSPO, SAPO, GMPO; verl `seq-mean-token-mean` |
| `constant_length` | `1 / (B_all max_new_tokens)` | Dr. GRPO; verl `seq-mean-token-sum-norm` |
| `sequence_sum` | `1 / B_all` | LUSPO, RLOO, Fast-LLM's GSPO; verl `seq-mean-token-sum` |
| `turn_mean` | `1 / (K_all turn length)`, K_all being the turns | several turns: each counts the same |
| `micro_batch_token_mean` | `1 / (num_micro_batches N_micro)` | TRL's `bnpo` |

`scope: step` counts over the optimizer step; `scope: block` over the whole block, so that a step with more tokens counts more (TRL's
`num_items_in_batch`). Completions without a trained token count in `B_all`; tokens that a tool or environment wrote count nowhere.

## Moving from TRL

`presets.trl(config)`, or `presets.trl(loss_type=..., ...)`, builds what a `GRPOConfig` means. It raises on

- an unknown field or string, which TRL finds at the first loss;
- `vespo` with a sampler correction that is not per token, as TRL does;
- a `delta` of at most `1 - epsilon`, below which no ratio is left, and sizes that no run has (a SAPO or VESPO parameter
  that is not positive, an entropy coefficient whose bounds are out of order);
- `router_aux_loss_coef` and `sync_ref_model`: a router's loss and a moving reference are no part of an objective.
  `logitless.integrations.trl.GRPOTrainer` takes both: TRL moves the reference, and the router loss of a mixture of
  experts is added as TRL adds it.

It warns about `cispo` with an `epsilon_high` below 1 (the default is 0.2): TRL takes it for the ceiling and scales every
gradient down. `GRPOTrainer` refuses what TRL's trains in three cases: DeepSpeed ZeRO-3, prompt learning, and an LM head
that is not `softcap(scale * (hidden @ weight.T + bias))`.

It leaves a note (`Algorithm.notes`) on

- `scale_rewards` under `normalize_then_sum`, `epsilon` under `sapo` and `vespo`, `delta` under `cispo`, `sapo` and
  `vespo`: no effect;
- a `delta` below `1 + epsilon_high`, which bounds the ratio of positive advantages;
- `bnpo`, `top_entropy_quantile` and the entropy bonus: the result depends on the size of a micro-batch;
- `luspo` at the token level, and `dapo`, `bnpo`, `dr_grpo`, `cispo` at the sequence level: not the papers' losses;
- top-p, top-k, min-p or a repetition penalty with a sampler correction: two different distributions.

## Often stated, and wrong

| statement | what holds |
|---|---|
| k2 is `exp(d) - 1 - d` and k3 is `d^2 / 2` | The names are swapped, and the exponent's sign is lost: k2 is `d^2 / 2`, k3 is `exp(-d) - 1 + d`. |
| The importance ratio is pi / pi_ref, detached | It is against the policy that drew the batch, and the gradient passes through it. |
| Subtract the per-group means from the rewards | The means are one a group and the rewards one a completion: each must be gathered back by its group's id first. |
| `A * mean(logp)` is the GRPO loss | Without ratio and clip it is wrong from the second step on a batch. |
| A higher reward in a group lowers the loss | At ratio 1, centred advantages under `sequence_mean` give a loss of 0 whatever the rewards. Look at the gradient. |
| Multiply by the mask to hide `-inf` or NaN | `0 * inf` is NaN. Hidden tokens have no row here. |
| bfloat16 weights are enough for AdamW at 1e-6 | Most updates are rounded away. Keep float32 master weights. |
| top_p < 1 is harmless | The loss is of the full softmax, the samples are not. Temperature must divide the logits on both sides. |
"""  # noqa: E501


Curves = dict[str, list[float]]


def ratios(words: Words) -> torch.Tensor:
    """The ratios at which a picture is drawn: the middles of equal cells, so that round bounds fall between two.

    Example:
        >>> ratios(WORDS["grpo"])[:2]
        tensor([0.0083, 0.0250], dtype=torch.float64)
    """
    low, high = words.ratio
    return low + (torch.arange(NUM_POINTS, dtype=torch.float64) + 0.5) * ((high - low) / NUM_POINTS)


def curves(name: str) -> Curves:
    """``d loss / d logp`` of a preset for both signs of the advantage, to seven decimals.

    Example:
        >>> curves("nll")["A = +1"][0]
        -1.0
    """
    objective = PRESETS[name]().objective
    log_ratio = ratios(_words(name)).log()
    logp_old = torch.full_like(log_ratio, _words(name).probability_old).log()
    drawn: Curves = {}
    for chosen in (False, True) if "selected" in objective.needs else (False,):
        for label, advantage in ((POSITIVE, 1.0), (NEGATIVE, -1.0)):
            batch = TokenBatch(
                sequence=torch.arange(NUM_POINTS),
                num_sequences=NUM_POINTS,
                advantage=torch.full_like(log_ratio, advantage),
                token_weight=torch.ones_like(log_ratio),
                logp_old=logp_old,
                selected=torch.full((NUM_POINTS,), chosen),
            )
            gradient = objective((logp_old + log_ratio).requires_grad_(), None, batch).grad_logp
            assert gradient is not None
            drawn[f"{label}, chosen" if chosen else label] = [round(g, 7) + 0.0 for g in gradient.tolist()]
    return drawn


def all_curves() -> dict[str, Curves]:
    """``curves`` of every preset."""
    return {name: curves(name) for name in PRESETS}


def picture(name: str, drawn: Curves) -> str:
    """The curves of a preset as SVG; its description is ``digest(drawn)``."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.2, 2.3), layout="constrained")
        axes = figure.add_subplot()
        axes.axhline(0.0, color="#94a3b8", linewidth=0.8)
        axes.axvline(1.0, color="#94a3b8", linewidth=0.8, linestyle=":")
        x = ratios(_words(name)).tolist()
        for label, y in drawn.items():
            sign = label.removesuffix(", chosen")
            axes.plot(x, y, label=label, linestyle="-" if label == sign else "--", **_LINES[sign])
        axes.set_xlim(*_words(name).ratio)
        axes.locator_params(axis="x", nbins=6)
        axes.set_xlabel("ratio")
        axes.set_ylabel("d loss / d logp")
        figure.legend(loc="outside upper left", ncols=len(drawn))
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Description": digest(drawn)})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def digest(drawn: Curves) -> str:
    """What ties a picture to its numbers."""
    return hashlib.sha256(json.dumps(drawn).encode()).hexdigest()


def page() -> str:
    """docs/objectives.md."""
    rows = ["## Presets\n", "| preset | ratio | surrogate | advantage | weighting |", "|---|---|---|---|---|"]
    for name, preset in PRESETS.items():
        cells = (f"`{cell}`" if cell else "–" for cell in _composition(preset()).values())
        rows.append(f"| [`{name}`](#{name}) | {' | '.join(list(cells)[:4])} |")
    measured = json.loads(COST.read_text(encoding="utf-8")) if COST.is_file() else None
    return "\n".join([_OPENING, *rows, "", *(_section(name) for name in PRESETS), _PARTS, cost(measured)])


def cost(measured: Mapping[str, Any] | None) -> str:
    """What ``benchmarks/objective.py`` found, in words.

    Example:
        >>> cost(None).splitlines()[-1]
        'Not measured yet: run `python benchmarks/objective.py` on a GPU.'
    """
    if measured is None:
        return "## Cost\n\nNot measured yet: run `python benchmarks/objective.py` on a GPU.\n"
    alone = [row for row in measured["rows"] if not row["diagnostics"]]
    watched = [row for row in measured["rows"] if row["diagnostics"]]
    head, machine = measured["head"], measured["environment"]
    peak = max(row["peak_bytes_per_token"] for row in measured["rows"])
    return (
        f"## Cost\n\nOn {measured['tokens']} tokens in {measured['sequences']} sequences, forward and backward of an "
        f"objective take\n{_range(alone)}\nof the time of one bfloat16 product with a head of {head['width']} x "
        f"{head['vocabulary']} in the same run ({measured['product_ms']:.0f} ms); with the step's diagnostics\n"
        f"{_range(watched)}.\nThey allocate at most {peak:.0f} bytes a token. "
        f"({machine['gpu']}, driver {machine['driver']}, torch {machine['torch']};\n"
        "[result file](../benchmarks/results/objective.json), by `benchmarks/objective.py`.)\n"
    )


def _range(rows: Sequence[Mapping[str, Any]]) -> str:
    """The cheapest and the dearest objective."""
    low, *_, high = sorted(rows, key=lambda row: float(row["ratio_to_product"]))
    shares = [f"{row['ratio_to_product']:.2%} (`{row['objective']}`)" for row in (low, high)]
    return " to ".join(shares)


def outdated(docs: Path) -> list[str]:
    """What under ``docs`` is not as the code has it, in words; empty where all is current."""
    found = []
    text = docs / "objectives.md"
    if not text.is_file() or text.read_text(encoding="utf-8") != page():
        found.append("objectives.md")
    numbers = docs / "objectives" / "gradients.json"
    kept: dict[str, Curves] = json.loads(numbers.read_text(encoding="utf-8")) if numbers.is_file() else {}
    if kept.keys() != PRESETS.keys():
        found.append("objectives/gradients.json: other presets")
    for name in kept.keys() & PRESETS.keys():
        if not _close(kept[name], curves(name)):
            found.append(f"objectives/gradients.json: {name}")
        drawn = docs / "objectives" / f"{name}.svg"
        if not drawn.is_file() or digest(kept[name]) not in drawn.read_text(encoding="utf-8"):
            found.append(f"objectives/{name}.svg")
    return sorted(found)


def write(docs: Path) -> None:
    """Write page, numbers and pictures."""
    folder = docs / "objectives"
    folder.mkdir(parents=True, exist_ok=True)
    drawn = all_curves()
    (docs / "objectives.md").write_text(page(), encoding="utf-8")
    lines = (
        f'"{name}": {{\n' + ",\n".join(f"  {json.dumps(label)}: {json.dumps(y)}" for label, y in each.items()) + "\n}"
        for name, each in drawn.items()
    )
    (folder / "gradients.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    for name, each in drawn.items():
        (folder / f"{name}.svg").write_text(picture(name, each), encoding="utf-8")


def _close(some: Curves, others: Curves) -> bool:
    return some.keys() == others.keys() and all(
        len(y) == len(others[label]) and max(abs(a - b) for a, b in zip(y, others[label], strict=True)) <= TOLERANCE
        for label, y in some.items()
    )


def _words(name: str) -> Words:
    if name not in WORDS:
        raise ConfigurationError(
            needed=f"words on the preset {name!r}", given="none", remedy=f"Add it to WORDS in {Path(__file__).name}."
        )
    return WORDS[name]


def _section(name: str) -> str:
    words, preset = _words(name), PRESETS[name]
    parameters: Sequence[inspect.Parameter] = tuple(inspect.signature(preset).parameters.values())
    given = ", ".join(f"`{each.name}={_number(each.default)}`" for each in parameters)
    rows = [f"| {part} | `{value}` |" for part, value in _composition(preset()).items() if value]
    names = [f"| {library} | {name} |" for library, name in words.names.items()]
    return "\n".join(
        [
            f"### {name}\n",
            f"{words.title}. Paper: {words.paper}.{f' Parameters: {given}.' if given else ''}\n",
            *(f"    {line}" for line in _equation(preset())),
            "",
            f"![d loss / d logp of {name} against the ratio](objectives/{name}.svg)\n",
            "| part | here |",
            "|---|---|",
            *rows,
            "",
            *(["| library | name |", "|---|---|", *names, ""] if names else []),
            *(f"- {difference}" for difference in words.differences),
            "",
        ]
    )


def _equation(algorithm: Algorithm) -> list[str]:
    """The loss of an algorithm, a line a part."""
    surrogate = algorithm.objective.surrogate
    lines = _SURROGATES[surrogate.name].splitlines()
    if surrogate.reads == "any":
        lines.append(_RATIOS[algorithm.objective.ratio.name])
    if algorithm.advantage is not None:
        lines.append(_ADVANTAGES[algorithm.advantage.name])
    lines.append(_WEIGHTINGS[algorithm.weighting.name])
    if algorithm.value_loss is not None:
        lines.append("R_t = A_t + V_t, before A is whitened")
        lines.append("value loss: coefficient * mean over the step's trained tokens that have a return of")
        lines.append("    1/2 max( (V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2 )")
    return lines


def _composition(algorithm: Algorithm) -> dict[str, str]:
    """The parts of an algorithm as its objects have them."""
    surrogate = algorithm.objective.surrogate
    parts = {
        "ratio": algorithm.objective.ratio if surrogate.reads != "none" else None,
        "surrogate": surrogate,
        "advantage": algorithm.advantage,
        "weighting": algorithm.weighting,
        "value loss": algorithm.value_loss,
    }
    return {name: "" if part is None else _spelled(part) for name, part in parts.items()}


def _spelled(part: Any) -> str:
    """A part with its values, those that are off left out."""
    values = {each.name: getattr(part, each.name) for each in dataclasses.fields(part)}
    name = values.pop("name", "")
    inner = ", ".join(f"{key}={_number(value)}" for key, value in values.items() if value is not None)
    return f"{name}({inner})" if name and inner else name or inner


def _number(value: Any) -> str:
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def main() -> int:
    """Write the page and its pictures, or with ``--check`` say whether they are current."""
    return pages.main(MODULE, pages.Written(partial(write, DOCS), partial(outdated, DOCS)))


if __name__ == "__main__":
    sys.exit(main())

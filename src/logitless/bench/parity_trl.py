"""TRL's installed loss, from rewards to gradients, against ``presets.trl`` on the same rollouts.

TRL's ``_generate_and_score_completions`` (masks, advantages, sampler ratios, token counts) and ``_compute_loss`` run on
a trainer without a model: it has only the attributes that they read. Log-probs and entropies are float64 tensors that
both sides get, and gradients are taken with respect to them.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn

from logitless.bench.parity import FLOAT64, Measured, Row, row
from logitless.errors import UnavailableError
from logitless.integrations.padded import Places, from_padded
from logitless.objective.advantage import AdvantageInputs, combine_rewards
from logitless.objective.algorithm import Algorithm
from logitless.objective.entropy import EntropyController
from logitless.objective.objective import ObjectiveOutput
from logitless.objective.presets import trl as trl_preset
from logitless.objective.weighting import MicroBatchTokenMean, Totals
from logitless.types import TokenBatch

NUM_PROMPTS, NUM_GENERATIONS, MICRO_BATCH = 2, 4, 2
NUM_SEQUENCES = NUM_PROMPTS * NUM_GENERATIONS
MICRO_BATCHES = NUM_SEQUENCES // MICRO_BATCH
LENGTHS = (5, 2, 7, 3, 1, 6, 4, 2)
EOS, PAD = 1, 0
REWARD_WEIGHTS = (1.0, 0.5)


@dataclass(frozen=True)
class Case:
    """One configuration of TRL's.

    Args:
        fields: of ``GRPOConfig``; the rest keep TRL's defaults.
        accumulation: micro-batches an optimizer step; a generation batch has four.
        with_tools: whether some tokens, and all of one completion, were written by a tool.
        on_policy: whether TRL has no old log-probabilities and takes the current ones.
        note: about TRL's loss.
    """

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    accumulation: int = 2
    with_tools: bool = False
    on_policy: bool = False
    note: str = ""


def _of(loss: str, **more: Any) -> dict[str, Any]:
    return {"loss_type": loss, **({"epsilon_high": 5.0} if loss == "cispo" else {}), **more}


def _cases() -> Iterator[Case]:
    yield from _losses()
    yield from _corrections()
    yield from _filters()
    yield from _batches()
    everything = _of(
        "grpo",
        importance_sampling_level="sequence",
        beta=0.2,
        delta=1.5,
        use_vllm=True,
        vllm_importance_sampling_mode="sequence_truncate",
        off_policy_mask_threshold=-0.1,
        top_entropy_quantile=0.5,
        entropy_coef=0.1,
        multi_objective_aggregation="normalize_then_sum",
    )
    yield Case("everything at once", everything, with_tools=True)


def _losses() -> Iterator[Case]:
    losses = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
    notes = {
        ("luspo", "token"): "three LUSPO losses exist under padding; this TRL masks, its earlier releases and Liger "
        "average over padded columns",
        ("luspo", "sequence"): "three LUSPO losses exist under padding; this TRL sums the trained tokens",
        ("vespo", "sequence"): "TRL ignores importance_sampling_level under vespo",
        ("bnpo", "token"): "not the BNPO of arXiv:2506.02864, which normalises rewards",
        ("cispo", "token"): "TRL's epsilon_high is the ceiling itself; its default 0.2 would scale every gradient",
    }
    for loss in losses:
        for level in ("token", "sequence"):
            fields = _of(loss, importance_sampling_level=level)
            yield Case(f"{loss}, {level} ratio", fields, note=notes.get((loss, level), ""))
    for level in ("token", "sequence"):
        for corrected in (True, False):
            fields = _of("dapo", beta=0.3, use_bias_correction_kl=corrected, importance_sampling_level=level)
            note = "TRL corrects the KL of a token by the ratio of its sequence" if corrected else ""
            note = note if level == "sequence" else ""
            yield Case(f"kl {'bias-corrected' if corrected else 'uncorrected'}, {level} ratio", fields, note=note)
    yield Case(
        "vespo, kl corrected by the sequence's ratio", _of("vespo", beta=0.3, importance_sampling_level="sequence")
    )
    yield Case("luspo, kl", _of("luspo", beta=0.3, importance_sampling_level="sequence"))


def _corrections() -> Iterator[Case]:
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        sampler = {"use_vllm": True, "vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 1.2}
        yield Case(f"sampler correction {mode}", _of("dapo", **sampler))
        bounded = {**sampler, "vllm_importance_sampling_clip_min": 0.9}
        yield Case(f"sampler correction {mode} from below, grpo", _of("grpo", **bounded), with_tools=True)
    for mode in ("token_truncate", "token_mask"):
        sampler = {"use_vllm": True, "vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 1.2}
        yield Case(f"sampler correction {mode}, vespo", _of("vespo", **sampler))
    yield Case("sampler correction off", _of("dapo", use_vllm=True, vllm_importance_sampling_correction=False))


def _filters() -> Iterator[Case]:
    for level in ("token", "sequence"):
        yield Case(f"delta, {level} ratio", _of("dapo", delta=1.5, importance_sampling_level=level))
    yield Case("off-policy mask", _of("dapo", off_policy_mask_threshold=-0.1))
    yield Case(
        "off-policy mask of the sampler",
        _of("grpo", off_policy_mask_threshold=-0.1, use_vllm=True, vllm_importance_sampling_mode="token_truncate"),
    )
    micro = "TRL takes it over each micro-batch: the result depends on its size"
    for quantile in (0.5, 0.2):
        yield Case(f"entropy quantile {quantile}", _of("dapo", top_entropy_quantile=quantile), note=micro)
    yield Case("entropy quantile, tools", _of("grpo", top_entropy_quantile=0.5), with_tools=True, note=micro)
    yield Case("entropy bonus", _of("dapo", entropy_coef=0.1), note=micro)
    yield Case("entropy bonus with quantile", _of("grpo", entropy_coef=0.1, top_entropy_quantile=0.5), note=micro)
    adaptive = {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 9.0, "entropy_coef_delta": 0.25}
    yield Case("adaptive entropy bonus", _of("dapo", **adaptive), accumulation=1, note=micro)
    yield Case(
        "adaptive entropy bonus above its target", _of("dapo", **{**adaptive, "entropy_target": 0.1}), note=micro
    )
    for loss in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "vespo"):
        yield Case(f"tool mask, {loss}", _of(loss), with_tools=True)
    yield Case("tool mask, sequence ratio", _of("grpo", importance_sampling_level="sequence"), with_tools=True)
    for loss in ("dapo", "grpo"):
        yield Case(f"mask_truncated_completions, {loss}", _of(loss, mask_truncated_completions=True))


def _batches() -> Iterator[Case]:
    divides = "TRL divides by the tokens of the generation batch, not of the optimizer step"
    for loss in ("dapo", "cispo", "vespo"):
        for accumulation, note in ((1, divides), (4, "")):
            name = f"num_items_in_batch, {loss}, {accumulation} micro-batches a step"
            yield Case(name, _of(loss), accumulation=accumulation, note=note)
    for loss in ("dapo", "cispo"):
        yield Case(f"without old log-probabilities, {loss}", _of(loss), accumulation=4, on_policy=True)
    for scale in ("group", "batch", "none"):
        yield Case(f"scale_rewards={scale}", _of("dapo", scale_rewards=scale))
        note = "" if scale == "group" else f"TRL ignores scale_rewards={scale!r} here"
        summed = _of("dapo", scale_rewards=scale, multi_objective_aggregation="normalize_then_sum")
        yield Case(f"normalize_then_sum, scale_rewards={scale}", summed, note=note)


CASES = tuple(_cases())
"""Every option of TRL that an objective depends on."""


class Rollouts:
    """Input of both sides: lists as an engine returns them, and float64 tensors in place of a model's outputs."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(21)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        shape = (NUM_SEQUENCES, max(LENGTHS))
        self.case = case
        self.logp_old = -normal(*shape).abs() - 0.1
        self.logp = self.logp_old if case.on_policy else self.logp_old + 0.3 * normal(*shape)
        self.logp_ref = self.logp_old + 0.5 * normal(*shape)
        self.logp_sampler = self.logp_old + 0.2 * normal(*shape)
        self.logp_sampler[4, 0] = self.logp_sampler[2, 3] = torch.nan
        self.entropy = (normal(*shape).abs() + 0.05).float().double()  # TRL takes the quantile of float32 entropies
        self.rewards = normal(NUM_SEQUENCES, len(REWARD_WEIGHTS))
        self.rewards[1, 0] = torch.nan
        self.rewards[6] = torch.nan

    def completion_ids(self) -> list[list[int]]:
        """Token ids; every third completion is truncated."""
        return [[5] * (n - 1) + [5 if i % 3 == 0 else EOS] for i, n in enumerate(LENGTHS)]

    def tool_mask(self) -> list[list[int]] | None:
        if not self.case.with_tools:
            return None
        return [[0] * n if i == 3 else [0 if t % 3 == 1 else 1 for t in range(n)] for i, n in enumerate(LENGTHS)]

    def sampler_lists(self) -> list[list[float | None]] | None:
        if not self.case.fields.get("use_vllm", False):
            return None
        lists = [values[:n].tolist() for values, n in zip(self.logp_sampler, LENGTHS, strict=True)]
        return [[None if value != value else value for value in values] for values in lists]

    @cached_property
    def completion_mask(self) -> Tensor:
        return torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]


def against_trl(*, quick: bool = False) -> Iterator[Row]:
    """A row for every case, or for every fifth if ``quick``.

    Raises:
        UnavailableError: TRL is not installed, or older than 1.16.
    """
    try:
        installed = metadata.version("trl")
    except metadata.PackageNotFoundError:
        installed = "none"
    if installed == "none" or Version(installed) < Version("1.16"):
        raise UnavailableError(
            needed="TRL 1.16 or later to compare with", given=installed, remedy="pip install 'logitless[trl]'."
        )
    for case in CASES[::5] if quick else CASES:
        rollouts = Rollouts(case)
        yield row(case.name, "trl", theirs(case, rollouts), ours(case, rollouts), FLOAT64, case.note)


# --- TRL --------------------------------------------------------------------------------------------------------------


def theirs(case: Case, rollouts: Rollouts) -> Measured:
    """Losses and gradients of TRL's code."""
    from trl.trainer.utils import split_tensor_dict

    logp, entropy = (each.clone().requires_grad_() for each in (rollouts.logp, rollouts.entropy))
    trainer = _trainer(case, rollouts)
    reference, current = trainer.ref_model, {"rows": slice(0)}

    def scores(model: object, *_args: Any, compute_entropy: bool = False, **_more: Any) -> tuple[Tensor | None, ...]:
        if model is reference:
            return rollouts.logp_ref, None, None
        if not compute_entropy:
            return rollouts.logp_old, None, None
        return logp[current["rows"]], entropy[current["rows"]], None

    trainer._get_per_token_logps_and_entropies = scores
    with _float64_by_default():  # in float32 TRL's standard deviation is 1e-8 off
        generation_batch = trainer._generate_and_score_completions([{"prompt": "p"}] * NUM_SEQUENCES)
    micro_batches = split_tensor_dict(generation_batch, MICRO_BATCHES)
    losses = []
    for first in range(0, MICRO_BATCHES, case.accumulation):
        step = 0.0
        for index in range(first, first + case.accumulation):
            current["rows"] = slice(index * MICRO_BATCH, (index + 1) * MICRO_BATCH)
            trainer.accelerator.sync_gradients = index == first + case.accumulation - 1
            loss = trainer._compute_loss(trainer.model, micro_batches[index])
            loss.backward()
            step += loss.item()
        losses.append(step)
    return Measured(tuple(losses), _gradients(logp, entropy))


@contextmanager
def _float64_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


_READ = (
    *("loss_type", "importance_sampling_level", "beta", "top_entropy_quantile", "off_policy_mask_threshold"),
    *("use_vllm", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
    *("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"),
    *("max_completion_length", "mask_truncated_completions", "num_iterations", "num_generations"),
    *("scale_rewards", "multi_objective_aggregation", "entropy_coef", "use_adaptive_entropy", "log_multimodal"),
)
"""Settings that the loss reads from the trainer."""


def _trainer(case: Case, rollouts: Rollouts) -> Any:
    """A ``GRPOTrainer`` with the attributes that its loss reads, and no more."""
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        output_dir="parity",
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=MICRO_BATCH,
        num_generations=NUM_GENERATIONS,
        steps_per_generation=MICRO_BATCHES,
        gradient_accumulation_steps=case.accumulation,
        num_iterations=1 if case.on_policy else 2,
        reward_weights=list(REWARD_WEIGHTS),
        max_completion_length=9,
        **case.fields,
    )
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    for name in _READ:
        setattr(trainer, name, getattr(args, name))
    trainer.args = args
    trainer.epsilon_low = args.epsilon
    trainer.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    trainer.model, trainer.ref_model = nn.Module().train(), nn.Module()
    trainer.model.is_gradient_checkpointing = False
    trainer.accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        process_index=0,
        sync_gradients=True,
        gather=lambda value: value,
        gather_for_metrics=lambda value: value,
        pad_across_processes=lambda value, **_: value,
        reduce=lambda value, **_: value,
    )
    trainer.current_gradient_accumulation_steps = case.accumulation
    trainer.num_generations_eval = NUM_GENERATIONS
    trainer.aux_loss_enabled = trainer._is_vlm = False
    trainer._entropy_bonus_enabled = args.entropy_coef != 0 or args.use_adaptive_entropy
    trainer._last_world_entropy, trainer._entropy_window_stats = 0.0, None
    trainer._tokenizer, trainer.eos_token_ids = SimpleNamespace(pad_token_id=PAD), [EOS]
    trainer.environment_factories = trainer.environments = trainer.tools = trainer.pad_to_multiple_of = None
    trainer.reward_weights = torch.tensor(REWARD_WEIGHTS)
    trainer.reward_func_names = [f"reward {i}" for i in range(len(REWARD_WEIGHTS))]
    trainer.reward_funcs = trainer.reward_func_names
    trainer._metrics = {"train": defaultdict(list)}
    trainer._logs = {name: [] for name in ("prompt", "completion", "advantages", "images")}
    trainer._logs |= {"rewards": defaultdict(list), "extra": defaultdict(list)}
    trainer._pending_extra_logs, trainer._pending_metrics = {}, {}
    trainer._calculate_rewards = lambda *_: rollouts.rewards
    ids = rollouts.completion_ids()
    written: tuple[Any, ...] = (rollouts.tool_mask(), ["c"] * NUM_SEQUENCES, rollouts.sampler_lists(), {}, None, None)
    trainer._generate = lambda prompts: ([[7, 8]] * len(prompts), ids, *written)
    return trainer


# --- logitless --------------------------------------------------------------------------------------------------------


def ours(case: Case, rollouts: Rollouts) -> Measured:
    """Losses and gradients of ``presets.trl`` on packed batches."""
    algorithm = trl_preset(**{"max_completion_length": 9, **case.fields})
    bonus = algorithm.objective.entropy_bonus
    controller = None
    if bonus is not None and bonus.adaptive is not None:
        controller = EntropyController(bonus)
        controller.load_state_dict({"coefficient": bonus.coefficient, "last_entropy": 0.0})
    logp, entropy = (each.clone().requires_grad_() for each in (rollouts.logp, rollouts.entropy))
    losses, scales = [], []
    for step in _steps(case, rollouts, algorithm):
        outputs, scale = [], 0.0
        for rows, batch, places in step:
            output = algorithm.objective(
                places.taken_from(logp[rows]),
                places.taken_from(entropy[rows]),
                batch,
                beta=0.0 if algorithm.kl_control is None else algorithm.kl_control.beta,
                entropy_coefficient=None if controller is None else controller.applied,
            )
            output.loss.backward()  # type: ignore[no-untyped-call]
            outputs.append(output)
            scale += float((batch.token_weight * output.token_loss).abs().sum())
        losses.append(sum(each.loss.item() for each in outputs))
        scales.append(scale)
        if controller is not None:
            controller.update(_mean_entropy(outputs))
    return Measured(tuple(losses), _gradients(logp, entropy), tuple(scales))


def _steps(case: Case, rollouts: Rollouts, algorithm: Algorithm) -> Iterator[list[tuple[slice, TokenBatch, Places]]]:
    """For each optimizer step its micro-batches: rows of the rollouts, packed batch, places in the padded one."""
    weighting, advantage = algorithm.weighting, _advantage(algorithm, rollouts)
    tools = rollouts.tool_mask()
    trained = rollouts.completion_mask.clone()
    if tools is not None:
        for i, flags in enumerate(tools):
            trained[i, : len(flags)] &= torch.tensor(flags, dtype=torch.bool)
    counts = tuple(trained.sum(1).tolist())
    truncated = [algorithm.drop_truncated and ids[-1] != EOS for ids in rollouts.completion_ids()]
    over_block = weighting.spans_block
    for first in range(0, NUM_SEQUENCES, MICRO_BATCH * case.accumulation):
        step = slice(first, first + MICRO_BATCH * case.accumulation)
        over = slice(None) if over_block else step
        totals = replace(
            Totals.of(counts[over], truncated[over]),
            num_steps=MICRO_BATCHES / case.accumulation if over_block else 1.0,
            num_micro_batches=case.accumulation,
        )
        micro_batches = []
        for start in range(step.start, step.stop, MICRO_BATCH):
            rows = slice(start, start + MICRO_BATCH)
            dropped = truncated[rows]
            weight = weighting(counts[rows], totals, dropped, dtype=torch.float64)
            batch, places = from_padded(
                trained[rows],
                advantage[rows],
                lambda _, weight=weight: weight,  # type: ignore[misc]
                logp_old=rollouts.logp_old[rows],
                logp_ref=rollouts.logp_ref[rows],
                logp_sampler=rollouts.logp_sampler[rows] if rollouts.sampler_lists() is not None else None,
            )
            if algorithm.objective.entropy_bonus is not None:
                of_step = replace(totals, num_steps=1.0)
                bonus_weight = MicroBatchTokenMean()(counts[rows], of_step, dropped, dtype=torch.float64)
                batch = replace(batch, entropy_weight=bonus_weight)
            micro_batches.append((rows, batch, places))
        yield micro_batches


def _advantage(algorithm: Algorithm, rollouts: Rollouts) -> Tensor:
    group = torch.arange(NUM_PROMPTS).repeat_interleave(NUM_GENERATIONS)
    weights = torch.tensor(REWARD_WEIGHTS, dtype=torch.float64)
    assert algorithm.advantage is not None
    inputs = AdvantageInputs(
        rewards=combine_rewards(rollouts.rewards, weights),
        group=group,
        sequence=torch.arange(len(group)),  # one token a completion gives one advantage a completion
        scores=rollouts.rewards,
        weights=weights,
    )
    return algorithm.advantage(inputs).advantage


def _mean_entropy(outputs: list[ObjectiveOutput]) -> float:
    """Over the tokens of a step that no quantile dropped."""
    kept = [
        each.entropy[each.trained & ~each.dropped.get("top_entropy", torch.zeros_like(each.trained))]
        for each in outputs
        if each.entropy is not None
    ]
    return float(torch.cat(kept).mean())


def _gradients(*leaves: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)

"""TRL's ``GRPOTrainer`` with logitless's head and objective: an existing script changes one import.

    from trl import GRPOTrainer                          # before
    from logitless.integrations.trl import GRPOTrainer   # after

Two things are replaced: log-probs come from ``token_scores``, and ``_compute_loss`` uses the objective that
``presets.trl`` makes from the configuration. Data, generation, vLLM, rewards, advantages, PEFT, FSDP and checkpoints
are TRL's. Loss and gradient equal TRL's; ``GRPOConfig`` here has further options. The router loss of a mixture of
experts is TRL's, from the same pass of the backbone. Not supported: DeepSpeed ZeRO-3, which frees the head's weight
before the backward pass; prompt learning; LM heads that ``verify_lm_head`` does not recognise.
"""

import functools
import json
import logging
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import trl
from torch import Tensor
from torch.torch_version import TorchVersion
from transformers import PreTrainedModel
from trl.trainer.utils import FusedCausalLMOutput, nanmax, nanmin

from logitless.errors import ConfigurationError, UnavailableError
from logitless.head.api import token_scores
from logitless.integrations.padded import Places, from_padded
from logitless.models.lm_head import backbone, causal_lm, lm_head, verify_lm_head
from logitless.objective.algorithm import Algorithm
from logitless.objective.entropy import EntropyController
from logitless.objective.inputs import known
from logitless.objective.kl_control import FixedKL, KLController, LinearKL, ProportionalKL, ZieglerKL
from logitless.objective.objective import ObjectiveOutput
from logitless.objective.presets import trl as trl_preset
from logitless.objective.ratio import SequenceTokenRatio
from logitless.objective.surrogate import Cispo, Clip
from logitless.objective.weighting import MicroBatchTokenMean, Totals
from logitless.types import TokenBatch

logger = logging.getLogger("logitless")

Backend = Literal["auto", "reference", "chunked", "fused"]

_KL_CONTROLS = {"proportional": ProportionalKL, "linear": LinearKL, "ziegler": ZieglerKL}
_KL_STATE = "kl_control_state.json"
_MULTIMODAL = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
    *("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
)


@dataclass
class GRPOConfig(trl.GRPOConfig):
    """TRL's configuration with further options; ``importance_sampling_level`` may be ``sequence_token`` (GSPO-token).

    Args:
        kl_estimator: ``k1``, ``k2`` or ``k3`` (TRL's).
        kl_control: ``fixed``, ``proportional``, ``linear`` or ``ziegler``: how beta follows the KL.
        kl_target: nats a token, for an adaptive ``kl_control``.
        skip_rows: tell the head before the forward pass that completions with advantage 0 have no gradient.
        head_backend: ``auto``, ``reference``, ``chunked`` or ``fused``.

    Example:
        >>> GRPOConfig("out", use_cpu=True, bf16=False, report_to="none", importance_sampling_level="sequence_token",
        ...            beta=0.05, kl_estimator="k2").kl_estimator
        'k2'
    """

    kl_estimator: str = field(default="k3", metadata={"help": "k1, k2 or k3."})
    kl_control: str = field(default="fixed", metadata={"help": "fixed, proportional, linear or ziegler."})
    kl_target: float = field(default=0.05, metadata={"help": "Nats a token that an adaptive kl_control aims at."})
    skip_rows: bool = field(default=False, metadata={"help": "Announce rows without gradient to the head."})
    head_backend: str = field(default="auto", metadata={"help": "auto, reference, chunked or fused."})


def algorithm_of(args: trl.GRPOConfig) -> Algorithm:
    """The algorithm of a configuration: that of ``presets.trl``, with the further options of ``GRPOConfig``.

    Raises:
        ConfigurationError: what ``presets.trl`` raises; an unknown option, or one without effect.

    Example:
        >>> args = GRPOConfig("out", use_cpu=True, bf16=False, report_to="none", beta=0.1, kl_control="proportional")
        >>> algorithm_of(args).kl_control.name
        'proportional'
    """
    levels, needed = ("token", "sequence", "sequence_token"), "importance_sampling_level that this trainer knows"
    token_level = known(args.importance_sampling_level, levels, needed) == "sequence_token"
    # TRL's own callback moves the reference; the router loss stands beside the objective.
    fields: dict[str, Any] = {"sync_ref_model": False, "router_aux_loss_coef": None}
    if token_level:
        fields["importance_sampling_level"] = "sequence"
    found = trl_preset(args, **fields)
    objective, control = found.objective, found.kl_control
    if token_level:
        objective = replace(objective, ratio=SequenceTokenRatio())
    estimator, rule = getattr(args, "kl_estimator", "k3"), getattr(args, "kl_control", "fixed")
    if objective.kl is None and (estimator, rule) != ("k3", "fixed"):
        raise ConfigurationError(
            needed="a KL term, for kl_estimator and kl_control",
            given=f"beta=0.0, kl_estimator={estimator!r}, kl_control={rule!r}",
            remedy="Set beta, or leave them at 'k3' and 'fixed'.",
        )
    if objective.kl is not None:
        objective = replace(objective, kl=replace(objective.kl, estimator=estimator))  # type: ignore[arg-type]
    if rule != "fixed":
        if rule not in _KL_CONTROLS:
            raise ConfigurationError(
                needed="a kl_control 'fixed', 'proportional', 'linear' or 'ziegler'",
                given=repr(rule),
                remedy="Use 'proportional' to hold the KL near kl_target.",
            )
        control = _KL_CONTROLS[rule](beta=args.beta, target=getattr(args, "kl_target", 0.05))
    if getattr(args, "skip_rows", False) and (objective.kl is not None or objective.entropy_bonus is not None):
        raise ConfigurationError(
            needed="a loss without gradient where the advantage is 0, for skip_rows",
            given="a KL term or an entropy bonus, which every row has",
            remedy="Set skip_rows=False; the head finds rows without gradient by itself.",
        )
    return replace(found, objective=objective, kl_control=control)


NAN_ATTENTION = (
    "cuDNN's attention, which torch prefers on this GPU, gives NaN gradients where rows padded on the left are 64, "
    "192, 320, ... tokens long (pytorch issue 196678): call torch.backends.cuda.enable_cudnn_sdp(False) before training"
)


def attention_may_be_nan(model: PreTrainedModel) -> bool:
    """Whether a model's padded rows may go through the backward of cuDNN that ``NAN_ATTENTION`` names.

    Seen with torch 2.11 on an H200; where it is repaired is not known.
    """
    return (
        model.device.type == "cuda"
        and model.config._attn_implementation == "sdpa"
        and torch.cuda.get_device_capability(model.device)[0] == 9
        and torch.__version__ >= TorchVersion("2.11")
        and bool(torch.backends.cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]
    )


class GRPOTrainer(trl.GRPOTrainer):
    """``trl.GRPOTrainer`` that computes its loss through logitless. Same arguments.

    Raises:
        ConfigurationError: see ``algorithm_of``.
        UnavailableError: DeepSpeed ZeRO-3, or a model whose LM head ``verify_lm_head`` does not recognise.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._entropy_window_stats: Tensor | None = None
        self.algorithm = algorithm_of(self.args)
        for note in self.algorithm.notes:
            logger.warning("%s", note)
        if attention_may_be_nan(self.model):
            logger.warning("%s", NAN_ATTENTION)
        plugin = self.accelerator.state.deepspeed_plugin
        if plugin is not None and plugin.zero_stage == 3:
            raise UnavailableError(
                needed="an LM head whose weight stays until the backward pass",
                given="DeepSpeed ZeRO-3",
                remedy="Use FSDP2 or ZeRO-2, or stay with TRL's trainer.",
            )
        self._kl_controller = None if self.algorithm.kl_control is None else KLController(self.algorithm.kl_control)
        self._kl_window: Tensor | None = None
        verify_lm_head(self.model)
        self._head = _Head(
            temperature=self.temperature,
            backend=_backend(getattr(self.args, "head_backend", "auto")),
            in_float32=self.args.cast_lm_head_to_fp32,
        )
        for model in (self.model, self.ref_model):
            if model is not None:
                self._head.install(causal_lm(self.accelerator.unwrap_model(model)))

    def _compute_loss(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        """The loss of one micro-batch, normalised as TRL does: summed over micro-batches, averaged over ranks."""
        mode = "train" if self.model.training else "eval"
        objective = self.algorithm.objective
        if getattr(self.args, "skip_rows", False):
            advantages = inputs["advantages"]
            self._head.live = (advantages != 0) if advantages.dim() == 1 else (advantages != 0).any(1)
        logp, entropy, router_loss = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].size(1),
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
            **{name: inputs.get(name) for name in _MULTIMODAL},
        )
        self._head.live = None
        batch, places = self._token_batch(inputs, logp.detach(), mode)
        entropy = entropy if objective.entropy_bonus is not None else entropy.detach()
        controller = self._entropy_controller()
        output = objective(
            places.taken_from(logp),
            places.taken_from(entropy),
            batch,
            beta=0.0 if self._kl_controller is None else self._kl_controller.beta,
            entropy_coefficient=None if controller is None else controller.applied,
            gather=lambda part: self.accelerator.gather(self.accelerator.pad_across_processes(part)),
        )
        one_ratio = objective.ratio.name != "token"
        self._log_metrics(output, batch, places, mode, one_flag=one_ratio and inputs["advantages"].dim() == 1)
        if mode == "train":
            self._steer(output, controller, batch.num_sequences)
        return output.loss if router_loss is None else output.loss + self._router_term(router_loss, mode)

    def _router_term(self, router_loss: Tensor, mode: str) -> Tensor:
        """TRL's share of one micro-batch: ``router_aux_loss_coef * router_loss``, averaged over those of a step."""
        self._metrics[mode]["aux_loss"].append(self.accelerator.gather_for_metrics(router_loss).mean().item())
        accumulation = self.current_gradient_accumulation_steps if mode == "train" else 1.0
        return self.router_aux_loss_coef * router_loss / accumulation

    def _token_batch(self, inputs: Mapping[str, Any], logp: Tensor, mode: str) -> tuple[TokenBatch, Places]:
        """The packed micro-batch; in training its weights are those of one micro-batch of many."""
        weighting = self.algorithm.weighting
        batch, places = from_padded(
            inputs["completion_mask"],
            inputs["advantages"],
            lambda counts: weighting(counts, self._totals(counts, inputs, mode)),
            tool_mask=inputs.get("tool_mask"),
            logp_old=inputs.get("old_per_token_logps", logp),
            logp_sampler=inputs.get("sampling_per_token_logps"),
            logp_ref=inputs.get("ref_per_token_logps"),
        )
        if self.algorithm.objective.entropy_bonus is not None:
            counts = tuple(torch.bincount(batch.sequence, minlength=batch.num_sequences).tolist())
            totals = replace(self._totals(counts, inputs, mode), num_steps=1.0)
            batch = replace(batch, entropy_weight=MicroBatchTokenMean()(counts, totals).to(logp.device))
        return batch, places

    def _totals(self, counts: tuple[int, ...], inputs: Mapping[str, Any], mode: str) -> Totals:
        """TRL's divisors: this micro-batch times the micro-batches of a step, or the tokens of the generation batch."""
        accumulation = self.current_gradient_accumulation_steps if mode == "train" else 1
        if not self.algorithm.weighting.spans_block:
            return Totals(sum(counts) * accumulation, len(counts) * accumulation, num_micro_batches=accumulation)
        num_steps = self.args.steps_per_generation / accumulation if mode == "train" else 1.0
        return Totals(
            max(int(inputs["num_items_in_batch"]), 1),
            len(counts) * accumulation,
            num_steps=num_steps * self.accelerator.num_processes,
            num_micro_batches=accumulation,
        )

    def _entropy_controller(self) -> EntropyController | None:
        """The controller of an adaptive bonus, with the state from TRL's attributes, which its checkpoints hold."""
        bonus = self.algorithm.objective.entropy_bonus
        if bonus is None or bonus.adaptive is None:
            return None
        controller = EntropyController(bonus)
        controller.load_state_dict({"coefficient": self.entropy_coef, "last_entropy": self._last_world_entropy})
        return controller

    def _steer(self, output: ObjectiveOutput, controller: EntropyController | None, num_sequences: int) -> None:
        """Update beta and the entropy coefficient after the last micro-batch of a step."""
        if controller is not None and output.entropy is not None:
            kept = output.trained & ~output.dropped.get("top_entropy", torch.zeros_like(output.trained))
            seen = torch.stack([output.entropy[kept].sum(), kept.sum().float()])
            self._entropy_window_stats = _added(self._entropy_window_stats, seen)
            if self.accelerator.sync_gradients:
                total, count = self.accelerator.reduce(self._entropy_window_stats, reduction="sum").tolist()
                controller.update(total / max(count, 1.0))
                self.entropy_coef, self._last_world_entropy = controller.coefficient, controller.last_entropy
                self._entropy_window_stats = None
        if self.algorithm.objective.entropy_bonus is not None and self.accelerator.sync_gradients:
            self._metrics["train"]["entropy_coef"].append(self.entropy_coef)
        beta = self._kl_controller
        if beta is not None and not isinstance(beta.control, FixedKL) and output.kl is not None:
            number = output.kl.new_tensor(float(num_sequences))
            seen = torch.stack([output.kl.sum(), output.trained.sum().to(number), number])
            self._kl_window = _added(self._kl_window, seen)
            if self.accelerator.sync_gradients:
                total, count, completions = self.accelerator.reduce(self._kl_window, reduction="sum").tolist()
                beta.update(total / max(count, 1.0), int(completions))
                self._metrics["train"]["beta"].append(beta.beta)
                self._kl_window = None

    def _log_metrics(
        self, output: ObjectiveOutput, batch: TokenBatch, places: Places, mode: str, *, one_flag: bool
    ) -> None:
        """TRL's own metrics but ``vespo/phi_seq_mean``, from the objective's tensors.

        Args:
            one_flag: whether all tokens of a sequence have the same ratio and advantage.
        """
        metrics = self._metrics[mode]

        def token_mean(values: Tensor) -> float:
            return self._mean(values.sum(), output.trained.sum().float())

        if output.kl is not None:
            metrics["kl"].append(token_mean(output.kl))
        if output.entropy is not None:
            metrics["entropy"].append(token_mean(output.entropy))
        if self.algorithm.objective.entropy_bonus is not None:
            policy_loss = (batch.token_weight * output.token_loss).sum()
            of_step = mode == "train" and not self.algorithm.weighting.spans_block
            per_step = self.current_gradient_accumulation_steps if of_step else 1
            metrics["policy_loss"].append(self.accelerator.gather(policy_loss * per_step).nanmean().item())
        surrogate = self.algorithm.objective.surrogate
        if output.log_ratio is None or not isinstance(surrogate, Clip | Cispo):
            return

        counts = places.scatter_back(output.trained.float()).sum(1)

        def of_sequences(flags: Tensor) -> Tensor:
            # With one ratio and one advantage a sequence, TRL counts an empty sequence as not clipped.
            return places.scatter_back(flags.float()).sum(1) / (counts.clamp(min=1.0) if one_flag else counts)

        def mean(flags: Tensor) -> float:
            if not one_flag:
                return token_mean(flags.float())
            return self._mean(of_sequences(flags).sum(), counts.new_tensor(float(len(counts))))

        # TRL bounds the ratio by delta before it is compared: a delta below 1 + epsilon_high hides the upper clip.
        ratio, delta = output.log_ratio.exp(), self.args.delta
        if isinstance(surrogate, Cispo):
            metrics["cispo_clip_ratio"].append(mean((ratio > self.epsilon_high) & (output.advantage > 0)))
            return
        ratio = ratio if delta is None else ratio.clamp(max=delta)
        low = (ratio < 1 - self.epsilon_low) & (output.advantage < 0)
        high = (ratio > 1 + self.epsilon_high) & (output.advantage > 0)
        for name, flags in (("low_mean", low), ("high_mean", high), ("region_mean", low | high)):
            metrics[f"clip_ratio/{name}"].append(mean(flags))
        metrics["clip_ratio/low_min"].append(nanmin(self.accelerator.gather(of_sequences(low))).item())
        metrics["clip_ratio/high_max"].append(nanmax(self.accelerator.gather(of_sequences(high))).item())

    def _mean(self, total: Tensor, count: Tensor) -> float:
        """Over the values of every rank."""
        totals = self.accelerator.reduce(torch.stack([total, count]), reduction="sum")
        return (totals[0] / totals[1].clamp(min=1.0)).item()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self._kl_controller is not None and self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            (folder / _KL_STATE).write_text(json.dumps(self._kl_controller.state_dict()))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self._kl_controller is not None and checkpoint is not None:
            path = Path(checkpoint) / _KL_STATE
            if path.exists():  # a checkpoint of TRL's own trainer has none
                self._kl_controller.load_state_dict(json.loads(path.read_text()))


@dataclass
class _Head:
    """Replaces the forward that TRL installs for ``fused_lm_head=True``.

    Args:
        temperature: divides the logits.
        backend: of ``token_scores``.
        in_float32: compute in float32 whatever the dtype of the hidden states.
        live: one flag for each sequence of the next call: False if none of its tokens has a gradient.
    """

    temperature: float
    backend: Backend
    in_float32: bool
    live: Tensor | None = None

    def install(self, model: PreTrainedModel) -> None:
        """Wrap the model's forward; calls without ``fused_lm_head=True`` stay as they are."""
        before, head = model.forward, self

        @functools.wraps(type(model).forward)
        def forward(self: PreTrainedModel, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
            return head.scored(self, *args, **kwargs) if fused_lm_head else before(*args, **kwargs)

        model.forward = types.MethodType(forward, model)

    def scored(self, model: PreTrainedModel, *args: Any, labels: Tensor, **kwargs: Any) -> FusedCausalLMOutput:
        """Log-probabilities and entropies [B, T - 1] of the labels that are not -100, 0 elsewhere."""
        output = backbone(model)(*args, use_cache=False, **kwargs)
        hidden, lm = output.last_hidden_state[:, :-1], lm_head(model)
        hidden, labels = hidden.to(lm.weight.device), labels[:, 1:].to(lm.weight.device)
        scored = labels != -100
        rows, device = hidden[scored], hidden.device.type
        if self.in_float32:
            rows = rows.float()
        elif torch.is_autocast_enabled(device):
            rows = rows.to(torch.get_autocast_dtype(device))
        nonzero = None if self.live is None else self.live[:, None].expand_as(scored)[scored]
        target = labels[scored]
        scores = token_scores(rows, lm, target, temperature=self.temperature, backend=self.backend, nonzero=nonzero)
        padded = [each.new_zeros(scored.shape).masked_scatter(scored, each) for each in (scores.logp, scores.entropy)]
        router_loss = None
        if kwargs.get("output_router_logits"):
            router_loss = _router_loss(model, output.router_logits, kwargs.get("attention_mask"))
        return FusedCausalLMOutput(log_probs=padded[0], entropy=padded[1], label_mask=scored, aux_loss=router_loss)


def _router_loss(model: PreTrainedModel, router_logits: tuple[Tensor, ...], mask: Tensor | None) -> Tensor:
    """The load-balancing loss of transformers, over prompt and completion, padding left out.

    Source: Fedus et al. 2021 (Switch Transformer), equations 4 to 6; transformers has one copy for every family.
    """
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    config: Any = model.config.get_text_config()
    return load_balancing_loss_func(router_logits, config.num_experts, config.num_experts_per_tok, mask)


def _added(window: Tensor | None, seen: Tensor) -> Tensor:
    return seen if window is None else window + seen


def _backend(name: str) -> Backend:
    if name not in get_args(Backend):
        raise ConfigurationError(
            needed="a head_backend 'auto', 'reference', 'chunked' or 'fused'",
            given=repr(name),
            remedy="Use 'auto' unless you compare backends.",
        )
    return name  # type: ignore[return-value]

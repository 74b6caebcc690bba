"""One base model and the adapters that clients train on it.

The model has one slot for each shape of adapter (rank and adapted parts): a PEFT adapter whose factors are overwritten
by those of the client whose request runs. An ``Adapter`` holds a client's factors, gradients and Adam's state outside
of the model, so that nothing of one client is in another's pass, and adapters of one shape share kernels and CUDA
graphs.

Log-probs of ``sample`` are bitwise those of ``forward``. Where the engine is exact they are the engine's. Elsewhere the
trainer scores what was sampled, and passes of both are over one sequence each, whose bits no other sequence can change.

One thread at a time calls this.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from logitless.data.packing import Packing, pack
from logitless.errors import InputError, TrainingError, UnavailableError
from logitless.models.lm_head import causal_lm, is_peft
from logitless.models.loading import check_vocabulary, disable_dropout, load_model
from logitless.models.lora import LoraOptions, adapters_off, add_adapter
from logitless.models.lora_targets import expert_weights
from logitless.rollout.engine import Engine, ExactEngine
from logitless.rollout.sampling import SamplingOptions
from logitless.rollout.transformers import TransformersEngine
from logitless.tinker.losses import checked_config, token_losses
from logitless.tinker.wire import AdamParams, ForwardBackward, LoraConfig, Sampled
from logitless.train.assembly.layers import against_row_invariant, in_words, no_row_invariant
from logitless.train.learn.policy import Policy
from logitless.train.optim.optimizer import automatic_implementation, take_step
from logitless.train.recipe.model import LoraSection, ModelSection
from logitless.types import Completion, Prompt

logger = logging.getLogger("logitless")

ALPHA = 32.0
"""LoRA's alpha in the service: the product of the factors is multiplied by 32 / rank."""


@dataclass(frozen=True)
class Shape:
    """What adapters of one slot have in common."""

    rank: int
    attention: bool
    mlp: bool
    unembed: bool

    @classmethod
    def of(cls, config: LoraConfig) -> "Shape":
        """Of a request."""
        return cls(config.rank, config.train_attn, config.train_mlp, config.train_unembed)

    @property
    def name(self) -> str:
        """Of the PEFT adapter."""
        parts = {"attention": self.attention, "mlp": self.mlp, "unembed": self.unembed}
        return "_".join([f"rank{self.rank}", *(part for part, has in parts.items() if has)])


_versions = count(1)


@dataclass
class Adapter:
    """A client's adapter.

    Args:
        shape: of its slot.
        weights: float32 factors, in the order of the slot's parameters.
        version: changes whenever the weights do; no two adapters share one.
        optimizer: Adam's state; None before the first step.
        broken: why the gradients so far are incomplete; empty if they are not.
    """

    shape: Shape
    weights: list[nn.Parameter]
    version: int = field(default_factory=lambda: next(_versions))
    optimizer: torch.optim.AdamW | None = None
    broken: str = ""

    def snapshot(self) -> "Snapshot":
        """A copy of the weights in host memory."""
        return Snapshot(self.shape, [w.detach().to("cpu", copy=True) for w in self.weights], self.version)


@dataclass(frozen=True)
class Snapshot:
    """Weights of an adapter as they were.

    Args:
        shape: of its slot.
        weights: float32, in host memory.
        version: of the adapter; negative for one that was read from a file.
        names: of the weights; empty: they are in the slot's order.
    """

    shape: Shape
    weights: list[Tensor]
    version: int
    names: tuple[str, ...] = ()


@dataclass
class _Slot:
    """A PEFT adapter in the model, and whose factors it holds."""

    names: list[str]
    parameters: list[nn.Parameter]
    engine: Engine
    holds: int = 0

    def ordered(self, named: Mapping[str, Tensor]) -> list[Tensor]:
        """Saved tensors, one for each parameter.

        Raises:
            InputError: other names or shapes.
        """
        wanted = {name: tuple(parameter.shape) for name, parameter in zip(self.names, self.parameters, strict=True)}
        given = {name: tuple(tensor.shape) for name, tensor in named.items()}
        if wrong := sorted(name for name in wanted.keys() | given.keys() if wanted.get(name) != given.get(name)):
            raise InputError(
                needed=f"{wrong[0]} of shape {wanted.get(wrong[0])}, for an adapter of this base model",
                given=f"shape {given.get(wrong[0])}; {len(wrong)} tensors differ",
                remedy="Load a checkpoint that was saved with the same model.",
            )
        return [named[name] for name in self.names]


@dataclass(frozen=True)
class Request:
    """One prompt to complete.

    Args:
        id: names its random numbers together with ``seed``.
        tokens: of the prompt.
        num_samples, options, seed: of sampling.
        scores_prompt: whether the prompt's log-probs are wanted.
        scores_last: of its last tokens alone; None for all.
    """

    id: str
    tokens: tuple[int, ...]
    num_samples: int
    options: SamplingOptions
    seed: int
    scores_prompt: bool = False
    scores_last: int | None = None

    @property
    def shared(self) -> tuple[Any, ...]:
        """What requests of one call of the engine have in common."""
        return self.num_samples, self.options, self.seed


class Trainer:
    """Trains and samples adapters of one base model.

    Args:
        model: a transformers causal LM without adapters, on its device.
        tokenizer: decodes, and says which token ends a completion.
        row_invariant: whether to install row-invariant layers.
        tokens_per_row: the most tokens of a packed row; a longer sequence has a row of its own.
        memory: bytes for keys and values while sampling on a GPU; None takes half of what is free.
        max_rows: completions decoded at once.

    Raises:
        UnavailableError: a mixture of experts.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        row_invariant: bool,
        tokens_per_row: int = 8192,
        memory: int | None = None,
        max_rows: int = 512,
    ) -> None:
        if expert_weights(model):
            raise UnavailableError(
                needed="a dense model",
                given="a mixture of experts, whose adapters PEFT does not hold side by side",
                remedy="Train it with `logitless train`.",
            )
        self.model, self.tokenizer, self.row_invariant = model.requires_grad_(False), tokenizer, row_invariant
        self.tokens_per_row, self.memory, self.max_rows = tokens_per_row, memory, max_rows
        config = causal_lm(model).config.get_text_config()
        self.vocabulary: int = config.vocab_size
        self.limit: int | None = getattr(config, "max_position_embeddings", None)
        self.device = next(model.parameters()).device
        self._targets = _parts_of(model)
        self._slots: dict[Shape, _Slot] = {}
        self._installation: Any = None
        self._policy: Policy | None = None
        self._base_engine: Engine = self._install()

    # --- slots

    def _install(self) -> Engine:
        """Give the model its layers, and forget what was made for the layers before; returns the base's engine."""
        if self.row_invariant:
            from logitless.models.row_invariant.layers import install_row_invariant
            from logitless.models.row_invariant.self_check import self_check

            self._installation = install_row_invariant(self.model)
            if self.device.type == "cuda" and not self._slots and not self_check(self.model).exact:
                logger.warning("layers: transformers' own, for attention does not keep its bits on this GPU")
                self._installation.remove()
                self._installation, self.row_invariant = None, False
        self._policy = None
        for slot in self._slots.values():
            slot.engine = self._engine()
        self._base_engine = self._engine()
        return self._base_engine

    def _engine(self) -> Engine:
        if self.row_invariant:
            from logitless.rollout.gpu.engine import GpuEngine  # needs Triton

            return GpuEngine(self.model, self.tokenizer, memory=self.memory, max_rows=self.max_rows)
        return TransformersEngine(self.model, self.tokenizer, max_rows=self.max_rows)

    @property
    def policy(self) -> Policy:
        """The model with the adapter that is in force."""
        if self._policy is None:
            self._policy = Policy(self.model, share_prompts=self.row_invariant)
        return self._policy

    def _slot(self, shape: Shape) -> _Slot:
        if shape not in self._slots:
            targets = [end for part, ends in self._targets.items() if getattr(shape, part) for end in ends]
            options = LoraOptions(rank=shape.rank, alpha=ALPHA, targets=tuple(targets))
            if self._installation is not None:
                self._installation.remove()
            try:
                self.model = add_adapter(self.model, options, name=shape.name).train()
                own = [(n, p) for n, p in self.model.named_parameters() if f".{shape.name}." in n]
                names = [name.replace(f".{shape.name}.", ".") for name, _ in own]
                self._slots[shape] = _Slot(names, [p for _, p in own], self._base_engine)
            except Exception:
                if self._slots and shape.name in self.model.peft_config:  # type: ignore[operator]
                    self.model.set_adapter(next(iter(self._slots)).name)  # type: ignore[operator]
                    self.model.delete_adapter(shape.name)  # type: ignore[operator]
                raise
            finally:
                self._install()
        slot = self._slots[shape]
        if self.model.active_adapter != shape.name:  # type: ignore[union-attr]
            self.model.set_adapter(shape.name)  # type: ignore[operator]
        return slot

    def _in_force(self, adapter: Adapter | Snapshot) -> _Slot:
        """The slot of an adapter, with its weights."""
        slot = self._slot(adapter.shape)
        if slot.holds != adapter.version:
            weights = [weight.detach() for weight in adapter.weights]
            if isinstance(adapter, Snapshot) and adapter.names:
                weights = slot.ordered(dict(zip(adapter.names, weights, strict=True)))
            slot.holds = 0  # of nobody, if it fails midway
            with torch.no_grad():
                torch._foreach_copy_([*slot.parameters], weights)
            slot.holds = adapter.version
        return slot

    def names(self, shape: Shape) -> list[str]:
        """Names of an adapter's weights, as PEFT's files have them."""
        return self._slot(shape).names

    def peft_config(self, shape: Shape) -> Any:
        """PEFT's configuration of an adapter."""
        self._slot(shape)
        return self.model.peft_config[shape.name]  # type: ignore[union-attr, index]

    # --- adapters

    def create(self, shape: Shape, *, seed: int) -> Adapter:
        """A fresh adapter, which changes nothing: A is uniform as in PEFT, B is 0.

        Args:
            shape: of it.
            seed: of the A factors.
        """
        slot, weights = self._slot(shape), []
        generator = torch.Generator().manual_seed(seed % 2**63)
        for name, parameter in zip(slot.names, slot.parameters, strict=True):
            fresh = torch.zeros(parameter.shape)
            if ".lora_A." in name:
                nn.init.kaiming_uniform_(fresh, a=5**0.5, generator=generator)
            weights.append(nn.Parameter(fresh.to(self.device)))
        return Adapter(shape, weights)

    def loaded(self, shape: Shape, tensors: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> Adapter:
        """An adapter of saved tensors.

        Args:
            shape: of it.
            tensors: factors by name.
            state: of ``optimizer_state``; empty for a fresh optimizer.

        Raises:
            InputError: tensors of another model.
        """
        slot = self._slot(shape)
        adapter = Adapter(shape, [nn.Parameter(t.to(self.device, copy=True)) for t in slot.ordered(tensors)])
        if state:
            optimizer = self._optimizer(adapter)
            ends = {key: f".{key}" for key in ("exp_avg", "exp_avg_sq")}
            saved = {
                key: slot.ordered({n.removesuffix(end): t for n, t in state.items() if n.endswith(end)})
                for key, end in ends.items()
            }
            for index, weight in enumerate(adapter.weights):
                moments = {key: kept[index].to(self.device, copy=True) for key, kept in saved.items()}
                on_device = automatic_implementation(self.device) == "fused"
                step = state["step"].to(self.device if on_device else "cpu", copy=True)
                optimizer.state[weight] = {"step": step, **moments}
        return adapter

    def tensors(self, adapter: Adapter) -> dict[str, Tensor]:
        """The factors by name, in host memory."""
        return dict(zip(self.names(adapter.shape), adapter.snapshot().weights, strict=True))

    def optimizer_state(self, adapter: Adapter) -> dict[str, Tensor]:
        """Adam's state by name, in host memory; empty before the first step."""
        found: dict[str, Tensor] = {}
        if adapter.optimizer is None or not adapter.optimizer.state:
            return found
        for name, weight in zip(self.names(adapter.shape), adapter.weights, strict=True):
            state = adapter.optimizer.state[weight]
            found["step"] = state["step"].detach().cpu()
            found |= {f"{name}.{key}": state[key].detach().cpu() for key in ("exp_avg", "exp_avg_sq")}
        return found

    def _optimizer(self, adapter: Adapter) -> torch.optim.AdamW:
        if adapter.optimizer is None:
            chosen = automatic_implementation(self.device)
            adapter.optimizer = torch.optim.AdamW(adapter.weights, foreach=chosen == "foreach", fused=chosen == "fused")
        return adapter.optimizer

    # --- training

    def forward_backward(
        self, adapter: Adapter, request: ForwardBackward
    ) -> tuple[list[dict[str, np.ndarray]], dict[str, float]]:
        """Log-probs and losses of each datum; adds the gradient of the summed loss to the adapter's.

        Returns:
            ``logprobs`` of each datum (and ``elementwise_loss`` of cross_entropy) in the shape of its targets, and
            metrics.

        Raises:
            InputError: of ``checked_config``.
        """
        config = checked_config(request.loss, request.config)
        slot = self._in_force(adapter)
        columns = [(d, k) for d, datum in enumerate(request.data) for k in range(datum.targets.shape[1])]
        batch = _packed([(request.data[d].tokens, request.data[d].targets[:, k]) for d, k in columns])
        logp = [np.zeros(datum.targets.shape, np.float32) for datum in request.data]
        losses = [np.zeros_like(each) for each in logp]
        if not request.forward_only:
            for parameter, weight in zip(slot.parameters, adapter.weights, strict=True):
                parameter.grad = weight.grad
        try:
            with torch.set_grad_enabled(not request.forward_only):
                for row in self._rows(batch):
                    parts = [columns[s] for s in row]
                    scores = self.policy.scores(batch.take(row), temperature=1.0, backend="auto").logp
                    inputs = {
                        name: torch.from_numpy(
                            np.concatenate([request.data[d].inputs[name][:, k] for d, k in parts])
                        ).to(scores.device)
                        for name in request.data[0].inputs
                    }
                    lengths = [len(request.data[d].tokens) for d, _ in parts]
                    loss = token_losses(request.loss, config, scores, inputs, lengths)
                    if not request.forward_only:
                        loss.sum().backward()  # type: ignore[no-untyped-call]
                    for values, into in ((scores, logp), (loss, losses)):
                        pieces = torch.split(values.detach().float().cpu(), lengths)
                        for (d, k), piece in zip(parts, pieces, strict=True):
                            into[d][:, k] = piece.numpy()
            if not request.forward_only:
                for parameter, weight in zip(slot.parameters, adapter.weights, strict=True):
                    weight.grad = parameter.grad
        finally:
            for parameter in slot.parameters:
                parameter.grad = None
        total = float(sum(each.astype(np.float64).sum() for each in losses))
        shaped = [(each, datum) for each, datum in zip(logp, request.data, strict=True)]
        outputs = [{"logprobs": each[:, 0] if datum.is_flat else each} for each, datum in shaped]
        if request.loss == "cross_entropy":
            for output, each, datum in zip(outputs, losses, request.data, strict=True):
                output["elementwise_loss"] = each[:, 0] if datum.is_flat else each
        return outputs, {"loss:sum": total, "num_tokens:sum": float(request.num_tokens)}

    def _rows(self, batch: Any) -> Sequence[Sequence[int]]:
        """Packed rows; where layers are not row-invariant, one sequence each."""
        sequences = range(len(batch.inputs.lengths))
        if not self.exact:
            return [(s,) for s in sequences]
        limit = max(self.tokens_per_row, *batch.inputs.lengths)
        return Packing(limit, self.policy.shares_prompts, self.policy.hidden_size).rows(sequences, batch.inputs)

    @property
    def exact(self) -> bool:
        """Whether the engine's log-probs are bitwise identical to the trainer's."""
        engine = self._base_engine
        return isinstance(engine, ExactEngine) and engine.exact

    def optim_step(self, adapter: Adapter, params: AdamParams) -> dict[str, float]:
        """One step of AdamW with the gradients so far, which are then 0; returns metrics.

        Raises:
            TrainingError: a request that adds to the gradient failed, or it is not finite; weights and moments stay.
        """
        broken, adapter.broken = adapter.broken, ""
        if broken:
            for weight in adapter.weights:
                weight.grad = None
            raise TrainingError(
                needed="the whole gradient of the step",
                given=f"a part that failed ({broken})",
                remedy="Send the step's data again: its gradients were dropped.",
            )
        optimizer = self._optimizer(adapter)
        for group in optimizer.param_groups:
            group |= {"betas": (params.beta1, params.beta2), "eps": params.eps, "weight_decay": params.weight_decay}
        adapter.version = next(_versions)  # before the step, which may fail midway
        try:
            for weight in adapter.weights:
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
            norm, taken = take_step(optimizer, rate=params.learning_rate, max_grad_norm=params.grad_clip_norm or None)
        finally:
            for weight in adapter.weights:
                weight.grad = None
        if not taken:
            raise TrainingError(
                needed="a finite gradient",
                given=f"norm {float(norm)}",
                remedy="The step was left out: weights and moments are as before, gradients are dropped.",
            )
        return {"grad_norm:mean": float(norm)}

    # --- sampling

    def sample(
        self, weights: Adapter | Snapshot | None, requests: Sequence[Request]
    ) -> list[tuple[list[Sampled], np.ndarray | None]]:
        """Samples of each request, and log-probs of its prompt [L] if it wants them, NaN first.

        Log-probs are of the softmax at the temperature, before top-k and top-p; at temperature 0 of that at 1.

        Args:
            weights: None for the base model.
            requests: with distinct ids, alike in what ``Request.shared`` names.
        """
        num_samples, options, seed = requests[0].shared
        off = weights is None and is_peft(self.model)
        engine = self._base_engine if weights is None else self._in_force(weights).engine
        prompts = [Prompt(each.id, "", each.tokens) for each in requests]
        with adapters_off(self.model) if off else nullcontext(), torch.no_grad():
            groups = engine.sample(prompts, num_samples, options, seed=seed)
            scores = self._prompt_logprobs([request for request in requests if request.scores_prompt])
            temperature = options.temperature or 1.0
            return [
                ([self._sampled(prompt, each, temperature) for each in group], scores.get(prompt.id))
                for prompt, group in zip(prompts, groups, strict=True)
            ]

    def _sampled(self, prompt: Prompt, completion: Completion, temperature: float) -> Sampled:
        logp = completion.logp_sampler if completion.logp_policy is None else completion.logp_policy
        if not self.exact or logp is None or np.isnan(logp).any():
            logp = self._scored(pack([(prompt, completion)]), temperature)
        return Sampled(completion.token_ids, logp, completion.finish_reason == "stop")

    def _prompt_logprobs(self, requests: Sequence[Request]) -> dict[str, np.ndarray]:
        """Of each prompt, by the request's id."""
        found = {request.id: np.full(len(request.tokens), np.nan, np.float32) for request in requests}
        longer = [(request, np.array(request.tokens)) for request in requests if len(request.tokens) > 1]
        if longer:
            batch = _packed([(ids[:-1], ids[1:]) for _, ids in longer])
            for row in self._rows(batch):
                lengths = [len(longer[s][1]) - 1 for s in row]
                scored = np.split(self._scored(batch.take(row), 1.0), np.cumsum(lengths)[:-1])
                for s, logp in zip(row, scored, strict=True):
                    request, ids = longer[s]
                    first = 1 if request.scores_last is None else len(ids) - request.scores_last
                    found[request.id][first:] = logp[first - 1 :]
        return found

    def _scored(self, batch: Any, temperature: float) -> np.ndarray:
        # Not in evaluation mode: what is compared with this, `forward`, is not either.
        scores = self.policy.scores(batch, temperature=temperature, backend="auto").logp
        return scores.float().cpu().numpy()


def _packed(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> Any:
    """Pairs of tokens and targets [L], already shifted, as a batch that scores every position."""
    read = [(Prompt("", "", tokens[:1]), Completion("", np.append(tokens[1:], 0), "", "length")) for tokens, _ in pairs]
    return replace(pack(read), target=torch.from_numpy(np.concatenate([targets for _, targets in pairs])))


def _parts_of(model: nn.Module) -> dict[str, list[str]]:
    """Ends of the names of linear modules: in attention (and other mixers), in MLPs, and the LM head."""
    inner = causal_lm(model)
    head = inner.get_output_embeddings()
    parts: dict[str, list[str]] = {"attention": [], "mlp": [], "unembed": []}
    for name, module in inner.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        words = name.split(".")
        in_mlp = any("mlp" in word or word in ("feed_forward", "ffn") for word in words[:-1])
        part = "unembed" if module is head else "mlp" if in_mlp else "attention"
        end = words[-1] if part == "unembed" else ".".join(words[-2:])
        if end not in parts[part]:
            parts[part].append(end)
    return parts


def open_trainer(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    device: torch.device,
    dtype: str,
    layers: str,
    **options: Any,
) -> tuple[Trainer, str]:
    """A trainer of a model that is loaded, and which layers it has and why, in words.

    Args:
        source: hub name or folder.
        tokenizer: of the model.
        device: for the model.
        dtype: of its weights.
        layers: ``auto``, ``row_invariant`` or ``transformers``.
        options: of ``Trainer``.

    Raises:
        ConfigurationError, UnavailableError: the model cannot be loaded, or not get the layers that were named.
    """
    model = load_model(source, dtype=getattr(torch, dtype), device=device)
    check_vocabulary(model, tokenizer)
    disable_dropout(model)
    section = ModelSection(source=source, lora=LoraSection(), dtype=dtype, layers=layers)
    reason = "layers: transformers" if layers == "transformers" else in_words(against_row_invariant(section, model))
    if reason and layers == "row_invariant":
        raise no_row_invariant(reason)
    trainer = Trainer(model, tokenizer, row_invariant=not reason, **options)
    if not reason:
        return trainer, "row-invariant: log-probs of sampling and training are bitwise identical"
    return trainer, f"transformers' own ({reason}); the trainer scores what was sampled"

"""One base model and the adapters that clients train on it.

An ``Adapter`` holds a client's factors, gradients and Adam's state. The base is shared and never merged: a pass is told
which adapter each of its rows has.

- With row-invariant layers a pass is over the packed rows of several clients, and a batch of sampling over their
  sequences (``models/row_invariant/adapters.py``); tokens, log-probs and gradients are bitwise those of each alone.
- With transformers' layers a pass is over one sequence, whose bits no other can change, and clients take turns.

Log-probs of ``sample`` are bitwise those of ``forward``: the engine's where it is exact, else the trainer's scores of
what was sampled.

One thread at a time calls this.
"""

import logging
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from logitless.data.packing import Packing, pack, share_prompts
from logitless.errors import InputError, TrainingError, UnavailableError
from logitless.head import likeliest_tokens, token_scores
from logitless.models.delta_gradients import check_delta_gradients
from logitless.models.lm_head import backbone_hidden, causal_lm, lm_head
from logitless.models.loading import check_vocabulary, disable_dropout, load_model
from logitless.models.lora_targets import expert_weights
from logitless.models.repeated_rows import RepeatedRows
from logitless.rollout.engine import Engine, is_exact
from logitless.rollout.transformers import TransformersEngine
from logitless.tinker.adapter import ALPHA, Adapter, Shape, Snapshot, Weights, version_of
from logitless.tinker.samples import Request
from logitless.tinker.wire import NO_TOKEN, NO_TOKENS, AdamParams, ForwardBackward, PromptScores, Sampled, Top
from logitless.tinker.work import Trained, Work, packed
from logitless.train.assembly.layers import against_row_invariant, in_words, no_row_invariant
from logitless.train.optim.optimizer import automatic_implementation, take_step
from logitless.train.recipe.model import LoraSection, ModelSection
from logitless.transfer import sent
from logitless.types import Completion, LMHead, PackedBatch, PackedInputs, Prompt, PromptGroup, SharedInputs

logger = logging.getLogger("logitless")

TOGETHER = 8
"""The most adapters in a batch of sampling; fewer where their factors would take a quarter of the memory."""

HELD_BYTES = 16
"""Of a number of an adapter on the device: itself, its gradient and Adam's moments, float32."""

Factors = Mapping[nn.Module, tuple[Tensor, Tensor]]
"""A and B by linear module."""


class Trainer:
    """Trains and samples adapters of one base model.

    Args:
        model: a transformers causal LM without adapters, on its device.
        tokenizer: decodes, and says which token ends a completion.
        row_invariant: whether to install row-invariant layers.
        tokens_per_row: the most tokens of a pass; a longer sequence has a pass of its own.
        memory: bytes for adapters, and for keys and values while sampling; None takes half of what is free on a GPU,
            and any on a CPU.
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
                given="a mixture of experts, whose adapters cannot lie side by side",
                remedy="Train it with `logitless train`.",
            )
        self.model, self.tokenizer, self.row_invariant = model.requires_grad_(False).train(), tokenizer, row_invariant
        self.tokens_per_row, self.memory, self.max_rows = tokens_per_row, memory, max_rows
        config = causal_lm(model).config.get_text_config()
        self.vocabulary: int = config.vocab_size
        self.limit: int | None = getattr(config, "max_position_embeddings", None)
        self.device = next(model.parameters()).device
        self._head: Any = causal_lm(model).get_output_embeddings()
        self._parts = _parts_of(model)
        self._adapters = weakref.WeakSet[Adapter]()
        self._places: OrderedDict[int, int] = OrderedDict()  # of versions in the stack, the one used last at the end
        self._installation: Any = self._install() if row_invariant else None
        self._stack: Any = None
        self._stack_keeps_bits, self._spans_keep_bits = True, self.row_invariant and self._divisible()
        free = torch.cuda.mem_get_info(self.device)[0] // 2 if self.device.type == "cuda" else None
        self.budget = free if memory is None else memory
        self._engine: Any = self._new_engine()

    def _install(self) -> Any:
        from logitless.models.row_invariant.layers import install_row_invariant
        from logitless.models.row_invariant.self_check import self_check

        installation = install_row_invariant(self.model)
        if self.device.type == "cuda" and not self_check(self.model).exact:
            logger.warning("layers: transformers' own, for attention does not keep its bits on this GPU")
            installation.remove()
            self.row_invariant = False
            return None
        return installation

    def _divisible(self) -> bool:
        """Whether passes of several adapters give each the gradients that it would have alone."""
        from logitless.models.row_invariant.adapters import spans_keep_bits
        from logitless.rollout.gpu.steps import forms_of

        if forms_of(self.model)[1]:  # gated delta nets: their chunks are listed for a whole row
            return False
        found = self.device.type != "cuda" or spans_keep_bits(self.model)
        if not found:
            logger.warning("passes: of one adapter each, for products of spans do not keep their bits on this GPU")
        return found

    def _new_engine(self) -> Engine:
        if self.row_invariant:
            from logitless.rollout.gpu.engine import GpuEngine  # needs Triton

            return GpuEngine(self.model, self.tokenizer, memory=self.memory, max_rows=self.max_rows)
        return TransformersEngine(self.model, self.tokenizer, max_rows=self.max_rows)

    @property
    def exact(self) -> bool:
        """Whether the engine's log-probs are bitwise identical to the trainer's."""
        return is_exact(self._engine) and self._stack_keeps_bits

    @property
    def together(self) -> int:
        """The most adapters that share a batch of sampling."""
        return TOGETHER if self.exact else 1

    @property
    def passes_together(self) -> int:
        """The most adapters that share a pass."""
        return TOGETHER if self.exact and self._spans_keep_bits else 1

    # --- shapes

    def _modules(self, shape: Shape) -> list[tuple[str, nn.Linear]]:
        wanted = [part for part in ("attention", "mlp", "unembed") if getattr(shape, part)]
        return [(name, module) for part, name, module in self._parts if part in wanted]

    def names(self, shape: Shape) -> list[str]:
        """Names of an adapter's weights in PEFT's files."""
        return [f"base_model.model.{name}.lora_{ab}.weight" for name, _ in self._modules(shape) for ab in "AB"]

    def _sizes(self, shape: Shape) -> list[tuple[int, int]]:
        both = [((shape.rank, m.in_features), (m.out_features, shape.rank)) for _, m in self._modules(shape)]
        return [size for pair in both for size in pair]

    def bytes_of(self, shape: Shape) -> int:
        """Device bytes of an adapter with its gradient and moments."""
        return HELD_BYTES * sum(rows * columns for rows, columns in self._sizes(shape))

    @property
    def room(self) -> int | None:
        """Bytes for adapters, half of the budget; None if unlimited."""
        return None if self.budget is None else self.budget // 2

    def peft_config(self, shape: Shape) -> Any:
        from peft import LoraConfig as Config

        ends = dict.fromkeys(_end_of(name, module is self._head) for name, module in self._modules(shape))
        base = getattr(causal_lm(self.model).config, "name_or_path", None)
        return Config(
            r=shape.rank, lora_alpha=ALPHA, target_modules=[*ends], task_type="CAUSAL_LM", base_model_name_or_path=base
        )

    def _ordered(self, shape: Shape, named: Mapping[str, Tensor]) -> list[Tensor]:
        """Saved tensors in the order of ``names``.

        Raises:
            InputError: other names or shapes.
        """
        wanted = dict(zip(self.names(shape), self._sizes(shape), strict=True))
        given = {name: tuple(tensor.shape) for name, tensor in named.items()}
        if wrong := sorted(name for name in wanted.keys() | given.keys() if wanted.get(name) != given.get(name)):
            raise InputError(
                needed=f"{wrong[0]} of shape {wanted.get(wrong[0])}, for an adapter of this base model",
                given=f"shape {given.get(wrong[0])}; {len(wrong)} tensors differ",
                remedy="Load a checkpoint that was saved with the same model.",
            )
        return [named[name] for name in wanted]

    def _factors(self, weights: Weights) -> dict[nn.Module, tuple[Tensor, Tensor]]:
        if weights is None:
            return {}
        pairs = zip(weights.weights[0::2], weights.weights[1::2], strict=True)
        return {module: pair for (_, module), pair in zip(self._modules(weights.shape), pairs, strict=True)}

    # --- adapters

    def create(self, shape: Shape, *, seed: int) -> Adapter:
        """A fresh adapter, which changes nothing: A is uniform as in PEFT and seeded by ``seed``, B is 0."""
        weights = []
        generator = torch.Generator().manual_seed(seed % 2**63)
        for number, size in enumerate(self._sizes(shape)):
            fresh = torch.zeros(size)
            if number % 2 == 0:
                nn.init.kaiming_uniform_(fresh, a=5**0.5, generator=generator)
            weights.append(fresh)
        return self._adapter(shape, weights)

    def _adapter(self, shape: Shape, weights: Sequence[Tensor]) -> Adapter:
        adapter = Adapter(shape, [nn.Parameter(weight.to(self.device, copy=True)) for weight in weights])
        self._adapters.add(adapter)
        if self.row_invariant:
            from logitless.models.row_invariant.adapters import groups_of
            from logitless.models.row_invariant.linear import lay_end_to_end

            factors = self._factors(adapter)
            for group in groups_of(self.model):
                for ab in zip(*(factors[module] for module in group if module in factors), strict=True):
                    lay_end_to_end(ab)  # two products for all maps of an input
        return adapter

    def loaded(self, shape: Shape, tensors: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> Adapter:
        """An adapter from saved factors and ``optimizer_state``, by name; an empty state is a fresh optimizer.

        Raises:
            InputError: tensors of another model.
        """
        adapter = self._adapter(shape, self._ordered(shape, tensors))
        if state:
            optimizer = self._optimizer(adapter)
            ends = {key: f".{key}" for key in ("exp_avg", "exp_avg_sq")}
            saved = {
                key: self._ordered(shape, {n.removesuffix(end): t for n, t in state.items() if n.endswith(end)})
                for key, end in ends.items()
            }
            for index, weight in enumerate(adapter.weights):
                moments = {key: kept[index].to(self.device, copy=True) for key, kept in saved.items()}
                on_device = automatic_implementation(self.device) == "fused"
                step = state["step"].to(self.device if on_device else "cpu", copy=True)
                optimizer.state[weight] = {"step": step, **moments}
        return adapter

    def saved(self, shape: Shape, tensors: Mapping[str, Tensor], version: int) -> Snapshot:
        """Saved factors as a snapshot to sample with; raises InputError for tensors of another model."""
        return Snapshot(shape, self._ordered(shape, tensors), version)

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

    # --- passes

    def _logp(self, parts: Sequence[tuple[Weights, PackedBatch]]) -> list[Tensor]:
        """Log-probs [N] of each batch's targets under its weights, from one pass.

        Gradient: to the factors of adapters.
        """
        found = []
        for (hidden, source, head), (_, batch) in zip(self._passed(parts), parts, strict=True):
            # Samples of a prompt have its targets in common: the head reads each once.
            pairs = (source * self.vocabulary + batch.target).numpy()
            _, first, place = (
                torch.from_numpy(each) for each in np.unique(pairs, return_index=True, return_inverse=True)
            )
            logp = self._scores(self._taken(hidden, source[first]), head, batch.target[first])
            found.append(self._taken(logp, place))
        return found

    def _taken(self, rows: Tensor, index: Tensor) -> Tensor:
        return RepeatedRows.of(index).to(self.device).take(rows)

    def _scores(self, states: Tensor, head: LMHead, target: Tensor, temperature: float = 1.0) -> Tensor:
        target = sent(target, self.device)
        return token_scores(states, head, target, temperature=temperature, backend="auto").logp

    def _states(self, parts: Sequence[tuple[Weights, PackedBatch]]) -> list[tuple[Tensor, LMHead]]:
        """The hidden states [N, D] that predict each batch's targets, from one pass, and the head with its adapter."""
        return [(self._taken(hidden, source), head) for hidden, source, head in self._passed(parts)]

    def _passed(self, parts: Sequence[tuple[Weights, PackedBatch]]) -> list[tuple[Tensor, Tensor, LMHead]]:
        """From one pass, of each batch: hidden states [T, D], which of them predicts each target, and the head."""
        read = [share_prompts(batch.inputs) if self.row_invariant else batch.inputs for _, batch in parts]
        factors, sizes = [self._factors(weights) for weights, _ in parts], [len(each.input_ids) for each in read]
        scales = [1.0 if weights is None else ALPHA / weights.shape.rank for weights, _ in parts]
        if self.row_invariant:
            from logitless.models.row_invariant.adapters import Lora, SpanAdapters

            loras = tuple(Lora(self._moved(each), scale) for each, scale in zip(factors, scales, strict=True))
            with self._installation.adapted(SpanAdapters(tuple(sizes), loras)):
                hidden = backbone_hidden(self.model, _end_to_end(read).to(self.device))
        else:
            assert len(parts) == 1
            with self._applied(parts[0][0]):
                hidden = backbone_hidden(self.model, read[0].to(self.device))
        found, base = list[tuple[Tensor, Tensor, LMHead]](), lm_head(self.model)
        rows = [hidden] if len(parts) == 1 else torch.split(hidden, sizes)
        for own, inputs, of_adapter, scale in zip(rows, read, factors, scales, strict=True):
            head = base
            if self._head in of_adapter:
                lora_a, lora_b = (factor.to(self.device) for factor in of_adapter[self._head])
                head = replace(base, lora_a=lora_a, lora_b=lora_b, lora_scale=scale)
            found.append((own, inputs.source, head))
        return found

    def _moved(self, factors: Factors) -> Factors:
        return {module: (a.to(self.device), b.to(self.device)) for module, (a, b) in factors.items()}

    @contextmanager
    def _applied(self, weights: Weights) -> Iterator[None]:
        """Inside, linear modules of transformers' layers add this adapter, as PEFT does."""
        if weights is None:
            yield
            return
        scale = ALPHA / weights.shape.rank

        def add(a: Tensor, b: Tensor, _: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
            return (out + F.linear(F.linear(given[0].to(a.dtype), a), b) * scale).to(out.dtype)

        factors = self._moved(self._factors(weights))
        handles = [module.register_forward_hook(partial(add, a, b)) for module, (a, b) in factors.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _rows(self, inputs: PackedInputs) -> Sequence[Sequence[int]]:
        """Packed rows; where layers are not row-invariant, one sequence each."""
        sequences = range(len(inputs.lengths))
        if not self.exact:
            return [(s,) for s in sequences]
        limit = max(self.tokens_per_row, *inputs.lengths)
        return Packing(limit, self.row_invariant, self._head.weight.shape[1]).rows(sequences, inputs)

    # --- training

    def forward_backward(self, adapter: Adapter, request: ForwardBackward) -> Trained:
        """Log-probs and losses of each datum; adds the gradient of the summed loss to the adapter's.

        Returns:
            ``logprobs`` of each datum (and ``elementwise_loss`` of cross_entropy) in the shape of its targets, and
            metrics.
        """
        work = Work(adapter, request)
        for row in self._rows(work.to_pack):
            self._pass([(work, row)])
        return work.result()

    def forward_backward_together(self, pairs: Sequence[tuple[Adapter, ForwardBackward]]) -> list[Trained]:
        """``forward_backward`` of several adapters, bit for bit, in one pass if each has one row and all fit into one.

        Args:
            pairs: with distinct adapters; alike in ``forward_only``.

        Raises:
            Exception: of any of them; if there are several, no gradient has changed.
        """
        if len(pairs) == 1:
            return [self.forward_backward(*pairs[0])]
        works = [Work(adapter, request) for adapter, request in pairs]
        rows = [self._rows(work.to_pack) for work in works]
        num_tokens = sum(sum(work.batch.inputs.lengths) for work in works)
        before = [[None if w.grad is None else w.grad.clone() for w in adapter.weights] for adapter, _ in pairs]
        try:
            if len(pairs) <= self.passes_together and max(map(len, rows)) == 1 and num_tokens <= self.tokens_per_row:
                self._pass([(work, own[0]) for work, own in zip(works, rows, strict=True)])
                # A row that is not finite can reach its neighbour's gradient, where kernels read beyond a row's end
                # and multiply by 0. Alone it is its own.
                if all(work.is_finite for work in works):
                    return [work.result() for work in works]
                _restore(pairs, before)
            return [self.forward_backward(adapter, request) for adapter, request in pairs]
        except Exception:
            _restore(pairs, before)
            raise

    def _pass(self, parts: Sequence[tuple[Work, Sequence[int]]]) -> None:
        """A pass over a row of each."""
        forward_only = parts[0][0].request.forward_only
        with torch.set_grad_enabled(not forward_only):
            scores = self._logp([(work.adapter, work.batch.take(row)) for work, row in parts])
            losses = [work.loss(row, logp) for (work, row), logp in zip(parts, scores, strict=True)]
            if not forward_only:
                torch.autograd.backward([loss.sum() for loss in losses])

    def optim_step(self, adapter: Adapter, params: AdamParams) -> dict[str, float]:
        """One step of AdamW with the gradients so far, which are then 0; returns metrics.

        Raises:
            TrainingError: a request that adds to the gradient failed, or it is not finite; weights and moments stay.
        """
        broken, adapter.broken = adapter.broken, ""
        if broken:
            adapter.drop_gradients()
            raise TrainingError(
                needed="the whole gradient of the step",
                given=f"a part that failed ({broken})",
                remedy="Send the step's data again: its gradients were dropped.",
            )
        optimizer = self._optimizer(adapter)
        for group in optimizer.param_groups:
            group |= {"betas": (params.beta1, params.beta2), "eps": params.eps, "weight_decay": params.weight_decay}
        adapter.renew()  # before the step, which may fail midway
        try:
            for weight in adapter.weights:
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
            norm, taken = take_step(optimizer, rate=params.learning_rate, max_grad_norm=params.grad_clip_norm or None)
        finally:
            adapter.drop_gradients()
        if not taken:
            raise TrainingError(
                needed="a finite gradient",
                given=f"norm {float(norm)}",
                remedy="The step was left out: weights and moments are as before, gradients are dropped.",
            )
        return {"grad_norm:mean": float(norm)}

    # --- sampling

    def sample(self, wanted: Sequence[tuple[Weights, Request]]) -> list[tuple[list[Sampled], PromptScores]]:
        """Samples of each request, and what it wants to know of its prompt.

        Log-probs are of the softmax at the temperature, before top-k and top-p; at temperature 0 of that at 1.

        Args:
            wanted: requests alike in what ``Request.shared`` names, with distinct ids among those of the same weights.
        """
        versions = dict.fromkeys(version_of(weights) for weights, _ in wanted)
        most = self._stack_for(wanted) if self.row_invariant else 1
        found: dict[int, tuple[list[Sampled], PromptScores]] = {}
        chunks = [[*versions][i : i + most] for i in range(0, len(versions), most)]
        for chunk in chunks:
            chosen = [i for i, (w, _) in enumerate(wanted) if version_of(w) in chunk]
            found |= zip(chosen, self._sample([wanted[i] for i in chosen]), strict=True)
        return [found[i] for i in range(len(wanted))]

    def _sample(self, wanted: Sequence[tuple[Weights, Request]]) -> list[tuple[list[Sampled], PromptScores]]:
        num_samples, options, seed, only_scores = wanted[0][1].shared
        prompts = [Prompt(request.id, "", request.tokens) for _, request in wanted]
        with torch.no_grad():
            if only_scores:
                groups: list[list[Completion]] = [[] for _ in prompts]
            elif self.row_invariant:
                self._engine.memory = self._memory_for_sampling()
                places = self._placed([weights for weights, _ in wanted])
                groups = self._engine.sample(prompts, num_samples, options, seed=seed, adapters=places)
            else:
                with self._applied(wanted[0][0]):
                    groups = self._engine.sample(prompts, num_samples, options, seed=seed)
            scores = self._prompt_scores(wanted)
            none = [NO_TOKENS] * num_samples
            return [
                (
                    [self._sampled(weights, request, prompt, each) for each in group] or none,
                    scores.get(n, PromptScores()),
                )
                for n, ((weights, request), prompt, group) in enumerate(zip(wanted, prompts, groups, strict=True))
            ]

    def _memory_for_sampling(self) -> int | None:
        """Bytes for keys and values: what adapters leave of ``memory``."""
        if self.memory is None:
            return None
        return max(1, self.memory - sum(self.bytes_of(adapter.shape) for adapter in self._adapters) - self.stack_bytes)

    @property
    def stack_bytes(self) -> int:
        """Bytes of the stack of adapters to sample with."""
        return 0 if self._stack is None else int(self._stack.num_bytes)

    def _stack_for(self, wanted: Sequence[tuple[Weights, Request]]) -> int:
        """Make a stack that holds these ranks, unless there is one; returns its number of places."""
        from logitless.models.row_invariant.adapters import AdapterStack

        rank = max([16, *(1 << (w.shape.rank - 1).bit_length() for w, _ in wanted if w is not None)])
        if self._stack is None or self._stack.rank < rank:
            self._installation.stack = self._stack = None
            self._places.clear()
            each = AdapterStack.bytes_of(self.model, num_places=0, rank=rank)
            quarter = self.budget // 4 if self.budget is not None else TOGETHER * each + each
            num_places = max(1, min(TOGETHER, quarter // each - 1))
            self._stack = AdapterStack(self.model, num_places=num_places, rank=rank)
            if self.device.type == "cuda" and not self._stack.keeps_bits():
                logger.warning("adapters: one at a time, for products of several do not keep their bits on this GPU")
                self._stack_keeps_bits = False
            self._installation.stack = self._stack
        return int(self._stack.num_places)

    def _placed(self, wanted: Sequence[Weights]) -> list[int]:
        """The place of each adapter in the stack, which is filled where needed."""
        from logitless.models.row_invariant.adapters import Lora

        distinct = {weights.version: weights for weights in wanted if weights is not None}
        # An adapter that is as it was when a snapshot was taken is on the device already.
        distinct |= {adapter.version: adapter for adapter in self._adapters if adapter.version in distinct}
        for version in distinct.keys() & self._places.keys():
            self._places.move_to_end(version)
        for version, weights in distinct.items():
            if version not in self._places:
                free = set(range(1, self._stack.num_places + 1)) - set(self._places.values())
                place = min(free) if free else self._places.popitem(last=False)[1]
                self._stack.put(place, Lora(self._factors(weights), ALPHA / weights.shape.rank))
                self._places[version] = place
        return [0 if weights is None else self._places[weights.version] for weights in wanted]

    def _sampled(self, weights: Weights, request: Request, prompt: Prompt, completion: Completion) -> Sampled:
        logp = completion.logp_sampler if completion.logp_policy is None else completion.logp_policy
        temperature, top = request.options.temperature or 1.0, None
        if not self.exact or (logp is not None and np.isnan(logp).any()):
            logp = None
        if logp is None or request.top_sampled:
            batch = pack([(prompt, completion)])
            [(states, head)] = self._states([(weights, batch)])
            if logp is None:
                logp = self._scores(states, head, batch.target, temperature).float().cpu().numpy()
            if request.top_sampled:
                top = _top(states, head, request.top_sampled, temperature)
        return Sampled(completion.token_ids, logp, completion.finish_reason == "stop", top)

    def _prompt_scores(self, wanted: Sequence[tuple[Weights, Request]]) -> dict[int, PromptScores]:
        """The wanted scores of prompts, by index of the request."""
        chosen = [(i, weights, request) for i, (weights, request) in enumerate(wanted) if request.reads_prompt]
        found = {i: _unscored(request) for i, _, request in chosen}
        for version in dict.fromkeys(version_of(weights) for _, weights, _ in chosen):
            own = [each for each in chosen if version_of(each[1]) == version and len(each[2].tokens) > 1]
            if not own:
                continue
            ids = [np.array(request.tokens) for *_, request in own]
            batch = packed([(each[:-1], each[1:]) for each in ids])
            for row in self._rows(batch.inputs):
                [(states, head)] = self._states([(own[row[0]][1], batch.take(row))])
                for s, part in zip(row, torch.split(states, [len(ids[s]) - 1 for s in row]), strict=True):
                    self._score_prompt(found[own[s][0]], own[s][2], part, head)
        return found

    def _score_prompt(self, found: PromptScores, request: Request, states: Tensor, head: LMHead) -> None:
        """Write the wanted scores of a prompt; ``states`` predict its tokens after the first."""
        first = 1 if request.scores_last is None else len(request.tokens) - request.scores_last
        if found.logprobs is not None:
            logp = self._scores(states, head, torch.tensor(request.tokens[1:]))
            found.logprobs[first:] = logp[first - 1 :].float().cpu().numpy()
        if found.top is not None:
            top = _top(states[first - 1 :], head, request.top_prompt)
            found.top.ids[first:], found.top.logprobs[first:] = top.ids, top.logprobs
        if found.targets is not None:
            asked, values = found.targets
            cells = np.flatnonzero(asked.ids >= 0)
            for start in range(0, len(cells), len(states)):  # no more rows at once than a pass has
                part = cells[start : start + len(states)]
                own = states.index_select(0, sent(torch.from_numpy(asked.rows[part]), self.device))
                values[part] = self._scores(own, head, torch.from_numpy(asked.ids[part])).float().cpu().numpy()


def _unscored(request: Request) -> PromptScores:
    """``PromptScores`` to be filled, for what the request wants."""
    length, size = len(request.tokens), (len(request.tokens), request.top_prompt)
    token, logp = NO_TOKEN
    return PromptScores(
        np.full(length, np.nan, np.float32) if request.scores_prompt else None,
        Top(np.full(size, token, np.int32), np.full(size, logp, np.float32)) if request.top_prompt else None,
        None if request.targets is None else (request.targets, np.zeros(len(request.targets.ids), np.float32)),
    )


def _top(states: Tensor, head: LMHead, k: int, temperature: float = 1.0) -> Top:
    ids, logp = likeliest_tokens(states, head, k, temperature=temperature)
    return Top(ids.cpu().numpy(), logp.float().cpu().numpy())


def _restore(pairs: Sequence[tuple[Adapter, Any]], before: Sequence[Sequence[Tensor | None]]) -> None:
    for (adapter, _), grads in zip(pairs, before, strict=True):
        for weight, grad in zip(adapter.weights, grads, strict=True):
            weight.grad = None if grad is None else grad.clone()


def _end_to_end(parts: Sequence[PackedInputs | SharedInputs]) -> PackedInputs | SharedInputs:
    """Packed rows as one, without ``source``."""
    if len(parts) == 1:
        return parts[0]
    groups = [
        part.groups if isinstance(part, SharedInputs) else [PromptGroup(length) for length in part.lengths]
        for part in parts
    ]
    ids, positions = torch.cat([part.input_ids for part in parts]), torch.cat([part.position_ids for part in parts])
    return SharedInputs(ids, positions, tuple(group for of in groups for group in of), ids[:0])


def _parts_of(model: nn.Module) -> list[tuple[str, str, nn.Linear]]:
    """(part, name, module) of linear modules: in attention (and other mixers), in MLPs, and the LM head."""
    inner = causal_lm(model)
    head, parts = inner.get_output_embeddings(), list[tuple[str, str, nn.Linear]]()
    for name, module in inner.named_modules():
        if isinstance(module, nn.Linear):
            words = name.split(".")[:-1]
            in_mlp = any("mlp" in word or word in ("feed_forward", "ffn") for word in words)
            parts.append(("unembed" if module is head else "mlp" if in_mlp else "attention", name, module))
    return parts


def _end_of(name: str, is_head: bool) -> str:
    """The end of a module's name by which PEFT finds it."""
    return ".".join(name.split(".")[-1 if is_head else -2 :])


def open_trainer(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    device: torch.device,
    dtype: str,
    layers: str,
    **options: Any,
) -> tuple[Trainer, str]:
    """Load a model and make its trainer; also returns which layers it has and why, in words.

    Args:
        source: hub name or folder.
        layers: ``auto``, ``row_invariant`` or ``transformers``.
        options: of ``Trainer``.

    Raises:
        ConfigurationError, UnavailableError: the model cannot be loaded, or cannot have the layers that were named.
    """
    model = load_model(source, dtype=getattr(torch, dtype), device=device)
    check_vocabulary(model, tokenizer)
    disable_dropout(model)
    section = ModelSection(source=source, lora=LoraSection(), dtype=dtype, layers=layers)
    reason = "layers: transformers" if layers == "transformers" else in_words(against_row_invariant(section, model))
    if reason and layers == "row_invariant":
        raise no_row_invariant(reason)
    if reason:
        check_delta_gradients(model, device)
    trainer = Trainer(model, tokenizer, row_invariant=not reason, **options)
    if not reason:
        return trainer, "row-invariant: log-probs of sampling and training are bitwise identical"
    return trainer, f"transformers' own ({reason}); the trainer scores what was sampled"

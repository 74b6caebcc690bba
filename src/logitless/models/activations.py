"""What each decoder layer keeps of its forward pass for the backward pass, chosen to fit a memory budget.

    keep         everything
    selective    results of products and attention; those of elementwise kernels and norms are recomputed (row-invariant
                 layers only)
    recompute    the layer's input; everything else is recomputed
    host         as recompute, with the input in host memory

Gradients are bitwise identical in every mode, if the layer's kernels are deterministic. The bytes per token of a mode
are measured on the model itself, in two short passes; on a GPU also what the backward pass needs while it runs. Both
grow in proportion to the tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from logitless.errors import ConfigurationError, UnavailableError
from logitless.float32_sums import gradient_dtype
from logitless.models.lm_head import backbone, backbone_hidden
from logitless.models.one_node import recomputed
from logitless.types import PackedInputs

Mode = Literal["keep", "selective", "recompute", "host"]
MODES: tuple[Mode, ...] = ("keep", "selective", "recompute", "host")
MODE_WORDS: dict[str, str] = {
    "keep": "keep all",
    "selective": "keep products",
    "recompute": "are recomputed",
    "host": "on the host",
}
PROBE = {"cuda": (1024, 3072), "cpu": (16, 32)}
"""Tokens of the two measuring passes, by device; on a GPU so many that spare rows in buffers do not matter."""


# --- modes


def set_modes(model: nn.Module, modes: Sequence[Mode]) -> None:
    """Set the mode of every decoder layer, for use in training mode.

    Args:
        model: a transformers causal LM with any layers.
        modes: one per layer, the first layer first.

    Raises:
        UnavailableError: the layers cannot be recomputed, or ``selective`` without row-invariant layers.
    """
    _set(model, modes, None)


def _set(model: nn.Module, modes: Sequence[Mode], tally: "_Tally | None") -> None:
    layers = _layers(model)
    assert len(layers) == len(modes)
    if "selective" in modes and "selective" not in _modes_of(layers):
        raise UnavailableError(
            needed="row-invariant layers for the mode selective",
            given=type(layers[0]).__name__,
            remedy="Set model.layers: row_invariant, or choose keep, recompute or host.",
        )
    for layer, mode in zip(layers, modes, strict=True):
        layer.gradient_checkpointing = mode != "keep" or tally is not None
        layer._gradient_checkpointing_func = partial(_run, mode, tally)


def _modes_of(layers: Sequence[Any]) -> tuple[Mode, ...]:
    return MODES if hasattr(layers[0], "row_invariant_form") else tuple(mode for mode in MODES if mode != "selective")


def _layers(model: nn.Module) -> list[Any]:
    layers = list(getattr(backbone(model), "layers", []))
    if not layers or any(not hasattr(layer, "gradient_checkpointing") for layer in layers):
        raise UnavailableError(
            needed="decoder layers that transformers can run a second time",
            given=type(backbone(model)).__name__,
            remedy="Leave train.activation_memory out, and lower train.tokens_per_micro_batch instead.",
        )
    return layers


def _run(mode: Mode, tally: "_Tally | None", layer: Callable[..., Any], *args: Any) -> Any:
    """Run a layer's forward pass and keep what its mode says: a checkpointing function of transformers."""
    of_rows = "rows" in getattr(layer, "keywords", {})
    # A row-invariant layer gets the residual stream and what is still to be added to it. Keeping their sum instead
    # takes half the bytes; the layer's first norm would compute the same bits.
    if of_rows and mode in ("recompute", "host") and args[1] is not None:
        args = (args[0] + args[1], None)
    kept: Any = nullcontext() if tally is None else _Counted(tally)
    if mode in ("selective", "host"):
        kept = _Recomputed(tally) if mode == "selective" else _OnHost()
    with kept:
        if mode in ("keep", "selective"):
            return layer(*args)
        if not of_rows:
            return checkpoint(layer, *args, use_reentrant=False)
        with recomputed():
            return layer(*args)


class _Tally:
    """Bytes of the distinct storages that are kept, without those of parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.storages: dict[int, int] = {}
        self._parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            self.storages[storage.data_ptr()] = storage.nbytes()


class _Counted(saved_tensors_hooks):
    """Counts every saved tensor, and keeps it."""

    def __init__(self, tally: _Tally) -> None:
        def pack(tensor: Tensor) -> Tensor:
            tally.see(tensor)
            return tensor.detach()

        super().__init__(pack, lambda tensor: tensor)


class _OnHost(saved_tensors_hooks):
    """Keeps saved tensors in host memory, page-locked if they come from a GPU."""

    # Both copies are queued on the GPU, after the kernel that writes a tensor and before the one that reads it, so the
    # host waits for neither.

    def __init__(self) -> None:
        def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
            there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            return tensor.device, there.copy_(tensor, non_blocking=True)

        super().__init__(pack, lambda kept: kept[1].to(kept[0], non_blocking=True))


# --- recomputing the results of our own kernels

_current: "_Recomputed | None" = None


def recipes_are_kept() -> bool:
    """Whether ``can_be_recomputed`` has an effect here: a layer in mode ``selective`` is running."""
    return _current is not None


def can_be_recomputed(out: Tensor, again: Callable[[], Tensor]) -> None:
    """Register a function that recomputes a kernel's result, to be kept instead of the result.

    Args:
        out: the result.
        again: recomputes it; must not refer to ``out``.
    """
    if _current is not None:
        _current.offers[_place(out)] = (out, again)


class _Recomputed(saved_tensors_hooks):
    """Keeps the function of ``can_be_recomputed`` instead of each tensor that has one."""

    def __init__(self, tally: _Tally | None) -> None:
        # registered results live until the layer is done, so that no other tensor gets their address
        self.offers: dict[tuple[Any, ...], tuple[Tensor, Callable[[], Tensor]]] = {}

        def pack(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
            offer = self.offers.get(_place(tensor))
            if offer is not None:
                return offer[1]
            if tally is not None:
                tally.see(tensor)
            return tensor.detach()

        super().__init__(pack, lambda kept: kept if isinstance(kept, Tensor) else kept())

    def __enter__(self) -> None:
        global _current
        _current = self
        super().__enter__()

    def __exit__(self, *args: object) -> None:
        global _current
        super().__exit__(*args)
        _current = None
        self.offers.clear()


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


# --- measuring bytes, and choosing modes that fit


@dataclass(frozen=True)
class Cost:
    """Bytes per token of one layer.

    Args:
        kept: from the layer's forward to its backward pass.
        worked_on: in addition, while its backward pass runs; measured on GPUs only.
    """

    kept: float
    worked_on: float = 0.0


def costs_per_token(model: nn.Module) -> dict[Mode, Cost]:
    """Measure the memory of one layer in each mode that it supports, as a mean over the layers.

    Args:
        model: in training mode, on its device, without gradients; it is not changed.

    Example:
        >>> from logitless.models.loading import load_model
        >>> config = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
        ...           "num_attention_heads": 1, "vocab_size": 11}
        >>> found = costs_per_token(load_model(config, random_weights=True, seed=0).train())
        >>> found["recompute"].kept, found["host"].kept, found["keep"].kept > found["recompute"].kept
        (32.0, 0.0, True)
    """
    layers = _layers(model)
    found: dict[Mode, Cost] = {}
    few, many = PROBE[next(model.parameters()).device.type]
    with _modes_restored(layers), _gradients_in_place(model):
        for mode in _modes_of(layers):
            (kept0, peak0), (kept1, peak1) = (_kept_and_peak(model, mode, tokens) for tokens in (few, many))
            kept = (kept1 - kept0) / (many - few)
            # Part of a short pass's peak may belong to a weight and hide the growth with tokens: take at least the mean
            # per token of the longer pass.
            needed = max((peak1 - peak0) / (many - few) - kept, (peak1 - kept1) / many)
            found[mode] = Cost(kept / len(layers), max(0.0, needed))
    return found


@contextmanager
def _modes_restored(layers: Sequence[Any]) -> Iterator[None]:
    """Restore the layers' modes afterwards: whether they checkpoint, and by which function."""
    before = [(layer.gradient_checkpointing, getattr(layer, "_gradient_checkpointing_func", None)) for layer in layers]
    try:
        yield
    finally:
        for layer, (on, function) in zip(layers, before, strict=True):
            layer.gradient_checkpointing = on
            if function is not None:
                layer._gradient_checkpointing_func = function


@contextmanager
def _gradients_in_place(model: nn.Module) -> Iterator[None]:
    """Inside, trained parameters on a GPU have gradients of zeros, so that their allocation is not measured."""
    bare = [p for p in model.parameters() if p.requires_grad and p.grad is None and p.is_cuda]
    for parameter in bare:
        parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
    try:
        yield
    finally:
        for parameter in bare:
            parameter.grad = None


def _kept_and_peak(model: nn.Module, mode: Mode, tokens: int) -> tuple[int, int]:
    """(bytes that all layers keep, peak of GPU memory or 0 elsewhere) for one sequence.

    The last layer's output and tensors that depend on shapes only are not subtracted.
    """
    tally = _Tally(model)
    _set(model, [mode] * len(_layers(model)), tally)
    device = next(model.parameters()).device
    ids, places = torch.zeros(tokens, dtype=torch.long), torch.arange(tokens)
    inputs = PackedInputs(ids, places, (tokens,), places, (tokens,)).to(device)
    begun = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        begun = torch.cuda.memory_allocated(device)
    with torch.enable_grad():
        hidden = backbone_hidden(model, inputs)
    total = sum(tally.storages.values())
    if device.type != "cuda":
        return total, 0
    hidden.backward(torch.zeros_like(hidden))  # type: ignore[no-untyped-call]
    return total, torch.cuda.max_memory_allocated(device) - begun


@dataclass(frozen=True)
class ActivationPlan:
    """The mode of each layer, and the memory that these modes need.

    Args:
        modes: one per layer.
        kept_bytes: at the end of the forward pass.
        num_bytes: at the peak of the backward pass.
        num_tokens: length of the packed row.

    Example:
        >>> costs = {"keep": Cost(100.0, 30.0), "selective": Cost(60.0, 50.0), "recompute": Cost(10.0, 120.0),
        ...          "host": Cost(0.0, 130.0)}
        >>> plan = ActivationPlan.of(costs, num_layers=4, num_tokens=10, budget=2400)
        >>> plan.counts, plan.kept_bytes, plan.num_bytes
        ({'keep': 0, 'selective': 3, 'recompute': 1, 'host': 0}, 1900, 2400)
    """

    modes: tuple[Mode, ...]
    kept_bytes: int
    num_bytes: int
    num_tokens: int

    @classmethod
    def with_counts(
        cls, costs: Mapping[Mode, Cost], counts: Mapping[Mode, int], *, num_tokens: int
    ) -> "ActivationPlan":
        """The plan with so many layers of each mode; those that recompute most come first.

        The backward pass reaches the first layers last, when the layers after them have freed what they kept.

        Example:
            >>> costs = {"keep": Cost(100.0, 30.0), "recompute": Cost(10.0, 120.0)}
            >>> ActivationPlan.with_counts(costs, {"recompute": 3, "keep": 1}, num_tokens=1).num_bytes
            160
        """
        kept = peak = 0.0
        for mode in reversed(MODES):
            if count := counts.get(mode, 0):
                kept += count * costs[mode].kept
                peak = max(peak, kept + costs[mode].worked_on)
        modes = tuple(mode for mode in reversed(MODES) for _ in range(counts.get(mode, 0)))
        return cls(modes, round(kept * num_tokens), round(peak * num_tokens), num_tokens)

    @classmethod
    def of(cls, costs: Mapping[Mode, Cost], *, num_layers: int, num_tokens: int, budget: int) -> "ActivationPlan":
        """The plan that fits into ``budget`` with the least recomputation.

        Args:
            costs: as from ``costs_per_token``.
            num_layers: of the model.
            num_tokens: length of the packed row.
            budget: bytes.

        Raises:
            ConfigurationError: no plan fits.
        """
        # Recomputing a layer from its input adds a third to its products, ``selective`` a few per cent: first as few
        # as possible of the former, then of the latter.
        least: int | None = None
        for num_host in range(num_layers + 1):
            for num_recomputed in range(num_layers - num_host + 1):
                rest = num_layers - num_host - num_recomputed
                if num_host and rest:
                    continue
                for num_kept in range(rest, -1 if "selective" in costs else rest - 1, -1):
                    counts: dict[Mode, int] = {
                        "host": num_host, "recompute": num_recomputed, "selective": rest - num_kept, "keep": num_kept
                    }  # fmt: skip
                    plan = cls.with_counts(costs, counts, num_tokens=num_tokens)
                    if plan.num_bytes <= budget:
                        return plan
                    least = plan.num_bytes if least is None else min(least, plan.num_bytes)
        raise ConfigurationError(
            needed=f"train.activation_memory of at least {least} bytes",
            given=str(budget),
            remedy="Raise it, or lower train.tokens_per_micro_batch.",
        )

    @property
    def counts(self) -> dict[Mode, int]:
        return {mode: self.modes.count(mode) for mode in MODES}

    def __str__(self) -> str:
        parts = [f"{count} {MODE_WORDS[mode]}" for mode, count in self.counts.items() if count]
        return f"{', '.join(parts)}: {self.num_bytes / 2**30:.2f} GiB for {self.num_tokens:,} tokens"


def fit_activations(model: nn.Module, *, num_tokens: int, budget: int) -> ActivationPlan:
    """Measure, choose and set the layers' modes so that a packed row of ``num_tokens`` needs at most ``budget`` bytes.

    Args:
        model: in training mode, on its device, without gradients.
        num_tokens: of the longest packed row.
        budget: bytes for all layers together: on a GPU at the peak of the backward pass, elsewhere at its start.
    """
    layers = _layers(model)
    plan = ActivationPlan.of(costs_per_token(model), num_layers=len(layers), num_tokens=num_tokens, budget=budget)
    set_modes(model, plan.modes)
    return plan

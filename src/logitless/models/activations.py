"""What each decoder layer keeps of a forward pass for its backward, chosen so that a number of bytes is enough.

    keep         everything
    selective    products and attention; what elementwise kernels and norms made of them is made again (row-invariant
                 layers)
    recompute    the layer's input; everything else is made again
    host         the same, with the input in the host's memory

Nothing else changes: a layer's gradients have the same bits in every mode, where its kernels are deterministic.
What a layer keeps a token is measured on the model itself, in two short passes a mode, and grows in proportion.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from logitless.errors import ConfigurationError, UnavailableError
from logitless.models.lm_head import backbone, backbone_hidden
from logitless.types import PackedInputs

Mode = Literal["keep", "selective", "recompute", "host"]
MODES: tuple[Mode, ...] = ("keep", "selective", "recompute", "host")
PROBE = {"cuda": (1024, 3072), "cpu": (16, 32)}
"""Tokens of the two passes that measure, by device; on a GPU enough for rows to spare not to show."""


# --- modes


def set_modes(model: nn.Module, modes: Sequence[Mode]) -> None:
    """Give every decoder layer its mode; it holds while the model is in training mode.

    Args:
        model: a transformers causal LM with any layers.
        modes: one a layer, the first layer first.

    Raises:
        UnavailableError: layers that cannot be run a second time.
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
    """What layers can do."""
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
    """A layer's forward pass, keeping what its mode says; what transformers calls a checkpointing function."""
    kept: Any = _MadeAgain(tally) if mode == "selective" else _Kept(tally)
    if mode == "host":
        kept = save_on_cpu(pin_memory=args[0].is_cuda)
    with kept:
        return layer(*args) if mode in ("keep", "selective") else checkpoint(layer, *args, use_reentrant=False)


class _Tally:
    """Bytes of the distinct storages that are kept, those of parameters aside."""

    def __init__(self, model: nn.Module) -> None:
        self.storages: dict[int, int] = {}
        self._parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            self.storages[storage.data_ptr()] = storage.nbytes()


class _Kept(saved_tensors_hooks):
    """Counts what is kept."""

    def __init__(self, tally: _Tally | None) -> None:
        def pack(tensor: Tensor) -> Tensor:
            if tally is not None:
                tally.see(tensor)
            return tensor.detach()

        super().__init__(pack, lambda tensor: tensor)
        self._counts = tally is not None

    def __enter__(self) -> None:
        if self._counts:
            super().__enter__()

    def __exit__(self, *args: object) -> None:
        if self._counts:
            super().__exit__(*args)


# --- what kernels of ours made, made again

_current: "_MadeAgain | None" = None


def can_be_made_again(out: Tensor, again: Callable[[], Tensor]) -> None:
    """Said of a kernel's result: what wants to keep it may keep ``again`` instead, which must not refer to ``out``."""
    if _current is not None:
        _current.offers[_place(out)] = (out, again)


class _MadeAgain(saved_tensors_hooks):
    """Keeps a recipe for each tensor that has one.

    What was offered lives until the layer is done, so that its place in memory is not that of something else.
    """

    def __init__(self, tally: _Tally | None) -> None:
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


# --- how many bytes, and which modes they are enough for


def bytes_per_token(model: nn.Module) -> dict[Mode, float]:
    """What one layer keeps of one token in each mode that it has, measured, as a mean over the layers.

    Args:
        model: in training mode, on its device; nothing of it is changed.

    Example:
        >>> from logitless.models.loading import load_model
        >>> config = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
        ...           "num_attention_heads": 1, "vocab_size": 11}
        >>> found = bytes_per_token(load_model(config, random_weights=True, seed=0).train())
        >>> found["recompute"], found["host"], found["keep"] > found["recompute"]
        (32.0, 0.0, True)
    """
    layers = _layers(model)
    before = [(layer.gradient_checkpointing, getattr(layer, "_gradient_checkpointing_func", None)) for layer in layers]
    found: dict[Mode, float] = {}
    probe = PROBE[next(model.parameters()).device.type]
    try:
        for mode in _modes_of(layers):
            kept = [_kept_bytes(model, mode, tokens) for tokens in probe]
            found[mode] = (kept[1] - kept[0]) / (probe[1] - probe[0]) / len(layers)
    finally:
        for layer, (on, function) in zip(layers, before, strict=True):
            layer.gradient_checkpointing = on
            if function is not None:
                layer._gradient_checkpointing_func = function
    return found


def _kept_bytes(model: nn.Module, mode: Mode, tokens: int) -> int:
    """By all layers, of one sequence; the last layer's output and what shapes alone decide are not counted apart."""
    tally = _Tally(model)
    _set(model, [mode] * len(_layers(model)), tally)
    device = next(model.parameters()).device
    ids, places = torch.zeros(tokens, dtype=torch.long), torch.arange(tokens)
    inputs = PackedInputs(ids, places, (tokens,), places, (tokens,)).to(device)
    with torch.enable_grad():
        hidden = backbone_hidden(model, inputs)
    total = sum(tally.storages.values())
    del hidden
    return total


@dataclass(frozen=True)
class ActivationPlan:
    """Which layers keep what.

    Args:
        modes: one a layer.
        num_bytes: that they keep of the tokens that the plan is for.
        num_tokens: of a packed row.

    Example:
        >>> costs = {"keep": 100.0, "selective": 60.0, "recompute": 10.0, "host": 0.0}
        >>> plan = ActivationPlan.of(costs, num_layers=4, num_tokens=10, budget=2000)
        >>> plan.counts, plan.num_bytes
        ({'keep': 0, 'selective': 3, 'recompute': 1, 'host': 0}, 1900)
    """

    modes: tuple[Mode, ...]
    num_bytes: int
    num_tokens: int

    @classmethod
    def of(cls, per_token: Mapping[Mode, float], *, num_layers: int, num_tokens: int, budget: int) -> "ActivationPlan":
        """The modes that fit into ``budget`` and make the least anew.

        A layer that is made again from its input costs a third of its products more, one made again elementwise a few
        per cent: first as few as possible of the former, then of the latter. They are the first layers, which the
        backward pass reaches last, when the others have given their memory back.

        Args:
            per_token: of ``bytes_per_token``.
            num_layers: of the model.
            num_tokens: of a packed row.
            budget: bytes.

        Raises:
            ConfigurationError: the budget is too small for anything.
        """
        keep, recompute, host = (per_token[mode] * num_tokens for mode in ("keep", "recompute", "host"))
        selective = per_token.get("selective", per_token["keep"]) * num_tokens
        for num_host in range(num_layers + 1):
            for num_recomputed in range(num_layers - num_host + 1):
                rest = num_layers - num_host - num_recomputed
                low = num_host * host + num_recomputed * recompute + rest * selective
                if low > budget or (num_host and rest):
                    continue
                spare = keep - selective
                num_kept = rest if spare <= 0 else min(rest, int((budget - low) // spare))
                counts = {"host": num_host, "recompute": num_recomputed, "selective": rest - num_kept, "keep": num_kept}
                modes = tuple(mode for mode in reversed(MODES) for _ in range(counts[mode]))
                return cls(modes, round(low + num_kept * spare), num_tokens)
        raise ConfigurationError(
            needed=f"train.activation_memory of at least {round(num_layers * host)} bytes",
            given=str(budget),
            remedy="Raise it, or lower train.tokens_per_micro_batch.",
        )

    @property
    def counts(self) -> dict[Mode, int]:
        """How many layers are in each mode."""
        return {mode: self.modes.count(mode) for mode in MODES}

    def __str__(self) -> str:
        named = {"keep": "keep all", "selective": "keep products", "recompute": "are recomputed", "host": "on the host"}
        parts = [f"{count} {named[mode]}" for mode, count in self.counts.items() if count]
        return f"{', '.join(parts)}: {self.num_bytes / 2**30:.2f} GiB for {self.num_tokens:,} tokens"


def fit_activations(model: nn.Module, *, num_tokens: int, budget: int) -> ActivationPlan:
    """Measure, choose and set the layers' modes so that a packed row of ``num_tokens`` keeps at most ``budget`` bytes.

    Args:
        model: in training mode, on its device.
        num_tokens: the most that a packed row has.
        budget: bytes that the layers may keep together.
    """
    layers = _layers(model)
    plan = ActivationPlan.of(bytes_per_token(model), num_layers=len(layers), num_tokens=num_tokens, budget=budget)
    set_modes(model, plan.modes)
    return plan


@contextmanager
def kept_bytes(model: nn.Module) -> Iterator[Callable[[], int]]:
    """Inside, what the layers keep as they are set is counted; for tests and benchmarks."""
    layers = _layers(model)
    before = [(layer.gradient_checkpointing, getattr(layer, "_gradient_checkpointing_func", None)) for layer in layers]
    tally = _Tally(model)
    for layer, (on, function) in zip(layers, before, strict=True):
        mode: Mode = function.args[0] if on and isinstance(function, partial) else "keep"
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(_run, mode, tally)
    try:
        yield lambda: sum(tally.storages.values())
    finally:
        for layer, (on, function) in zip(layers, before, strict=True):
            layer.gradient_checkpointing = on
            if function is not None:
                layer._gradient_checkpointing_func = function

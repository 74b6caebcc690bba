"""Liger's kernels for the layers of a model (RMSNorm, rotary embedding, gated MLP), installed only after a check.

Before the model is changed, two layers of its architecture with random float32 weights run on one batch, with and
without the kernels. Logits and gradient norm must agree to 1e-3; otherwise nothing is replaced and an error is raised.
LM head and loss stay logitless's own. The rotary embedding is replaced for the whole process, as Liger does it.
"""

import copy
import inspect
import sys
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from logitless.errors import UnavailableError
from logitless.models.lm_head import causal_lm
from logitless.models.seeded import seeded

TOLERANCE = 1e-3
"""Largest difference allowed: of a logit relative to the largest logit, and of the gradient norm relative to itself."""

_VOCABULARY, _TOKENS = 128, 64


def install_liger_layers(model: nn.Module) -> None:
    """Replace the layers of a causal language model, PEFT-wrapped or not, in place.

    Raises:
        UnavailableError: Liger is not installed, does not support the family, or fails the check on this device.
    """
    inner: Any = causal_lm(model)
    device = next(model.parameters()).device
    if device.type == "meta":
        _exchange_of(inner.config.model_type)
        return
    check_liger_layers(inner.config, device)
    _exchange(inner)


def check_liger_layers(config: Any, device: torch.device) -> tuple[float, float]:
    """Compare two layers with Liger's kernels to plain ones.

    Args:
        config: the model's transformers config.
        device: that the layers will run on.

    Returns:
        Relative differences of logits and gradient norm.

    Raises:
        UnavailableError: one of them is above ``TOLERANCE``, or the kernels do not run.
    """
    _exchange_of(config.model_type)
    small = copy.deepcopy(config)
    for name, value in (("num_hidden_layers", 2), ("vocab_size", _VOCABULARY), ("pad_token_id", None)):
        setattr(small, name, value)
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:2]
    with seeded(0, device):
        built = AutoModelForCausalLM.from_config(small, dtype=torch.float32, attn_implementation="eager").to(device)
        tokens = torch.randint(_VOCABULARY, (2, _TOKENS), device=device)
    plain = _results(built, tokens)
    try:
        _exchange(built)
        fused = _results(built, tokens)
    except Exception as error:  # a kernel that does not compile or run
        raise _refused(f"{type(error).__name__}: {error}") from error
    logits = ((fused[0] - plain[0]).abs().max() / plain[0].abs().max()).item()
    norm = abs(fused[1] / plain[1] - 1)
    if not (logits <= TOLERANCE and norm <= TOLERANCE):  # NaN too
        raise _refused(f"logits off by {logits:.1e} and the gradient norm by {norm:.1e}")
    return logits, norm


def _results(model: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Logits, and the norm of the gradient of their mean square."""
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=tokens).logits
    logits.square().mean().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return logits.detach(), torch.nn.utils.get_total_norm(gradients).item()


def _exchange(model: nn.Module) -> None:
    model_type: str = model.config.model_type  # type: ignore[union-attr, assignment]
    apply = _exchange_of(model_type)
    wanted = {"rope": True, "rms_norm": True, "swiglu": True, "geglu": True}
    wanted |= {"cross_entropy": False, "fused_linear_cross_entropy": False}
    known = inspect.signature(apply).parameters
    modules = {sys.modules[kind.__module__] for kind in (*type(model).__mro__, *map(type, model.modules()))}
    families = [module for module in modules if module.__name__.startswith("transformers.models.")]
    classes = [(m, name, kind) for m in families for name, kind in vars(m).items() if isinstance(kind, type)]
    apply(model=model, **{name: value for name, value in wanted.items() if name in known})
    for module, name, kind in classes:  # the model has its kernels by now; later models get plain classes
        setattr(module, name, kind)


def _exchange_of(model_type: str) -> Any:
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise UnavailableError(
            needed="Liger for model.layers: liger", given=str(error), remedy="pip install 'logitless[liger]'"
        ) from error
    if model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UnavailableError(
            needed=f"a family that Liger knows ({', '.join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))})",
            given=model_type,
            remedy="Set model.layers: auto.",
        )
    return MODEL_TYPE_TO_APPLY_LIGER_FN[model_type]


def _refused(given: str) -> UnavailableError:
    return UnavailableError(
        needed=f"Liger's layers to agree with plain ones to {TOLERANCE:g} in float32 on this device",
        given=given,
        remedy="Set model.layers: transformers.",
    )

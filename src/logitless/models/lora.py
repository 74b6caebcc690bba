"""LoRA through PEFT, and the frozen reference policy: the same model with its adapters off, or a copy."""

import copy
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from logitless.errors import CheckpointError, ConfigurationError, InputError
from logitless.installed import optional
from logitless.models.lm_head import causal_lm, is_peft
from logitless.models.lora_targets import check_targets, expert_weights, lora_targets
from logitless.models.seeded import seeded


@dataclass(frozen=True)
class LoraOptions:
    """Options of LoRA, under PEFT's names where it has one.

    Args:
        rank: R.
        alpha: the product of the factors is multiplied by alpha / rank.
        targets: names of linear modules; in a mixture of experts also of expert weights, where each expert gets its own
            factors, and of routers (``lora_targets``). ``all-linear``: every linear module but the LM head, routers
            and modules whose weight is read without a call (``_READ_BY_WEIGHT``).
        use_rslora: multiply by alpha / sqrt(rank) instead (arXiv:2312.03732).
        dropout: probability with which an input of the factors is set to 0, only in passes with gradient. Sampling and
            scoring have no dropout, so the importance ratio of the first step is not 1.
        modules_to_save: ends of the names of modules that are fully trained beside the adapters; ``norm`` is every
            norm.

    Raises:
        ConfigurationError: a rank or alpha that is not positive, or a dropout outside [0, 1).
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    use_rslora: bool = False
    dropout: float = 0.0
    modules_to_save: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.dropout < 1:
            raise ConfigurationError(
                needed="a dropout of at least 0 and below 1",
                given=str(self.dropout),
                remedy="Use 0.05, or leave it out.",
            )
        if self.rank < 1 or not self.alpha > 0:
            raise ConfigurationError(
                needed="a rank of at least 1 and a positive alpha",
                given=f"rank {self.rank}, alpha {self.alpha}",
                remedy="Use for example rank 16 and alpha 32.",
            )


def add_lora(model: nn.Module, options: LoraOptions, *, seed: int = 0) -> nn.Module:
    """Freeze the model and add trainable float32 adapters; the policy is unchanged until they are trained.

    ``modules_to_save`` are trained as float32 copies; the reference uses the base model's own.

    Args:
        model: a causal LM, changed in place. An adapter that it already has is merged first, so that the reference
            (adapters off) is the policy that training starts from.
        options: rank, scale and targets.
        seed: of the A factors; B starts at 0. The global generators are left alone.

    Returns:
        The PEFT model around it.

    Raises:
        ConfigurationError: a target or module to save names no module; LM head or embedding would change while they are
            tied; the adapter of the LM head or of experts has dropout; a module to save is quantized.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...                      vocab_size=11)
        >>> model = add_lora(LlamaForCausalLM(config), LoraOptions(rank=2, targets=("q_proj",)))
        >>> sum(p.numel() for p in model.parameters() if p.requires_grad)
        32
    """
    if is_peft(model):
        model = merge_adapters(model)
    _check_tied_head(model, options)
    peft = _peft()
    _check_modules_to_save(model, options)
    modules, parameters = _targets(model, options)
    config = peft.LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        target_modules=modules,
        target_parameters=parameters,
        exclude_modules=_not_adapted(model) if options.targets == "all-linear" else None,
        use_rslora=options.use_rslora,
        lora_dropout=options.dropout,
        modules_to_save=list(options.modules_to_save) or None,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        task_type="CAUSAL_LM",
    )
    with seeded(seed, next(model.parameters()).device):
        try:
            with warnings.catch_warnings():
                # PEFT warns that a tied LM head cannot be merged with its adapter.
                warnings.filterwarnings("ignore", message="(?s).*tie_word_embeddings")
                adapted: nn.Module = peft.get_peft_model(model, config)
        except ValueError as error:
            raise ConfigurationError(
                needed="targets that name linear modules of the model",
                given=f"{options.targets}: {error}",
                remedy='Name modules such as "q_proj", or use "all-linear".',
            ) from error
    for path, parameter in adapted.named_parameters():
        if ".modules_to_save." in path:
            parameter.data = parameter.data.float()
    _set_dropout(adapted)
    return adapted


def _targets(model: nn.Module, options: LoraOptions) -> tuple[str | list[str], list[str] | None]:
    """PEFT's ``target_modules`` and ``target_parameters``."""
    if not expert_weights(model):
        if isinstance(options.targets, str):
            return options.targets, None
        modules = dict(model.named_modules())
        linear = [name for name, module in modules.items() if isinstance(module, nn.Linear | Conv1D)]
        check_targets(options.targets, list(modules), offered=linear, kinds="linear modules")
        return list(options.targets), None
    found = lora_targets(model, options.targets)
    if found.parameters and options.dropout:
        raise ConfigurationError(
            needed="no dropout in adapters of experts, which change their weights and have no input of their own",
            given=f"dropout {options.dropout} and {', '.join(found.parameters)} among the targets",
            remedy="Set model.lora.dropout: 0, or name targets outside of the experts.",
        )
    return list(found.modules), list(found.parameters) or None


_READ_BY_WEIGHT = {
    "falcon_h1": "out_proj",
    "nemotron_h": "out_proj",
    "jamba": "dt_proj",
    "gemma3n_text": "correction_coefs",
}
"""By model type modules that are never called, as something reads their weight: an adapter there does nothing."""


def _not_adapted(model: nn.Module) -> list[str] | None:
    name = _READ_BY_WEIGHT.get(causal_lm(model).config.model_type)
    return None if name is None else [name]


class GradientDropout(nn.Dropout):
    """Dropout in passes with gradient; the identity in all others.

    Example:
        >>> with torch.no_grad():
        ...     GradientDropout(0.5)(torch.ones(3))
        tensor([1., 1., 1.])
    """

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if torch.is_grad_enabled() else input


def load_adapters(model: nn.Module, folder: str | Path) -> nn.Module:
    """Add adapters that ``save_adapters`` wrote to a model; they are neither merged nor trainable.

    Args:
        model: the base model they were trained on, changed in place.
        folder: with ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
        ConfigurationError: the folder holds no adapters in safetensors, or they do not fit the model.
    """
    missing = [n for n in ("adapter_config.json", "adapter_model.safetensors") if not (Path(folder) / n).is_file()]
    if missing:
        raise ConfigurationError(
            needed="a folder of adapters in safetensors",
            given=f"{str(folder)!r} without {' and '.join(missing)}",
            remedy="Give a folder written by save_adapters or by PEFT's save_pretrained.",
        )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")
            return _peft().PeftModel.from_pretrained(model, str(folder))
    except (RuntimeError, ValueError, UserWarning) as error:
        raise ConfigurationError(
            needed="adapters of this model",
            given=f"{str(folder)!r}: {error}",
            remedy="Load the base model they were trained on.",
        ) from error


def save_adapters(model: nn.Module, folder: str | Path, state: Mapping[str, Tensor] | None = None) -> None:
    """Write only the adapters, in PEFT's format with safetensors.

    Args:
        model: PEFT-wrapped.
        folder: created if it does not exist.
        state: the model's full weights by name, if its own are sharded.

    Raises:
        InputError: the model has none.
        CheckpointError: the folder cannot be written.
    """
    _check_peft(model)
    try:
        model.save_pretrained(str(folder), save_embedding_layers=False, state_dict=state)  # type: ignore[operator]
        (Path(folder) / "README.md").unlink(missing_ok=True)  # an empty template; `logitless export` writes a card
    except OSError as error:
        raise CheckpointError(
            needed="a folder that can be written",
            given=f"{str(folder)!r}: {error}",
            remedy="Free disk space or choose another folder.",
        ) from error


def merge_adapters(model: nn.Module) -> nn.Module:
    """The plain causal LM with the adapters merged into its weights, in their dtype.

    Raises:
        InputError: the model has no adapters.
    """
    _check_peft(model)
    return model.merge_and_unload(safe_merge=True)  # type: ignore[operator]


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes as the base model: adapters are off, also that of the LM head.

    Raises:
        InputError: the model has no adapters.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from logitless.models.lm_head import lm_head
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...                      vocab_size=11)
        >>> model = add_lora(LlamaForCausalLM(config), LoraOptions(rank=2, targets=("lm_head",)))
        >>> with adapters_off(model):
        ...     print(lm_head(model).lora_a)
        None
    """
    _check_peft(model)
    with model.disable_adapter():  # type: ignore[operator]
        yield


def frozen_copy(model: nn.Module, *, dtype: torch.dtype | None = None) -> nn.Module:
    """A frozen copy of the model in evaluation mode: the reference of full fine-tuning.

    Args:
        model: not changed.
        dtype: of the copy's weights; default as they are. Buffers keep their dtype.

    Example:
        >>> copied = frozen_copy(nn.Linear(2, 2), dtype=torch.bfloat16)
        >>> copied.weight.requires_grad, copied.weight.dtype, copied.training
        (False, torch.bfloat16, False)
    """
    copied = copy.deepcopy(model).requires_grad_(False).eval()
    copied.zero_grad(set_to_none=True)
    if dtype is not None:
        # no buffers: rounded rotary frequencies would rotate late positions by other angles than the policy's
        for parameter in copied.parameters():
            parameter.data = parameter.data.to(dtype)
    return copied


def empty_copy(model: nn.Module) -> nn.Module:
    """A frozen copy in evaluation mode that shares frozen weights and buffers with the model; the others are empty.

    Args:
        model: not changed.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> _ = layer.bias.requires_grad_(False)
        >>> copied = empty_copy(layer)
        >>> copied.bias is layer.bias, copied.weight.shape, copied.training
        (True, torch.Size([0]), False)
    """
    # deepcopy takes what is in its memo in place of a copy; a tied weight is one object there, and stays one.
    shared: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        trained = parameter.requires_grad
        shared[id(parameter)] = nn.Parameter(parameter.new_empty(0), requires_grad=False) if trained else parameter
    return copy.deepcopy(model, shared).eval()


def _check_tied_head(model: nn.Module, options: LoraOptions) -> None:
    output, inputs = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
    if output is None or output.weight is not inputs.weight:
        return
    name = next(name for name, module in causal_lm(model).named_modules() if module is output).rsplit(".", 1)[-1]
    embedding = next(name for name, module in causal_lm(model).named_modules() if module is inputs).rsplit(".", 1)[-1]
    targets = () if isinstance(options.targets, str) else options.targets
    whole = {each for each in (name, embedding) if each.endswith(options.modules_to_save)}  # as PEFT matches names
    if name in targets or whole:
        changed = name if name in {*targets, *whole} else embedding
        raise ConfigurationError(
            needed="an LM head of its own for adapters",
            given=f"{changed!r} among the targets or modules to save, while LM head and embedding are tied",
            remedy=f"Leave {changed!r} out, or untie them (tie_word_embeddings: false).",
        )


def _check_modules_to_save(model: nn.Module, options: LoraOptions) -> None:
    for wanted in options.modules_to_save:
        found = [module for name, module in causal_lm(model).named_modules() if name.endswith(wanted)]
        if not found:
            raise ConfigurationError(
                needed="modules_to_save that name modules of the model",
                given=repr(wanted),
                remedy='Name modules such as "lm_head", "embed_tokens" or "norm".',
            )
        if not all(p.is_floating_point() for module in found for p in module.parameters()):
            raise ConfigurationError(
                needed="modules_to_save in floating point, for they are trained",
                given=f"{wanted!r}, which is quantized",
                remedy="Adapt it with model.lora.targets, or leave model.quantize out.",
            )


def _set_dropout(model: nn.Module) -> None:
    """Replace the dropout of every adapter by ``GradientDropout``."""
    head = causal_lm(model).get_output_embeddings()
    for module in model.modules():
        for name, dropout in dict(getattr(module, "lora_dropout", {})).items():
            if isinstance(dropout, nn.Dropout):
                module.lora_dropout[name] = GradientDropout(dropout.p)  # type: ignore[operator, index, assignment]
                if module is head:
                    raise ConfigurationError(
                        needed="no dropout in an adapter of the LM head, which is applied without its logits",
                        given=f"dropout {dropout.p} and the LM head among the targets",
                        remedy="Leave the LM head out of the targets, or set dropout to 0.",
                    )


def _check_peft(model: nn.Module) -> None:
    if not is_peft(model):
        raise InputError(
            needed="a model with adapters",
            given=type(model).__name__,
            remedy="Call add_lora first; for full fine-tuning the reference is frozen_copy(model).",
        )


def _peft() -> Any:
    said = logging.getLogger("bitsandbytes.backends.cpu.ops")  # PEFT imports it, also where no weight has four bits
    was, said.disabled = said.disabled, True
    try:
        return optional("peft", extra="lora", needed="PEFT for LoRA")
    finally:
        said.disabled = was

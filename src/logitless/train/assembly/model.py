"""Tokenizer and policy model of the section ``model``, with adapters and layers."""

import logging
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from logitless.distributed.arrangement import Arrangement
from logitless.errors import ConfigurationError
from logitless.models.activations import set_modes
from logitless.models.lm_head import backbone
from logitless.models.loading import check_vocabulary, compile_layers, disable_dropout, load_model, load_tokenizer
from logitless.models.lora import LoraOptions, add_lora, load_adapters
from logitless.models.router import freeze_routers
from logitless.rollout.chat import check_chat_template_kwargs
from logitless.train.assembly.layers import (
    ROUTER_RULES,
    SELF_CHECK,
    Fitted,
    against_row_invariant,
    in_words,
    no_row_invariant,
)
from logitless.train.optim.master_weights import lower_to
from logitless.train.recipe.config import Recipe
from logitless.train.recipe.model import ModelSection
from logitless.train.recipe.rule import check

logger = logging.getLogger("logitless")

OWN_BASE = "a base that only this run has: `logitless export RUN` merges it with the adapter"
"""Base model of an adapter on random weights or after a warm start: an error of Hugging Face shows it."""


def tokenizer_of(section: ModelSection) -> PreTrainedTokenizerBase:
    """The tokenizer of a recipe.

    Raises:
        ConfigurationError: the model is a config and no tokenizer is named, or the chat template does not use
            ``chat_template_kwargs``.
    """
    source = section.tokenizer if section.tokenizer is not None else section.source
    if not isinstance(source, str):
        raise ConfigurationError(
            needed="a tokenizer beside a model given as a config",
            given="model.tokenizer: null",
            remedy="Set model.tokenizer to a folder or hub name.",
        )
    tokenizer = load_tokenizer(source, trust_remote_code=section.trust_remote_code)
    check_chat_template_kwargs(tokenizer, section.chat_template_kwargs)
    return tokenizer


def policy_model(
    section: ModelSection,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    device: torch.device,
    weights: Path | None = None,
    empty: bool = False,
) -> nn.Module:
    """The model to train: all weights in ``trained_dtype``, or under LoRA a frozen base with an adapter in it.

    Args:
        tokenizer: must fit the vocabulary.
        seed: of random weights, the adapter's included.
        device: ``meta`` for a dry run.
        weights: folder with weights of the run: a whole model, or under LoRA the adapter of a warm start, which is
            merged into the base before a fresh adapter is added.
        empty: leave weights uninitialised; see ``load_model``.
    """
    full = section.lora is None
    stored = full and weights is not None
    model: nn.Module = load_model(
        str(weights) if stored else section.source,
        dtype=torch.float32 if full else getattr(torch, section.dtype),
        device=device,
        attention=section.attention,
        trust_remote_code=section.trust_remote_code,
        random_weights=section.random_weights and not stored,
        seed=seed,
        four_bit=section.quantize,
        empty=empty,
    )
    check_vocabulary(model, tokenizer)
    num_dropouts = disable_dropout(model)
    if num_dropouts:
        logger.info("dropout: %d probabilities set to 0, so that logp_old and logp are of one function", num_dropouts)
    if section.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    if section.lora is not None:
        if weights is not None:
            model = load_adapters(model, weights)
        model = _with_adapter(section, model, seed=seed, has_own_base=section.random_weights or weights is not None)
    check(ROUTER_RULES, Fitted(section, model, device))
    _finish(section, model)
    if section.compile:
        compile_layers(model)
    return model.train()


def copy_that_samples(section: ModelSection, tokenizer: PreTrainedTokenizerBase) -> nn.Module:
    """The policy's architecture with weights on ``meta``, for an engine that has a copy of the policy's weights."""
    plain = section.model_copy(update={"layers": "transformers", "compile": False, "gradient_checkpointing": False})
    return policy_model(plain, tokenizer, seed=0, device=torch.device("cpu"), empty=True).eval()


def after_warm_start(section: ModelSection, model: nn.Module, *, seed: int) -> nn.Module:
    """The model after a warm start: under LoRA the adapter is merged into the base, and a fresh one is added.

    It is equal to what ``policy_model`` makes from the saved weights of the warm start.
    """
    if section.lora is None:
        return model
    if hasattr(backbone(model), "row_invariant"):
        backbone(model).row_invariant.remove()  # type: ignore[operator, union-attr]
    model = _with_adapter(section, model, seed=seed, has_own_base=True).train()
    _finish(section, model)
    return model


def _with_adapter(section: ModelSection, model: nn.Module, *, seed: int, has_own_base: bool) -> nn.Module:
    """The model with a fresh adapter in it, or in place of a trained one.

    Args:
        has_own_base: whether no other model is the base: it has random weights, or a warm start's.
    """
    model = add_lora(model, lora_options(section), seed=seed)
    if has_own_base:  # else from_pretrained would take the model without the warm start, or ask the hub for one, None
        for config in model.peft_config.values():  # type: ignore[operator, union-attr]
            config.base_model_name_or_path = OWN_BASE
    return model


def lora_options(section: ModelSection) -> LoraOptions:
    """The adapters of a recipe with ``model.lora``."""
    assert section.lora is not None
    return LoraOptions(**section.lora.model_dump())


def is_cut_from_host(recipe: Recipe, arrangement: Arrangement) -> bool:
    """Whether the first rank loads the model into host memory, from where its units are sharded one by one.

    Not if the whole model must run on the device before: for a warm start, to measure activations, or to try layers
    that do not run on a CPU (compiled ones, chosen attention backends).
    """
    model = recipe.model
    runs_before = recipe.warm_start is not None or recipe.train.activation_memory is not None
    for_gpus = model.compile or model.sdpa_backends is not None
    return arrangement.is_sharded and not runs_before and not for_gpus


def _finish(section: ModelSection, model: nn.Module) -> None:
    """Freeze routers, round trained weights to their dtype (master weights keep float32), and exchange the layers."""
    if section.router.frozen:
        freeze_routers(model, dtype=None if section.lora else getattr(torch, section.trained_dtype))
    if section.trained_dtype != "float32":
        lower_to(getattr(torch, section.trained_dtype), model.parameters())
    if section.layers != "transformers":
        _exchange_layers(section, model)


def _exchange_layers(section: ModelSection, model: nn.Module) -> None:
    """Install row-invariant layers; under ``auto`` only where they run.

    Raises:
        UnavailableError: the recipe names them, and they cannot run (``against_row_invariant``).
    """
    reason = in_words(against_row_invariant(section, model)) or install_checked(model)
    if reason and section.layers == "row_invariant":
        raise no_row_invariant(reason)
    if not reason and section.gradient_checkpointing and hasattr(backbone(model), "row_invariant"):
        set_modes(model, ["recompute"] * len(backbone(model).layers))


def install_checked(model: nn.Module) -> str:
    """Install row-invariant layers in a model that they cover, and check them on its GPU.

    A model on the meta device is left as it is.

    Returns:
        Why they were removed again, in words; empty if they were not.
    """
    if next(model.parameters()).device.type == "meta":
        return ""
    from logitless.models.row_invariant.layers import install_row_invariant

    installation = install_row_invariant(model)
    if _passes_self_check(model):
        return ""
    installation.remove()
    logger.warning("layers: transformers' own, for %s", SELF_CHECK.given)
    return SELF_CHECK.given


def _passes_self_check(model: nn.Module) -> bool:
    """Whether attention is bitwise identical on this GPU; on a CPU Triton's interpreter always is."""
    from logitless.models.row_invariant.self_check import self_check

    return next(model.parameters()).device.type != "cuda" or self_check(model).exact

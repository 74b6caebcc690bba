"""From a recipe to the things a run is made of, each checked before the first rollout.

Also the place where settings of the process are made and their effect is read back: matmul precision, allocator,
attention, optimizer. ``effects`` says what is really in force.
"""

import importlib.util
import logging
import os
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from transformers import PreTrainedTokenizerBase

from logitless.data.mixing import MixedOrder
from logitless.data.prompts import PromptOrder, load_prompts, without_overlap
from logitless.data.sources import DataOptions, MixedData
from logitless.distributed.arrangement import Arrangement
from logitless.errors import ConfigurationError, DataError, UnavailableError
from logitless.models.activations import set_modes
from logitless.models.four_bit import num_weights
from logitless.models.liger_layers import install_liger_layers
from logitless.models.lm_head import backbone, causal_lm
from logitless.models.loading import check_vocabulary, compile_layers, disable_dropout, load_model, load_tokenizer
from logitless.models.lora import LoraOptions, add_lora, load_adapters
from logitless.models.value_head import ValueHead, value_head_for
from logitless.objective.algorithm import Algorithm
from logitless.objective.own import OwnAdvantage, OwnSurrogate
from logitless.objective.presets import algorithm
from logitless.rewards.combine import weighted
from logitless.rewards.contract import WeightedReward
from logitless.rewards.instruction_reward import InstructionReward
from logitless.rewards.suites import warn_of_overlap
from logitless.rollout.chat import check_chat_template_kwargs
from logitless.seeds import derived_seed
from logitless.train.config import ModelSection, Recipe, ValueHeadSection
from logitless.train.masters import lower_to
from logitless.train.precision import dtype_line
from logitless.types import Prompt

logger = logging.getLogger("logitless")


@dataclass(frozen=True)
class Data:
    """Prompts, and the account of what was left out.

    Args:
        train: prompts to train on; none is held out.
        held_out: prompts to evaluate on.
        warm_start: prompts with answers, none held out.
        counts: rows read and dropped, by source.
        held_out_sets: further prompts to evaluate on, by the name of their set.
    """

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    warm_start: tuple[Prompt, ...]
    counts: dict[str, dict[str, int]]
    held_out_sets: Mapping[str, tuple[Prompt, ...]] = field(default_factory=dict)

    @property
    def judged(self) -> tuple[Prompt, ...]:
        """All that rewards will read: to train and to evaluate on."""
        return (*self.train, *self.all_held_out)

    @property
    def all_held_out(self) -> tuple[Prompt, ...]:
        """Of every held-out set."""
        return (*self.held_out, *(prompt for prompts in self.held_out_sets.values() for prompt in prompts))


def device_of(section: ModelSection) -> torch.device:
    """The device a recipe asks for; ``auto`` is CUDA where there is one.

    Raises:
        ConfigurationError: CUDA by name on a machine without it.
    """
    if section.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if re.fullmatch(r"cpu|cuda(:\d+)?", section.device) is None:
        raise ConfigurationError(
            needed="auto, cpu, cuda or cuda:<number> as model.device",
            given=repr(section.device),
            remedy="Set model.device: auto.",
        )
    device = torch.device(section.device)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ConfigurationError(
                needed="a CUDA device for model.device",
                given=f"{section.device}, and {count or 'none'} on this machine",
                remedy="Set model.device: cpu or auto" + (f", or at most cuda:{count - 1}." if count else "."),
            )
    return device


_SDPA: dict[str, tuple[Callable[[bool], Any], Callable[[], Any]]] = {
    "flash": (torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.flash_sdp_enabled),
    "efficient": (torch.backends.cuda.enable_mem_efficient_sdp, torch.backends.cuda.mem_efficient_sdp_enabled),
    "cudnn": (torch.backends.cuda.enable_cudnn_sdp, torch.backends.cuda.cudnn_sdp_enabled),
    "math": (torch.backends.cuda.enable_math_sdp, torch.backends.cuda.math_sdp_enabled),
}


def sdpa_allowed() -> list[str]:
    """Kernels that scaled_dot_product_attention may choose from, as the process is set.

    Example:
        >>> "math" in sdpa_allowed()
        True
    """
    return [name for name, (_, enabled) in _SDPA.items() if enabled()]


def set_process(section: ModelSection, *, seed: int) -> None:
    """Settings that must precede the first tensor on a GPU and the first product.

    The global generators are seeded for code that draws from them; nothing of logitless does.
    """
    set_allocator(section.allocator)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.set_float32_matmul_precision(section.matmul_precision)
    for name, (enable, _) in _SDPA.items():
        if section.sdpa_backends is not None:
            enable(name in section.sdpa_backends)
    transformers.utils.logging.disable_progress_bar()


def set_allocator(setting: str | None) -> None:
    """Set torch's CUDA allocator for this process and those that it starts, unless the user or a recipe did before.

    Args:
        setting: as of ``PYTORCH_CUDA_ALLOC_CONF``; None leaves it to torch.
    """
    if setting is not None and allocator_of_environment() is None:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = setting
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # Ranks and doctor have asked CUDA for its devices before: the variable is not read any more.
            torch._C._accelerator_setAllocatorSettings(setting)


def allocator_of_environment() -> str | None:
    """The user's setting of torch's CUDA allocator, under either of its names, or what a recipe set before."""
    return os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or None


def tokenizer_of(section: ModelSection) -> PreTrainedTokenizerBase:
    """The tokenizer of a recipe.

    Raises:
        ConfigurationError: none is named beside a model that is a bare config, or its chat template does not read
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
    """The model to train: every weight in ``trained_dtype``, under LoRA adapters in it on a frozen base.

    Args:
        section: of the recipe.
        tokenizer: must fit the vocabulary.
        seed: of random weights and of the adapter's.
        device: ``meta`` for a dry run.
        weights: folder with the weights of a run: a whole model, or under LoRA the adapter of a warm start, which is
            merged before the adapter to train is added.
        empty: without its weights, and those of the adapter to train; see ``load_model``.
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
        drop_router_loss=section.drop_router_loss,
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
        model = add_lora(model, lora_options(section), seed=seed)
    _finish(section, model)
    if section.compile:
        compile_layers(model)
    return model.train()


def after_warm_start(section: ModelSection, model: nn.Module, *, seed: int) -> nn.Module:
    """The model that reinforcement learning begins with: under LoRA what was learnt is merged into the base that is
    there, and a fresh adapter added; it is the model that ``policy_model`` makes of the warm start's weights."""
    if section.lora is None:
        return model
    if hasattr(backbone(model), "row_invariant"):
        backbone(model).row_invariant.remove()  # type: ignore[operator, union-attr]
    model = add_lora(model, lora_options(section), seed=seed).train()
    _finish(section, model)
    return model


def lora_options(section: ModelSection) -> LoraOptions:
    """The adapters of a recipe with ``model.lora``.

    Raises:
        ConfigurationError: modules that are trained whole in another dtype than the rest of the model.
    """
    assert section.lora is not None
    if section.lora.modules_to_save and section.trained_dtype != section.dtype:
        raise ConfigurationError(
            needed="one dtype of the base model and of modules_to_save, which stand between its layers",
            given=f"model.dtype: {section.dtype}, model.trained_dtype: {section.trained_dtype}",
            remedy="Set both alike, or leave both at auto.",
        )
    return LoraOptions(**section.lora.model_dump())


def section_for(section: ModelSection, arrangement: Arrangement) -> ModelSection:
    """The section as these ranks can run it: where weights or sequences are split, ``auto`` is transformers' layers."""
    split = arrangement.is_sharded or arrangement.sequence > 1
    return section.model_copy(update={"layers": "transformers"}) if split and section.layers == "auto" else section


def is_cut_from_host(recipe: Recipe, arrangement: Arrangement) -> bool:
    """Whether the model stays in the host's memory, of the first rank alone, until its units go to the device one by
    one, to be cut there.

    Not where the whole model is trained or measured before, nor where a CPU cannot try its layers (``why_unshared``
    and ``install_liger_layers`` run a few tokens): Liger's kernels, compiled ones, chosen backends of attention.
    """
    model = recipe.model
    runs_before = recipe.warm_start is not None or recipe.train.activation_memory is not None
    for_gpus = model.layers == "liger" or model.compile or model.sdpa_backends is not None
    return arrangement.is_sharded and not runs_before and not for_gpus


def _finish(section: ModelSection, model: nn.Module) -> None:
    """Round what is trained to its dtype, masters keeping what was there, and exchange the layers."""
    if section.trained_dtype != "float32":
        lower_to(getattr(torch, section.trained_dtype), model.parameters())
    if section.layers == "liger":
        install_liger_layers(model)
    elif section.layers != "transformers":
        _exchange_layers(section, model)


def _exchange_layers(section: ModelSection, model: nn.Module) -> None:
    """Row-invariant layers, checked on this GPU; under ``auto`` only where they serve, which ``effects`` then says.

    On the meta device a model is looked at and left as it is.

    Raises:
        UnavailableError: they are asked for by name, and something stands in the way (``own_layers_because``).
    """
    reason = own_layers_because(section, model)
    device = next(model.parameters()).device
    if not reason and device.type != "meta":
        from logitless.models.row_invariant import install_row_invariant

        installation = install_row_invariant(model)
        if not _keeps_bits(model):
            installation.remove()
            reason = "attention does not keep its bits on this GPU (`logitless doctor` has the details)"
            logger.warning("layers: transformers' own, for %s", reason)
        elif section.gradient_checkpointing:
            set_modes(model, ["recompute"] * len(backbone(model).layers))
    if reason and section.layers == "row_invariant":
        raise UnavailableError(
            needed="a model and a GPU that row-invariant layers serve",
            given=reason,
            remedy="Set model.layers: transformers, or auto. docs/bits.md lists what is covered.",
        )


def _keeps_bits(model: nn.Module) -> bool:
    """What this GPU's self-check says; the interpreter on a CPU has one order of every sum."""
    from logitless.models.self_check import self_check

    return next(model.parameters()).device.type != "cuda" or self_check(model).exact


def own_layers_because(section: ModelSection, model: nn.Module, device: torch.device | None = None) -> str:
    """What keeps a model with transformers' own layers from row-invariant ones, in words; empty where nothing does.

    Under ``auto`` that is also what would make them slow: the interpreter on a CPU, and float32 weights, which no
    tensor core multiplies.

    Args:
        section: of the recipe.
        model: of the section.
        device: that it is to run on; None for the one that it is on.
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is absent (pip install 'logitless[triton]')"
    from logitless.models.row_invariant import uncovered

    beside = {
        f"model.attention: {section.attention}": section.attention != "packed",
        f"model.autocast: {section.autocast}": section.autocast is not None,
        "model.compile: true": section.compile,
        f"model.quantize: {section.quantize}": section.quantize is not None,
    }
    found = [setting for setting, given in beside.items() if given] + list(uncovered(model))
    device = device or next(model.parameters()).device
    automatic = section.layers == "auto"
    if device.type == "cpu" and (automatic or os.environ.get("TRITON_INTERPRET") != "1"):
        found.append("a model on the CPU")
    elif automatic and backbone(model).get_input_embeddings().weight.dtype == torch.float32:  # type: ignore[operator]
        found.append("float32 weights (model.trained_dtype: bfloat16, under LoRA model.dtype, would serve)")
    return "; ".join(found)


def effects(section: ModelSection, device: torch.device, model: nn.Module) -> list[str]:
    """What is really in force, read back from torch and the model, one line each."""
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    checkpointing = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    compiled = any(module._compiled_call_impl is not None for module in model.modules())
    sdpa = sdpa_allowed()
    lines = [
        f"device {device}" + (f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""),
        dtype_line(section),
        f"trained: {sum(p.numel() for p in trained):,} weights in {_dtypes(trained)}",
        f"frozen: {sum(map(num_weights, frozen)):,} weights in {_dtypes(frozen)}" if frozen else "frozen: none",
        f"products in {section.autocast or _dtypes(trained)}, float32 ones at precision "
        f"{torch.get_float32_matmul_precision()!r}",
        f"attention {causal_lm(model).config._attn_implementation}; SDPA may use {', '.join(sdpa)}",
        f"layers {layers_line(section, device, model)}",
        f"gradient checkpointing {'on' if checkpointing else 'off'}, compile {'on' if compiled else 'off'}",
    ]
    if section.quantize is not None:
        lines.append(
            f"base in four bits a weight ({section.quantize}, uint8 above), by bitsandbytes: log-probs of sampling and "
            "training have no one set of bits"
        )
    if device.type == "cuda":
        lines.append(f"allocator {allocator_of_environment() or 'default'}")
    return lines


def layers_line(section: ModelSection, device: torch.device, model: nn.Module) -> str:
    """Which layers a model has or, on the meta device, would have on ``device``, and why."""
    if runs_row_invariant(section, device, model):
        return "row-invariant: a token has one set of bits in any packed row"
    if section.layers == "liger":
        return "Liger's norm, rotary embedding and gated MLP"
    reason = own_layers_because(section, model, device) if section.layers == "auto" else ""
    return "transformers' own" + (f", for {reason}" if reason else "")


def runs_row_invariant(section: ModelSection, device: torch.device, model: nn.Module) -> bool:
    """Whether a model has row-invariant layers.

    Of a model on the meta device: whether it would have them on ``device``, if that GPU's self-check finds nothing.
    """
    if next(model.parameters()).device.type != "meta":
        return hasattr(backbone(model), "row_invariant")
    return section.layers in ("auto", "row_invariant") and not own_layers_because(section, model, device)


def _dtypes(parameters: Sequence[nn.Parameter]) -> str:
    return ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})) or "none"


def data_of(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]] | None = None
) -> Data:
    """Load all prompts of a recipe; held-out texts are removed from training.

    Args:
        recipe: checked.
        tokenizer: of the policy.
        tools: of the environment, that prompts tell of.

    Raises:
        DataError: nothing is left to train on, and whatever the sources raise.

    Warns:
        OverlapWarning: instruction ids are both trained on and held out.
    """
    section = recipe.data
    counts: dict[str, dict[str, int]] = {}

    def load(name: str, options: DataOptions) -> tuple[Prompt, ...]:
        found = load_prompts(
            options,
            tokenizer,
            max_prompt_tokens=section.max_prompt_tokens,
            too_long=section.too_long,
            tools=tools,
            chat_template_kwargs=recipe.model.chat_template_kwargs,
        )
        counts[name] = dict(found.counts)
        return tuple(replace(prompt, source=name) for prompt in found.prompts)

    held_out = load("held_out", section.held_out) if section.held_out is not None else ()
    sets = {name: load(name, each.data) for name, each in recipe.evaluation.sets.items()}
    evaluated = [*held_out, *(prompt for prompts in sets.values() for prompt in prompts)]

    def to_train_on(name: str, options: DataOptions) -> tuple[Prompt, ...]:
        split = without_overlap(load(name, options), evaluated)
        counts[name]["held_out"] = split.num_removed
        return split.training

    if isinstance(section.train, MixedData):
        train = tuple(
            replace(prompt, id=f"{name}/{prompt.id}")
            for name, each in section.train.sources.items()
            for prompt in to_train_on(name, each.data)
        )
    else:
        train = to_train_on("train", section.train)
    warm: tuple[Prompt, ...] = ()
    if recipe.warm_start is not None:
        warm = without_overlap(load("warm_start", recipe.warm_start.data), evaluated).training
    if len(train) < recipe.rollout.prompts_per_block:
        raise DataError(
            needed=f"at least rollout.prompts_per_block = {recipe.rollout.prompts_per_block} prompts to train on",
            given=f"{len(train)} ({ ({name: counts[name] for name in recipe.training_sources}) })",
            remedy="Give more data, raise data.max_prompt_tokens, or lower rollout.prompts_per_block.",
        )
    order_of(recipe, train)  # says what a mixture lacks, before anything else is loaded
    warn_of_overlap(_instruction_ids(recipe, train), _instruction_ids(recipe, evaluated))
    return Data(train, held_out, warm, counts, sets)


def order_of(recipe: Recipe, prompts: Sequence[Prompt]) -> PromptOrder | MixedOrder:
    """In which order prompts are drawn: an epoch of one source after another, or a mixture's sources in turn.

    Args:
        recipe: checked.
        prompts: to train on.

    Raises:
        DataError: a source of a mixture has too few prompts for its share of a block.
    """
    data = recipe.data.train
    if not isinstance(data, MixedData):
        return PromptOrder(len(prompts), derived_seed(recipe.seed, "order"))
    members: dict[str, list[int]] = {name: [] for name in data.sources}
    for index, prompt in enumerate(prompts):
        members[prompt.source].append(index)
    weights = {name: each.weight for name, each in data.sources.items()}
    most = recipe.rollout.prompts_per_block
    return MixedOrder(members, weights, seed=derived_seed(recipe.seed, "order"), most=most)


def _instruction_ids(recipe: Recipe, prompts: Sequence[Prompt]) -> set[str]:
    """What the recipe's suites read as ids in these rows; whether they are ids is checked with the rewards."""
    columns = [reward.ids_column for reward in recipe.rewards if isinstance(reward, InstructionReward)]
    given = [prompt.columns.get(name) for prompt in prompts for name in columns]
    return {name for ids in given if isinstance(ids, list) for name in ids if isinstance(name, str)}


def rewards_of(recipe: Recipe, prompts: Sequence[Prompt]) -> tuple[WeightedReward, ...]:
    """The recipe's rewards, each checked against every row that it will be given."""
    rewards = weighted(recipe.rewards)
    for entry in rewards:
        rows = [prompt.columns for prompt in prompts if entry.judges(prompt.source)]
        entry.reward.check({name: [row.get(name) for row in rows] for name in {n for row in rows for n in row}})
    return rewards


def algorithm_of(recipe: Recipe) -> Algorithm:
    """The preset with the recipe's replacements, its KL and its lengths filled in.

    Raises:
        ConfigurationError: an unknown preset, parameters it does not have, parts that do not go together, or a part of
            one's own that does not pass its trial.
    """
    section = recipe.algorithm
    preset = algorithm(section.preset, section.parameters)
    parts: dict[str, Any] = {
        name: value.made() if isinstance(value, OwnSurrogate) else value
        for name in ("ratio", "surrogate", "filters", "correction", "entropy_bonus")
        if (value := getattr(section, name)) is not None
    }
    advantage = section.advantage or preset.advantage
    kl = recipe.kl
    penalty = kl.penalty if kl is not None and kl.placement == "loss" else None
    weighting = section.weighting or preset.weighting
    found = replace(
        preset,
        objective=replace(preset.objective, **parts, kl=penalty),
        advantage=advantage.made() if isinstance(advantage, OwnAdvantage) else advantage,
        weighting=weighting.for_rollouts_of(recipe.rollout.longest_completion),
        value_loss=section.value_loss or preset.value_loss,
        kl_control=None if kl is None else kl.control,
        kl_in_reward=kl is not None and kl.placement == "reward",
        drop_truncated=recipe.train.drop_truncated or preset.drop_truncated,
    )
    found.check_completions(recipe.rollout.completions_per_prompt)
    if not recipe.rewards and found.advantage is not None and found.advantage.reads_functions:
        raise ConfigurationError(
            needed=f"rewards for the advantage {found.advantage.name!r}, which takes them apart",
            given="rewards: []",
            remedy="Choose another algorithm.advantage, or name a reward.",
        )
    if found.value_loss is None and recipe.value_head is not None:
        raise ConfigurationError(
            needed="an algorithm with a value loss for value_head to apply to",
            given=f"preset {section.preset!r} without one",
            remedy="Remove value_head, or set algorithm.preset: ppo.",
        )
    for note in found.notes:
        logger.info("algorithm: %s", note)
    if recipe.rollout.sampling.filters_distribution and found.objective.correction is None:
        logger.warning(
            "rollout.sampling: tokens are drawn from something else than the policy at its temperature (top_p, top_k, "
            "min_p, a repetition penalty or temperature 0), which the loss does not see; leave them out to be on policy"
        )
    return found


def value_head_section(recipe: Recipe) -> ValueHeadSection:
    """The recipe's section, or its defaults."""
    return recipe.value_head or ValueHeadSection()


def value_head_of(recipe: Recipe, algorithm: Algorithm, model: nn.Module) -> ValueHead | None:
    """The value head that an algorithm with a value loss starts from; None for any other.

    Args:
        recipe: names a file to start from, or none.
        algorithm: of the recipe.
        model: the policy's.

    Raises:
        ConfigurationError: the file is not that of a value head that fits the model.
    """
    if algorithm.value_loss is None:
        return None
    source = value_head_section(recipe).source
    return value_head_for(model, None if source is None else Path(source))

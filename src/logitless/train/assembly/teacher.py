"""The teacher of a recipe: checked beside the policy's tokenizer, loaded, and described."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from logitless.distributed.arrangement import Arrangement
from logitless.errors import ConfigurationError
from logitless.models.gguf import gguf_file
from logitless.models.loading import check_vocabulary, disable_dropout, load_model, load_tokenizer
from logitless.train.assembly.process import device_of
from logitless.train.learn.policy import AdaptersOff, Policy
from logitless.train.learn.teacher import Teacher
from logitless.train.recipe.config import Recipe
from logitless.train.recipe.precision import automatic_dtype
from logitless.train.recipe.teacher import TeacherSection
from logitless.train.record.provenance import digest_of_file


def has_teacher_model(recipe: Recipe) -> bool:
    """Whether there is a teacher with weights of its own; LoRA's base is the policy without adapters."""
    return recipe.teacher is not None and not recipe.teacher.is_base


def teacher_of(recipe: Recipe, policy: Policy, arrangement: Arrangement) -> Teacher | None:
    """The teacher of a recipe, frozen; None without one.

    Args:
        recipe: resolved.
        policy: that it teaches.
        arrangement: of the ranks; weights that are to be sharded are loaded into host memory.
    """
    if recipe.teacher is None:
        return None
    if recipe.teacher.is_base:
        return Teacher(AdaptersOff(policy), recipe.teacher)
    model = teacher_model(recipe, torch.device("cpu") if arrangement.is_sharded else device_of(recipe.model))
    own = Policy(
        model,
        autocast=policy.autocast,
        memory_budget=recipe.train.head_memory_budget,
        share_prompts=recipe.train.share_prompts,
    )
    teacher = Teacher(own, recipe.teacher)
    if not arrangement.is_sharded:
        teacher.wait()
    return teacher


def teacher_model(recipe: Recipe, device: torch.device) -> nn.Module:
    """The teacher's frozen model.

    Args:
        recipe: with a teacher that has weights of its own.
        device: ``meta`` for a plan.
    """
    section = recipe.teacher
    assert section is not None
    dtype = automatic_dtype(recipe.model)[0] if section.dtype == "auto" else section.dtype
    remote: dict[str, Any] = {"trust_remote_code": recipe.model.trust_remote_code}
    model: nn.Module = load_model(
        section.source, dtype=getattr(torch, dtype), device=device, attention=recipe.model.attention, **remote
    )
    check_vocabulary(model, load_tokenizer(section.source, **remote))
    disable_dropout(model)
    return model.requires_grad_(False).eval()


def check_teacher_tokenizer(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a teacher with another tokenizer than the policy's.

    Raises:
        ConfigurationError: a token has another id, or is in one of them only.
    """
    if not has_teacher_model(recipe):
        return
    assert recipe.teacher is not None
    of_teacher = load_tokenizer(recipe.teacher.source, trust_remote_code=recipe.model.trust_remote_code).get_vocab()
    own = tokenizer.get_vocab()
    differ = sorted(token for token in {*own, *of_teacher} if own.get(token) != of_teacher.get(token))
    if differ:
        raise ConfigurationError(
            needed="a teacher with the policy's tokenizer: both models are compared token by token",
            given=f"another one in {recipe.teacher.source!r}: {len(differ)} tokens have another id or none, the first "
            f"{differ[0]!r}",
            remedy="Take a teacher of the policy's model family (teacher.source).",
        )


def digest_of_teacher(source: str) -> str:
    """SHA-256 of a teacher's config and weights; of a hub model its name."""
    gguf, folder = gguf_file(source), Path(source)
    if gguf is not None:
        return digest_of_file(Path(gguf))
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))] if folder.is_dir() else []
    return hashlib.sha256("".join(digest_of_file(file) for file in files).encode()).hexdigest() if files else source


def teacher_line(section: TeacherSection) -> str:
    """The teacher in words, for the first lines of a run and of ``--dry-run``.

    Example:
        >>> teacher_line(TeacherSection(source="base", divergence="reverse_kl", weight=0.5, advantage=True))
        'teacher base: 0.5 * reverse_kl in the loss, 1 * (logp_teacher - logp_sampler) in the advantage'
    """
    parts = []
    if section.divergence is not None:
        beta = (
            ""
            if section.divergence != "jensen_shannon"
            else f" (beta {0.5 if section.beta is None else section.beta:g})"
        )
        parts.append(f"{section.weight:g} * {section.divergence}{beta} in the loss")
    if section.advantage:
        parts.append(f"{section.advantage:g} * (logp_teacher - logp_sampler) in the advantage")
    if section.alone:
        parts.append("without rewards")
    return f"teacher {section.source}: {', '.join(parts)}"

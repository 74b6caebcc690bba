"""The teachers of a recipe: checked beside the policy's tokenizer, loaded, and described."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from logitless.distributed.arrangement import Arrangement
from logitless.errors import ConfigurationError
from logitless.head.contract import on_device
from logitless.models.gguf import gguf_file
from logitless.models.lm_head import backbone
from logitless.models.loading import check_vocabulary, disable_dropout, load_model, load_tokenizer
from logitless.train.assembly.layers import LAYER_RULES, SELF_CHECK, Fitted, in_words, layers_in_words, no_row_invariant
from logitless.train.assembly.model import install_checked
from logitless.train.assembly.policies import policy_of
from logitless.train.assembly.process import device_of, named_device
from logitless.train.assembly.resolve import against_whole
from logitless.train.learn.policy import AdaptersOff, Itself, Policy
from logitless.train.learn.teacher import Teacher
from logitless.train.learn.teacher_prompts import TeacherPrompts, teacher_index
from logitless.train.learn.teacher_server import ServedTeacher
from logitless.train.recipe.config import Recipe
from logitless.train.recipe.model import ModelSection, RouterSection
from logitless.train.recipe.precision import automatic_dtype
from logitless.train.recipe.rule import unmet
from logitless.train.recipe.teacher import BASE, OF_POLICY, SELF, START, TeacherSection, is_address
from logitless.train.record.provenance import digest_of_file
from logitless.types import Prompt


def teacher_of(
    recipe: Recipe,
    policy: Policy,
    arrangement: Arrangement,
    *,
    start: Policy | None,
    prompts: TeacherPrompts | None,
    models: Mapping[str, nn.Module],
) -> Teacher | None:
    """The teachers of a recipe, frozen; None without one.

    Args:
        recipe: resolved.
        policy: that they teach.
        arrangement: of the ranks; weights that are to be sharded are loaded into host memory.
        start: the policy before its first step, for ``source: start``.
        prompts: of the teachers; None if they read the policy's.
        models: frozen, by their sources, in place of those that would be loaded.
    """
    section = recipe.teacher
    if section is None:
        return None
    device = torch.device("cpu") if arrangement.is_sharded else teacher_device(recipe)

    def model_of(source: str) -> Policy | Itself | ServedTeacher:
        if is_address(source):
            return ServedTeacher.at(source)
        if source == BASE:
            return AdaptersOff(policy)
        if source == SELF:
            return Itself(policy)
        if source == START:
            assert start is not None
            return start
        with on_device(device):
            model = models[source] if source in models else teacher_model(recipe, source, device)
            _exchange_layers(recipe, model, arrangement)
            return policy_of(recipe, model)

    of_source = {source: model_of(source) for source in dict.fromkeys(section.sources.values())}
    in_order = [of_source[source] for source in section.sources.values()]
    teacher = Teacher(in_order, section, prompts, memory_budget=recipe.train.head_memory_budget)
    if not arrangement.is_sharded:
        teacher.wait()
    return teacher


def teacher_prompts_of(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]] | None
) -> TeacherPrompts | None:
    """The prompts of the teachers under ``teacher.template``; None if they read the policy's.

    Args:
        tools: of the environment, for the chat template.
    """
    if recipe.teacher is None or recipe.teacher.template is None:
        return None
    variables = {**recipe.model.chat_template_kwargs, **({} if tools is None else {"tools": list(tools)})}
    return TeacherPrompts(recipe.teacher.template, tokenizer, variables)


def teacher_model(recipe: Recipe, source: str, device: torch.device) -> nn.Module:
    """A teacher's frozen model.

    Args:
        recipe: with teachers.
        source: one with weights of its own.
        device: ``meta`` for a plan.
    """
    section = recipe.teacher
    assert section is not None
    dtype = automatic_dtype(recipe.model)[0] if section.dtype == "auto" else section.dtype
    remote: dict[str, Any] = {"trust_remote_code": recipe.model.trust_remote_code}
    model: nn.Module = load_model(
        source, dtype=getattr(torch, dtype), device=device, attention=recipe.model.attention, **remote
    )
    check_vocabulary(model, load_tokenizer(source, **remote))
    disable_dropout(model)
    return model.requires_grad_(False).eval()


def teachers_on_meta(recipe: Recipe) -> dict[str, nn.Module]:
    """The models of teachers with weights of their own, without their weights, by their sources; for a plan."""
    sources = () if recipe.teacher is None else recipe.teacher.models.values()
    return {source: teacher_model(recipe, source, torch.device("meta")) for source in sources}


def teacher_device(recipe: Recipe) -> torch.device:
    """Where teachers with weights of their own run.

    Raises:
        ConfigurationError: ``teacher.place`` names a device that this machine does not have.
    """
    assert recipe.teacher is not None
    name = recipe.teacher.device
    return device_of(recipe.model) if name is None else named_device(name, "teacher.place", "device")


def _exchange_layers(recipe: Recipe, model: nn.Module, arrangement: Arrangement) -> None:
    """Give a teacher row-invariant layers; under ``auto`` only where they serve.

    Raises:
        UnavailableError: the recipe names them, and they cannot run.
    """
    assert recipe.teacher is not None
    reason = _against_layers(recipe, model, arrangement) or install_checked(model)
    if reason and recipe.teacher.layers == "row_invariant":
        raise no_row_invariant(reason, "teacher.layers")


def _against_layers(recipe: Recipe, model: nn.Module, arrangement: Arrangement) -> str:
    """Why a teacher has transformers' layers, in words; empty where row-invariant ones serve.

    Args:
        model: with transformers' layers; one on the meta device is treated as one on ``teacher_device``.
    """
    section = recipe.teacher
    assert section is not None
    if section.layers == "transformers":
        return "teacher.layers: transformers"
    if sharded := against_whole(recipe, arrangement):
        return in_words(sharded)
    device = next(model.parameters()).device
    device = teacher_device(recipe) if device.type == "meta" else device
    settings = recipe.model.attention, recipe.model.autocast
    as_policy = ModelSection(source="", attention=settings[0], autocast=settings[1], router=RouterSection(loss=0))
    fitted = Fitted(as_policy, model, device)
    reasons = [each.given for each in unmet(LAYER_RULES, fitted)]
    if section.layers == "auto" and device.type == "cpu":
        reasons.append("a model on the CPU")
    elif section.layers == "auto" and fitted.is_slow:
        reasons.append("float32 weights (teacher.dtype: bfloat16 would serve)")
    return "; ".join(dict.fromkeys(reasons))


def layers_lines(recipe: Recipe, models: Mapping[str, nn.Module], arrangement: Arrangement) -> Iterator[str]:
    """Which layers each teacher with weights of its own has, and why.

    Args:
        models: by their sources, on their device; or on ``meta``, for a plan.
    """
    for source, model in models.items():
        reason = ""
        if not hasattr(backbone(model), "row_invariant"):
            is_plan = next(model.parameters()).device.type == "meta"
            reason = _against_layers(recipe, model, arrangement) or ("" if is_plan else SELF_CHECK.given)
        yield f"teacher {source}: layers {layers_in_words('transformers' if reason else 'row_invariant', reason)}"


def check_teachers(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> None:
    """Refuse a teacher with another tokenizer than the policy's, and prompts without a teacher.

    Raises:
        ConfigurationError: a token has another id, or is in one of them only; a device that is not there.
        DataError: no teacher grades a prompt.
    """
    section, own = recipe.teacher, tokenizer.get_vocab()
    if section is None:
        return
    teacher_device(recipe)
    for source in dict.fromkeys(section.models.values()):
        of_teacher = load_tokenizer(source, trust_remote_code=recipe.model.trust_remote_code).get_vocab()
        differ = sorted(token for token in {*own, *of_teacher} if own.get(token) != of_teacher.get(token))
        if differ:
            raise ConfigurationError(
                needed="a teacher with the policy's tokenizer: both models are compared token by token",
                given=f"another one in {source!r}: {len(differ)} tokens have another id or none, the first "
                f"{differ[0]!r}",
                remedy="Take a teacher of the policy's model family (teacher.source).",
            )
    for prompt in prompts:
        teacher_index(section, prompt)


def digests_of_teachers(section: TeacherSection) -> dict[str, str]:
    """SHA-256 of each teacher's config and weights; of a hub model, or of the policy, its name."""
    return {"teacher" + (name and f".{name}"): digest_of_teacher(each) for name, each in section.sources.items()}


def digest_of_teacher(source: str) -> str:
    """SHA-256 of a teacher's config and weights; of a hub model its name."""
    if source in OF_POLICY:
        return source
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
        over = "" if section.top_k is None else f" over a server's {section.top_k} likeliest tokens and the rest"
        parts.append(f"{section.weight:g} * {section.divergence}{beta}{over} in the loss")
    if section.advantage:
        parts.append(f"{section.advantage:g} * (logp_teacher - logp_sampler) in the advantage")
    if section.alone:
        parts.append("without rewards")
    if section.template is not None:
        parts.append("after prompts of its own")
    names = ", ".join(f"{source} for {name}" if name else source for name, source in section.sources.items())
    return f"teacher {names}: {', '.join(parts)}"

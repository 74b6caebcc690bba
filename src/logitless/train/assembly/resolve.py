"""Which layers and which engine ``auto`` stands for; resolved once, when the model is known.

Dtypes are resolved earlier, when a recipe is read (``precision.py``). A model on the meta device is treated as one on
the recipe's device, so that ``--dry-run`` shows what a run would choose.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from logitless.distributed.arrangement import Arrangement
from logitless.distributed.sharding import is_sharded
from logitless.errors import LogitlessError, UnavailableError
from logitless.models.lm_head import backbone
from logitless.train.assembly.layers import (
    SELF_CHECK,
    against_row_invariant,
    in_words,
    layers_in_words,
    no_row_invariant,
)
from logitless.train.assembly.process import device_of, runs_kernels
from logitless.train.recipe.config import Recipe
from logitless.train.recipe.engine import GPU_FUSED, GPU_HERE, gpu
from logitless.train.recipe.model import WHOLE_LAYERS, ModelSection
from logitless.train.recipe.rule import Machine, Processes, Rule, check, recipe_of, unmet

LAYERS, ENGINE = "model.layers", "rollout.engine"


@dataclass(frozen=True)
class Resolved:
    """A recipe without ``auto``, and why ``auto`` was resolved so.

    Args:
        recipe: names layers and engine.
        against: for ``LAYERS`` and ``ENGINE`` if they were ``auto``: why row-invariant layers or the GPU engine cannot
            run; empty if they were chosen.
    """

    recipe: Recipe
    against: Mapping[str, Sequence[LogitlessError]] = field(default_factory=dict)

    @property
    def layers_line(self) -> str:
        """The model's layers in words, with the reason if ``auto`` chose them."""
        return layers_in_words(self.recipe.model.layers, in_words(self.against.get(LAYERS, ())))

    @property
    def engine_line(self) -> str:
        """The engine in words, with the reason if ``auto`` chose it."""
        name, against = self.recipe.rollout.engine.name, self.against.get(ENGINE)
        if against is None:
            return f"{name}, set by the recipe"
        if self.recipe.parallel.has_copy:
            return f"{name}, with a copy of the weights over {self.recipe.parallel.sampling_shards}"
        return f"{name}, for {in_words(against)}" if against else f"{name}, bitwise identical to training"


def before_loading(recipe: Recipe, arrangement: Arrangement) -> Recipe:
    """The recipe to load a model by: ``model.layers: auto`` is ``transformers`` where weights are sharded."""
    is_split = bool(against_whole(recipe, arrangement))
    return _with_layers(recipe, "transformers") if is_split and recipe.model.layers == "auto" else recipe


def against_whole(recipe: Recipe, arrangement: Arrangement) -> list[LogitlessError]:
    """Why row-invariant layers cannot run in this arrangement; empty where they can."""
    return unmet((WHOLE_LAYERS,), Processes(recipe, arrangement.world, arrangement))


def resolved(recipe: Recipe, model: nn.Module, arrangement: Arrangement) -> Resolved:
    """Resolve ``auto`` for a model.

    Args:
        model: loaded by ``before_loading``, on its device or on ``meta``.

    Raises:
        UnavailableError: the recipe names layers or an engine that do not run on its device.
    """
    device, against = device_of(recipe.model), dict[str, Sequence[LogitlessError]]()
    found = before_loading(recipe, arrangement)
    if found is not recipe:
        against[LAYERS] = against_whole(recipe, arrangement)
    elif recipe.model.layers == "auto":
        if recipe.rollout.engine.bitwise or _is_row_invariant(recipe.model, device, model):  # the engine installs them
            against[LAYERS] = ()
        else:
            against[LAYERS] = against_row_invariant(recipe.model, model, device) or (SELF_CHECK,)
        found = _with_layers(recipe, "transformers" if against[LAYERS] else "row_invariant")
    elif (
        recipe.model.layers == "row_invariant"
        and _device_type(model) == "meta"  # others are checked when loaded
        and (reasons := against_row_invariant(recipe.model, model, device))
    ):
        raise no_row_invariant(in_words(reasons))
    choices, placed = recipe.rollout.engine.choices, Placed(found, model)
    if choices is None:
        check(GPU_RULES, placed)
    else:
        against[ENGINE] = unmet(GPU_RULES, placed)[:1]
        if against[ENGINE] and found.parallel.has_copy:
            raise against[ENGINE][0]
        chosen = choices[bool(against[ENGINE])]
        found = found.model_copy(update={"rollout": found.rollout.model_copy(update={"engine": chosen})})
    return Resolved(found, against)


@dataclass(frozen=True)
class Placed:
    """A recipe with its model, as the subject of rules about the engine ``gpu``.

    Args:
        recipe: checked.
        model: of the recipe; one on the meta device is treated as one on the recipe's device.
    """

    recipe: Recipe
    model: nn.Module

    @property
    def machine(self) -> Machine:
        """The recipe with its device. For the engine ``gpu``, Triton's interpreter counts as a GPU, for tests."""
        device = device_of(self.recipe.model)
        is_one = self.recipe.rollout.engine.bitwise and runs_kernels(device)
        return Machine(self.recipe, "cuda" if is_one else device.type)

    @property
    def without_layers(self) -> str:
        """Why the model that samples has no row-invariant layers; empty where it has them, or will be given them."""
        section, device, has_copy = self.recipe.model, device_of(self.recipe.model), self.recipe.parallel.has_copy
        if not has_copy and _is_row_invariant(section, device, self.model):
            return ""
        if not has_copy and not self.recipe.rollout.engine.bitwise:
            return "its layers are not row-invariant ones"
        # A copy is made with them, and an engine that is named installs them.
        return in_words(
            against_row_invariant(section.model_copy(update={"layers": "row_invariant"}), self.model, device)
        )

    @property
    def split(self) -> str:
        """That its weights are or will be sharded, in words; empty if they stay whole or sampling has a copy."""
        if self.recipe.parallel.has_copy:
            return ""
        if any(is_sharded(parameter) for parameter in self.model.parameters()):
            return "its weights are sharded"
        on_host = _device_type(self.model) == "cpu" and device_of(self.recipe.model).type == "cuda"
        return "its weights are to be sharded" if on_host else ""


_placed = gpu.on(recipe_of)
_HERE: Rule[Placed] = GPU_HERE.on(lambda placed: placed.machine)

GPU_RULES: tuple[Rule[Placed], ...] = (
    _HERE,
    _placed.needs(
        "whole weights or parallel.sampling_shards",
        given=lambda placed: placed.split,
        remedy="Set parallel.replicate or parallel.sampling_shards to the number of processes.",
    ),
    _placed.needs(
        "row-invariant layers",
        given=lambda placed: placed.without_layers,
        remedy="Set rollout.engine: {name: transformers}, or leave it out. docs/bits.md lists what is covered.",
        kind=UnavailableError,
    ),
    GPU_FUSED.on(recipe_of),
)
"""What the engine ``gpu`` needs of a policy, named or with a copy; ``auto`` chooses it where all of them hold."""


def _is_row_invariant(section: ModelSection, device: torch.device, model: nn.Module) -> bool:
    """Whether a model has row-invariant layers. On the meta device: whether it would have them on ``device``, provided
    that the GPU passes the self-check."""
    if next(model.parameters()).device.type != "meta":
        return hasattr(backbone(model), "row_invariant")
    return section.layers in ("auto", "row_invariant") and not against_row_invariant(section, model, device)


def _with_layers(recipe: Recipe, layers: str) -> Recipe:
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"layers": layers})})


def _device_type(model: nn.Module) -> str:
    return next(model.parameters()).device.type

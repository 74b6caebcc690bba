"""Why a recipe cannot run on this machine, and the nearest settings with which it can."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from logitless.errors import LogitlessError
from logitless.train.assembly.process import device_of
from logitless.train.plan.run_plan import Plan, plan_of
from logitless.train.recipe.config import MACHINE_RULES, Recipe
from logitless.train.recipe.loading import load_recipe
from logitless.train.recipe.rule import Machine, is_installed
from logitless.train.record.memory import free_host_memory, size_text


@dataclass(frozen=True)
class Fit:
    """Whether a recipe runs here.

    Args:
        problems: why not; empty if it does.
        changes: settings for ``--set`` with which it would run; None if none were found.
        recipe, plan: with these changes; the plan is None if the recipe cannot be planned.
    """

    problems: tuple[str, ...]
    changes: tuple[str, ...] | None
    recipe: Recipe
    plan: Plan | None


def fit_of(path: Path, overrides: Sequence[str], memory: int | None = None, host: int | None = None) -> Fit:
    """Check a recipe against this machine.

    Args:
        memory: bytes that the run may hold on its device; None: what is free there.
        host: bytes of host memory that a run on a GPU may hold; None: what is available.

    Raises:
        ConfigurationError: the recipe is invalid anywhere.
    """
    recipe = load_recipe(path, overrides)
    problems, changes = [], []
    for said, remedy in _lacking(recipe):
        problems.append(said)
        changes += [each for each in remedy if each not in changes]
    changed = load_recipe(path, [*overrides, *changes])
    try:
        plan = plan_of(changed)
        device = device_of(changed.model)
    except LogitlessError as error:
        return Fit((*problems, str(error)), None, recipe, None)
    memory = free_memory(device) if memory is None else memory
    if host is None:
        host = free_host_memory() if device.type == "cuda" else sys.maxsize  # on a CPU the plan counts host memory

    def fits(plan: Plan) -> bool:
        return plan.total_bytes <= memory and plan.host.peak_bytes <= host

    if not fits(plan):
        ways = _SMALLER
        if plan.total_bytes > memory:
            problems.append(
                f"the plan holds {size_text(plan.total_bytes)}, and {size_text(memory)} are free on {device}"
            )
        if plan.host.peak_bytes > host:
            ways = (_moments, *ways)
            problems.append(
                f"{plan.host.fullest} takes {size_text(plan.host.peak_bytes)} of the host's memory, and "
                f"{size_text(host)} are available"
            )
        found = _smaller(path, [*overrides, *changes], fits, ways)
        if found is None:
            return Fit(tuple(problems), None, recipe, plan)
        changes += found
        changed = load_recipe(path, [*overrides, *changes])
        plan = plan_of(changed)
    return Fit(tuple(problems), tuple(changes), changed, plan)


def free_memory(device: torch.device) -> int:
    """Free bytes of a GPU, or of the host."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_memory()


def _lacking(recipe: Recipe) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Pairs of what this machine lacks and the settings that do without it."""
    try:
        device = device_of(recipe.model)
    except LogitlessError as error:
        yield str(error), ("model.device=auto",)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine = Machine(recipe, device.type)
    for rule in MACHINE_RULES:
        if rule.is_broken(machine):
            yield str(rule.error(machine)), rule.instead(machine)


Change = Callable[[Recipe], Sequence[str]]


def _checkpointing(recipe: Recipe) -> Sequence[str]:
    return [] if recipe.model.gradient_checkpointing else ["model.gradient_checkpointing=true"]


def _micro_batch(recipe: Recipe) -> Sequence[str]:
    longest = recipe.data.max_prompt_tokens + recipe.rollout.longest_completion
    return [f"train.tokens_per_micro_batch={longest}"] if recipe.train.tokens_per_micro_batch > longest else []


def _rows(rows: int) -> Change:
    return lambda recipe: [f"rollout.max_rows={rows}"] if recipe.rollout.max_rows > rows else []


def _prefill(recipe: Recipe) -> Sequence[str]:
    return ["rollout.prefill_tokens=2048"] if recipe.rollout.prefill_tokens > 2048 else []


def _head(recipe: Recipe) -> Sequence[str]:
    least, budget = 2**28, recipe.train.head_memory_budget
    return [f"train.head_memory_budget={least}"] if budget is None or budget > least else []


def _lora(recipe: Recipe) -> Sequence[str]:
    if recipe.model.lora is not None or not is_installed("peft"):
        return []
    low = [] if recipe.model.trained_dtype == "bfloat16" else ["model.autocast=bfloat16"]
    return ["model.lora={rank: 16, alpha: 32}", "model.dtype=bfloat16", *low, "train.optimizer.learning_rate=1e-5"]


def _moments(recipe: Recipe) -> Sequence[str]:
    return ["train.optimizer.moments=float32"] if recipe.train.optimizer.moments == "host" else []


_SMALLER: tuple[Change, ...] = (
    *(_checkpointing, _micro_batch, _rows(128), _rows(32), _prefill, _head, _lora),
    *(_rows(8),),
)
"""Changes that save memory, those that change results least first; LoRA trains something else, so it comes late."""


def _smaller(
    path: Path, overrides: Sequence[str], suits: Callable[[Plan], bool], ways: Sequence[Change]
) -> list[str] | None:
    """A minimal list of changes with which the plan fits; None if it never does."""

    def fits(changes: Sequence[Sequence[str]]) -> bool:
        flat = [each for change in changes for each in change]
        try:
            return suits(plan_of(load_recipe(path, [*overrides, *flat])))
        except LogitlessError:
            return False

    taken: list[Sequence[str]] = []
    for change in ways:
        wanted = change(load_recipe(path, [*overrides, *(each for of in taken for each in of)]))
        if not wanted:
            continue
        taken.append(wanted)
        if fits(taken):
            needed = list(taken)
            for each in taken[:-1]:
                fewer = [other for other in needed if other is not each]
                needed = fewer if fits(fewer) else needed
            return [each for change in needed for each in change]
    return None

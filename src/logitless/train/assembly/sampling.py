"""How many processes only sample: what ``parallel.sampling: auto`` stands for."""

from functools import partial

from logitless.train.assembly.checks import arrangement_of
from logitless.train.recipe.config import Recipe
from logitless.train.recipe.parallel import RULES
from logitless.train.recipe.rule import check, refusal


def with_sampling(recipe: Recipe, world: int) -> tuple[Recipe, str]:
    """The recipe with a number for ``parallel.sampling: auto``, and the choice in words; empty where it gave one.

    Half of the processes where blocks are sampled ahead, rounded down, or the nearest number that leaves processes
    which the recipe can train on. How long sampling and training take is unknown before a run; if more processes are
    faster in proportion, half takes at most twice as long as the best division. Without staleness none, for sampling
    and training would wait for each other. Memory is not considered.

    Args:
        world: number of processes.
    """
    if recipe.parallel.sampling != "auto":
        return recipe, ""
    number, half, why = 0, world // 2, "for at rollout.staleness 0 sampling and training wait for each other"
    if recipe.rollout.staleness > 0:
        nearest = sorted(range(min(1, half), world), key=lambda number: (abs(number - half), -number))
        against = {each: refusal(partial(_check, _with(recipe, each), world)) for each in nearest}
        number = next((each for each in nearest if not against[each]), 0)
        why = f"for {half} cannot: {against[half]}" if against[half] else "half" + ", rounded down" * (world % 2)
    return _with(recipe, number), f"{number} of {world}, {why}"


def _check(recipe: Recipe, world: int) -> None:
    """Raise if so many processes cannot sample."""
    check(RULES, recipe)
    arrangement_of(recipe, world)


def _with(recipe: Recipe, number: int) -> Recipe:
    return recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"sampling": number})})

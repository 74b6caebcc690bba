"""``logitless recipes [list | show | copy]``: the recipes that come with the package."""

import argparse
import difflib
from pathlib import Path

from logitless.cli.output import program
from logitless.errors import ConfigurationError
from logitless.train.recipe.shipped import ShippedRecipe, shipped_recipes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to do, and with which recipe."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    actions.add_parser("list", help="names and descriptions; the default ACTION")
    show = actions.add_parser("show", help="print a recipe")
    copy = actions.add_parser("copy", help="copy a recipe, its tokenizer and its data, to train it or to change it")
    for action in (show, copy):
        action.add_argument("name", help="of `logitless recipes list`")
    copy.add_argument("folder", type=Path, nargs="?", default=Path("recipes"), help="default: recipes")


def run(options: argparse.Namespace) -> int:
    """Print, or copy and say what comes next."""
    if options.action in (None, "list"):
        recipes = shipped_recipes()
        width = max(map(len, recipes))
        for name, recipe in recipes.items():
            print(f"{name:{width}s}  {recipe.summary}")
    elif options.action == "show":
        print(_named(options.name).text, end="")
    else:
        recipe = _named(options.name)
        copied = recipe.copy_to(options.folder)
        print(f"copied to {copied}")
        if recipe.preparation is not None:
            print(f"first: python {options.folder / recipe.preparation}  # writes what it reads; its head says how")
        print(f"next: {program()} train {copied}")
    return 0


def _named(name: str) -> ShippedRecipe:
    recipes = shipped_recipes()
    if name not in recipes:
        near = difflib.get_close_matches(name, recipes, n=1)
        raise ConfigurationError(
            needed=f"the name of a recipe ({', '.join(recipes)})",
            given=repr(name),
            remedy=f"Did you mean {near[0]!r}?" if near else "Name one of these.",
        )
    return recipes[name]

"""From a YAML file and ``--set a.b=c`` to nested mappings, without torch: a mistake in the file is found at once."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from logitless.errors import ConfigurationError
from logitless.train.recipe.shipped import shipped_recipes


class _Loader(yaml.SafeLoader):
    """Safe YAML in which ``1e-5`` is a number and a key given twice is an error."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
    twice = {key for key in keys if keys.count(key) > 1}
    if twice:
        raise yaml.constructor.ConstructorError(None, None, f"{twice.pop()!r} is given twice", node.start_mark)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_mapping(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Read a recipe's file and apply overrides; nothing of it is checked.

    Args:
        path, overrides: of ``load_recipe``.

    Raises:
        ConfigurationError: no such file, malformed YAML, or an override of a section or item that is not there.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        remedy = "Check the path." if path.exists() else _remedy_for_missing(path)
        raise ConfigurationError(
            needed=f"a readable recipe at {path}", given=error.strerror or str(error), remedy=remedy
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            needed=f"a recipe in UTF-8 at {path}", given=str(error), remedy="Save it in UTF-8."
        ) from error
    raw = _parse(text, str(path))
    if not isinstance(raw, dict):
        raise ConfigurationError(
            needed=f"a mapping of sections in {path}", given=type(raw).__name__, remedy="See docs/configuration.md."
        )
    for override in overrides:
        _apply(raw, override)
    return raw


def _remedy_for_missing(path: Path) -> str:
    """What to do about a recipe that does not exist: name a similar file, or copy a shipped recipe."""
    name = next((each for each in shipped_recipes() if each in (path.name, path.stem)), None)
    if name is None:
        near = difflib.get_close_matches(path.stem, [each.stem for each in path.parent.glob("*.yaml")], n=1)
        return f"Did you mean {path.parent / near[0]}.yaml?" if near else "Check the path."
    if (copied := Path("recipes") / f"{name}.yaml").is_file():
        return f"Name {copied}."
    return f"It comes with logitless: run `logitless recipes copy {name}`, then name {copied}."


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:  # 2024-13-01 is a ValueError
        raise ConfigurationError(
            needed=f"well-formed YAML in {where}", given=_problem(error, text), remedy="Repair that line."
        ) from error


def _problem(error: Exception, text: str) -> str:
    """An error of YAML in a line, with the line that it is about."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return str(error).replace("\n", " ")
    at, begun = error.problem_mark, error.context_mark
    lines = text.splitlines()
    since = f" {error.context} that begins in line {begun.line + 1}" if error.context and begun else ""
    shown = f": {lines[at.line].strip()[:80]}" if at.line < len(lines) else ""
    return f"{error.problem}{since}, in line {at.line + 1}, column {at.column + 1}{shown}"


def _apply(raw: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigurationError(
            needed="--set key=value", given=override, remedy="Write for example --set train.blocks=10."
        )
    *parents, last = key.split(".")
    at: Any = raw
    for parent in parents:
        if isinstance(at, dict) and at.get(parent) is None:
            at[parent] = {}
        at = _item(at, parent, key)
    if isinstance(at, dict):
        at[last] = _parse(value, f"--set {key}")
    else:
        _item(at, last, key)  # raises unless it is a list with that item
        at[int(last)] = _parse(value, f"--set {key}")


def _item(at: Any, name: str, key: str) -> Any:
    if isinstance(at, dict):
        return at[name]
    if isinstance(at, list) and name.isdigit() and int(name) < len(at):
        return at[int(name)]
    raise ConfigurationError(
        needed=f"a section or list item called {name!r} in --set {key}",
        given=f"{type(at).__name__}" if not isinstance(at, list) else f"a list of {len(at)} items",
        remedy="Name sections by key and list items by number from 0.",
    )

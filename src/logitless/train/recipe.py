"""From a YAML file and ``--set a.b=c`` to a checked ``Recipe``, with errors that name the key and the repair.

A relative path in a recipe starts at the folder of its file, one in ``--set`` at the current folder; what comes out has
whole paths and the dtypes that ``auto`` is on this machine: a resolved recipe means the same wherever it is kept.
"""

import dataclasses
import difflib
import json
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from logitless.errors import ConfigurationError
from logitless.own_code import with_whole_path
from logitless.train.config import Recipe
from logitless.train.precision import resolved_dtypes
from logitless.train.shipped import shipped_recipes


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

PATHS = (
    *("data.train.path", "data.train.sources.*.data.path", "data.held_out.path", "evaluation.sets.*.data.path"),
    "warm_start.data.path",
    *("rollout.engine.path", "rollout.engine.api_key_file", "rollout.engine.weights.path", "value_head.source"),
)
"""Keys whose value is the path of a file that the run reads; a star stands for any name, or for a place in a list."""

CODE = (
    *("rewards.*.path", "rollout.environment.factory", "rollout.environment.function"),
    *("algorithm.surrogate.factory", "algorithm.advantage.factory"),
)
"""Keys whose value is an import path: of a module, or of a file (``./file.py:name``), which is made whole."""

NAMES_OR_PATHS = (
    *("model.source", "model.tokenizer"),
    *("data.train.dataset", "data.train.sources.*.data.dataset", "data.held_out.dataset"),
    *("evaluation.sets.*.data.dataset", "warm_start.data.dataset"),
)
"""Keys whose value is a path if it begins with ``.``, ``/`` or ``~`` or a folder or GGUF file has that name, else a hub
name."""


def load_recipe(path: Path, overrides: Sequence[str] = (), *, plans_for_gpus: bool = False) -> Recipe:
    """Read a recipe and apply overrides.

    Args:
        path: YAML file; relative paths in it start at its folder.
        overrides: ``a.b=value`` with a YAML value; list items by number (``rewards.0.weight=2``); relative paths in
            them start at the current folder.
        plans_for_gpus: take ``model.device: auto`` for a GPU where this machine has none.

    Raises:
        ConfigurationError: no such file, malformed YAML, an unknown key (the nearest known one is named), a value of
            the wrong type, or parts that contradict each other.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        remedy = "Check the path."
        if not path.exists() and path.stem in shipped_recipes():
            remedy = f"It comes with logitless: run `logitless recipes copy {path.stem}`, then name the copy."
        raise ConfigurationError(
            needed=f"a readable recipe at {path}",
            given=error.strerror or str(error),
            remedy=remedy,
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
    replaced = [override.partition("=")[0] for override in overrides]

    def folder_of(key: str) -> Path:
        return Path.cwd() if any(f"{key}.".startswith(f"{each}.") for each in replaced) else path.parent

    return _checked(_with_whole_paths(raw, folder_of), plans_for_gpus=plans_for_gpus)


def parse_recipe(raw: Mapping[str, Any]) -> Recipe:
    """Check a recipe that is already a mapping; relative paths in it start at the current folder.

    Raises:
        ConfigurationError: as ``load_recipe``; every problem is listed.
    """
    return _checked(_with_whole_paths(raw, lambda _: Path.cwd()))


def _with_whole_paths(raw: Mapping[str, Any], folder_of: Callable[[str], Path]) -> dict[str, Any]:
    """The same with every relative path joined to the folder of its key; what is not a path yet is left for checks."""
    whole = _copied(raw)
    for pattern in (*PATHS, *NAMES_OR_PATHS):
        for key, at, last in places(whole, pattern):
            value = at[last]
            if isinstance(value, str | Path) and str(value):
                path = str((folder_of(key) / os.path.expanduser(value)).absolute())  # noqa: PTH111 - never raises
                if pattern in PATHS or str(value).startswith((".", "/", "~")) or _is_there(path):
                    at[last] = path
    for pattern in CODE:
        for key, at, last in places(whole, pattern):
            if isinstance(at[last], str):
                at[last] = with_whole_path(at[last], folder_of(key).absolute())
    return whole


def _is_there(path: str) -> bool:
    """A folder, or a GGUF file, which stands where a hub name could too."""
    return os.path.isdir(path) or (path.endswith(".gguf") and os.path.isfile(path))  # noqa: PTH112, PTH113


def _copied(value: Any) -> Any:
    """The same with mappings and lists of its own, down to the first thing that is neither."""
    if isinstance(value, list | tuple):
        return [_copied(inner) for inner in value]
    return {key: _copied(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value


def places(whole: Mapping[str, Any], pattern: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Where a key is in a recipe: its full name, the mapping that holds it, and its name there.

    Args:
        whole: the recipe, of plain mappings and lists.
        pattern: names with dots between them; a star stands for any name, or for any place in a list.

    Example:
        >>> found = places({"sets": {"a": {"path": "x"}, "b": {}}}, "sets.*.path")
        >>> [(key, at[last]) for key, at, last in found]
        [('sets.a.path', 'x')]
    """
    found: list[tuple[str, Any]] = [("", whole)]
    *sections, last = pattern.split(".")
    for section in sections:
        found = [
            (f"{path}{name}.", inner)
            for path, at in found
            for name, inner in (enumerate(at) if isinstance(at, list) else at.items())
            if section in ("*", name) and isinstance(inner, dict | list)
        ]
    for path, at in found:
        if isinstance(at, dict) and last in at:
            yield f"{path}{last}", at, last


def _checked(raw: Mapping[str, Any], *, plans_for_gpus: bool = False) -> Recipe:
    try:
        json.dumps(raw, default=str, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            needed="texts of whole characters", given=str(error), remedy="Replace the half of a surrogate pair."
        ) from error
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigurationError(
            needed="sections with texts as keys that do not contain themselves",
            given=str(error),
            remedy="See docs/configuration.md.",
        ) from error
    try:
        given = Recipe.model_validate(raw)
        dtypes = resolved_dtypes(given, plans_for_gpus=plans_for_gpus)
        return Recipe.model_validate({**raw, "model": {**raw["model"], **dtypes}}) if dtypes else given
    except ValidationError as error:
        problems = "; ".join(_problem(details) for details in error.errors())
        raise ConfigurationError(
            needed="a valid recipe", given=problems, remedy="See docs/configuration.md for every key."
        ) from error


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML that ``load_recipe`` reads back to the same recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:  # 2024-13-01 is a ValueError
        raise ConfigurationError(
            needed=f"well-formed YAML in {where}", given=str(error).replace("\n", " "), remedy="Repair that line."
        ) from error


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
    if isinstance(at, list):
        _item(at, last, key)
        at[int(last)] = _parse(value, f"--set {key}")
    elif isinstance(at, dict):
        at[last] = _parse(value, f"--set {key}")
    else:
        _item(at, last, key)


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


def _problem(details: ErrorDetails) -> str:
    location = [str(part) for part in details["loc"]]
    path, known = _followed(Recipe, location)
    where = ".".join(path)
    if details["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        near = _nearest(path, known)
        return f"unknown key {where!r}" if near is None else f"unknown key {where!r} (nearest: {near!r})"
    message = details["msg"].removeprefix("Value error, ")
    given = "" if details["type"] == "missing" or isinstance(details["input"], dict) else f", not {details['input']!r}"
    return f"{where or 'the recipe'}: {message}{given}"


def _nearest(path: Sequence[str], known: set[str]) -> str | None:
    """The whole path of the key that is spelled most like the last part of ``path``.

    One in the same section, unless the recipe has a far better one elsewhere; below the section comes before beside it.
    """
    *section, name = path

    def likeness(key: str) -> float:
        return difflib.SequenceMatcher(a=name, b=key).ratio()

    here = max(sorted(known), key=likeness, default=None)
    elsewhere: list[list[str]] = [p for p in _paths(Recipe) if likeness(p[-1]) >= 0.8]
    if elsewhere and (here is None or likeness(here) < 0.75):
        best: list[str] = max(elsewhere, key=lambda p: (likeness(p[-1]), p[: len(section)] == section, -len(p)))
        return ".".join(best)
    return None if here is None else ".".join([*section, here])


def _paths(kind: Any, above: tuple[str, ...] = ()) -> Iterator[list[str]]:
    """Every key of the sections below, as a path; parts that stand in lists have none."""
    for alternative in _alternatives(kind):
        for name, inner in _fields(alternative).items():
            yield [*above, name]
            yield from _paths(inner, (*above, name))


def _followed(kind: Any, location: Sequence[str]) -> tuple[list[str], set[str]]:
    """The path as a recipe has it, and the keys known where it ends; pydantic's locations hold union tags too."""
    path: list[str] = []
    kinds, beside = list(_alternatives(kind)), []
    for part in location:
        entered = [inner for k in kinds for name, inner in _fields(k).items() if name == part]
        items = [a for k in kinds if get_origin(k) in (tuple, list) for a in get_args(k) if a is not Ellipsis]
        named = [get_args(k)[1] for k in kinds if get_origin(k) in (dict, Mapping) and len(get_args(k)) == 2]
        tagged = [k for k in kinds if part == getattr(k, "__name__", "") or part in _tags(k)]
        if not entered and not (items and part.isdigit()) and tagged:
            kinds = tagged
            continue
        path.append(part)
        beside = kinds
        kinds = [a for inner in entered or named or items for a in _alternatives(inner)]
    return path, {name for k in beside for name in _fields(k)}


def _alternatives(kind: Any) -> Iterator[Any]:
    if get_origin(kind) is Annotated:
        yield from _alternatives(get_args(kind)[0])
    elif get_origin(kind) in (Union, types.UnionType):
        for inner in get_args(kind):
            yield from _alternatives(inner)
    else:
        yield kind


def _fields(kind: Any) -> dict[str, Any]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return {field.name: field.type for field in dataclasses.fields(kind) if field.init}
    return {}


def _tags(kind: Any) -> tuple[Any, ...]:
    """The values of the key that tells variants apart."""
    fields = _fields(kind)
    return get_args(fields.get("name", fields.get("placement")))

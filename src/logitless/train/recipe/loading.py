"""From a YAML file and ``--set a.b=c`` to a checked ``Recipe``, with errors that name the key and the repair.

A relative path in a recipe starts at the folder of its file, one in ``--set`` at the current folder. The loaded recipe
has absolute paths and no dtype ``auto``, so that it means the same wherever it is written.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from logitless.errors import ConfigurationError
from logitless.own_code import with_whole_path
from logitless.train.recipe.config import Recipe
from logitless.train.recipe.precision import resolved_dtypes
from logitless.train.recipe.problems import refusal_of
from logitless.train.recipe.reading import read_mapping
from logitless.train.recipe.teacher import OF_POLICY

PATHS = (
    *("data.train.path", "data.train.sources.*.data.path", "data.held_out.path", "evaluation.sets.*.data.path"),
    "warm_start.data.path",
    *("rollout.engine.path", "rollout.engine.api_key_file", "rollout.engine.weights.path", "value_head.source"),
)
"""Keys with a path; a star stands for any name, or for any index of a list."""

CODE = (
    *("rewards.*.path", "rollout.environment.factory", "rollout.environment.function"),
    *("algorithm.surrogate.factory", "algorithm.advantage.factory"),
)
"""Keys with an import path: of a module, or of a file (``./file.py:name``), whose path is made absolute."""

NAMES_OR_PATHS = (
    *("model.source", "model.tokenizer", "teacher.source", "teacher.source.*"),
    *("data.train.dataset", "data.train.sources.*.data.dataset", "data.held_out.dataset"),
    *("evaluation.sets.*.data.dataset", "warm_start.data.dataset"),
)
"""Keys with a path or a hub name: a path if it begins with ``.``, ``/`` or ``~``, or if it names an existing folder or
GGUF file."""


def load_recipe(path: str | Path, overrides: Sequence[str] = (), *, plans_for_gpus: bool = False) -> Recipe:
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
    return _checked(_read(Path(path), overrides), plans_for_gpus=plans_for_gpus)


def check_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """``load_recipe`` without a look at this machine's GPUs: a dtype ``auto`` stays.

    Args:
        path, overrides: as for ``load_recipe``.

    Raises:
        ConfigurationError: as ``load_recipe``.
    """
    return _given(_read(Path(path), overrides))


def _read(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    raw = read_mapping(path, overrides)
    replaced = [override.partition("=")[0] for override in overrides]

    def folder_of(key: str) -> Path:
        return Path.cwd() if any(f"{key}.".startswith(f"{each}.") for each in replaced) else path.parent

    return _with_absolute_paths(raw, folder_of)


def parse_recipe(raw: Mapping[str, Any]) -> Recipe:
    """Check a recipe that is already a mapping; relative paths in it start at the current folder.

    Raises:
        ConfigurationError: as ``load_recipe``; every problem is listed.
    """
    return _checked(_with_absolute_paths(raw, lambda _: Path.cwd()))


def _with_absolute_paths(raw: Mapping[str, Any], folder_of: Callable[[str], Path]) -> dict[str, Any]:
    """A copy with every relative path joined to the folder of its key; values of other types are left as they are."""
    whole = _copied(raw)
    for pattern in (*PATHS, *NAMES_OR_PATHS):
        for key, at, last in places(whole, pattern):
            value = at[last]
            is_policy = pattern.startswith("teacher.") and value in OF_POLICY
            if isinstance(value, str | Path) and str(value) and not is_policy:
                path = str((folder_of(key) / os.path.expanduser(value)).absolute())  # noqa: PTH111 - never raises
                if pattern in PATHS or str(value).startswith((".", "/", "~")) or _is_model_or_data(path):
                    at[last] = path
    for pattern in CODE:
        for key, at, last in places(whole, pattern):
            if isinstance(at[last], str):
                at[last] = with_whole_path(at[last], folder_of(key).absolute())
    return whole


def _is_model_or_data(path: str) -> bool:
    """Whether there is a folder or a GGUF file, which the key of a hub name may name as well."""
    return os.path.isdir(path) or (path.endswith(".gguf") and os.path.isfile(path))  # noqa: PTH112, PTH113


def _copied(value: Any) -> Any:
    """A copy of nested mappings and lists; other values are shared."""
    if isinstance(value, list | tuple):
        return [_copied(inner) for inner in value]
    return {key: _copied(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value


def places(whole: Mapping[str, Any], pattern: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Every match of a pattern in a recipe: its full name, the mapping that holds it, and its name there.

    Args:
        pattern: names with dots between them; a star stands for any name, or for any index of a list.

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
        if isinstance(at, dict):
            for name in [*at] if last == "*" else {last} & at.keys():
                yield f"{path}{name}", at, name


def _checked(raw: Mapping[str, Any], *, plans_for_gpus: bool = False) -> Recipe:
    given = _given(raw)
    dtypes = resolved_dtypes(given, plans_for_gpus=plans_for_gpus)
    return _given({**raw, "model": {**raw["model"], **dtypes}}) if dtypes else given


def _given(raw: Mapping[str, Any]) -> Recipe:
    """The recipe with ``auto`` as it was given."""
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
        return Recipe.model_validate(raw)
    except ValidationError as error:
        raise refusal_of(error) from error


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML that ``load_recipe`` reads back to the same recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)

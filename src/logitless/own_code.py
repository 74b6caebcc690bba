"""Code of a user that a recipe names: ``package.module:name``, or ``folder/file.py:name``.

A file is imported once a process, under a name of its own, so that no package is hidden by it; what stands beside it
can be imported by name. Worker processes of rewards import this file: standard library only.
"""

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from logitless.errors import ConfigurationError

FORMS = "'package.module:name' or './file.py:name'"


def with_whole_path(path: str, folder: Path) -> str:
    """The path with its file's place made absolute; one of a module, or of neither form, as it is.

    Args:
        path: of either form.
        folder: that a relative file starts at.

    Example:
        >>> with_whole_path("./rewards.py:brief", Path("/recipes")), with_whole_path("rewards:brief", Path("/recipes"))
        ('/recipes/rewards.py:brief', 'rewards:brief')
    """
    place, _, name = path.rpartition(":")
    if not place.endswith(".py"):
        return path
    return f"{os.path.abspath(os.path.join(folder, os.path.expanduser(place)))}:{name}"  # noqa: PTH100, PTH111, PTH118


def imported(path: str) -> Any:
    """The object that a path names, attributes of attributes (``module:Class.method``) included.

    Raises:
        Exception: whatever the import raises; ImportError for a path of neither form or a file that is not there.

    Example:
        >>> imported("math:sqrt")(4.0)
        2.0
    """
    place, _, names = path.rpartition(":")
    if not (place and names):
        raise ImportError(f"no name behind a colon in {path!r}")
    found: Any = _module_of_file(place) if place.endswith(".py") else importlib.import_module(place)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def made(factory: str, options: Mapping[str, Any], *, what: str, key: str) -> Any:
    """What the object that a path names returns when it is called with options.

    Args:
        factory: a path, see ``imported``.
        options: keyword arguments.
        what: it is to make, in words.
        key: of the recipe, that names it.

    Raises:
        ConfigurationError: it cannot be imported or called.

    Example:
        >>> made("fractions:Fraction", {"numerator": 3}, what="a number", key="number.factory")
        Fraction(3, 1)
    """
    try:
        return imported(factory)(**options)
    except Exception as error:
        raise ConfigurationError(
            needed=f"an import path like {FORMS} that makes {what}",
            given=f"{factory!r} ({described(error)})",
            remedy=f"Correct {key} or its options.",
        ) from error


def described(error: Exception) -> str:
    """An exception and, where that is code of a user, the line that it was raised in.

    Example:
        >>> described(ValueError("no"))
        'ValueError: no'
    """
    last = traceback.extract_tb(error.__traceback__)[-1:]
    ours = (__file__, importlib.__file__)
    where = [f" in {each.filename}, line {each.lineno}" for each in last if each.filename not in ours and each.line]
    return "".join([f"{type(error).__name__}: {error}", *where])


def _module_of_file(place: str) -> ModuleType:
    path = os.path.abspath(os.path.expanduser(place))  # noqa: PTH100, PTH111 - nothing is asked of the disk, see walls
    folder, file = os.path.split(path)
    if folder not in sys.path:
        sys.path.append(folder)
    name = f"{file.removesuffix('.py')}_{hashlib.sha256(path.encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not os.path.isfile(path):  # noqa: PTH113
        raise ImportError(f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickles look it up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module

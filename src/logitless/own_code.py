"""User code that a recipe names: ``package.module:name``, or ``folder/file.py:name``.

A file is imported once a process, under a unique module name, so that it hides no package; it can import other files of
its folder by name. Worker processes of rewards import this module: standard library only.
"""

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from logitless.errors import ConfigurationError, LogitlessError

FORMS = "'package.module:name' or './file.py:name'"

_LAST_CALLS = 4
"""Innermost calls of a traceback that an error shows."""


def with_whole_path(path: str, folder: Path) -> str:
    """The path with a relative file made absolute; any other path unchanged.

    Args:
        path: an import path, as above.
        folder: what a relative file is relative to.

    Example:
        >>> with_whole_path("./rewards.py:brief", Path("/recipes")), with_whole_path("rewards:brief", Path("/recipes"))
        ('/recipes/rewards.py:brief', 'rewards:brief')
    """
    place, _, name = path.rpartition(":")
    if not place.endswith(".py"):
        return path
    return f"{os.path.abspath(os.path.join(folder, os.path.expanduser(place)))}:{name}"  # noqa: PTH100, PTH111, PTH118


def imported(path: str) -> Any:
    """The object that an import path names; also an attribute of it, as in ``module:Class.method``.

    Raises:
        ImportError: a path of another form, or a file or name that does not exist.
        Exception: whatever the import raises.

    Example:
        >>> imported("math:sqrt")(4.0)
        2.0
    """
    place, _, names = path.rpartition(":")
    if not (place and names):
        raise ImportError(f"no name after a colon in {path!r}")
    found: Any = _module_of_file(place) if place.endswith(".py") else importlib.import_module(place)
    for name in names.split("."):
        if not hasattr(found, name):
            known = [each for each in _names(found) if not each.startswith("_")]
            raise ImportError(f"no {name!r} in {place}, which has {', '.join(known[:20]) or 'no public name'}")
        found = getattr(found, name)
    return found


def _names(found: Any) -> list[str]:
    """The names a module defines, without those it imports; of any other object, all its attributes."""
    if not isinstance(found, ModuleType):
        return dir(found)
    own = [name for name, each in vars(found).items() if getattr(each, "__module__", None) == found.__name__]
    return own or dir(found)


def named(path: str, *, what: str, key: str) -> Any:
    """``imported``, with a configuration error.

    Args:
        path: see ``imported``.
        what: what it should be, for the error.
        key: the recipe's key that names it.

    Raises:
        ConfigurationError: it cannot be imported.
    """
    try:
        return imported(path)
    except Exception as error:
        raise ConfigurationError(
            needed=f"an import path like {FORMS} {what}".rstrip(),
            given=f"{path!r} ({described(error)})",
            remedy="Correct that line." if _line_of(error) else f"Correct {key}.",
        ) from error


def made(factory: str, options: Mapping[str, Any], *, what: str, key: str) -> Any:
    """The result of calling the object that a path names with options.

    Args:
        factory: a path, see ``imported``.
        options: keyword arguments.
        what: what it should make, for the error.
        key: the recipe's key that names it.

    Raises:
        ConfigurationError: it cannot be imported or called, or its code raises.

    Example:
        >>> made("fractions:Fraction", {"numerator": 3}, what="a number", key="number.factory")
        Fraction(3, 1)
    """
    function = named(factory, what=f"that makes {what}", key=key)
    try:
        return function(**options)
    except Exception as error:
        section = key.rpartition(".")[0]
        raise ConfigurationError(
            needed=f"{what} from {factory!r} with options {dict(options)}",
            given=described(error),
            remedy="Correct that line." if _line_of(error) else f"Correct what {key} names, or {section}.options.",
        ) from error


def check_takes(call: str, function: Callable[..., Any], /, *positional: Any, **named: Any) -> None:
    """Refuse a function that cannot be called with these arguments; it is not called.

    Args:
        call: what it must take, for the error.
        function: one whose arguments Python cannot name is not checked.

    Raises:
        ConfigurationError: it lacks an argument, or needs another one.

    Example:
        >>> check_takes("start(prompt, *, seed)", lambda prompt, sede: None, None, seed=0)
        Traceback (most recent call last):
        logitless.errors.ConfigurationError: needed start(prompt, *, seed); given <lambda>(prompt, sede), missing ...
    """
    try:
        taken = inspect.signature(function)
    except ValueError:  # of a builtin
        return
    try:
        taken.bind(*positional, **named)
    except TypeError as error:
        name = getattr(function, "__qualname__", type(function).__name__)
        raise ConfigurationError(
            needed=call, given=f"{name}{taken}, {error}", remedy="Correct its arguments."
        ) from error


def described(error: BaseException) -> str:
    """An exception in words, with the line of user code that raised it, if any.

    Example:
        >>> described(ValueError("no"))
        'ValueError: no'
    """
    return f"{type(error).__name__}: {error}{_line_of(error)}"


@contextmanager
def blamed(what: str, kind: type[LogitlessError], *, passing: type[Exception] = MemoryError) -> Iterator[None]:
    """Turn an exception of user code into a logitless error that ends with the last lines of its traceback.

    Errors of logitless and ``MemoryError`` pass unchanged.

    Args:
        what: what the code should give, and the code's name; ``needed`` of the error.
        kind: class of the error.
        passing: another class that passes unchanged.

    Example:
        >>> from logitless.errors import TrainingError
        >>> with blamed("verdicts from reward 'mine'", TrainingError):
        ...     {}["answer"]
        Traceback (most recent call last):
        logitless.errors.TrainingError: needed verdicts from reward 'mine'; given KeyError: 'answer'. Correct it:
        ...
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, LogitlessError | MemoryError | passing):
            raise
        frames = error.__traceback__ and error.__traceback__.tb_next  # the first is this function's
        last = "".join(traceback.format_tb(frames, -_LAST_CALLS)).rstrip()
        raise kind(needed=what, given=f"{type(error).__name__}: {error}", remedy=f"Correct it:\n{last}") from error


def _line_of(error: BaseException) -> str:
    """The innermost line of user code in the error's traceback, in words; empty if there is none."""
    ours = (os.path.dirname(__file__) + os.sep, importlib.__file__)  # noqa: PTH120
    lines = [each for each in traceback.extract_tb(error.__traceback__) if each.line]  # none in frozen modules
    where = [f" in {each.filename}, line {each.lineno}" for each in lines if not each.filename.startswith(ours)]
    return "".join(where[-1:])


def _module_of_file(place: str) -> ModuleType:
    path = os.path.abspath(os.path.expanduser(place))  # noqa: PTH100, PTH111 - a sandbox may hide the disk
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
    sys.modules[name] = module  # before it runs: dataclasses and pickle look it up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module

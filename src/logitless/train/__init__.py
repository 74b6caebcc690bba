"""The training loop and what it writes. The package itself can be called: ``logitless.train(recipe)`` is
``logitless.train.entry.train``."""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """This package, with ``logitless.train.entry.train`` as what it does when it is called."""

    # Importing anything below this package makes Python set the attribute ``train`` of ``logitless`` to the package.
    # A function of that name there would be replaced in the middle of a program, so the package is what is called.
    # ``logitless/__init__.py`` tells type checkers the function's signature.
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from logitless.train.entry import train

        return train(*arguments, **options)


sys.modules[__name__].__class__ = _CallablePackage

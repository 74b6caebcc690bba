"""The trainer. The package itself is callable: ``logitless.train(recipe)`` is ``logitless.train.entry.train``."""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """This package; calling it calls ``logitless.train.entry.train``."""

    # Importing a module of this package makes Python set the attribute ``train`` of ``logitless`` to the package, which
    # would replace a function of that name. So the package itself is called; ``logitless/__init__.py`` gives type
    # checkers the function's signature.
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from logitless.train.entry import train

        return train(*arguments, **options)


sys.modules[__name__].__class__ = _CallablePackage

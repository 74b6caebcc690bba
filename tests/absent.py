"""An environment in which some packages alone are installed: the others are kept out of a process of this one."""

from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_FILTER = """
import sys
absent = {absent!r}

class Filtered:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in absent else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Filtered(finder) for finder in sys.meta_path]
"""


def keep_out(allowed: list[str]) -> str:
    """The beginning of a program in which no installed package but these can be imported.

    Args:
        allowed: of ``modules_of``.
    """
    return _FILTER.format(absent=sorted({*metadata.packages_distributions()} - {*allowed, "logitless"}))


def modules_of(*requirements: str) -> list[str]:
    """Names that can be imported where these requirements are installed, with what they require in turn.

    Args:
        requirements: for example ``torch`` or ``logitless[rewards]``.
    """
    waiting, done, packages = [Requirement(each) for each in requirements], set(), set()
    while waiting:
        requirement = waiting.pop()
        package, extras = canonicalize_name(requirement.name), sorted(requirement.extras) or [""]
        if (package, *extras) in done:
            continue
        done.add((package, *extras))
        packages.add(package)
        try:
            needed = [Requirement(each) for each in metadata.requires(package) or []]
        except metadata.PackageNotFoundError:  # an optional one of another platform
            continue
        for each in needed:
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(each)
    installed = metadata.packages_distributions()
    return sorted(name for name, owners in installed.items() if {canonicalize_name(o) for o in owners} & packages)

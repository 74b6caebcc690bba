"""Importing this file loads the packages and tables that checks otherwise load on first use.

It is imported by the process that worker processes are forked from, so that they share what it loads. Absent packages
are skipped; the checks that need them raise.
"""

import contextlib

from logitless.errors import UnavailableError
from logitless.rewards.instructions import text

_SAMPLE = "One word."
_LOADED = []

for _load in (text.words, text.language, text.ends_with_emoji, text.syllables):
    with contextlib.suppress(UnavailableError):
        _load(_SAMPLE)
        _LOADED.append(_load.__name__)


def loaded() -> tuple[str, ...]:
    """Names of the functions that are ready.

    Example:
        >>> loaded()
        ('words', 'language', 'ends_with_emoji', 'syllables')
    """
    return tuple(_LOADED)

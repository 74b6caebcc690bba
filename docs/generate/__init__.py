"""The parts of pages that come from the code; ``python -m docs.generate`` (``make docs``) updates them."""

import re


def renewed(page: str, begin: str, fresh: str, end: str = "") -> str:
    """The page with ``fresh`` after the one place of ``begin``, up to the next ``end`` or to the end of the page.

    Raises:
        ValueError: ``begin`` is not there exactly once, or ``end`` not behind it.

    Example:
        >>> renewed("Numbers: 1, 2. More.", "Numbers: ", "3", ". ")
        'Numbers: 3. More.'
    """
    before, after = page.split(begin)
    return f"{before}{begin}{fresh}{after[after.index(end) :] if end else ''}"


def linked(text: str) -> str:
    """The text with names of pages as links.

    Example:
        >>> linked("see docs/bits.md")
        'see [bits](bits.md)'
    """
    return re.sub(r"\bdocs/(\w+)\.md\b", r"[\1](\1.md)", text)

"""What pages take from the code: ``python -m docs.generate`` (``make docs``) writes it anew, all other words stay."""


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

"""Bounds on a text before a library parses it, to refuse texts made to stall the parser.

Each bound is far above what a person writes, and close to what a parser can handle. Linear time.
"""

import math
import re
from functools import reduce

MAX_CHARACTERS = 200_000
MAX_DEPTH = 100
MAX_DIGITS = 1_000
MAX_POWER_DIGITS = 4_000
"""Of the value of a power of literal numbers, such as ``2^{10}`` or a tower."""

_PLAIN = re.compile(r"[A-Za-z0-9 ,\n\t]*(?:(?<=[0-9])\.(?=[0-9])[A-Za-z0-9 ,\n\t]*)*[.]?", re.ASCII)
_DIGITS = re.compile(r"[0-9_]+", re.ASCII)
_POWERS = re.compile(r"[0-9]+(?:[)\]}\s]*(?:\^|\*\*)[\s({\[+-]*[0-9]+)+", re.ASCII)
_OPENING, _CLOSING = "([{", ")]}"


def too_large(text: str) -> str | None:
    """Why a text should not be passed to a library that evaluates mathematics; None if it may.

    Example:
        >>> too_large("The answer is $2^{10} = 1024$."), too_large("9^{9^{9^9}}")
        (None, 'a power of over 4000 digits')
    """
    if len(text) > MAX_CHARACTERS:
        return f"{len(text)} characters, over {MAX_CHARACTERS}"
    if depth(text) > MAX_DEPTH:
        return f"brackets over {MAX_DEPTH} deep"
    if max(map(len, _DIGITS.findall(text)), default=0) > MAX_DIGITS:
        return f"a number of over {MAX_DIGITS} digits"
    if any(_digits(chain) > MAX_POWER_DIGITS for chain in _POWERS.findall(text)):
        return f"a power of over {MAX_POWER_DIGITS} digits"
    return None


def depth(text: str) -> int:
    """The depth to which brackets of any kind are nested, unmatched ones included.

    Example:
        >>> depth("f((x))"), depth("((("), depth("()()")
        (2, 3, 1)
    """
    if sum(map(text.count, _OPENING)) <= 1:
        return sum(map(text.count, _OPENING))
    deepest = now = 0
    for character in text:
        if character in _OPENING:
            now += 1
            deepest = max(deepest, now)
        elif character in _CLOSING:
            now = max(0, now - 1)
    return deepest


def runs_nothing(text: str) -> bool:
    """Whether a text is only words and short numbers, so that evaluating it as Python runs nothing.

    It has no bracket, quote, operator, underscore, or dot except a decimal point: it cannot call, assign or access an
    attribute.

    Example:
        >>> runs_nothing("so it is 3.5"), runs_nothing("abba"), runs_nothing("exec('x')"), runs_nothing("a.b")
        (True, True, False, False)
    """
    return _PLAIN.fullmatch(text) is not None and too_large(text) is None


def _digits(chain: str) -> float:
    """The number of digits of a chain of powers: ``2^{3^4}`` is 2 to the 81st, ``(2^3)^4`` is 2 to the 12th."""
    logarithms = []
    for tower in re.split(r"[)\]}]\s*(?:\^|\*\*)", chain):
        *numbers, top = (float(number[:300]) for number in re.findall("[0-9]+", tower))
        logarithms.append(reduce(_log10_of_power, reversed(numbers), math.log10(max(top, 1))))
    return logarithms[0] * math.prod(10 ** min(each, 300) for each in logarithms[1:])


def _log10_of_power(log10_exponent: float, base: float) -> float:
    """``log10(base ** 10 ** log10_exponent)``."""
    return math.log10(base) * 10 ** min(log10_exponent, 300) if base > 1 else 0.0

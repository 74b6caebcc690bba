"""A calculator with bounds on every step, for worker processes."""

import ast
import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any, TypeAlias

from logitless.rewards.workers.size import too_large

Number: TypeAlias = int | Fraction | float

MAX_CHARACTERS = 1_000
MAX_BITS = 4_096
"""Of a whole number, or of a fraction's numerator and denominator; larger numbers become floats."""

_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: Fraction(a) / b if isinstance(a, int | Fraction) and isinstance(b, int | Fraction) else a / b,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def evaluated(text: str) -> dict[str, str]:
    """``{"value": ...}`` of an expression of numbers, ``+ - * / // % **`` and brackets, or ``{"error": why}``.

    Whole numbers and fractions are exact; a fraction is printed as a decimal of 12 digits.

    Example:
        >>> evaluated("37 * (48 - 2)"), evaluated("1/4 + 1"), evaluated("2/3")
        ({'value': '1702'}, {'value': '1.25'}, {'value': '0.666666666667'})
        >>> evaluated("open('x')")
        {'error': 'numbers and + - * / // % ** alone'}
    """
    text = text.strip().replace("×", "*").replace("÷", "/").replace("−", "-").replace("^", "**")
    if len(text) > MAX_CHARACTERS or too_large(text):
        return {"error": "too large"}
    try:
        value = _value(ast.parse(text, mode="eval").body)
    except ZeroDivisionError:
        return {"error": "division by zero"}
    except OverflowError:
        return {"error": "too large"}
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return {"error": "numbers and + - * / // % ** alone"}
    return {"value": _shown(value)}


def _value(node: ast.AST) -> Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        inner = _value(node.operand)
        return -inner if isinstance(node.op, ast.USub) else inner
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and not _is_small_power(left, right):
            left, right = float(left), float(right)
        return _bounded(_OPERATORS[type(node.op)](left, right))
    raise ValueError("not arithmetic")


def _is_small_power(base: Number, exponent: Number) -> bool:
    """Whether an exact power has few digits."""
    if isinstance(base, float) or not isinstance(exponent, int):
        return False
    return max(_bits(base), 1) * abs(exponent) <= MAX_BITS


def _bounded(value: Any) -> Number:
    if isinstance(value, Fraction) and value.denominator == 1:
        value = value.numerator
    if isinstance(value, complex):
        raise ValueError("not a real number")
    if isinstance(value, int | Fraction) and _bits(value) > MAX_BITS:
        value = float(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise OverflowError
    return value


def _bits(value: Number) -> int:
    assert not isinstance(value, float)
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _shown(value: Number) -> str:
    return str(value) if isinstance(value, int) else f"{float(value):.12g}"

"""A replacement of ``eval`` for literals and formulas alone, for verifiers that evaluate a model's text.

Verifiers of reasoning-gym parse lists with ``eval``, and sympy's parser turns text into Python and evaluates it: a
completion could call anything, and give itself a score. Here it can hold values, arithmetic and calls of sympy's
functions; anything else is a ``ValueError``, which verifiers treat as a wrong answer.
"""

import ast
import builtins
import sys
from collections.abc import Mapping
from typing import Any

_VALUES = (
    ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.BinOp, ast.UnaryOp, ast.BoolOp,
    ast.Compare, ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context,
)  # fmt: skip
_FORMULAS = (*_VALUES, ast.Call, ast.Name, ast.keyword)
_FUNCTIONS = frozenset({"abs", "divmod", "pow", "round", "sum"})


def plain_eval(source: str, *_: Any) -> Any:
    """The value of literals and arithmetic.

    Raises:
        ValueError: the source contains anything else.

    Example:
        >>> plain_eval("[1, 2 + 3]")
        [1, 5]
    """
    _check(source, _VALUES)
    return builtins.eval(source, {"__builtins__": {}})


def check_formula(source: str, names: Mapping[str, Any]) -> str:
    """The source, if it calls nothing but expression classes and functions of sympy.

    Raises:
        ValueError: it contains anything else.

    Example:
        >>> check_formula("Integer(2)*Symbol('x')", {})
        Traceback (most recent call last):
        ValueError: a formula expected, not a call of 'Integer'
    """
    for node in _check(source, _FORMULAS):
        if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and _computes(names, node.func.id)):
            raise ValueError(f"a formula expected, not a call of {getattr(node.func, 'id', 'an expression')!r}")
    return source


def guard_verifiers() -> None:
    """Install both in this process: in sympy's parser, and as ``eval`` of every module of reasoning-gym."""
    from sympy.parsing import sympy_parser

    if getattr(sympy_parser.stringify_expr, "guarded", False):
        return
    stringify = sympy_parser.stringify_expr

    def guarded(text: str, local: dict[str, Any], known: dict[str, Any], transformations: Any) -> str:
        return check_formula(stringify(text, local, known, transformations), {**known, **local})

    guarded.guarded = True  # type: ignore[attr-defined]
    sympy_parser.stringify_expr = guarded
    for name, module in list(sys.modules.items()):
        if name.startswith("reasoning_gym."):
            vars(module).setdefault("eval", plain_eval)


def _check(source: str, allowed: tuple[type, ...]) -> list[ast.AST]:
    nodes = list(ast.walk(ast.parse(source.strip(), mode="eval")))
    for node in nodes:
        if not isinstance(node, allowed):
            raise ValueError(f"literals and arithmetic expected, not {type(node).__name__}")
    return nodes


def _computes(names: Mapping[str, Any], name: str) -> bool:
    """Whether a name is a sympy class of expressions, or a function that returns one."""
    from sympy import Basic

    found = names.get(name)
    if isinstance(found, type):
        return issubclass(found, Basic)
    return name in _FUNCTIONS or str(getattr(found, "__module__", "")).startswith("sympy.functions.")

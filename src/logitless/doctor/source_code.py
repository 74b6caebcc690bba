"""A parsed file, and what rules need to know of its expressions."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

Function = ast.FunctionDef | ast.AsyncFunctionDef
Node = TypeVar("Node", bound=ast.AST)


@dataclass(frozen=True)
class Module:
    """A file of the audited code, parsed."""

    name: str
    tree: ast.Module
    text: str

    @classmethod
    def parse(cls, name: str, text: str) -> "Module":
        """From source code.

        Raises:
            SyntaxError, ValueError: it is not Python.
        """
        return cls(name, ast.parse(text), text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the file."""
        return list(ast.walk(self.tree))

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """The parent of each node."""
        return {child: parent for parent in self.nodes for child in ast.iter_child_nodes(parent)}

    @cached_property
    def changed_in_place(self) -> set[str]:
        """The sources of what gets or loses an item somewhere in the file."""
        items = (each.value for each in self.every(ast.Subscript) if not isinstance(each.ctx, ast.Load))
        methods = (call.func for call in self.calls("update", "pop", "setdefault", "clear"))
        owners = (each.value for each in methods if isinstance(each, ast.Attribute))
        return {ast.unparse(each) for each in (*items, *owners)}

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """The ancestors of a node, from the inside out."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def function_of(self, node: ast.AST) -> Function | None:
        """The innermost function around a node."""
        return next((each for each in self.above(node) if isinstance(each, Function)), None)

    def scope_of(self, node: ast.AST) -> ast.AST:
        """The innermost function, or the file."""
        return self.function_of(node) or self.tree

    def every(self, kind: type[Node]) -> Iterator[Node]:
        """The nodes of one kind."""
        return (node for node in self.nodes if isinstance(node, kind))

    def calls(self, *names: str) -> Iterator[ast.Call]:
        """Calls of functions or methods with these names, on any object."""
        return (call for call in self.every(ast.Call) if called(call) in names)

    def named(self, imported: str) -> list[str]:
        """Other names that the file imports something under."""
        aliases = (alias for node in self.every(ast.ImportFrom) for alias in node.names)
        return [alias.asname for alias in aliases if alias.name == imported and alias.asname is not None]

    def assigned(self, name: str, before: ast.AST) -> list[ast.expr]:
        """Values assigned to a name above a node in the same function, the latest first."""
        line = getattr(before, "lineno", 0)
        found = [
            node.value
            for node in _in_order(self.scope_of(before))
            if isinstance(node, ast.Assign)
            and node.lineno < line
            and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
        ]
        return found[::-1]

    def written(self, expression: ast.expr, before: ast.AST) -> ast.expr:
        """The value of a name that is bound once, by an assignment: in the function of a node, else in the file.

        At the same level the assignment stands above the node. Any other expression or name is returned as it is.
        """
        if not isinstance(expression, ast.Name):
            return expression
        scope = self.scope_of(before)
        bound, is_beside = _bindings(scope, expression.id), True
        if not bound:
            bound, is_beside = _bindings(self.tree, expression.id), scope is self.tree
        if len(bound) != 1 or (is_beside and bound[0].lineno >= getattr(before, "lineno", 0)):
            return expression
        assignment = self.parents[bound[0]]
        if isinstance(assignment, ast.Assign) and bound[0] in assignment.targets:
            return assignment.value
        return expression

    def place(self, node: ast.AST) -> str:
        """File and line."""
        return f"{self.name}:{getattr(node, 'lineno', 1)}"

    def at(self, node: ast.AST) -> tuple[str, str]:
        """Its place and its line."""
        return self.place(node), self.line(node)

    def line(self, node: ast.AST) -> str:
        """The source of a node on one line, shortened."""
        text = " ".join(ast.unparse(node).split())
        return text if len(text) <= 100 else f"{text[:97]}..."


Binding = ast.Name | ast.arg | ast.alias | ast.ExceptHandler


def _bindings(scope: ast.AST, name: str) -> list[Binding]:
    """Where a function, or the file outside of its functions, binds or deletes a name."""
    found: list[Binding] = []
    below = [*ast.iter_child_nodes(scope)]
    while below:
        node = below.pop()
        if isinstance(node, Binding) and _bound(node) == name:
            found.append(node)
        if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            below += ast.iter_child_nodes(node)
    return found


def _bound(node: Binding) -> str | None:
    """The name that a node binds or deletes."""
    if isinstance(node, ast.Name):
        return None if isinstance(node.ctx, ast.Load) else node.id
    if isinstance(node, ast.arg):
        return node.arg
    return (node.asname or node.name) if isinstance(node, ast.alias) else node.name


def _in_order(scope: ast.AST) -> Iterator[ast.stmt]:
    """Statements of a function in the order of the file, those of functions inside it left out."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, Function | ast.ClassDef):
            continue
        if isinstance(child, ast.stmt):
            yield child
        yield from _in_order(child)


def called(call: ast.Call) -> str:
    """The last name of what is called: ``mean`` for ``torch.mean(x)`` and for ``x.mean()``."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """The value of a keyword argument."""
    return next((each.value for each in call.keywords if each.arg == name), None)


def argument_of(expression: ast.expr, name: str) -> ast.expr | None:
    """``x`` of ``x.name()``, ``torch.name(x)``, ``numpy.name(x)`` and the like without further arguments.

    Example:
        >>> [ast.unparse(argument_of(ast.parse(t, mode="eval").body, "exp")) for t in ("torch.exp(a)", "(-a).exp()")]
        ['a', '-a']
    """
    if not isinstance(expression, ast.Call) or called(expression) != name or expression.keywords:
        return None
    if len(expression.args) == 1:
        return expression.args[0]
    if not expression.args and isinstance(expression.func, ast.Attribute):
        return expression.func.value
    return None


def words_of(node: ast.AST) -> set[str]:
    """The parts of all names in an expression: ``ref_log_probs`` has ref, log and probs.

    Example:
        >>> sorted(words_of(ast.parse("self.refModel(a_b)")))
        ['a', 'b', 'model', 'ref', 'self']
    """
    found: set[str] = set()
    for each in ast.walk(node):
        name = {ast.Name: "id", ast.Attribute: "attr", ast.Constant: "value"}.get(type(each))
        text = None if name is None else getattr(each, name)
        if isinstance(text, str):
            found |= {word.lower() for word in _WORD.findall(text)}
    return found


_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")


Terms = Counter[str]
"""Coefficients of the summands of an expression, by their source."""


def terms_of(expression: ast.expr, sign: int = 1) -> Terms:
    """The summands of an expression, without conversions (``.float()``, ``.detach()``, ``.clamp(...)``).

    Example:
        >>> terms_of(ast.parse("a - (b.float() - c)", mode="eval").body) == Counter({"a": 1, "b": -1, "c": 1})
        True
    """
    expression = without_conversions(expression)
    if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Add | ast.Sub):
        right = sign if isinstance(expression.op, ast.Add) else -sign
        return _sum(terms_of(expression.left, sign), terms_of(expression.right, right))
    if isinstance(expression, ast.UnaryOp) and isinstance(expression.op, ast.USub):
        return terms_of(expression.operand, -sign)
    if isinstance(expression, ast.Constant) and isinstance(expression.value, int | float):
        return Counter({f"{float(expression.value):g}": sign})
    return Counter({ast.unparse(expression): sign})


def _sum(one: Terms, other: Terms) -> Terms:
    return Counter({key: n for key in {*one, *other} if (n := one[key] + other[key])})


_CONVERSIONS = ("float", "detach", "clamp", "contiguous", "to", "clip", "double")


def without_conversions(expression: ast.expr) -> ast.expr:
    """The expression without outer calls that change only the dtype, device or range of a value.

    Example:
        >>> ast.unparse(without_conversions(ast.parse("torch.clamp(a, min=0).float()", mode="eval").body))
        'a'
    """
    while isinstance(expression, ast.Call) and called(expression) in _CONVERSIONS:
        function = expression.func
        if isinstance(function, ast.Attribute) and not _is_library(function.value):
            expression = function.value
        elif expression.args:
            expression = expression.args[0]
        else:
            break
    return expression


def _is_library(expression: ast.expr) -> bool:
    return isinstance(expression, ast.Name) and expression.id in ("torch", "np", "numpy", "jnp", "F")

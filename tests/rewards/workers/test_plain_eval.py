import pytest

from logitless.rewards.workers.plain_eval import check_formula, plain_eval

sympy = pytest.importorskip("sympy")
NAMES = {**vars(sympy), "Integer": sympy.Integer, "exec": exec, "getattr": getattr, "abs": abs}


@pytest.mark.parametrize(
    "source", ["[1, 2]", "['a', ['b']]", "(1, -2.5)", "{'a': 1}", "3 + 4 * 2", "0x3 >> 1", " [1]\n"]
)
def test_literals_and_arithmetic_have_the_value_that_python_gives(source):
    assert plain_eval(source) == eval(source.strip())


@pytest.mark.parametrize(
    "source",
    ["f()", "x", "[].__class__", "(lambda: 1)", "[x for x in 'a']", "f'{1}'", "[1][0]", "(y := 1)", "__import__('os')"],
)
def test_what_could_run_is_refused(source):
    with pytest.raises(ValueError, match="literals and arithmetic expected"):
        plain_eval(source)


@pytest.mark.parametrize("source", ["Integer(2)*Symbol('x')", "sin(Integer(1))", "sqrt(Integer(2))", "abs(x)", "x**y"])
def test_formulas_of_sympy_pass(source):
    assert check_formula(source, NAMES) == source


@pytest.mark.parametrize(
    "source", ["exec('1')", "getattr(x, 'y')", "sympify('1')", "lambdify(x, y)", "x.subs(y, 1)", "sin(x)(y)", "S('1')"]
)
def test_calls_of_anything_else_are_refused(source):
    with pytest.raises(ValueError, match="expected"):
        check_formula(source, NAMES)

"""Mutation test of the objectives: would the tests notice if an equation were wrong?

``make mutation`` changes one thing at a time in ``src/logitless/objective`` (a sign, a comparison, a constant, min
for max, a dropped clamp or detach, a missing raise ...) and runs the tests of ``tests/objective`` and the doctests
against it until one fails. A change that no test notices is a survivor; it needs a test, or an entry in
``mutation_survivors.toml`` that says why it changes nothing. Exit status 1 if there is any other, or an entry too many.

Everything runs in forks of one process. A change inside a function is made after the tests are collected, by exchanging
the function's code, so that it costs no import; a change of a default or a module's constant imports the package anew.
Tests that start processes of their own would import the unchanged source there; ``tests.ranks`` skips them.

    python -m tests.mutation [FILE.py ...]
"""

import ast
import copy
import functools
import gc
import importlib.machinery
import importlib.metadata
import inspect
import itertools
import os
import pickle
import signal
import sys
import time
import tomllib
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

if __name__ == "__main__":  # before torch is imported; not under pytest, which looks for doctests here
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "LOGITLESS_ONE_PROCESS": "1"}

import beartype  # noqa: F401  imported once, before any fork, as are the plugins of pytest
import hypothesis
import pydantic  # noqa: F401
import pytest
import torch._inductor  # noqa: F401  what torch.use_deterministic_algorithms imports

for plugin in importlib.metadata.entry_points(group="pytest11"):
    plugin.load()

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "src/logitless/objective"
TESTS = ROOT / "tests/objective"
EXPLAINED = Path(__file__).with_name("mutation_survivors.toml")
SURVIVED, KILLED, NEEDS_IMPORT, BROKEN = range(4)
NUM_WORKERS = os.cpu_count() or 1
STARTED = time.monotonic()
Result = TypeVar("Result")


# --- what is changed ------------------------------------------------------------------------------------------------

COMPARISONS = {
    "Lt": "LtE GtE", "LtE": "Lt Gt", "Gt": "GtE LtE", "GtE": "Gt Lt", "Eq": "NotEq", "NotEq": "Eq", "Is": "IsNot",
    "IsNot": "Is", "In": "NotIn", "NotIn": "In",
}  # fmt: skip
OPERATORS = {
    "Add": "Sub", "Sub": "Add", "Mult": "Div", "Div": "Mult", "FloorDiv": "Mult", "Mod": "Mult", "Pow": "Mult",
    "BitAnd": "BitOr", "BitOr": "BitAnd", "BitXor": "BitOr",
}  # fmt: skip
NAMES = {
    "min": "max", "minimum": "maximum", "amin": "amax", "argmin": "argmax", "clamp_min": "clamp_max", "any": "all",
    "sum": "mean", "nansum": "nanmean", "zeros": "ones", "zeros_like": "ones_like", "new_zeros": "new_ones",
    "floor": "ceil", "logical_and": "logical_or", "isnan": "isfinite",
}  # fmt: skip
NAMES |= {new: old for old, new in NAMES.items()}
DROPPED = {
    "abs", "clamp", "clip", "detach", "exp", "expm1", "log", "nan_to_num", "neg", "roll", "sign", "sigmoid", "sqrt",
    "square", "flip", "cumsum",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change: ``source[start:end]`` (bytes) becomes ``after``."""

    file: Path
    line: int
    function: str
    start: int
    end: int
    after: str
    in_function: bool

    def source(self) -> bytes:
        """The whole file with the change made."""
        source = self.file.read_bytes()
        return source[: self.start] + self.after.encode() + source[self.end :]

    def key(self) -> tuple[str, str, str, str]:
        """File, function, and the changed lines before and after, each as one line."""
        source = self.file.read_bytes()
        first = source.rfind(b"\n", 0, self.start) + 1
        last = source.find(b"\n", self.end)
        after = source[first : self.start] + self.after.encode() + source[self.end : last]
        before, after = (" ".join(lines.decode().split()) for lines in (source[first:last], after))
        return self.file.relative_to(SOURCES).as_posix(), self.function, before, after


def replacements(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """What in a node may be replaced, and with what."""
    match node:
        case ast.Compare(ops=[op]):
            for other in COMPARISONS[type(op).__name__].split():
                yield node, changed(node, ops=[getattr(ast, other)()])
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op).__name__ in OPERATORS:
            yield node, changed(node, op=getattr(ast, OPERATORS[type(op).__name__])())
        case ast.BoolOp(op=op):
            yield node, changed(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.UnaryOp(operand=operand):
            yield node, operand
        case ast.Constant(value=bool(value)):
            yield node, ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield node, ast.Constant(value + 1)
        case ast.IfExp(body=body, orelse=orelse):
            yield node, changed(node, body=orelse, orelse=body)
        case ast.If(test=test) if not isinstance(test, ast.Compare | ast.UnaryOp):
            yield test, ast.UnaryOp(ast.Not(), test)
        case ast.Raise() | ast.Expr(value=ast.Call()):
            yield node, ast.Pass()
        case ast.Call(func=ast.Attribute(value=owner, attr=name) as function, args=args):
            if name in NAMES:
                yield node, changed(node, func=changed(function, attr=NAMES[name]))
            if name in DROPPED:
                is_method = not (isinstance(owner, ast.Name) and owner.id in ("torch", "math", "functional"))
                yield node, owner if is_method else args[0]
            if name == "where" and len(args) == 3:
                yield node, changed(node, args=[args[0], args[2], args[1]])
            if name == "clamp" and len(node.keywords) == 1:
                (bound,) = node.keywords
                yield node, changed(node, keywords=[ast.keyword({"min": "max", "max": "min"}[bound.arg], bound.value)])
        case ast.Call(func=ast.Name(id="min" | "max" | "any" | "all" as name)):
            yield node, changed(node, func=ast.Name(NAMES[name]))
        case ast.Call(func=ast.Name(id="abs"), args=[argument]):
            yield node, argument


def changed(node: ast.AST, **fields: object) -> ast.AST:
    """A copy of a node with other fields."""
    twin = copy.copy(node)
    for name, value in fields.items():
        setattr(twin, name, value)
    return twin


def mutants_of(file: Path) -> list[Mutant]:
    """Every change of a file."""
    source = file.read_bytes()
    line_starts = [0]
    for line in source.splitlines(keepends=True):
        line_starts.append(line_starts[-1] + len(line))
    found: list[Mutant] = []

    def visit(node: ast.AST, path: str, in_function: bool) -> None:
        for old, new in replacements(node):
            start = line_starts[old.lineno - 1] + old.col_offset
            end = line_starts[old.end_lineno - 1] + old.end_col_offset
            after = ast.unparse(ast.fix_missing_locations(new))
            after = f"({after})" if isinstance(old, ast.expr) else after
            found.append(Mutant(file, old.lineno, path, start, end, after, in_function))
        match node:
            case ast.Raise() | ast.Delete() | ast.Import() | ast.ImportFrom() | ast.JoinedStr():
                return
            case ast.Assign(value=ast.Subscript() | ast.BinOp(op=ast.BitOr())) if not in_function:
                return  # the name of a type
            case ast.FunctionDef(name=name):
                inner = path if in_function else f"{path}.{name}".lstrip(".")
                for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
                    visit(default, inner, in_function)
                children, in_function = node.body, True
            case ast.ClassDef(name=name):
                inner, children = name, node.body
            case ast.AnnAssign(value=value):
                inner, children = path, [] if value is None else [value]
            case _:
                inner, children = path, ast.iter_child_nodes(node)
        for child in children:
            visit(child, inner, in_function)

    visit(ast.parse(source), "", False)
    return found


# --- how a change is made -------------------------------------------------------------------------------------------


def functions_in_memory() -> dict[tuple[str, str], list[types.FunctionType]]:
    """What is defined in Python, by file and qualified name, wrapped or not."""
    found: dict[tuple[str, str], list[types.FunctionType]] = {}
    for thing in gc.get_objects():
        if type(thing) is types.FunctionType:  # isinstance would ask proxies for their class, and some warn
            found.setdefault((thing.__code__.co_filename, thing.__code__.co_qualname), []).append(thing)
    return found


def exchange_code(mutant: Mutant, functions: Sequence[types.FunctionType]) -> None:
    """Give the live function the changed code.

    Raises:
        ValueError: the change alters what the function closes over, so that only a new import can make it.
    """
    code = function_codes(compile(mutant.source(), str(mutant.file), "exec"))[mutant.function]
    for function in functions:
        function.__code__ = code


def function_codes(code: types.CodeType) -> dict[str, types.CodeType]:
    """The functions of a module and of its classes, by qualified name; not those inside functions."""
    found = {}
    for constant in filter(lambda c: isinstance(c, types.CodeType), code.co_consts):
        if constant.co_flags & inspect.CO_NEWLOCALS:
            found[constant.co_qualname] = constant
        else:
            found |= function_codes(constant)
    return found


def import_changed(mutant: Mutant) -> None:
    """Let the next import of the file read the changed source, not the file or its cached bytecode."""
    loader = importlib.machinery.SourceFileLoader
    read, stats = loader.get_data, loader.path_stats
    path = str(mutant.file)
    loader.get_data = lambda self, name: mutant.source() if name == path else read(self, name)
    loader.path_stats = lambda self, name: {"mtime": 0, "size": -1} if name == path else stats(self, name)
    loader.set_data = lambda *_args, **_options: None


# --- how the tests are run ------------------------------------------------------------------------------------------


def run_forked(jobs: Sequence[Callable[[], int]], progress: str) -> list[int]:
    """The exit statuses of jobs run in forks, as many at a time as there are processors; KILLED by a signal, too."""
    statuses, running = [KILLED] * len(jobs), {}
    for index, job in [*enumerate(jobs), *[(None, None)] * NUM_WORKERS]:
        if len(running) == NUM_WORKERS or (index is None and running):
            pid, status = os.wait()
            statuses[running.pop(pid)] = os.WEXITSTATUS(status) if os.WIFEXITED(status) else KILLED
        if index is None:
            continue
        if index % 100 == 0:
            print(f"{progress}: {index} of {len(jobs)}, {time.monotonic() - STARTED:.0f} s", flush=True)
        pid = os.fork()
        if pid == 0:
            status = BROKEN
            try:
                status = job()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        running[pid] = index
    if BROKEN in statuses:
        sys.exit("this harness failed, see above")
    return statuses


class Runner:
    """A pytest plugin that runs the collected tests against changes instead of once."""

    def __init__(self, against: Callable[["Runner"], None]) -> None:
        self.against = against
        self.items: list[pytest.Item] = []
        self.seconds: dict[str, float] = {}
        self.first_failure: str | None = None

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = session.items
        self.against(self)
        return True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and self.first_failure is None:
            self.first_failure = f"{report.nodeid}\n{report.longrepr}"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0) + report.duration
        if report.failed and self.first_failure is None:
            self.first_failure = report.nodeid

    def run(self, file: Path | None = None, seconds: dict[str, float] | None = None) -> int:
        """Run until a test fails: those named after the file first, the others from quick to slow."""
        seconds = seconds or {}
        mirrors = tests_named_after(file) if file else []
        order = sorted(self.items, key=lambda item: (item.path not in mirrors, seconds.get(item.nodeid, 0)))
        for item, following in itertools.zip_longest(order, order[1:]):
            if self.first_failure is None:
                if seconds:  # a change that makes a loop endless
                    signal.setitimer(signal.ITIMER_PROF, 10 * seconds.get(item.nodeid, 0) + 5)
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        return SURVIVED if self.first_failure is None else KILLED


def tests_named_after(file: Path) -> list[Path]:
    """The tests of a file, of its folder where that is a family of its own, and of every part's configuration."""
    stems = [file.stem, *([] if file.parent == SOURCES else [file.parent.stem]), "configuration"]
    return [path for stem in stems if (path := TESTS / f"test_{stem}.py").exists()]


def run_pytest(against: Callable[[Runner], None], paths: Sequence[Path] = (TESTS, SOURCES)) -> Runner:
    """Collect tests and hand them over."""
    runner = Runner(against)
    chosen = "not slow and not gpu and not multi_gpu"
    hushed = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"  # of the imports above
    pytest.main([*map(str, paths), "-p", "no:terminal", "-m", chosen, "-W", hushed], plugins=[runner])
    return runner


def statuses_in_memory(mutants: Sequence[Mutant]) -> tuple[dict[Mutant, int], dict[str, float]]:
    """Run the tests once unchanged, then against every change inside a function, each time in a process of its own."""
    statuses: dict[Mutant, int] = {}
    seconds: dict[str, float] = {}

    def unchanged(runner: Runner) -> tuple[str | None, dict[str, float]]:
        runner.run()
        return runner.first_failure, runner.seconds

    def against(runner: Runner) -> None:
        failure, measured = in_a_fork(lambda: unchanged(runner))
        if failure is not None:
            print("these tests fail before anything is changed:", failure)
            return
        seconds.update(measured)
        print(f"{len(runner.items)} tests take {sum(seconds.values()):.0f} s", flush=True)

        functions = functions_in_memory()
        gc.freeze()

        def job(mutant: Mutant) -> int:
            try:
                exchange_code(mutant, functions[str(mutant.file), mutant.function])
            except ValueError:
                return NEEDS_IMPORT
            return runner.run(mutant.file, seconds)

        jobs = [functools.partial(job, mutant) for mutant in with_control(mutants)]
        statuses.update(without_control(mutants, run_forked(jobs, "changes inside functions")))

    run_pytest(against)
    if len(statuses) != len(mutants):
        sys.exit("stopped, see above")
    return statuses, seconds


def status_after_import(mutant: Mutant, seconds: dict[str, float]) -> int:
    """Run the tests on a package that is imported with the change in it; those named after the file first."""
    import_changed(mutant)
    status = KILLED

    def against(runner: Runner) -> None:
        nonlocal status
        status = runner.run(mutant.file, seconds)

    mirrors = tests_named_after(mutant.file)
    if mirrors:
        run_pytest(against, mirrors)
    if status == SURVIVED or not mirrors:
        status = KILLED
        run_pytest(against)
    return status


def with_control(mutants: Sequence[Mutant]) -> list[Mutant]:
    """The changes, and before them one that changes nothing."""
    return [replace(mutants[0], start=0, end=0, after=""), *mutants] if mutants else []


def without_control(mutants: Sequence[Mutant], statuses: Sequence[int]) -> dict[Mutant, int]:
    """The status of each change, once the control has survived."""
    if statuses and statuses[0] != SURVIVED:
        sys.exit("the tests fail on unchanged code that is treated like changed code")
    return dict(zip(mutants, statuses[1:], strict=True))


def in_a_fork(work: Callable[[], Result]) -> Result:
    """What a function returns, without what it imports."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            with os.fdopen(writer, "wb") as pipe:
                pickle.dump(work(), pipe)
        except SystemExit as stop:
            print(stop, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        content = pipe.read()
    os.wait()
    if not content:
        sys.exit(2)
    return pickle.loads(content)


# --- the report -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Report survivors; see the top of the file."""
    hypothesis.settings.register_profile(
        "mutation", derandomize=True, database=None, phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate]
    )
    hypothesis.settings.load_profile("mutation")
    files = [SOURCES / name for name in arguments] or sorted(SOURCES.rglob("*.py"))
    mutants = [mutant for file in files for mutant in mutants_of(file)]
    gc.freeze()  # what every fork inherits needs no collection
    statuses, seconds = in_a_fork(lambda: statuses_in_memory([m for m in mutants if m.in_function]))
    rest = [m for m in mutants if statuses.get(m, NEEDS_IMPORT) == NEEDS_IMPORT]
    jobs = [functools.partial(status_after_import, mutant, seconds) for mutant in with_control(rest)]
    statuses |= without_control(rest, run_forked(jobs, "changes that need an import"))

    explained = {(e["file"], e["function"], e["before"], e["after"]) for e in explanations("survivor")}
    of_any_numbers = {(e["file"], e["function"]) for e in explanations("any_numbers")}
    survivors = [
        mutant for mutant in mutants if statuses[mutant] == SURVIVED and mutant.key()[:2] not in of_any_numbers
    ]
    unexplained = [mutant for mutant in survivors if mutant.key() not in explained]
    stale = {key for key in explained if SOURCES / key[0] in files} - {mutant.key() for mutant in survivors}
    for mutant in unexplained:
        _, _, before, after = mutant.key()
        print(f"\n{mutant.file.relative_to(ROOT)}:{mutant.line} {mutant.function}\n- {before}\n+ {after}")
    for key in sorted(stale):
        print("\nexplained, but it does not survive (any more):", *key, sep="\n  ")
    print()
    for file in files:
        of_file = [mutant for mutant in mutants if mutant.file == file]
        alive = sum(mutant in survivors for mutant in of_file)
        print(f"{file.relative_to(SOURCES).as_posix():34} {len(of_file):5} changes {alive:4} survivors")
    print(f"{len(mutants)} changes, {len(survivors)} survivors, {len(unexplained)} of them not explained, in", end=" ")
    print(f"{(time.monotonic() - STARTED) / 60:.1f} minutes")
    return int(bool(unexplained or stale))


def explanations(kind: str) -> list[dict[str, str]]:
    """The survivors that change nothing, or the functions that may as well give other numbers, with the reason."""
    return tomllib.loads(EXPLAINED.read_text())[kind]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

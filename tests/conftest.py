"""Shared by all tests: shapes checked, memory poisoned, a bounded number of threads, no network, no wait for disks."""

import functools
import gc
import logging
import os
import signal
from dataclasses import fields, is_dataclass
from inspect import isclass
from pathlib import Path
from types import FunctionType
from typing import Any, get_args

# Here and in every process that a test starts: else they take as many as there are processors, each of them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import jaxtyping
import torch
from beartype.roar import BeartypeCallHintViolation

torch.set_num_threads(1)  # for what a module makes before its first test

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "GPUS_OF_WORKERS" in os.environ and "PYTEST_XDIST_WORKER" in os.environ:  # each worker has its own, by its number
    gpus = os.environ["GPUS_OF_WORKERS"].split(" ")
    worker = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[worker % len(gpus)]
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Ignored in a background job or under nohup, and processes of tests would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

PACKAGE = Path(__file__).parents[1] / "src" / "logitless"

# Every module but Triton kernels, whose source Triton reads itself.
CHECKED = [
    "logitless.types",
    "logitless.objective",
    *(
        ".".join(("logitless", *module.relative_to(PACKAGE).with_suffix("").parts))
        for part in ("models", "rollout", "train")
        for module in (PACKAGE / part).rglob("[!_]*.py")
        if module.parent.name != "kernels"
    ),
    "logitless.head.contract",
    "logitless.head.reference",
    "logitless.head.chunked",
    "logitless.head.vocab_parallel",
    "logitless.head.sharded",
    "logitless.head.api",
    "logitless.data",
    "logitless.distributed",
]


def says_shapes(annotation):
    """Whether an annotation, or a part of it, is an array with a shape."""
    if isinstance(annotation, str):  # of something that is defined later
        return "Tensor, " in annotation
    if isclass(annotation) and issubclass(annotation, jaxtyping.AbstractArray):
        return True
    return any(says_shapes(part) for part in (annotation if isinstance(annotation, list) else get_args(annotation)))


def jaxtyped_where_shapes_are(*, typechecker):
    """The import hook's decorator, where shapes are; checks of plain types besides would double the time of a run."""

    def decorate(thing):
        if isinstance(thing, classmethod | staticmethod):
            return type(thing)(decorate(thing.__func__))
        if isinstance(thing, property):
            return thing.getter(decorate(thing.fget))
        if is_dataclass(thing):
            if any(says_shapes(field.type) for field in fields(thing)) and not hasattr(thing.__init__, "__wrapped__"):
                thing.__init__ = shapes_checked(thing.__init__, typechecker)
        elif any(map(says_shapes, getattr(thing, "__annotations__", {}).values())) and not isclass(thing):
            return shapes_checked(thing, typechecker)
        return thing

    return decorate


def shapes_checked(function, typechecker):
    """As ``jaxtyping.jaxtyped``, in a third of its time.

    That checks the parameters a second time beside the result, and binds the arguments of each call to their names.
    """
    code, names, defaults = function.__code__, function.__globals__, function.__defaults__
    copy = FunctionType(code, names, function.__name__, defaults, function.__closure__)
    copy.__kwdefaults__, copy.__module__ = function.__kwdefaults__, function.__module__
    later = (name for name, each in function.__annotations__.items() if isinstance(each, str) and not says_shapes(each))
    copy.__annotations__ = function.__annotations__ | dict.fromkeys(later, Any)
    checked, shapes, config = typechecker(copy), every_jaxtyped("context"), jaxtyping.config

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        if config.jaxtyping_disable:
            return function(*args, **kwargs)
        with shapes:
            try:
                return checked(*args, **kwargs)
            except BeartypeCallHintViolation as error:
                raise jaxtyping.TypeCheckError(str(error)) from error

    return wrapped


every_jaxtyped = jaxtyping.jaxtyped
jaxtyping.jaxtyped = jaxtyped_where_shapes_are
jaxtyping.install_import_hook(CHECKED, "beartype.beartype")

import hypothesis  # noqa: E402
import pytest  # noqa: E402

from tests.disk import written_at_once  # noqa: E402

written_at_once()

# Everywhere the same examples, at whatever speed; `pytest --hypothesis-profile default` looks for others.
hypothesis.settings.register_profile(
    "same", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("same")


def reset_torch():
    """Uninitialised memory is NaN, nondeterministic kernels are errors, seed and threads are those of every test."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    # Where there is no GPU, torch.manual_seed formats the stack three times, for the errors of devices to come.
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)


def pytest_collection_modifyitems(items):
    """What needs GPUs is skipped where there are too few; a test that needs more than two says so itself."""
    for item in items:
        needed = 2 if item.get_closest_marker("multi_gpu") else 1 if item.get_closest_marker("gpu") else 0
        if torch.cuda.device_count() < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device{'s'[: needed - 1]}"))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """No garbage is looked for while tests are collected: nearly all that is made then stays until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    """What several tests share is made as each of them would make it, whichever comes first."""
    if fixturedef.scope != "function":
        reset_torch()
    return (yield)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Uninitialised memory is NaN, nondeterministic kernels are errors."""
    reset_torch()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def ordinary_memory():
    """Not NaN: gigabytes of it take long, and a captured graph would repeat the kernel that writes it."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def signals_that_are_heard():
    """No garbage collection calls Python, as Hypothesis lets it: what a signal raises there is lost, Ctrl-C too."""
    gc.callbacks.clear()


@pytest.fixture(autouse=True)
def process_of_its_own():
    """What a command sets for its whole process (variables, how much is logged) does not reach the next test."""
    logger = logging.getLogger("logitless")
    variables, level = dict(os.environ), logger.level
    yield
    logger.setLevel(level)
    for name in {*variables, *os.environ} - {"PYTEST_CURRENT_TEST"}:
        if name not in variables:
            del os.environ[name]
        elif os.environ.get(name) != variables[name]:
            os.environ[name] = variables[name]

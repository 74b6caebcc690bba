"""Kernels that are compiled side by side: what is done with one when it is compiled."""

import os
import shutil
import sys
import sysconfig
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton
from triton.runtime import build
from triton.runtime.errors import OutOfResources

from logitless.models.kernels import compiling as compiling_module
from logitless.models.kernels.compiling import Compiling, ready_to_launch


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch):
    """Here calls launch nothing, and there is no graph to capture."""
    monkeypatch.setattr(compiling_module, "not_executed", lambda _: nullcontext())


class Kernel:
    """Asked for its launcher as Triton's is, which makes it then and loads the kernel."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.asked = error, 0

    @property
    def run(self) -> None:
        self.asked += 1
        if self.error is not None:
            raise self.error


def test_a_kernel_is_loaded_as_soon_as_it_is_compiled():
    kernel = Kernel()
    ready_to_launch(kernel)
    assert kernel.asked == 1


def test_a_kernel_that_does_not_fit_is_left_to_its_launch_and_any_other_error_is_raised():
    ready_to_launch(Kernel(OutOfResources(10, 5, "shared memory")))
    with pytest.raises(OSError, match="no compiler"):
        ready_to_launch(Kernel(OSError("no compiler")))


def test_some_kernels_are_waited_for_while_others_compile_and_each_is_compiled_once(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)  # on one processor there is one thread
    compiled, there, may_end = [], [], threading.Event()
    with Compiling(None) as compiling:

        def launch(name):
            def compile_it():
                assert name != "slow" or may_end.wait(300)
                compiled.append(name)
                return Kernel()

            compiling.unlaunched.submit(name, compile_it, lambda _: there.append(name))

        slow = compiling.begin([partial(launch, "slow")])
        quick = compiling.begin([partial(launch, "quick"), partial(launch, "slow")])
        quick()
        assert there == ["quick"]
        may_end.set()
        slow()
        assert there == ["quick", "slow"]
    assert sorted(compiled) == ["quick", "slow"]


def test_calls_that_are_made_to_compile_their_kernels_are_not_executed(monkeypatch):
    told = []

    @contextmanager
    def not_executed(device):
        told.append(f"{device} captures")
        yield
        told.append("thrown away")

    monkeypatch.setattr(compiling_module, "not_executed", not_executed)
    with Compiling("cuda:1") as compiling:
        compiling.begin([partial(told.append, "one"), partial(told.append, "another")])
    assert told == ["cuda:1 captures", "one", "another", "thrown away"]


def test_a_compilation_that_fails_is_raised_where_its_kernel_is_waited_for():
    def fail():
        raise ValueError("no such register")

    with pytest.raises(ValueError, match="no such register"), Compiling(None) as compiling:
        compiling.begin([lambda: compiling.unlaunched.submit("one", fail, print)])()


LAUNCHER = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) {{ return PyLong_FromLong({number}); }}
static PyMethodDef methods[] = {{{{"launch", launch, METH_VARARGS, ""}}, {{NULL, NULL, 0, NULL}}}};
static struct PyModuleDef module = {{PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods}};
PyMODINIT_FUNC PyInit___triton_launcher(void) {{ return PyModule_Create(&module); }}
"""
"""As Triton's: a module of the name that all have, initialized in one phase."""
BUILDS = (shutil.which("gcc") or shutil.which("clang")) and Path(sysconfig.get_path("include"), "Python.h").exists()


@pytest.mark.skipif(triton.__version__.startswith("3.7."), reason="Triton 3.7 has one launcher for all kernels")
@pytest.mark.skipif(not BUILDS, reason="needs a C compiler and Python's headers")
def test_threads_that_load_launchers_at_once_get_each_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def launched(number):
        return build.compile_module_from_src(LAUNCHER.format(number=number), "__triton_launcher").launch()

    assert [launched(number) for number in range(4)] == [0, 1, 2, 3]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            found = threads.map(lambda number: {launched(number) for _ in range(500)}, range(4))
            assert list(found) == [{0}, {1}, {2}, {3}]
    finally:
        sys.setswitchinterval(interval)

"""What this machine has, as Triton and pip find it."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from logitless import installed

RECIPES = Path(__file__).parents[1] / "recipes"
SOURCE = """
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "tiny", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_tiny(void) { return PyModule_Create(&module); }
"""


@pytest.fixture
def compiles(monkeypatch, tmp_path):
    """For a GPU, with an empty cache of Triton's and no variables of a C compiler."""
    for name in ("TRITON_INTERPRET", "CC", "CPATH", "C_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


def without_compiler(monkeypatch, tmp_path):
    (empty := tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(empty))
    return "no C compiler"


def compiler_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    return "no C compiler"


def without_headers(monkeypatch, tmp_path):
    paths = sysconfig.get_paths() | {"include": str(tmp_path)}
    monkeypatch.setattr(sysconfig, "get_paths", lambda *_, **__: paths)
    return f"no Python.h in {tmp_path}"


def without_cache(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    return f"cannot write to its cache {tmp_path / 'file' / 'cache'}, Not a directory"


def headers_elsewhere(monkeypatch, tmp_path):
    monkeypatch.setenv("CPATH", sysconfig.get_paths()["include"])
    without_headers(monkeypatch, tmp_path)
    return ""


@pytest.mark.parametrize(
    "change",
    [lambda *_: "", without_compiler, compiler_that_is_not_there, without_headers, without_cache, headers_elsewhere],
    ids=["as it is", "no compiler", "CC names nothing", "no headers", "no cache", "headers by CPATH"],
)
def test_kernels_cannot_be_compiled_where_triton_itself_fails_to_build_a_module(
    change, compiles, monkeypatch, tmp_path, capfd
):
    build = pytest.importorskip("triton.runtime.build")
    expected = change(monkeypatch, tmp_path)
    said = installed.without_triton.__wrapped__()
    try:
        build.compile_module_from_src(SOURCE, "tiny")
        failed = False
    except (RuntimeError, OSError, subprocess.CalledProcessError):
        failed = True
    capfd.readouterr()  # the compiler's words
    assert failed == bool(expected)
    assert expected in said
    assert bool(said) == failed


def test_without_the_package_kernels_cannot_be_compiled_and_interpreted_ones_are_not(compiles, monkeypatch, tmp_path):
    without_compiler(monkeypatch, tmp_path)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert installed.without_triton.__wrapped__() == ""
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    assert "pip install 'logitless[triton]'" in installed.without_triton.__wrapped__()


@pytest.mark.parametrize(
    ("driver", "seen", "built_for", "visible", "said"),
    [
        (None, False, None, None, ""),
        ("580.1", True, "13.0", None, ""),
        ("580.1", False, "13.0", "", ""),
        ("580.1", False, "13.0", None, "sees no GPU (a container"),
        ("580.1", False, None, "0", "is not built for it"),
    ],
    ids=["no driver", "in use", "hidden", "not given", "torch for CPUs"],
)
def test_a_gpu_that_torch_does_not_see_is_told_of_unless_it_is_hidden(
    driver, seen, built_for, visible, said, monkeypatch
):
    monkeypatch.setattr(installed, "gpu_driver", lambda: driver)
    monkeypatch.setattr("torch.cuda.is_available", lambda: seen)
    monkeypatch.setattr("torch.version.cuda", built_for)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert said in installed.unused_gpu()
    assert bool(installed.unused_gpu()) == bool(said)


@pytest.mark.gpu
def test_a_run_on_a_gpu_without_a_c_compiler_trains_without_kernels_and_says_what_to_install(tmp_path):
    (tmp_path / "bin").mkdir()
    caches = {"TRITON_CACHE_DIR": str(tmp_path / "t"), "XDG_CACHE_HOME": str(tmp_path / "x")}
    environment = {name: value for name, value in os.environ.items() if name != "CC"}
    command = [sys.executable, "-m", "logitless", "train", str(RECIPES / "length-toy.yaml")]
    command += ["--set", f"output={tmp_path / 'runs'}", "--set", "train.blocks=2"]
    environment |= caches | {"PATH": str(tmp_path / "bin")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Triton finds no C compiler (apt-get install gcc, or set CC)" in done.stdout + done.stderr

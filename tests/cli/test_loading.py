"""What a command imports before it begins, and what goes on meanwhile."""

import ctypes
import os
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from logitless.cli.loading import cuda_context
from tests import warm

READ_ONCE = """
import sys
opened = []
sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" else None)
from logitless.cli.loading import import_transformers
import_transformers()
import transformers
read = [path for path in opened if path.endswith("modeling_llama.py")]
assert len(read) == 1, read
from transformers.utils.import_utils import define_import_structure
models = transformers.models.__file__
assert define_import_structure(models) == define_import_structure.__wrapped__(models)
assert len([path for path in opened if path.endswith("modeling_llama.py")]) == 2, "the last line read nothing again"
"""

NOT_NEEDED_YET = """
import sys
from pathlib import Path
from logitless.train.learn.learner import Learner
from tests.train.tiny import finished_run, tiny_recipe

step = Learner.step

def checked(self):
    for name in ("pandas", "matplotlib", "tensorboard"):
        assert name not in sys.modules, name
    Learner.step = step  # only the first one is checked
    return step(self)

Learner.step = checked
run = finished_run(Path(sys.argv[1]), train__blocks=1, writers=[{"name": "tensorboard"}])
assert run.tensorboard.is_dir()
"""


def test_transformers_reads_the_files_of_its_models_once_and_offers_the_same() -> None:
    subprocess.run([sys.executable, "-c", READ_ONCE], check=True)


def test_a_run_takes_its_first_step_without_pandas_matplotlib_and_tensorboard(tmp_path) -> None:
    done = warm.run("-c", NOT_NEEDED_YET, str(tmp_path), environment=os.environ)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def calls(monkeypatch) -> list[tuple[Any, ...]]:
    """Calls of a library that stands in for CUDA's; it answers once the imports have begun."""
    made = list[tuple[Any, ...]]()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(**{each: called(name, each) for each in NAMES}))

    def called(library: str, name: str) -> Any:
        def call(*arguments: object) -> int:
            assert IMPORTING.wait(60)
            made.append((library, name, *arguments))
            return 0

        return call

    IMPORTING.clear()
    return made


NAMES = ("cudaSetDevice", "cudaFree")
IMPORTING = threading.Event()
TORCHRUN = {"WORLD_SIZE": "4", "LOCAL_RANK": "3"}


@pytest.mark.parametrize(
    ("device", "environment", "number"),
    [("auto", {}, 0), ("cuda", TORCHRUN, 3), ("cuda:2", {}, 2), ("auto", {"LOCAL_RANK": "3", "WORLD_SIZE": "1"}, 0)],
)
def test_the_context_of_the_ranks_own_gpu_is_created_while_modules_are_imported(calls, device, environment, number):
    with cuda_context(device, environment):
        assert not calls
        IMPORTING.set()
    assert calls == [("libcudart.so.13", "cudaSetDevice", number), ("libcudart.so.13", "cudaFree", None)]


@pytest.mark.parametrize(
    ("device", "built", "environment"),
    [("cpu", "13.0", {}), ("auto", None, {}), ("mps", "13.0", {}), ("auto", "13.0", {"WORLD_SIZE": "4"})],
)
def test_no_context_is_created_for_a_run_without_a_gpu(calls, monkeypatch, device, built, environment):
    monkeypatch.setattr(torch.version, "cuda", built)
    IMPORTING.set()
    with cuda_context(device, environment):
        pass
    assert not calls


def test_a_machine_without_the_library_is_left_to_torch(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "1234.0")
    with cuda_context("cuda", {}):
        pass

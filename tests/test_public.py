"""The public names: all there, and free until they are used."""

import importlib
import subprocess
import sys

import pytest

import logitless
from logitless.head.api import token_scores
from logitless.types import Prompt


def test_every_public_name_is_the_object_of_its_module():
    assert logitless.token_scores is token_scores
    assert logitless.Prompt is Prompt
    assert logitless.presets is importlib.import_module("logitless.objective.presets")
    assert all(getattr(logitless, name) is not None for name in logitless.__all__)
    assert set(logitless.__all__) <= set(dir(logitless))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="tokenscores"):
        logitless.tokenscores  # noqa: B018


def test_importing_the_package_or_a_worker_imports_no_torch():
    program = "import sys, logitless, logitless.rewards.workers.worker; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)

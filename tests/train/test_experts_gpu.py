"""A mixture of experts learns on a GPU whose caches of compiled kernels are empty."""

import os
import subprocess
import sys

import pytest

from logitless.train.record.run_folder import RunFolder
from script import ROOT, caches_in
from tests.train.test_experts import RECIPE, assert_learnt, of_three_letters

pytestmark = pytest.mark.gpu


def test_a_mixture_learns_from_empty_caches_with_the_gpu_engine(tmp_path):
    settings = [*of_three_letters(tmp_path), "name=mixture", "model.device=cuda", "rollout.engine={name: gpu}"]
    command = [sys.executable, "-m", "logitless", "train", str(RECIPE)]
    command += [word for setting in settings for word in ("--set", setting)]
    environment = {**os.environ, **caches_in(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert_learnt(list(RunFolder(tmp_path / "mixture").read_metrics()))

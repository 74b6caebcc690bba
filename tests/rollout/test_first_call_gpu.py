"""The GPU engine's first call in a process, with empty caches: nothing was compiled by anything that ran before."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from script import ROOT, caches_in

pytestmark = pytest.mark.gpu
GREEDY = {"temperature": 0}
OPTIONS = {
    "greedy": [GREEDY],
    "top-p": [{"top_p": 0.9}],
    "top-k": [{"top_k": 20}],
    "min-p": [{"min_p": 0.05}],
    "repetition penalty": [{"repetition_penalty": 1.2}],
    "presence penalty": [{"presence_penalty": 0.5}],
    "frequency penalty": [{"frequency_penalty": 0.5}],
    "minimum": [{"min_new_tokens": 4}],
    "stop string": [{"stop": ("ab",)}],
    "changed between calls": [{}, {"top_p": 0.9}, GREEDY, {"top_k": 5, "temperature": 0.7}, {}, {"top_p": 0.9}],
}


def first_calls(options, folder, *before, model="qwen3"):
    """The finished process of ``first_call.py``, with caches of its own."""
    environment = {**os.environ, **caches_in(folder)}
    command = [*before, sys.executable, "-m", "tests.rollout.first_call", model, *map(json.dumps, options)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_first_call_samples_with_training_log_probs_whether_kernels_are_compiled_or_only_some_are(name, tmp_path):
    for _ in range(2):  # with empty caches, and with those that the first process leaves
        done = first_calls(OPTIONS[name], tmp_path)
        assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("name", ["qwen3_moe", "llama4_text"])
def test_a_first_call_of_a_mixture_of_experts_samples_with_training_log_probs(name, tmp_path):
    done = first_calls([{}, GREEDY, {"top_p": 0.9}], tmp_path, model=name)
    assert done.returncode == 0, done.stderr[-4000:]


def test_kernels_of_other_options_in_the_cache_do_no_harm(tmp_path):
    for options in (OPTIONS["greedy"], OPTIONS["top-p"], OPTIONS["min-p"]):
        done = first_calls(options, tmp_path)
        assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer, of the CUDA toolkit")
@pytest.mark.parametrize("options", [GREEDY, {"top_p": 0.9}], ids=["greedy", "top-p"])
def test_a_first_call_reads_and_writes_no_memory_that_is_not_its_own(options, tmp_path):
    sanitizer = (shutil.which("compute-sanitizer"), "--tool", "memcheck", "--error-exitcode", "9")
    done = first_calls([options], tmp_path, *sanitizer)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout

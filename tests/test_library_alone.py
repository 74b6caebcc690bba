"""Head, objectives and packing need torch, jaxtyping and numpy: they run where all else is absent."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.absent import keep_out, modules_of

NEEDED = ("torch", "jaxtyping", "numpy")

CORE = """
import torch
from logitless import Completion, LMHead, Prompt, TokenBatch, presets, token_scores
from logitless.data.packing import pack
from logitless.objective.advantage import AdvantageInputs
from logitless.objective.weighting import Totals

weight = torch.randn(32, 64, requires_grad=True)
question = Prompt(id="7", text="2+2=", token_ids=(4, 9, 4, 11))
answers = [Completion("7", (6, 2), "4", "stop"), Completion("7", (7, 7, 2), "55", "stop")]
for preset in presets.PRESETS.values():
    preset()
grpo = presets.grpo()
packed = pack([(question, answer) for answer in answers])
counts = packed.inputs.source_counts
rewards = AdvantageInputs(torch.tensor([1.0, 0.0]), group=torch.tensor([7, 7]), sequence=packed.sequence)
hidden = torch.randn(packed.num_tokens, 64)
scores = token_scores(hidden, LMHead(weight), packed.target)
of_tokens = grpo.weighting(counts, Totals.of(counts))
batch = TokenBatch(packed.sequence, 2, grpo.advantage(rewards).advantage, of_tokens, logp_old=scores.logp.detach())
grpo.objective(scores.logp, scores.entropy, batch).loss.backward()
assert weight.grad.abs().sum() > 0
print("ran")
"""

TRAINER = """
import logitless.train.run
"""


def run_with(allowed, program):
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    source = keep_out(allowed) + program
    return subprocess.run([sys.executable, "-c", source], env=kept, capture_output=True, text=True)


@pytest.fixture(scope="module")
def allowed():
    return modules_of(*NEEDED)


def test_the_three_packages_bring_none_of_the_trainers(allowed):
    assert set(NEEDED) <= set(allowed)
    assert not {"transformers", "pydantic", "yaml", "pyarrow", "rich", "safetensors", "matplotlib"} & set(allowed)


@pytest.mark.slow
def test_head_objectives_and_packing_run_with_torch_jaxtyping_and_numpy_alone(allowed):
    done = run_with(allowed, CORE)
    assert done.stdout == "ran\n", done.stderr


def test_the_package_is_imported_where_nothing_else_is_installed():
    done = run_with([], "import logitless, logitless.rewards.workers.worker; print('ran')")
    assert done.stdout == "ran\n", done.stderr


@pytest.mark.slow
def test_what_is_kept_out_is_really_absent(allowed):
    done = run_with(allowed, TRAINER)
    assert "ModuleNotFoundError" in done.stderr


def test_a_plain_install_brings_the_trainer():
    required = Path(__file__).parents[1].joinpath("pyproject.toml").read_text(encoding="utf-8")
    plain = required.split("dependencies = [")[1].split("]")[0]
    named = {line.strip().strip('",').split(">=")[0] for line in plain.splitlines()}
    assert {*NEEDED, "transformers", "pydantic", "pyarrow"} <= named

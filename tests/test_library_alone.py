"""Head, objectives and packing need torch, jaxtyping and numpy: they run where all else is absent."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

NEEDED = ("torch", "jaxtyping", "numpy")

KEEP_OUT = """
import sys
present = {{*{allowed!r}, *sys.stdlib_module_names, "logitless"}}

class Filtered:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return self.finder.find_spec(name, path, target) if name.partition(".")[0] in present else None

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Filtered(finder) for finder in sys.meta_path]
"""

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


def modules_of(*packages):
    """Names that these packages and what they require install, extras and other machines' requirements left out."""
    found, waiting = set(), [*packages]
    while waiting:
        package = waiting.pop().lower().replace("_", "-")
        if package in found:
            continue
        found.add(package)
        try:
            requirements = metadata.requires(package) or []
        except metadata.PackageNotFoundError:  # for another platform or Python
            continue
        named = [each for each in requirements if "extra ==" not in each]
        waiting += ["".join(c if c.isalnum() or c in "-_." else " " for c in each).split()[0] for each in named]
    distributions = metadata.packages_distributions()
    return sorted(
        module for module, owners in distributions.items() if {o.lower().replace("_", "-") for o in owners} & found
    )


def run_with(allowed, program):
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    source = KEEP_OUT.format(allowed=allowed) + program
    return subprocess.run([sys.executable, "-c", source], env=kept, capture_output=True, text=True)


@pytest.fixture(scope="module")
def allowed():
    return modules_of(*NEEDED)


def test_the_three_packages_bring_none_of_the_trainers(allowed):
    assert set(NEEDED) <= set(allowed)
    assert not {"transformers", "pydantic", "yaml", "pyarrow", "rich", "safetensors", "matplotlib"} & set(allowed)


def test_head_objectives_and_packing_run_with_torch_jaxtyping_and_numpy_alone(allowed):
    done = run_with(allowed, CORE)
    assert done.stdout == "ran\n", done.stderr


def test_what_is_kept_out_is_really_absent(allowed):
    done = run_with(allowed, TRAINER)
    assert "ModuleNotFoundError" in done.stderr


def test_a_plain_install_brings_the_trainer():
    required = Path(__file__).parents[1].joinpath("pyproject.toml").read_text(encoding="utf-8")
    plain = required.split("dependencies = [")[1].split("]")[0]
    named = {line.strip().strip('",').split(">=")[0] for line in plain.splitlines()}
    assert {*NEEDED, "transformers", "pydantic", "pyarrow"} <= named

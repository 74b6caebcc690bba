"""Kernels of a training step compiled before it: nothing is executed, and the step compiles nothing."""

import json
import os
import subprocess
import sys

import pytest
import torch

from logitless.data.packing import pack
from logitless.models.lora import LoraOptions, add_lora
from logitless.models.row_invariant.layers import install_row_invariant
from logitless.train.learn.compile_ahead import compile_training_kernels
from logitless.train.learn.policy import Policy
from logitless.types import Completion, Prompt
from script import ROOT, caches_in
from tests.models.row_invariant.test_layers import COVERED
from tests.models.row_invariant.test_layers_gpu import wide

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def policy_of(family, *, lora=False):
    model = wide(family)
    if lora:
        model = add_lora(model, LoraOptions(rank=8))
    install_row_invariant(model)
    return Policy(model)


def step(policy):
    """A forward and a backward pass over three completions of one prompt."""
    prompt = Prompt("1", "", tuple(range(3, 90)))
    pairs = [(prompt, Completion("1", tuple(range(3 + n, 200 + n)), "", "stop")) for n in range(3)]
    scores = policy.scores(pack(pairs), temperature=1.0, backend="fused")
    scores.logp.sum().backward()
    return scores.logp.tolist()


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("family", COVERED)
def test_weights_gradients_and_log_probs_are_those_without_it(family, lora):
    plain, policy = policy_of(family, lora=lora), policy_of(family, lora=lora)
    policy.model.load_state_dict(plain.model.state_dict())
    compile_training_kernels(policy, backend="fused", temperature=1.0, entropy_gradient=True)
    assert all(p.grad is None for p in policy.model.parameters())
    assert step(policy) == step(plain)
    for ours, other in zip(policy.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, other)
        assert (ours.grad is None) == (other.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, other.grad)


def test_gradients_that_are_there_stay():
    policy = policy_of("qwen3")
    step(policy)
    before = {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}
    compile_training_kernels(policy, backend="fused", temperature=1.0, entropy_gradient=False)
    for name, p in policy.model.named_parameters():
        assert name not in before or torch.equal(p.grad, before[name])


def compiled_by_a_step():
    """In a process of its own: what is compiled ahead of the first training step, and in it."""
    import triton

    names: list[str] = []
    triton.knobs.compilation.listener = lambda *, src, **_: names.append(src.name)
    policy = policy_of("qwen3")
    compile_training_kernels(policy, backend="fused", temperature=1.0, entropy_gradient=False)
    ahead = len(names)
    step(policy)
    print(json.dumps({"ahead": names[:ahead], "in the step": names[ahead:]}))


def test_a_first_step_after_it_compiles_no_kernel_of_attention_norms_or_head(tmp_path):
    environment = {**os.environ, **caches_in(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # pytest's
    program = "from tests.train.learn.test_compile_ahead_gpu import compiled_by_a_step; compiled_by_a_step()"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["ahead"]) > 10
    assert not found["in the step"]

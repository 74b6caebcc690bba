"""Compile the kernels of a training step in parallel, before the first one.

A training step of row-invariant layers launches about twenty kernels for the first time. Compiled at their first launch
they would wait for each other; here threads compile all of them at once.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from logitless.head.api import token_scores
from logitless.models.attention import AttentionLayout, prepare_tables
from logitless.models.lm_head import backbone
from logitless.models.row_invariant.layer_graphs import rounded_rows
from logitless.train.learn.policy import Policy
from logitless.train.recipe.training import Backend
from logitless.types import PromptGroup

_GROUPS = (
    PromptGroup(64, (300, 300, 300)),
    PromptGroup(64, (300, 300, 301)),
    PromptGroup(64, (PromptGroup(20, (300, 300)), PromptGroup(10, (100, 301)))),
)
"""A prompt with completions long enough for attention to split their keys: of an even and an odd number of tokens, and
with prompts that share a prefix."""


def compile_training_kernels(policy: Policy, *, backend: Backend, temperature: float, entropy_gradient: bool) -> None:
    """Compile what a training step of the policy will launch; no kernel is executed, and gradients stay as they are.

    A kernel that is missed here is compiled at its first launch. Does nothing on a CPU, for layers of transformers and
    for sharded weights.

    Args:
        entropy_gradient: whether the objective has a gradient in the entropy.
    """
    decoder: Any = backbone(policy.model)
    if policy.device.type != "cuda" or policy.sharded is not None or not hasattr(decoder, "row_invariant"):
        return
    from logitless.models.kernels.compiling import compiled_together  # needs Triton

    padded = decoder.row_invariant.graphs is not None  # rows that CUDA graphs train are; longer ones are not
    kinds = [(group, rows) for group in _GROUPS for rows in dict.fromkeys((False, padded))]

    def read(hidden: Tensor, token: Tensor) -> None:
        scores = token_scores(
            hidden, policy.head(), token, temperature=temperature, backend=backend, memory_budget=policy.memory_budget
        )
        results = [scores.logp, scores.entropy] if entropy_gradient else [scores.logp]
        torch.autograd.backward(results, [torch.zeros_like(x) for x in results])

    passes = [_pass(policy, *kind, read) for kind in kinds]
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    before = [p.grad for p in parameters]
    # Kernels are collected in the calling thread only, so the backward pass must run in this one.
    with torch.autograd.set_multithreading_enabled(False), compiled_together(policy.device):
        for each in passes:
            each()
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad


def _pass(
    policy: Policy, group: PromptGroup, padded: bool, read: Callable[[Tensor, Tensor], None]
) -> Callable[[], None]:
    """A forward and a backward pass over one group; its tables are copied to the device here.

    Args:
        group: the whole packed row.
        padded: whether the row is padded to the length of a CUDA graph.
        read: the head's part, from hidden states and targets.
    """
    from logitless.models.row_invariant.delta_net import DeltaForm, DeltaRows  # needs Triton

    decoder: Any = backbone(policy.model)
    layout = AttentionLayout([group], policy.device, rounded_rows(group.size) if padded else group.size)
    kinds = [layer.row_invariant_kind for layer in decoder.layers]
    for form, _ in dict.fromkeys(kinds):
        if isinstance(form, DeltaForm):
            DeltaRows.of(layout, form.taps)
            continue
        prepare_tables(layout, form, decoder.norm.weight.dtype, gradients=True)
    decoder.row_invariant.reach(layout.longest)
    token = torch.zeros(layout.num_tokens, dtype=torch.long, device=policy.device)
    num_layers = 1 + max(map(kinds.index, set(kinds)))

    def run() -> None:
        positions = layout.positions.long()[None]
        hidden = decoder(input_ids=token[None], position_ids=positions, packed_layout=layout, num_layers=num_layers)
        read(hidden.last_hidden_state[0], token)

    return run

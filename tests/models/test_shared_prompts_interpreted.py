"""Shared prompts through the kernels, under Triton's interpreter: the bits of repeated ones, and no copy in a layer."""

import sys
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from logitless.data.packing import pack, share_prompts
from logitless.models import packed
from logitless.models.attention import AttentionLayout
from logitless.models.lm_head import backbone_hidden, why_unshared
from logitless.models.loading import load_model
from logitless.models.packed_layout import PackedLayout
from logitless.models.row_invariant.layers import install_row_invariant
from logitless.train.learn.policy import Policy
from logitless.train.optim.master_weights import lower_to
from logitless.types import Completion, Prompt, PromptGroup
from tests.head.interpreter import interpreted
from tests.models.tiny import LLAMA

pytestmark = pytest.mark.skipif(not interpreted(), reason="for Triton's interpreter; GPUs have tests of their own")


def _batch(prompt_length: int = 67):
    """The first prompt is longer than a block of keys unless it is said otherwise."""
    first, second = Prompt("a", "", tuple(range(3, 3 + prompt_length))), Prompt("b", "", (1, 2, 3))
    answers = [(first, (4, 5, 6)), (first, (7,)), (first, (8, 9, 10, 11)), (second, (5, 5)), (second, (6, 7, 8))]
    return pack([(p, Completion(p.id, tuple(t % 61 for t in ids), "", "stop")) for p, ids in answers])


def _model(**options):
    config = {"model_type": "qwen3", **LLAMA, "max_position_embeddings": 128, "head_dim": 16, **options}
    return load_model({**config, "vocab_size": 71}, random_weights=True, seed=1, dtype=torch.float32).train()


def test_row_invariant_layers_give_shared_prompts_the_bits_of_repeated_ones():
    model, batch = _model(num_hidden_layers=1, intermediate_size=32), _batch()
    assert install_row_invariant(model).exact
    assert why_unshared(model) is None
    hidden, gradients = [], []
    for inputs in (share_prompts(batch.inputs), batch.inputs):
        rows = backbone_hidden(model, inputs).index_select(0, inputs.source)
        weight = torch.randn(rows.shape, generator=torch.Generator().manual_seed(2))
        model.zero_grad()
        (rows * weight).sum().backward()
        hidden.append(rows.detach())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert torch.equal(hidden[0].view(torch.int32), hidden[1].view(torch.int32))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5 * float(gradients[1].abs().max()))


@pytest.mark.parametrize(
    ("window", "softcap", "has_sinks"), [(None, None, False), (9, None, False), (None, 1.5, False), (9, None, True)]
)
@pytest.mark.parametrize("shares", [False, True], ids=["packed", "shared"])
def test_the_kernel_gives_what_plain_torch_gives(monkeypatch, window, softcap, has_sinks, shares):
    shared = AttentionLayout([PromptGroup(20, (5, 7)), PromptGroup(3, (4,))])
    layout = shared if shares else PackedLayout((20, 12, 7))
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(1, heads, 39, 16, generator=generator).requires_grad_() for heads in (4, 2, 2)]
    sinks = torch.randn(4, generator=generator).requires_grad_() if has_sinks else None
    weight = torch.randn(1, 39, 4, 16, generator=generator)
    found = []
    for kernel in (False, True):
        monkeypatch.setattr(packed, "_shared_kernel_runs", lambda *_, kernel=kernel: kernel)
        options = {"scaling": 0.3, "sliding_window": window, "softcap": softcap, "sinks": sinks}
        out = packed.packed_attention(*leaves, layout, **options)
        of = [*leaves, sinks] if has_sinks else leaves
        found.append([out.detach(), *torch.autograd.grad((out * weight).sum(), of)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


class _TokenOperations(TorchDispatchMode):
    """Counts torch's operations on tensors with a row a token, but for those that Triton's interpreter makes."""

    _VIEWS = ("view", "as_strided", "detach", "empty", "slice", "split", "transpose", "aten.t.", "select", "alias")
    _VIEWS += ("permute", "expand", "set_", "lift_fresh", "_local_scalar")

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.num_tokens, self.found = num_tokens, Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        of_tokens = any(isinstance(a, torch.Tensor) and a.ndim and len(a) == self.num_tokens for a in args)
        name = str(function)
        if of_tokens and not any(view in name for view in self._VIEWS):
            frame = sys._getframe()
            while frame is not None and "/triton/" not in frame.f_code.co_filename:
                frame = frame.f_back
            self.found[name] += frame is None
        return function(*args, **(kwargs or {}))


def _operations(num_layers: int) -> Counter:
    model, batch = _model(num_hidden_layers=num_layers, intermediate_size=32), _batch(prompt_length=8)
    lower_to(torch.bfloat16, model.parameters())
    assert install_row_invariant(model).exact
    policy = Policy(model)
    with _TokenOperations(len(share_prompts(batch.inputs).input_ids)) as mode:
        policy.scores(batch, temperature=1.0, backend="chunked").logp.sum().backward()
    return +mode.found


def test_a_layer_makes_no_copy_cast_or_sum_over_the_tokens_outside_its_kernels_and_products():
    one, two = _operations(1), _operations(2)
    of_a_layer = {name: two[name] - one[name] for name in two if two[name] != one[name]}
    products = {"aten.mm.default", "aten.mm.out", "aten.addmm_.default", "aten.mm.dtype_out", "aten.mm.dtype"}
    # On a CPU torch has no product with a float32 sum of bfloat16 numbers: the factors of the 4 are cast there.
    casts = {"aten._to_copy.default": 4}
    assert {name: n for name, n in of_a_layer.items() if name not in products} in ({}, casts)

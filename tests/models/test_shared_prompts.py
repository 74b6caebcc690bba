"""A prompt that stands once: the same hidden states and gradients as one copy for every completion."""

import pytest
import torch

from logitless.data.packing import pack, share_prompts
from logitless.models.lm_head import backbone_hidden, why_unshared
from logitless.models.loading import disable_dropout, load_model
from logitless.models.lora import LoraOptions
from logitless.train.learn.policy import AdaptersOff, Policy
from logitless.types import Completion, Prompt, SharedInputs
from tests.models.tiny import CONFIGS, adapted, tiny

# LayerNorm and learned positions stay in float64 where RMSNorm and rotary embeddings drop to float32.
GPT2 = {**CONFIGS["gpt2"], **{f"{part}_pdrop": 0.0 for part in ("resid", "embd", "attn")}}
GROUPS = ((5, (3, 1, 9, 2)), (1, (4,)), (3, (6, 6)), (11, (1, 1)))  # tokens of prompts and completions
INSTRUCTIONS, BEGUN = 17, 18
"""Tokens that two further prompts begin with, and two completions of the first of those."""


def _inputs(vocabulary: int = 61):
    """Groups of ``GROUPS``, and a tree: instructions, two prompts of 2 and 3 more tokens, and 3 and 2 completions."""
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, vocabulary, (count,), generator=generator).tolist())

    pairs = []
    for name, (prompt_length, lengths) in enumerate(GROUPS):
        prompt = Prompt(str(name), "", ids(prompt_length))
        pairs += [(prompt, Completion(prompt.id, ids(length), "", "stop")) for length in lengths]
    instructions, begun = ids(INSTRUCTIONS), ids(BEGUN)
    first, second = Prompt("first", "", instructions + ids(2)), Prompt("second", "", instructions + ids(3))
    answers = [(first, begun + ids(4)), (second, ids(3)), (first, ids(2)), (first, begun + ids(1)), (second, ids(6))]
    return pack([*pairs, *((prompt, Completion(prompt.id, each, "", "stop")) for prompt, each in answers)]).inputs


def _gradients(model, inputs):
    """Rows of the scored tokens, and the gradient of a weighted sum of them."""
    rows = backbone_hidden(model, inputs)[inputs.source]
    weight = torch.randn(rows.shape, generator=torch.Generator().manual_seed(1), dtype=rows.dtype)
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad((rows * weight).sum(), parameters, allow_unused=True)
    return rows.detach(), torch.cat([g.flatten() for g in found if g is not None])


@pytest.mark.parametrize("attention", ["packed", "sdpa", "eager"])
def test_hidden_states_and_gradients_equal_those_of_repeated_prompts_to_1e12_in_float64(attention):
    model = load_model(GPT2, dtype=torch.float64, random_weights=True, seed=3, attention=attention)
    disable_dropout(model)
    inputs = _inputs()
    shared = share_prompts(inputs)
    assert isinstance(shared, SharedInputs)
    in_tree = INSTRUCTIONS + 2 + 3 + BEGUN + (4 - 1) + (1 - 1) + (2 - 1) + (3 - 1) + (6 - 1)
    assert len(shared.input_ids) == sum(p + sum(n - 1 for n in c) for p, c in GROUPS) + in_tree  # each prompt once
    rows, gradient = _gradients(model, shared)
    expected_rows, expected_gradient = _gradients(model, inputs)
    assert (rows - expected_rows).abs().max() <= 1e-12 * expected_rows.abs().max()
    assert (gradient - expected_gradient).abs().max() <= 1e-12 * expected_gradient.abs().max()


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3", "qwen3", "opt", "gpt_neox", "llama-dynamic"])
def test_hidden_states_of_other_families_equal_those_of_repeated_prompts(name):
    model, inputs = tiny(name), _inputs()
    assert why_unshared(model) is None
    with torch.no_grad():
        shared = share_prompts(inputs)
        found, expected = (backbone_hidden(model, each)[each.source] for each in (shared, inputs))
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_models_whose_attention_cannot_share_say_what_keeps_them():
    assert "longrope" in why_unshared(tiny("phi3-longrope"))
    assert "masks from positions" in why_unshared(tiny("mistral-window", attention="sdpa"))


def test_a_layer_that_looks_at_its_neighbours_is_found_by_its_numbers():
    model = tiny("llama")
    layer = model.model.layers[0]
    forward = layer.mlp.forward
    layer.mlp.forward = lambda x: forward(x) + torch.roll(x, 1, dims=1)  # a convolution over the row
    assert why_unshared(model) == "its layers give other numbers where a prompt stands once"


def test_a_lora_reference_reads_each_prompt_once_with_its_adapters_off():
    model = adapted(load_model(GPT2, random_weights=True, seed=3), LoraOptions(rank=2, targets=("c_attn",)))
    prompt = Prompt("a", "", (1, 2, 3))
    batch = pack([(prompt, Completion("a", ids, "", "stop")) for ids in [(4, 5), (6, 7, 8)]])
    policy = Policy(model.eval())
    read = []
    policy.model.get_base_model().transformer.h[0].register_forward_pre_hook(lambda _, given: read.append(given[0]))
    with torch.no_grad():
        ours, reference = (
            each.scores(batch, temperature=1.0, backend="reference").logp for each in (policy, AdaptersOff(policy))
        )
        base = load_model(GPT2, random_weights=True, seed=3).eval()
        expected = Policy(base, share_prompts=False).scores(batch, temperature=1.0, backend="reference").logp
    assert [hidden.shape[1] for hidden in read] == [3 + 1 + 2] * 2
    torch.testing.assert_close(reference, expected, rtol=1e-5, atol=1e-5)
    assert (ours - expected).abs().max() > 1e-3

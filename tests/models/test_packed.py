import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from logitless.errors import InputError, UnavailableError
from logitless.models.lm_head import backbone, backbone_hidden, verify_packing, why_unshared
from logitless.models.loading import load_model
from logitless.models.packed import packed_attention
from logitless.models.packed_layout import PackedLayout
from logitless.types import PackedInputs
from tests.models.tiny import CONFIGS, LLAMA, PACKABLE, packed, tiny
from tests.rounding import of_sum


def one_at_a_time(model: nn.Module, inputs: PackedInputs) -> Tensor:
    """The model's own plain forward of each sequence alone."""
    parts = inputs.input_ids.split(list(inputs.lengths))
    return torch.cat([backbone(model)(input_ids=part[None], use_cache=False).last_hidden_state[0] for part in parts])


def causal_by_hand(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], window: int | None, scale: float) -> Tensor:
    """Softmax over the allowed pairs of the whole row, [T, H, F]."""
    total = sum(lengths)
    sequence = torch.repeat_interleave(torch.tensor(lengths)).to(q.device)
    position = torch.arange(total, device=q.device)
    distance = position[:, None] - position
    allowed = (sequence[:, None] == sequence) & (distance >= 0) & (distance < (window or total))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    weights = (scale * q @ k.transpose(2, 3)).masked_fill(~allowed, float("-inf")).softmax(-1)
    return (weights @ v)[0].transpose(0, 1)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=7),
    window=st.sampled_from([None, 1, 3, 30]),
    key_heads=st.sampled_from([1, 2, 4]),
)
def test_packed_attention_and_its_gradients_are_softmax_over_each_sequence_in_float64(lengths, window, key_heads):
    generator = torch.Generator().manual_seed(sum(lengths))
    shapes = [(1, 4, sum(lengths), 8), (1, key_heads, sum(lengths), 8), (1, key_heads, sum(lengths), 6)]
    mine = [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]
    truth = [x.detach().clone().requires_grad_() for x in mine]
    out = packed_attention(*mine, PackedLayout(tuple(lengths)), scaling=0.3, sliding_window=window)
    expected = causal_by_hand(*truth, lengths, window, 0.3)
    torch.testing.assert_close(out[0], expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    out[0].backward(upstream)
    expected.backward(upstream)
    for a, b in zip(mine, truth, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 1000), min_size=1, max_size=40))
def test_buckets_hold_every_sequence_once_with_at_most_a_quarter_of_padding(lengths):
    layout = PackedLayout(tuple(lengths))
    assert sum(bucket.num_sequences for bucket in layout.buckets) == len(lengths)
    assert sum(bucket.num_sequences * bucket.max_length for bucket in layout.buckets) <= 1.25 * sum(lengths)
    if layout.inverse is not None:
        order = torch.cat([bucket.tokens for bucket in layout.buckets])
        assert torch.equal(order[layout.inverse], torch.arange(sum(lengths)))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_packed_row_equals_its_sequences_run_alone_with_gradients(name):
    model, inputs = tiny(name), packed([5, 1, 9, 9, 2, 17])
    mine, alone = backbone_hidden(model, inputs), one_at_a_time(model, inputs)
    torch.testing.assert_close(mine, alone, rtol=1e-4, atol=1e-5)
    upstream = torch.randn(mine.shape, generator=torch.Generator().manual_seed(3))
    parameters = [p for p in backbone(model).parameters() if p.requires_grad]
    first = torch.autograd.grad(mine, parameters, upstream, allow_unused=True)
    second = torch.autograd.grad(alone, parameters, upstream, allow_unused=True)
    # A key's bias has gradient 0 but for rounding: sums over 43 tokens of terms as large as the other gradients.
    largest = max(b.abs().max().item() for b in second if b is not None)
    floor = of_sum(torch.float32, len(inputs.input_ids), largest)
    for a, b in zip(first, second, strict=True):
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-4 * b.abs().max().item() + floor)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3", "opt"])
def test_attention_with_a_mask_gives_the_same_hidden_states(name, attention):
    inputs = packed([5, 1, 9, 2])
    mine = backbone_hidden(tiny(name), inputs)
    theirs = backbone_hidden(tiny(name, attention=attention), inputs)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PACKABLE)
def test_scoring_without_gradient_gives_bitwise_the_hidden_states_of_training(name):
    model, inputs = tiny(name).train(), packed([5, 1, 9, 30, 2])
    with torch.no_grad():
        scored = backbone_hidden(model, inputs)
    assert torch.equal(scored, backbone_hidden(model, inputs).detach())


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gpt2", "opt"])
def test_gradient_checkpointing_changes_no_bit(name):
    inputs, upstream = packed([5, 1, 30]), None
    grads = []
    for checkpointing in (False, True):
        model = tiny(name).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        hidden = backbone_hidden(model, inputs)
        upstream = torch.ones_like(hidden) if upstream is None else upstream
        hidden.backward(upstream)
        grads.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    assert all(torch.equal(grads[0][key], grads[1][key]) for key in grads[0])


def test_a_model_in_float64_equals_its_sequences_run_alone_to_the_float32_inside_it():
    model, inputs = tiny("llama", dtype=torch.float64), packed([5, 1, 9])
    hidden = backbone_hidden(model, inputs)
    assert hidden.dtype == torch.float64
    torch.testing.assert_close(hidden, one_at_a_time(model, inputs), rtol=1e-6, atol=1e-6)


def test_other_sequences_of_the_row_change_no_bit():
    model, inputs = tiny("qwen3"), packed([7, 3, 6])
    ids = inputs.input_ids.clone()
    ids[:7] = ids[:7].flip(0)
    changed = PackedInputs(ids, inputs.position_ids, inputs.lengths, inputs.source, inputs.source_counts)
    a, b = backbone_hidden(model, inputs), backbone_hidden(model, changed)
    assert torch.equal(a[7:], b[7:])
    assert not torch.equal(a[:7], b[:7])


def test_an_empty_sequence_is_refused():
    with pytest.raises(InputError, match="no empty one"):
        PackedLayout((3, 0))


def test_a_layout_of_another_length_is_refused():
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(InputError, match="one packed row of 5 tokens"):
        packed_attention(q, q, q, PackedLayout((3, 2)))


def test_attention_with_a_softcap_is_refused_where_it_would_be_left_out():
    with pytest.raises(UnavailableError, match="attention with a softcap"):
        load_model(CONFIGS["gemma2"], random_weights=True, attention="sdpa")


def test_an_architecture_with_its_own_attention_is_refused():
    with pytest.raises(UnavailableError, match="FalconForCausalLM"):
        load_model(CONFIGS["falcon"], random_weights=True, attention="packed")


def test_a_model_whose_packed_sequences_see_each_other_is_refused(monkeypatch):
    """OPT makes a mask of ones itself, so that under SDPA transformers finds no packing in it."""
    monkeypatch.setattr("logitless.models.lm_head._packing_arguments", lambda *_: {})
    with pytest.raises(UnavailableError, match="sequences see each other"):
        load_model(CONFIGS["opt"], random_weights=True, attention="sdpa")


@pytest.mark.parametrize("leak", [1e-6, 1e-2])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_rounding_that_follows_the_other_sequences_is_no_leak_in_experts_and_one_elsewhere(name, leak):
    """Which experts other tokens choose sets the rows of a product, and on some processors its last bits."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2} if name == "mixtral" else {}
    config = {**CONFIGS["llama"], "model_type": name, **experts}
    model = load_model(config, random_weights=True)
    calls = []

    def rounded_otherwise(module, args, output):
        calls.append(output)
        return output * (1 + leak * len(calls))

    model.model.norm.register_forward_hook(rounded_otherwise)
    if name == "mixtral" and leak == 1e-6:
        verify_packing(model)
    else:
        with pytest.raises(UnavailableError, match="sequences see each other"):
            verify_packing(model)


def test_a_deep_model_in_bfloat16_is_not_refused_for_products_of_other_rows_that_round_otherwise(monkeypatch):
    model = load_model(CONFIGS["llama"] | {"num_hidden_layers": 80}, random_weights=True, dtype=torch.bfloat16)

    def linear(x, weight, bias=None):
        """Each number is rounded up or down, as the number of rows decides."""
        generator = torch.Generator().manual_seed(x[..., 0].numel())
        exact = torch.einsum("...i,oi->...o", x.double(), weight.double())
        down, up = exact.bfloat16(), torch.nextafter(exact.bfloat16(), exact.sign().bfloat16() * torch.inf)
        return torch.where(torch.rand(exact.shape, generator=generator) < 0.5, down, up)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    verify_packing(model)
    assert why_unshared(model) is None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mamba", "hidden_size": 16, "state_size": 4}, "a decoder that takes position_ids"),
        ({"model_type": "rwkv", "hidden_size": 16}, "a decoder that takes position_ids"),
        ({"model_type": "minimax", **LLAMA, "router_aux_loss_coef": 0.0}, "minimax, with other linear_attention"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_layers_that_carry_a_state_along_the_row_are_refused_in_words(config, words, device):
    with pytest.raises(UnavailableError, match=words):
        load_model(config, random_weights=True, attention="eager", device=device)


def test_the_check_multiplies_in_whole_float32_and_restores_the_precision():
    torch.set_float32_matmul_precision("high")
    seen = []
    try:
        model = tiny("qwen2")
        backbone(model).register_forward_hook(lambda *_: seen.append(torch.get_float32_matmul_precision()))
        verify_packing(model)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert set(seen) == {"highest"}

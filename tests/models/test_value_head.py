"""The value head: linear, from 0, in float32 whatever the backbone is, and a file that only fits its own width."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from logitless.errors import ConfigurationError
from logitless.models.loading import load_model
from logitless.models.lora import LoraOptions, add_lora
from logitless.models.value_head import ValueHead, save_value_head, value_head_for
from tests.models.tiny import CONFIGS


def _model(dtype=torch.float32, **options):
    return load_model(CONFIGS["llama"], dtype=dtype, random_weights=True, seed=1, **options)


def _filled(head: ValueHead) -> ValueHead:
    with torch.no_grad():
        head.weight.copy_(torch.arange(head.weight.shape[1])[None] / 10)
        head.bias.fill_(0.5)
    return head


def test_a_value_is_the_sum_of_weighted_hidden_numbers_and_the_bias():
    hidden = torch.tensor([[1.0, 2.0, 3.0], [0.0, -1.0, 10.0]], requires_grad=True)
    head = _filled(ValueHead(3))
    values = head(hidden)
    assert values.tolist() == pytest.approx([0.2 + 0.6 + 0.5, -0.1 + 2.0 + 0.5])
    (values * torch.tensor([1.0, 2.0])).sum().backward()
    assert head.weight.grad.tolist() == [[1.0, 0.0, 23.0]]
    assert head.bias.grad.tolist() == [3.0]
    assert hidden.grad[1].tolist() == pytest.approx([0.0, 0.2, 0.4])


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_it_starts_at_0_with_the_width_of_the_lm_head_and_is_float32_but_for_float64(dtype, expected):
    model = _model(dtype)
    head = value_head_for(model)
    values = head(torch.ones(2, 32, dtype=dtype))
    assert (values.tolist(), values.dtype) == ([0.0, 0.0], expected)
    assert all(p.requires_grad for p in head.parameters())


def test_under_lora_it_reads_the_same_hidden_states():
    assert value_head_for(add_lora(_model(), LoraOptions(rank=2, targets=("lm_head",)))).weight.shape == (1, 32)


def test_bfloat16_rows_are_not_summed_in_bfloat16():
    hidden = torch.tensor([[1.0, 2.0**-9, 2.0**-9]], dtype=torch.bfloat16)  # 1 + 2^-9 rounds to 1 there
    head = ValueHead(3)
    torch.nn.init.ones_(head.weight)
    assert float(head(hidden).detach()) == 1 + 2.0**-8


def test_what_is_saved_is_plain_safetensors_and_comes_back_bit_for_bit(tmp_path):
    path = tmp_path / "value_head.safetensors"
    head = _filled(value_head_for(_model()))
    save_value_head(head, path)
    stored = load_file(path)
    assert {name: tuple(t.shape) for name, t in stored.items()} == {"weight": (1, 32), "bias": (1,)}
    again = value_head_for(_model(), path)
    assert torch.equal(again.weight, head.weight)
    assert torch.equal(again.bias, head.bias)


def test_a_file_that_is_absent_damaged_of_another_kind_or_of_another_width_is_refused(tmp_path):
    path = tmp_path / "value_head.safetensors"
    for device in ("cpu", "meta"):
        model = _model(device=device)
        with pytest.raises(ConfigurationError, match=r"width 32.*value_head\.safetensors.*start at 0"):
            value_head_for(model, path)
    for write in (
        lambda: path.write_bytes(b"not safetensors"),
        lambda: save_file({"score.weight": torch.ones(1, 32)}, path),
        lambda: save_value_head(ValueHead(31), path),
    ):
        write()
        for device in ("cpu", "meta"):
            with pytest.raises(ConfigurationError, match="width 32"):
                value_head_for(_model(device=device), path)

import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from logitless.errors import ConfigurationError, InputError
from logitless.models import lora
from logitless.models.lm_head import backbone_hidden, lm_head, verify_lm_head, verify_packing
from logitless.models.lora import (
    LoraOptions,
    adapters_off,
    add_lora,
    frozen_copy,
    load_adapters,
    merge_adapters,
    save_adapters,
)
from tests.models.tiny import packed, tiny

INPUTS = packed([5, 9])
OPTIONS = LoraOptions(rank=3, alpha=6.0)


def trained(options: LoraOptions = OPTIONS, name: str = "llama") -> nn.Module:
    """A model whose adapters do something."""
    model = add_lora(tiny(name), options, seed=1)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def logits(model: nn.Module, grad: bool = False) -> Tensor:
    with torch.set_grad_enabled(grad):
        return model(input_ids=INPUTS.input_ids[None], use_cache=False).logits


def hidden(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return backbone_hidden(model, INPUTS)


def test_a_new_adapter_changes_nothing_and_trains_only_itself():
    model = add_lora(tiny("llama"), OPTIONS)
    torch.testing.assert_close(hidden(model), hidden(tiny("llama")))
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert names
    assert all("lora_" in name for name in names)
    assert not any("lm_head" in name for name in names)


def test_adapters_depend_on_the_seed_and_not_on_the_global_generator():
    def weights(seed: int) -> Tensor:
        return torch.cat([p.flatten() for n, p in add_lora(tiny("llama"), OPTIONS, seed=seed).named_parameters()
                          if "lora_A" in n])  # fmt: skip

    first, state = weights(1), torch.get_rng_state()
    torch.manual_seed(5)
    assert torch.equal(first, weights(1))
    assert not torch.equal(first, weights(2))
    torch.manual_seed(0)
    weights(1)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("options", [OPTIONS, LoraOptions(rank=2, modules_to_save=("lm_head", "norm"))])
def test_adapters_and_modules_trained_whole_are_float32_beside_a_base_in_16_bits(options):
    model = add_lora(tiny("llama", dtype=torch.bfloat16), options)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS,
        LoraOptions(rank=2, targets=("q_proj", "lm_head"), use_rslora=True),
        LoraOptions(rank=2, modules_to_save=("lm_head",), dropout=0.5),
        LoraOptions(rank=2, modules_to_save=("lm_head", "embed_tokens", "norm")),
    ],
    ids=["layers", "lora-on-head", "trained-head", "trained-embedding-and-norm"],
)
def test_with_adapters_off_the_model_is_bitwise_the_base_model_and_trains_again_afterwards(options):
    model = trained(options)
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    on = logits(model)
    with adapters_off(model):
        off = logits(model)
        rows, head = hidden(model), lm_head(model)
    assert torch.equal(off, logits(tiny("llama")))
    assert torch.equal(rows, hidden(tiny("llama")))
    assert torch.equal(head.weight, tiny("llama").lm_head.weight)
    assert torch.equal(logits(model), on)
    assert not torch.allclose(on, off, atol=1e-2)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == trainable


def test_gradients_reach_the_adapters_and_leave_the_base_alone():
    model = trained(LoraOptions(rank=2, targets=("q_proj", "lm_head")))
    rows, head = backbone_hidden(model, INPUTS), lm_head(model)
    ((rows @ head.lora_a.T) @ head.lora_b.T).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == ("lora_" in name), name


def test_a_warm_started_adapter_is_merged_so_that_the_reference_is_where_training_starts():
    first = trained()
    start = logits(first)
    second = add_lora(first, LoraOptions(rank=2), seed=2)
    torch.testing.assert_close(logits(second), start, rtol=1e-4, atol=1e-4)
    with adapters_off(second):
        torch.testing.assert_close(logits(second), start, rtol=1e-4, atol=1e-4)
    assert not any(".lora_A" in name for name, _ in merge_adapters(second).named_modules())


def test_saved_adapters_come_back(tmp_path):
    model = trained()
    save_adapters(model, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    again = load_adapters(tiny("llama"), tmp_path).eval()
    assert torch.equal(logits(again), logits(model))
    assert not any(p.requires_grad for p in again.parameters())
    verify_lm_head(again)
    verify_packing(again)


def test_missing_and_foreign_adapters_are_errors(tmp_path):
    with pytest.raises(ConfigurationError, match=r"adapter_config\.json and adapter_model\.safetensors"):
        load_adapters(tiny("llama"), tmp_path)
    for other in ("gpt2", "qwen3"):
        save_adapters(trained(name=other), tmp_path)
        with pytest.raises(ConfigurationError, match="adapters of this model"):
            load_adapters(tiny("llama"), tmp_path)
    weights = load_file(tmp_path / "adapter_model.safetensors")
    save_adapters(trained(), tmp_path)
    half = {key: value for key, value in weights.items() if "layers.1" in key}
    save_file(half, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigurationError, match="missing adapter keys"):
        load_adapters(tiny("qwen3"), tmp_path)


def test_a_model_without_adapters_has_none_to_switch_off_merge_or_save(tmp_path):
    model = tiny("llama")
    for needs in (adapters_off(model).__enter__, lambda: merge_adapters(model), lambda: save_adapters(model, tmp_path)):
        with pytest.raises(InputError, match="a model with adapters"):
            needs()


def test_a_frozen_copy_stays_while_the_model_is_trained():
    model = tiny("llama-tied").train()
    hidden_before = hidden(model.eval())
    backbone_hidden(model.train(), INPUTS).sum().backward()
    reference = frozen_copy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert torch.equal(hidden(reference), hidden_before)
    assert not reference.training
    assert all(p.grad is None and not p.requires_grad for p in reference.parameters())
    assert reference.lm_head.weight is reference.get_input_embeddings().weight


def test_a_frozen_copy_in_another_dtype_turns_positions_by_the_same_angles():
    model = tiny("llama-tied")
    copied = frozen_copy(model, dtype=torch.bfloat16)
    assert copied.dtype == torch.bfloat16
    before = {name: buffer for name, buffer in model.named_buffers() if "inv_freq" in name}
    after = dict(copied.named_buffers())
    assert before
    assert all(torch.equal(after[name], buffer) for name, buffer in before.items())


def test_rslora_multiplies_by_alpha_over_the_root_of_the_rank():
    model = trained(LoraOptions(rank=4, alpha=6.0, targets=("lm_head",), use_rslora=True)).double()
    head, rows = lm_head(model), hidden(model)
    assert head.lora_scale == 3.0
    own = rows @ head.weight.T + head.lora_scale * (rows @ head.lora_a.T) @ head.lora_b.T
    first = INPUTS.lengths[0]  # the packed rows of the second sequence do not see it, PEFT's own do
    torch.testing.assert_close(own[:first], logits(model)[0, :first], rtol=1e-12, atol=1e-12)
    merged = logits(merge_adapters(trained(LoraOptions(rank=4, alpha=6.0, use_rslora=True)).double()))
    unmerged = logits(trained(LoraOptions(rank=4, alpha=6.0, use_rslora=True)).double())
    torch.testing.assert_close(merged, unmerged, rtol=1e-12, atol=1e-12)


def test_dropout_is_of_passes_with_a_gradient_alone():
    model, without = trained(LoraOptions(rank=3, alpha=6.0, dropout=0.5)).train(), trained()
    assert torch.equal(logits(model), logits(without))
    torch.manual_seed(0)
    one, other = logits(model, grad=True), logits(model, grad=True)
    assert not torch.allclose(one, logits(without), atol=1e-3)
    assert not torch.equal(one, other)
    torch.manual_seed(0)
    assert torch.equal(logits(model, grad=True), one)


def test_modules_trained_whole_come_back_from_the_adapters_file(tmp_path):
    model = trained(LoraOptions(rank=2, modules_to_save=("lm_head", "embed_tokens", "norm"), use_rslora=True))
    save_adapters(model, tmp_path)
    assert torch.equal(logits(load_adapters(tiny("llama"), tmp_path).eval()), logits(model))
    merged = merge_adapters(load_adapters(tiny("llama"), tmp_path)).eval()
    assert torch.equal(logits(merged).argmax(-1), logits(model).argmax(-1))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llama", {"modules_to_save": ("heads",)}, "modules_to_save that name modules of the model; given 'heads'"),
        ("llama", {"targets": ("lm_head",), "dropout": 0.1}, "no dropout in an adapter of the LM head"),
        ("llama-tied", {"modules_to_save": ("embed_tokens",)}, "'embed_tokens' among .* are tied"),
        ("llama-tied", {"modules_to_save": ("head",)}, "'lm_head' among .* are tied"),
        ("llama-tied", {"targets": ("lm_head",)}, "LM head and embedding are tied"),
        ("llama", {"targets": ("no_such_proj",)}, "targets that name linear modules"),
        ("llama", {"targets": ("q_proj", "v_prj")}, "given 'v_prj'. Choose from down_proj, .*v_proj, or use"),
        ("llama", {"dropout": 1.0}, "at least 0 and below 1"),
        ("llama", {"rank": 0}, "a rank of at least 1"),
        ("llama", {"alpha": 0.0}, "a positive alpha"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_words(name, options, message):
    with pytest.raises(ConfigurationError, match=message):
        add_lora(tiny(name), LoraOptions(**{"rank": 2, **options}))


def test_the_import_of_peft_does_not_ask_for_kernels_of_four_bits(monkeypatch, caplog):
    four_bits = logging.getLogger("bitsandbytes.backends.cpu.ops")

    def imported(*_, **__):
        four_bits.warning("make sure you already `pip install kernels`")
        logging.getLogger("peft").warning("another")

    monkeypatch.setattr(lora, "optional", imported)
    lora._peft()
    four_bits.warning("later")
    assert caplog.messages == ["another", "later"]

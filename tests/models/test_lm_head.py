import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from logitless.errors import InputError, UnavailableError
from logitless.models.lm_head import backbone, backbone_hidden, causal_lm, lm_head, verify_lm_head
from logitless.types import LMHead
from tests.models.tiny import CONFIGS, packed, tiny


def logits(hidden: Tensor, head: LMHead) -> Tensor:
    """The docstring of LMHead."""
    out = hidden @ head.weight.T
    if head.bias is not None:
        out = out + head.bias
    if head.lora_a is not None:
        out = out + head.lora_scale * (hidden @ head.lora_a.T) @ head.lora_b.T
    out = head.scale * out
    return out if head.softcap is None else head.softcap * torch.tanh(out / head.softcap)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_head_of_the_hidden_states_is_the_models_logits(name):
    model, inputs = tiny(name), packed([9])
    own = model(input_ids=inputs.input_ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits(backbone_hidden(model, inputs), lm_head(model)), own, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "scale", "softcap"),
    [("llama", 1.0, None), ("cohere", 0.25, None), ("granite", 1 / 3, None), ("gemma2", 1.0, 3.0)],
)
def test_scale_and_softcap_are_read_from_the_config(name, scale, softcap):
    head = lm_head(tiny(name))
    assert head.scale == pytest.approx(scale)
    assert head.softcap == softcap


def test_the_head_holds_the_models_own_parameters():
    tied, untied = tiny("llama-tied"), tiny("llama")
    assert lm_head(tied).weight is tied.get_input_embeddings().weight
    assert lm_head(untied).weight is untied.lm_head.weight
    assert lm_head(tiny("phi")).bias is not None


def test_a_head_that_is_not_the_models_is_refused():
    model = tiny("cohere")
    head = lm_head(model)
    with pytest.raises(UnavailableError, match="CohereForCausalLM, whose logits differ"):
        verify_lm_head(model, LMHead(weight=head.weight))


def test_an_architecture_with_an_unknown_step_before_its_head_is_refused():
    model = tiny("llama")
    model.lm_head.register_forward_pre_hook(lambda module, arguments: (arguments[0] * 1.5,))
    with pytest.raises(UnavailableError, match="whose logits differ"):
        verify_lm_head(model)


def test_verification_leaves_the_mode_and_the_gradients_alone():
    model = tiny("llama").train()
    verify_lm_head(model)
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_the_backbone_builds_no_logits():
    model = tiny("llama")
    model.lm_head.register_forward_hook(lambda *_: pytest.fail("the LM head ran"))
    backbone_hidden(model, packed([4, 3]))


def test_a_model_without_a_decoder_below_its_head_is_refused():
    with pytest.raises(UnavailableError, match="a decoder below its LM head"):
        backbone(backbone(tiny("llama")))


def test_a_model_without_a_head_is_refused():
    with pytest.raises(UnavailableError, match="a linear LM head"):
        lm_head(backbone(tiny("llama")))


def test_a_model_that_is_not_of_transformers_is_refused():
    with pytest.raises(InputError, match="a transformers model"):
        backbone(nn.Linear(2, 2))


def adapted(name: str = "llama", **options) -> nn.Module:
    """A PEFT model whose adapters do something."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny(name), LoraConfig(r=3, lora_alpha=5, **options))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * (0.3 if "lora_B" in key else 0.1))
    return model.eval()


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
    ids=["layers", "lora-on-head", "trained-head"],
)
def test_a_peft_model_has_the_logits_of_its_head_with_adapters_on_and_off(options):
    model, inputs = adapted(**options), packed([9])

    def own() -> Tensor:
        return model(input_ids=inputs.input_ids[None], use_cache=False).logits[0]

    on = own()
    torch.testing.assert_close(logits(backbone_hidden(model, inputs), lm_head(model)), on, rtol=1e-4, atol=1e-4)
    with model.disable_adapter():
        off = own()
        torch.testing.assert_close(logits(backbone_hidden(model, inputs), lm_head(model)), off, rtol=1e-4, atol=1e-4)
        assert lm_head(model).lora_a is None
    assert not torch.allclose(on, off, atol=1e-2)
    torch.testing.assert_close(off, tiny("llama")(input_ids=inputs.input_ids[None]).logits[0])


def test_an_adapter_is_found_in_a_head_that_something_wraps():
    model = adapted(target_modules=["lm_head"])
    inner = causal_lm(model)
    inner.lm_head = torch.compile(inner.lm_head, backend="eager")
    assert lm_head(model).lora_a is not None


def test_dora_on_the_head_is_refused():
    with pytest.raises(UnavailableError, match="DoRA"):
        lm_head(adapted(target_modules=["lm_head"], use_dora=True))


def test_lora_dropout_on_the_head_is_refused_while_training():
    model = adapted(target_modules=["lm_head"], lora_dropout=0.5)
    with pytest.raises(UnavailableError, match="LoRA with dropout"):
        lm_head(model.train())
    assert lm_head(model.eval()).lora_a is not None


def test_prompt_learning_is_refused():
    from peft import PromptTuningConfig, get_peft_model

    model = get_peft_model(tiny("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(UnavailableError, match="prompt learning"):
        causal_lm(model)


def test_gradients_reach_the_head_and_the_layers():
    model, inputs = tiny("llama-tied"), packed([5, 4])
    rows = backbone_hidden(model, inputs)[inputs.source]
    F.cross_entropy(logits(rows, lm_head(model)), torch.arange(len(rows))).backward()
    grads = [p.grad for p in model.parameters()]
    assert all(g is not None and g.abs().sum() > 0 for g in grads)

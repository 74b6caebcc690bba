import string

import pytest
from transformers import AutoTokenizer

from logitless.errors import InputError
from logitless.models.char_tokenizer import character_tokenizer


def test_every_text_of_the_alphabet_survives_a_round_trip_through_a_saved_folder(tmp_path):
    made = character_tokenizer(string.printable)
    made.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("", " a  b ", "\n\t x\n", "Hi, you!? 'tis 1+1=2.", string.printable):
        ids = loaded(text)["input_ids"]
        assert len(ids) == len(text)
        assert loaded.decode(ids) == text
        assert made(text)["input_ids"] == ids


def test_ids_are_special_tokens_then_the_alphabet_in_its_order():
    tokenizer = character_tokenizer("ba")
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer("ab<eos>")["input_ids"] == [4, 3, 2]
    assert tokenizer.decode([4, 3, 2], skip_special_tokens=True) == "ab"
    assert len(tokenizer) == 5


def test_a_character_outside_of_the_alphabet_is_not_replaced():
    with pytest.raises(Exception, match="UNK"):
        character_tokenizer("ab")("abc")


def test_an_alphabet_with_a_character_twice_or_with_none_is_refused():
    with pytest.raises(InputError, match=r"\['a'\] more than once"):
        character_tokenizer("aba")
    with pytest.raises(InputError, match="an empty one"):
        character_tokenizer("")

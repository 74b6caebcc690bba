import logging

import pytest

from logitless.errors import ConfigurationError
from logitless.models.char_tokenizer import character_tokenizer
from logitless.models.loading import load_tokenizer


def saved(folder, template: str | None, **special: str):
    tokenizer = character_tokenizer("abc:\n", **special)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


OPENED = "{% if add_generation_prompt %}assistant:{% endif %}"
TURN = "{{% for m in messages %}}{{{{ m.role }}}}:{{{{ m.content }}}}{end}\n{{% endfor %}}"


def test_a_tokenizer_that_ends_its_turns_with_eos_stays_as_it_is(tmp_path, caplog):
    assert load_tokenizer(saved(tmp_path, TURN.format(end="<eos>") + OPENED)).eos_token == "<eos>"
    assert not caplog.text


def test_the_token_that_ends_turns_takes_the_place_of_another_eos_and_the_run_says_so(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="logitless"):
        tokenizer = load_tokenizer(saved(tmp_path, TURN.format(end="<pad>")))
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<pad>", 0)
    assert "is <eos>, with which no turn of its chat template ends; <pad>, with which they do" in caplog.text


def test_of_two_tokens_behind_a_turn_the_first_ends_it(tmp_path):
    assert load_tokenizer(saved(tmp_path, TURN.format(end="<pad><bos>"))).eos_token == "<pad>"


def test_of_two_tokens_that_begin_alike_the_longer_ends_the_turn(tmp_path):
    tokenizer = load_tokenizer(saved(tmp_path, None))
    tokenizer.add_tokens(["<pad>b"], special_tokens=True)
    tokenizer.chat_template = TURN.format(end="<pad>b")
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).eos_token == "<pad>b" == tokenizer.tokenize("<pad>b")[0]


def test_turns_that_end_with_text_of_several_tokens_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"turns of .* that end with 'bc\\n', which is no token of its own"):
        load_tokenizer(saved(tmp_path, TURN.format(end="bc")))


@pytest.mark.parametrize(
    "template",
    [None, "{% for m in messages %}{{ m.content }}\n{% endfor %}", "{{ raise_exception('roles must alternate') }}"],
    ids=["none", "nothing but white space behind a turn", "refuses a plain conversation"],
)
def test_where_the_end_of_a_turn_cannot_be_told_nothing_changes(tmp_path, template):
    assert load_tokenizer(saved(tmp_path, template)).eos_token == "<eos>"


def test_a_template_that_leaves_the_header_of_a_turn_to_the_policy_gives_a_warning(tmp_path, caplog):
    load_tokenizer(saved(tmp_path, TURN.format(end="<eos>")))
    assert "ignores add_generation_prompt, so that prompts end before 'assistant:'" in caplog.text


def test_a_template_that_writes_nothing_between_prompt_and_answer_needs_no_generation_prompt(tmp_path, caplog):
    mistral = (
        "{% for m in messages %}{{ '[' + m.content + '] ' if m.role == 'user' else m.content + eos_token }}{% endfor %}"
    )
    load_tokenizer(saved(tmp_path, mistral))
    assert not caplog.text

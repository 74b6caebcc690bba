"""A teacher's prompt holds what its template says, and ends where the policy's does."""

import pytest

from logitless.errors import ConfigurationError, DataError
from logitless.models.char_tokenizer import character_tokenizer
from logitless.train.learn.teacher_prompts import TeacherPrompts
from logitless.types import Completion, Group, Prompt, Verdict

BEST = "{% if others and others[0].reward >= 1 %}{{ others[0].text }}{% endif %}{{ prompt }}"


def _rendered(template, *, chat_template=None, messages=None, **columns):
    tokenizer = character_tokenizer("abcdef")
    tokenizer.chat_template = chat_template
    text = "ab" if messages is None else "aff"
    prompt = Prompt("7", text, tokenizer(text, add_special_tokens=False)["input_ids"], columns, messages)
    completions = tuple(Completion("7", (4,), text, "stop") for text in "cde")
    said = tuple({"check": Verdict(None, "error", message=word)} for word in "fab")
    group = Group(prompt, completions, said, (0.0, 1.0, None))
    return [None if each is None else each.text for each in TeacherPrompts(template, tokenizer, {})([group, group])]


def test_a_completion_sees_the_best_of_the_others_and_never_itself():
    assert _rendered(BEST) == ["dab", "ab", "dab"] * 2


def test_the_template_reads_columns_the_own_reward_and_what_the_graders_said():
    template = "{% if reward == 0 %}{{ hint }}{{ verdicts.check.message }}{{ prompt }}{% endif %}"
    assert _rendered(template, hint="e") == ["efab", None, None] * 2  # where nothing is rendered no teacher grades


def test_what_is_rendered_takes_the_place_of_the_last_message_alone():
    chat = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}f{% endif %}"
    messages = ({"role": "system", "content": "a"}, {"role": "user", "content": "f"})
    tokenized = _rendered("{{ hint }}{{ prompt }}", chat_template=chat, messages=messages, hint="e")
    assert tokenized == ["aeff"] * 6


@pytest.mark.parametrize(
    ("template", "kind", "words"),
    [
        ("{{ prompt }}c", DataError, "it moves it, after 'c' .prompt '7'"),
        ("{{ hint }}{{ prompt }}", DataError, "'hint' is undefined"),
        ("{{ completion }}{{ prompt }}", DataError, "'completion' is undefined"),
        ("{% if %}", ConfigurationError, "teacher.template"),
    ],
)
def test_a_template_that_moves_the_completion_or_reads_what_is_not_there_is_refused(template, kind, words):
    with pytest.raises(kind, match=words):
        _rendered(template)

"""What becomes of rows: texts and token ids as the sampler reads them, counted drops, a resumable order."""

import json
from pathlib import Path

import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from logitless.data.prompts import PromptOrder, load_prompts, prompts_of_rows, without_overlap
from logitless.data.sources import FileData, ReasoningGymData, Rendered, Row
from logitless.errors import CheckpointError, ConfigurationError, DataError, InputError
from logitless.types import Prompt

BOS, EOS, USER, ASSISTANT, SYSTEM = "<bos>", "<eos>", "<user>", "<assistant>", "<system>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role not in ('user', 'assistant', 'system') %}{{ raise_exception('unknown role') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(chat: bool = False, adds: str = "") -> PreTrainedTokenizerFast:
    """One token a character; ``adds`` names the special tokens that plain encoding puts around the text."""
    special = [BOS, EOS, USER, ASSISTANT, SYSTEM]
    vocabulary = {token: number for number, token in enumerate([*special, *map(chr, range(32, 127)), "\n"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.add_special_tokens(special)
    around = {"": "$A", "bos": f"{BOS} $A", "bos eos": f"{BOS} $A {EOS}"}[adds]
    backend.post_processor = processors.TemplateProcessing(single=around, special_tokens=[(BOS, 0), (EOS, 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS)
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def write_rows(folder: Path, *rows: object) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(
    folder: Path, *rows: object, tokenizer: object = None, most: int = 20, too_long: str = "drop", **options: object
):
    """What becomes of these rows."""
    source = FileData(path=write_rows(folder, *rows), **options)
    return load_prompts(source, tokenizer or make_tokenizer(), max_prompt_tokens=most, too_long=too_long)


def characters(text: str) -> tuple[int, ...]:
    return tuple(5 + ord(letter) - 32 for letter in text)


def test_plain_text_is_tokenized_as_it_is(tmp_path):
    (prompt,) = load(tmp_path, {"prompt": "2+2=", "answer": "4"}).prompts
    assert (prompt.id, prompt.text, tuple(prompt.token_ids)) == ("0", "2+2=", characters("2+2="))
    assert (prompt.columns, prompt.messages) == ({"answer": "4"}, None)


@pytest.mark.parametrize("adds", ["bos", "bos eos"])
def test_plain_text_gets_the_start_token_that_the_tokenizer_adds_and_no_end_token(tmp_path, adds):
    prompts = load(tmp_path, {"prompt": "ab"}, {"prompt": f"{BOS}ab"}, tokenizer=make_tokenizer(adds=adds)).prompts
    assert [tuple(prompt.token_ids) for prompt in prompts] == [(0, *characters("ab"))] * 2


def test_a_chat_template_writes_its_own_special_tokens_and_none_is_doubled(tmp_path):
    tokenizer = make_tokenizer(chat=True, adds="bos")
    (prompt,) = load(tmp_path, {"prompt": "hi"}, tokenizer=tokenizer, system="Be.").prompts
    assert prompt.text == "<bos><system>Be.<user>hi<assistant>"
    assert tuple(prompt.token_ids) == (0, 4, *characters("Be."), 2, *characters("hi"), 3)
    assert prompt.messages == ({"role": "system", "content": "Be."}, {"role": "user", "content": "hi"})
    outsider = tokenizer.apply_chat_template(list(prompt.messages), add_generation_prompt=True)["input_ids"]
    assert list(prompt.token_ids) == outsider


def test_a_prompt_may_be_a_conversation(tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    given = {"tokenizer": make_tokenizer(chat=True), "columns": {"prompt": "turns"}}
    (prompt,) = load(tmp_path, {"turns": turns}, **given).prompts
    assert prompt.text == "<bos><user>a<assistant>b<user>c<assistant>"
    assert prompt.messages == tuple(turns)


def test_a_template_replaces_the_chat_template(tmp_path):
    given = {"tokenizer": make_tokenizer(chat=True), "system": "Be.", "template": "{system} Q: {prompt} A:"}
    (prompt,) = load(tmp_path, {"prompt": "hi"}, **given).prompts
    assert (prompt.text, prompt.messages) == ("Be. Q: hi A:", None)


def test_a_system_prompt_without_a_place_to_put_it_is_an_error(tmp_path):
    with pytest.raises(ConfigurationError, match="Set template"):
        load(tmp_path, {"prompt": "hi"}, system="Be.")


def test_a_conversation_without_a_chat_template_is_an_error(tmp_path):
    for options in ({}, {"template": "{prompt}", "tokenizer": make_tokenizer(chat=True)}):
        with pytest.raises(ConfigurationError, match="chat template"):
            load(tmp_path, {"prompt": [{"role": "user", "content": "hi"}]}, **options)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "ends with the assistant"),
        ([{"role": "robot", "content": "a"}], "unknown role"),
        ([{"role": "system", "content": "s"}, {"role": "user", "content": "a"}], "another one"),
        ([{"role": "user", "content": [{"type": "image"}]}], "images are not read, for no image tower is loaded"),
        ([{"content": "a"}], "list of messages"),
        (7, "prompt that is text"),
        (0, "prompt that is text"),
    ],
)
def test_a_prompt_that_no_template_can_read_is_named_by_its_place(tmp_path, messages, message):
    with pytest.raises(DataError, match="line 2") as raised:
        load(tmp_path, {"prompt": "fine"}, {"prompt": messages}, tokenizer=make_tokenizer(chat=True), system="Be.")
    assert message in str(raised.value)


def image_as(way):
    """A column's value with an image, as a Parquet file of the hub has it, or as `datasets` gives it."""
    if way == "decoded":
        return PIL.Image.new("RGB", (1, 1))
    stored = {"bytes": b"GIF", "path": None}
    return stored if way == "stored" else [stored]


@pytest.mark.parametrize("way", ["stored", "several", "decoded"])
def test_an_image_beside_a_prompt_is_not_dropped_in_silence(way, caplog):
    rows = [Row("row 0", {"prompt": "a", "image": None}), Row("row 1", {"prompt": "a", "image": image_as(way)})]
    assert len(prompts_of_rows(rows, Rendered(), make_tokenizer(), max_prompt_tokens=8).prompts) == 2
    assert "the images of column 'image' are not read, for no image tower is loaded" in caplog.text


@pytest.mark.parametrize("empty", [None, "", " \n", [], [{"role": "user", "content": " "}], [{"role": "user"}]])
def test_an_empty_prompt_is_dropped_and_counted(tmp_path, empty):
    loaded = load(tmp_path, {"prompt": "a"}, {"prompt": empty}, tokenizer=make_tokenizer(chat=True))
    assert len(loaded.prompts) == 1
    assert loaded.counts == {"rows": 2, "prompts": 1, "empty": 1, "too_long": 0}


def test_a_prompt_over_the_limit_is_dropped_and_counted_or_an_error(tmp_path):
    rows = [{"prompt": text, "id": name} for text, name in (("abc", "short"), ("abcd", "long"), ("x", 7))]
    loaded = load(tmp_path, *rows, most=3)
    assert [prompt.id for prompt in loaded.prompts] == ["short", "7"]
    assert loaded.counts == {"rows": 3, "prompts": 2, "empty": 0, "too_long": 1}
    with pytest.raises(DataError, match=r"4 tokens at .*line 2 \(id 'long'\)"):
        load(tmp_path, *rows, most=3, too_long="error")


def test_no_prompt_left_is_an_error_with_the_counts(tmp_path):
    with pytest.raises(DataError, match=r"2 rows from .*, line 1 on: 1 empty, 1 over 3 tokens"):
        load(tmp_path, {"prompt": ""}, {"prompt": "abcd"}, most=3)


def test_an_id_that_comes_twice_is_an_error_also_between_text_and_number(tmp_path):
    with pytest.raises(DataError, match=r"'1' at .*line 1 and at .*line 2"):
        load(tmp_path, {"prompt": "a", "key": 1}, {"prompt": "b", "key": "1"}, columns={"id": "key"})


@pytest.mark.parametrize("wrong", [None, 1.5, True, [1]])
def test_an_id_is_text_or_a_whole_number(tmp_path, wrong):
    with pytest.raises(DataError, match="line 1"):
        load(tmp_path, {"prompt": "a", "id": wrong})


def test_a_reasoning_gym_task_becomes_prompts_with_the_answer_beside_them():
    options = ReasoningGymData(task="chain_sum", size=4, seed=1, options={"max_terms": 3})
    loaded = load_prompts(options, make_tokenizer(chat=True), max_prompt_tokens=200)
    assert len(loaded.prompts) == 4
    for prompt in loaded.prompts:
        assert prompt.columns["entry"]["question"] in prompt.text
        assert prompt.columns["answer"] == prompt.columns["entry"]["answer"]


def make_prompts(*texts: str) -> list[Prompt]:
    return [Prompt(id=str(number), text=text, token_ids=(1,)) for number, text in enumerate(texts)]


def test_overlap_is_removed_from_training_and_never_from_what_is_held_out():
    training, held_out = make_prompts("a", "b", "a", "c"), make_prompts("a", "a")
    assert [prompt.text for prompt in without_overlap(training, held_out)] == ["b", "c"]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 9), st.integers(0, 5), st.lists(st.integers(1, 9), max_size=12))
def test_every_epoch_has_every_prompt_once_and_no_request_has_one_twice(num_prompts, seed, counts):
    order = PromptOrder(num_prompts, seed)
    drawn: list[int] = []
    for count in counts:
        draw = order.next(count)
        if count <= num_prompts:
            assert len(set(draw)) == count == len(draw)
        drawn += draw
    for start in range(0, len(drawn) - num_prompts + 1, num_prompts):
        assert sorted(drawn[start : start + num_prompts]) == list(range(num_prompts))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=2, max_size=8), st.data())
def test_a_resumed_order_goes_on_exactly_where_it_stopped(num_prompts, counts, data):
    stop = data.draw(st.integers(0, len(counts)))
    whole = PromptOrder(num_prompts, seed=3)
    expected = [whole.next(count) for count in counts]
    stopped = PromptOrder(num_prompts, seed=3)
    for count in counts[:stop]:
        stopped.next(count)
    resumed = PromptOrder(num_prompts, seed=3)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert [resumed.next(count) for count in counts[stop:]] == expected[stop:]


def test_epochs_and_seeds_differ():
    order = PromptOrder(50, seed=0)
    assert order.next(50) != order.next(50)
    assert PromptOrder(50, seed=0).next(50) != PromptOrder(50, seed=1).next(50)


@pytest.mark.parametrize("other", [PromptOrder(4, seed=1), PromptOrder(5, seed=0)])
def test_the_state_of_another_order_is_refused(other):
    with pytest.raises(CheckpointError):
        PromptOrder(4, seed=0).load_state_dict(other.state_dict())


def test_an_order_over_nothing_is_refused():
    with pytest.raises(InputError):
        PromptOrder(0, seed=0)

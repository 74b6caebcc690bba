import json

import pytest

from logitless.errors import DataError, InputError
from logitless.models.char_tokenizer import character_tokenizer
from logitless.rollout.recorded import ColumnEngine, RecordedEngine, read_completions, write_completions
from logitless.rollout.sampling import SamplingOptions
from logitless.types import Completion, Prompt

OPTIONS = SamplingOptions(max_new_tokens=8)
COMPLETIONS = [
    Completion("a", (4, 2), "vier ü", "stop", logp_sampler=(-0.5, -0.25)),
    Completion("b", (5,), "5", "length"),
    Completion("a", (6, 7, 2), "6\n7", "stop", trained=(True, False, True), turn=(0, 0, 1)),
    Completion("a", (), "", "length", logp_sampler=()),
]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_what_was_written_is_read_back_equal(tmp_path, suffix):
    path = tmp_path / f"completions.{suffix}"
    write_completions(path, COMPLETIONS)
    assert read_completions(path) == COMPLETIONS


def test_completions_come_back_in_the_order_of_prompts_and_file(tmp_path):
    write_completions(tmp_path / "c.jsonl", COMPLETIONS)
    engine = RecordedEngine(tmp_path / "c.jsonl")
    assert engine.sample([Prompt("b", "", (1,))], 1, OPTIONS, seed=0) == [[COMPLETIONS[1]]]
    three = engine.sample([Prompt("a", "", (1,))], 3, OPTIONS, seed=0)
    assert three == [[COMPLETIONS[0], COMPLETIONS[2], COMPLETIONS[3]]]


def test_the_seed_chooses_among_more_completions_than_asked_for(tmp_path):
    write_completions(tmp_path / "c.jsonl", COMPLETIONS)
    engine = RecordedEngine(tmp_path / "c.jsonl")
    chosen = [engine.sample([Prompt("a", "", (1,))], 2, OPTIONS, seed=seed)[0] for seed in range(20)]
    assert all(len(set(map(id, pair))) == 2 for pair in chosen)
    assert len({tuple(map(id, pair)) for pair in chosen}) == 3
    assert engine.sample([Prompt("a", "", (1,))], 2, OPTIONS, seed=7)[0] == chosen[7]


def test_too_few_or_too_long_completions_are_errors(tmp_path):
    write_completions(tmp_path / "c.jsonl", COMPLETIONS)
    engine = RecordedEngine(tmp_path / "c.jsonl")
    with pytest.raises(DataError, match=r"2 recorded completions of prompt 'b'; given 1"):
        engine.sample([Prompt("b", "", (1,))], 2, OPTIONS, seed=0)
    with pytest.raises(DataError, match="at most 1 tokens; given one of 3"):
        engine.sample([Prompt("a", "", (1,))], 3, SamplingOptions(max_new_tokens=1), seed=0)


def test_the_text_of_a_column_is_a_completion_that_eos_ends():
    tokenizer = character_tokenizer("abc")
    engine = ColumnEngine("answer", tokenizer)
    [[found]] = engine.sample([Prompt("7", "a", (3,), {"answer": "cb"})], 1, OPTIONS, seed=0)
    ids = [*tokenizer("cb", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert found == Completion("7", ids, "cb", "stop")
    with pytest.raises(DataError, match=r"column 'answer'.*given NoneType for prompt '7', which has 'solution'"):
        engine.sample([Prompt("7", "a", (3,), {"solution": "cb"})], 1, OPTIONS, seed=0)
    with pytest.raises(DataError, match="at most 2 tokens in column 'answer'; given 3"):
        engine.sample([Prompt("7", "a", (3,), {"answer": "cb"})], 1, SamplingOptions(max_new_tokens=2), seed=0)


def test_a_row_that_cannot_be_imitated_is_found_before_its_turn_comes():
    rows = [Prompt("7", "a", (3,), {"answer": "c"}), Prompt("8", "a", (3,), {"answer": "cbc"})]
    engine = ColumnEngine("answer", character_tokenizer("abc"))
    engine.check(rows, 4)
    with pytest.raises(DataError, match="at most 3 tokens in column 'answer'; given 4 for prompt '8'"):
        engine.check(rows, 3)


def test_rows_of_text_are_told_where_to_name_their_column(tmp_path):
    (tmp_path / "c.jsonl").write_text('{"prompt": "a", "completion": "b"}')
    with pytest.raises(DataError, match="name: recorded, column"):
        read_completions(tmp_path / "c.jsonl")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt_id": ', "line 2"),
        ("[1]", "an object a completion"),
        ('{"prompt_id": 7, "token_ids": [1], "text": "", "finish_reason": "stop"}', "prompt_id as str"),
        ('{"prompt_id": "7", "token_ids": 1, "text": "", "finish_reason": "stop"}', "token_ids as a list of int"),
        ('{"prompt_id": "7", "token_ids": [1.5], "text": "", "finish_reason": "stop"}', "token_ids as a list of int"),
        ('{"prompt_id": "7", "token_ids": [1], "text": "", "finish_reason": "eos"}', "finish_reason 'stop' or"),
        (
            '{"prompt_id": "7", "token_ids": [1], "text": "", "finish_reason": "stop", "logp_sampler": [0.0, 1.0]}',
            "one logp_sampler per token",
        ),
    ],
)
def test_a_malformed_line_is_an_error_with_its_number(tmp_path, line, message):
    path = tmp_path / "c.jsonl"
    write_completions(path, COMPLETIONS[:1])
    path.write_text(path.read_text(encoding="utf-8") + line + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=message) as caught:
        read_completions(path)
    assert "line 2" in str(caught.value)


def test_a_missing_file_and_another_kind_of_file_are_errors(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read_completions(tmp_path / "none.jsonl")
    (tmp_path / "c.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match="a Parquet file"):
        read_completions(tmp_path / "c.parquet")
    (tmp_path / "c.csv").write_text("a")
    with pytest.raises(DataError, match=r"\.jsonl or \.parquet"):
        read_completions(tmp_path / "c.csv")
    with pytest.raises(InputError, match=r"\.jsonl or \.parquet"):
        write_completions(tmp_path / "c.csv", COMPLETIONS)


def test_columns_for_other_readers_are_left_alone(tmp_path):
    row = {"prompt_id": "7", "token_ids": [1], "text": "x", "finish_reason": "stop", "advantage": 0.5}
    (tmp_path / "c.jsonl").write_text(json.dumps(row) + "\n\n")
    assert read_completions(tmp_path / "c.jsonl") == [Completion("7", (1,), "x", "stop")]

"""Files of prompts and responses are paired, scored in workers, and counted without losing a row."""

import json

import pytest

from logitless.errors import DataError
from logitless.rewards.evaluation import (
    Pairing,
    PromptRow,
    Rate,
    SuiteVerdict,
    official_rows,
    read_pairing,
    score_suite,
    suite_report,
    write_rows,
)

IDS = ["punctuation:no_comma", "startend:quotation"]


def written(path, *rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def paired(tmp_path, prompts, responses):
    return read_pairing(written(tmp_path / "p.jsonl", *prompts), written(tmp_path / "r.jsonl", *responses))


def asked(prompt, **fields):
    return {"prompt": prompt, "instruction_id_list": IDS, "kwargs": [{}, {}], **fields}


def said(prompt, response="Yes."):
    return {"prompt": prompt, "response": response}


def test_nothing_counted_says_nothing():
    assert Rate(0, 0).interval == (0.0, 1.0)


def test_rows_are_paired_by_prompt_with_spaces_around_it_left_out(tmp_path):
    pairing = paired(tmp_path, [asked("a "), asked("b"), asked("c")], [said("c", "3"), said("x"), said(" a", "1")])
    assert [row.prompt for row in pairing.rows] == ["a ", "b", "c"]
    assert pairing.responses == ["1", None, "3"]
    assert pairing.num_skipped == 1


def test_rows_are_paired_by_key_where_responses_have_no_prompt(tmp_path):
    prompts = [asked("a", key=7), asked("b", key="8")]
    pairing = paired(tmp_path, prompts, [{"key": "8", "response": "2"}, {"key": 9, "response": "3"}])
    assert pairing.responses == [None, "2"]
    assert pairing.num_skipped == 1


def test_prompts_may_be_in_a_column_of_another_name(tmp_path):
    prompts = written(tmp_path / "p.jsonl", {"question": "a", "prompt": "another"}, {"question": "b"})
    for name in ("question", "prompt"):  # of the responses, the latter as `logitless sample` writes them
        responses = written(tmp_path / "r.jsonl", {name: "b", "response": "2"})
        pairing = read_pairing(prompts, responses, column="question")
        assert [row.prompt for row in pairing.rows] == ["a", "b"]
        assert pairing.responses == [None, "2"]
        assert pairing.rows[1].columns["question"] == "b"
    with pytest.raises(DataError, match="a field 'asked'"):
        read_pairing(prompts, responses, column="asked")
    with pytest.raises(DataError, match=r"a field 'prompt' .* \(--column names another\) in p.jsonl, line 2"):
        read_pairing(prompts, responses)


def test_a_null_response_is_no_response(tmp_path):
    assert paired(tmp_path, [asked("a")], [said("a", None)]).responses == [None]


@pytest.mark.parametrize(
    ("prompts", "responses", "complaint"),
    [
        ([asked("a"), "\n", asked("a ")], [], "every prompt once in p.jsonl, line 3"),
        ([asked("a", key=1), asked("b", key=1)], [said("a")], "every key once in p.jsonl, line 2"),
        ([asked("a")], [said("a"), said("a")], "every prompt once in r.jsonl, line 2"),
        ([asked("a")], ["{\n"], "a JSON object in r.jsonl, line 1"),
        ([asked("a")], ["[1]\n"], "a JSON object in r.jsonl, line 1"),
        ([asked("a")], ['{"prompt": "a", "prompt": "a", "response": "b"}\n'], "field 'prompt' twice"),
        ([asked("a")], [{"prompt": "a"}], "a field 'response' in r.jsonl, line 1"),
        ([asked("a")], [said("a", 3)], "a text in field 'response'"),
        ([{"key": 1}], [{"key": 1, "response": "b"}], "a text in field 'prompt' in p.jsonl, line 1"),
        ([asked("a")], [{"key": 1, "response": "b"}], "a field 'key' to pair"),
        ([asked("a")], [{"question": "a", "response": "b"}], "says which prompt is answered in r.jsonl, line 1"),
    ],
)
def test_bad_files_are_refused_with_the_line(tmp_path, prompts, responses, complaint):
    with pytest.raises(DataError) as error:
        paired(tmp_path, prompts, responses)
    assert complaint in str(error.value)


def test_a_file_that_is_absent_or_no_text_is_refused(tmp_path):
    prompts = written(tmp_path / "p.jsonl", asked("a"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for responses in (tmp_path / "absent", tmp_path / "binary"):
        with pytest.raises(DataError, match="UTF-8"):
            read_pairing(prompts, responses)


@pytest.fixture(scope="module")
def scored():
    rows = [(IDS, 'Sure:\n"Yes."'), (IDS, '"Well, no."'), (IDS[:1], None), (IDS[:1], "   ")]
    prompts = [
        PromptRow(line, f"prompt {line}", {"instruction_id_list": ids, "kwargs": [{} for _ in ids], "key": line})
        for line, (ids, _) in enumerate(rows, start=1)
    ]
    pairing = Pairing(prompts, [response for _, response in rows], num_skipped=0)
    calls = []
    return pairing, score_suite(pairing, "ifeval", workers=1, progress=calls.append), calls


def test_workers_give_strict_and_loose_verdicts_in_the_order_of_the_prompts(scored):
    _, verdicts, calls = scored
    assert verdicts == [
        SuiteVerdict("graded", (True, False), (True, True)),
        SuiteVerdict("graded", (False, True), (False, True)),
        SuiteVerdict("missing", message="no response"),
        SuiteVerdict("graded", (False,), (False,)),
    ]
    assert calls == [3]


def test_the_report_has_all_four_rates_over_what_was_graded(scored):
    report = suite_report(*scored[:2])
    assert (report.prompt_strict, report.prompt_loose) == (Rate(0, 3), Rate(1, 3))
    assert (report.instruction_strict, report.instruction_loose) == (Rate(2, 5), Rate(3, 5))
    assert report.families["punctuation"] == {"strict": Rate(1, 3), "loose": Rate(1, 3)}
    assert report.families["startend"] == {"strict": Rate(1, 2), "loose": Rate(2, 2)}
    assert report.statuses == {"graded": 3, "missing": 1}


def test_official_rows_hold_the_scored_prompts_only(scored):
    rows = list(official_rows(*scored[:2], loose=True))
    assert [row["prompt"] for row in rows] == ["prompt 1", "prompt 2", "prompt 4"]
    followed = {"follow_instruction_list": [True, True], "follow_all_instructions": True}
    assert rows[0] == {"prompt": "prompt 1", "instruction_id_list": IDS, **followed}
    assert next(official_rows(*scored[:2]))["follow_instruction_list"] == [True, False]


def test_a_row_that_is_wrong_stops_the_scoring_before_it_starts():
    row = PromptRow(4, "p", {"instruction_id_list": ["count:numbers"], "kwargs": [{}], "key": "k7"})
    with pytest.raises(DataError, match=r"line 4, key k7"):
        score_suite(Pairing([row], [None], 0), "ifbench")


def test_rows_are_written_as_one_json_object_a_line(tmp_path):
    rows = [{"prompt": "é\n"}, {"prompt": "b"}]
    write_rows(tmp_path / "out.jsonl", rows)
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()] == rows

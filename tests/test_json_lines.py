"""Lines of JSON: what is refused, with its line."""

import math

import pytest

from logitless.errors import DataError
from logitless.json_lines import json_lines


def test_a_byte_order_mark_and_blank_lines_are_skipped_and_lines_keep_their_numbers(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf1\r\n\r\n[2]\n")
    assert list(json_lines(path)) == [(1, 1), (3, [2])]


@pytest.mark.parametrize(
    "line", [b"{", b'{"a": 1, "a": 2}', b'"\\ud800"', b"\xff", b"[" * 100_000, b"NaN", b"-Infinity"]
)
def test_what_is_no_json_is_an_error_that_names_file_and_line(line, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"1\n" + line)
    with pytest.raises(DataError, match=r"a\.jsonl, line 2"):
        list(json_lines(tmp_path / "a.jsonl"))


def test_nan_is_accepted_where_python_wrote_it(tmp_path):
    (tmp_path / "a.jsonl").write_text("NaN")
    [(_, value)] = json_lines(tmp_path / "a.jsonl", accept_nan=True)
    assert math.isnan(value)


def test_a_file_that_cannot_be_opened_is_an_error(tmp_path):
    with pytest.raises(DataError, match="readable file"):
        list(json_lines(tmp_path / "none.jsonl"))

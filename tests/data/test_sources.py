"""Every way a data source can be wrong names the place and what to do; every way it is right gives the same rows."""

import json
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from pydantic import BaseModel, ValidationError

from logitless.data.sources import DataOptions, FileData, HubData, ReasoningGymData, read_rows
from logitless.errors import ConfigurationError, DataError, UnavailableError


class Config(BaseModel):
    data: DataOptions


def write_lines(folder: Path, *lines: str) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_configuration_picks_the_source_by_its_name():
    data = Config.model_validate({"data": {"name": "file", "path": "a.jsonl", "columns": {"prompt": "q"}}}).data
    assert data == FileData(path=Path("a.jsonl"), columns={"prompt": "q"})


@pytest.mark.parametrize(
    "data",
    [
        {"name": "file", "path": "a.jsonl", "task": "chain_sum"},
        {"name": "reasoning_gym", "task": "chain_sum", "size": 0, "seed": 0},
    ],
)
def test_a_key_of_another_source_or_an_impossible_value_is_an_error(data):
    with pytest.raises(ValidationError):
        Config.model_validate({"data": data})


@pytest.mark.parametrize(
    ("template", "system"),
    [("no field", None), ("{prompt} {system}", None), ("{prompt}", "Be."), ("{prompt", None), ("{question}", None)],
)
def test_a_template_has_exactly_the_fields_it_can_fill(template, system):
    with pytest.raises(ConfigurationError):
        FileData(path=Path("a.jsonl"), template=template, system=system)


@pytest.mark.parametrize(
    "line",
    [
        *(b'{"prompt": "b"', b"[1]", b'"text"', b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b"\x00"),
        *(b'{"prompt": "a", "prompt": "b"}', b'{"prompt": "\xff"}'),
    ],
)
def test_a_line_that_is_not_one_object_is_named_by_file_and_number(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n\n' + line + b"\n")
    with pytest.raises(DataError, match=r"rows\.jsonl, line 3"):
        read_rows(FileData(path=path))


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert [row.values["prompt"] for row in read_rows(FileData(path=path))] == ["a", "b"]


def test_a_missing_file_a_folder_and_an_unknown_kind_of_file_are_errors(tmp_path):
    (tmp_path / "rows.csv").write_text("prompt\na\n")
    for path, message in [
        (tmp_path / "none.jsonl", "does not exist"),
        (tmp_path, "not a file"),
        (tmp_path / "rows.csv", "Convert"),
    ]:
        with pytest.raises(DataError, match=message):
            read_rows(FileData(path=path))


@pytest.mark.parametrize("lines", [[""], ["{}", "{}"]])
def test_a_file_without_a_value_is_an_error(tmp_path, lines):
    with pytest.raises(DataError, match="at least one row"):
        read_rows(FileData(path=write_lines(tmp_path, *lines)))


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        ('{"answer": "3", "qestion": "1+2"}', {"prompt": "question"}, "did you mean 'qestion'"),
        ('{"answer": "3", "question": "1+2"}', {}, r"a column 'prompt' in .* holds it: columns: \{prompt: NAME\}"),
        ('{"answer": "3", "question": "1+2"}', {"promt": "question"}, "Write 'prompt' instead of 'promt'"),
        ('{"prompt": "1+2", "gold": "3", "answer": "x"}', {"answer": "gold"}, "'answer' twice"),
        ('{"prompt": "1+2"}', {"prompt": "prompt", "id": "prompt"}, "once"),
    ],
)
def test_a_renaming_that_finds_no_column_hides_one_or_names_one_twice_is_an_error(tmp_path, row, columns, message):
    with pytest.raises(DataError, match=message):
        read_rows(FileData(path=write_lines(tmp_path, row), columns=columns))


def test_columns_are_renamed_and_the_others_kept(tmp_path):
    path = write_lines(tmp_path, '{"question": "1+2", "gold": "3", "level": 2}')
    (row,) = read_rows(FileData(path=path, columns={"prompt": "question", "answer": "gold"}))
    assert row.values == {"prompt": "1+2", "answer": "3", "level": 2}


def test_jsonl_and_parquet_give_the_same_rows_with_null_for_what_a_row_lacks(tmp_path):
    lines = ['{"prompt": "a", "kwargs": {"n": 0}}', '{"prompt": "b", "answer": null}', '{"prompt": "c", "answer": "x"}']
    path = write_lines(tmp_path, *lines)
    table = pyarrow.Table.from_pylist(
        [{"prompt": None, "kwargs": None, "answer": None} | json.loads(line) for line in lines]
    )
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    expected = [
        {"prompt": "a", "kwargs": {"n": 0}, "answer": None},
        {"prompt": "b", "kwargs": None, "answer": None},
        {"prompt": "c", "kwargs": None, "answer": "x"},
    ]
    assert [dict(row.values) for row in read_rows(FileData(path=path))] == expected
    assert [dict(row.values) for row in read_rows(FileData(path=tmp_path / "rows.parquet"))] == expected


def test_a_parquet_file_that_is_broken_or_has_a_column_name_twice_is_an_error(tmp_path):
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 but no more")
    with pytest.raises(DataError, match="readable Parquet"):
        read_rows(FileData(path=path))
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["prompt", "prompt"])
    pyarrow.parquet.write_table(table, path)
    with pytest.raises(DataError):
        read_rows(FileData(path=path))


def test_a_reasoning_gym_row_keeps_the_entry_that_its_verifier_needs():
    import reasoning_gym

    options = ReasoningGymData(task="chain_sum", size=3, seed=5, options={"max_terms": 2})
    rows = read_rows(options)
    outsider = reasoning_gym.create_dataset("chain_sum", size=3, seed=5, max_terms=2)
    assert [row.values["entry"] for row in rows] == list(outsider)
    assert all(outsider.score_answer(row.values["answer"], row.values["entry"]) == 1.0 for row in rows)
    assert json.loads(json.dumps(rows[0].values))["prompt"] == rows[0].values["entry"]["question"]


@pytest.mark.parametrize(
    ("task", "options"),
    [("chainsum", {}), ("chain_sum", {"max_therms": 3}), ("chain_sum", {"min_terms": 9, "max_terms": 2})],
)
def test_an_unknown_reasoning_gym_task_names_the_nearest_one_and_a_wrong_option_its_task(task, options):
    with pytest.raises(DataError, match="chain_sum"):
        read_rows(ReasoningGymData(task=task, size=1, seed=0, options=options))


def test_the_hub_source_reads_what_the_datasets_library_loads(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(name: str, config: str | None, split: str):
        asked.append((name, config, split))
        return datasets.Dataset.from_list([{"question": "1+2", "answer": "3"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (row,) = read_rows(HubData(dataset="me/sums", config="main", split="train", columns={"prompt": "question"}))
    assert asked == [("me/sums", "main", "train")]
    assert row.values == {"prompt": "1+2", "answer": "3"}


def test_a_hub_data_set_without_network_says_so():
    pytest.importorskip("datasets")
    with pytest.raises(UnavailableError, match="HF_HUB_OFFLINE"):
        read_rows(HubData(dataset="logitless/not-cached-anywhere", split="train"))


def test_an_unknown_split_of_a_loadable_data_set_is_an_error(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load_dataset(*_: object, **__: object):
        raise ValueError('Unknown split "tain". Should be one of ["train"].')

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match="tain"):
        read_rows(HubData(dataset="me/sums", split="tain"))


@pytest.mark.parametrize(
    ("package", "options"),
    [
        ("datasets", HubData(dataset="a/b", split="train")),
        ("reasoning_gym", ReasoningGymData(task="chain_sum", size=1, seed=0)),
    ],
)
def test_an_absent_library_is_named_with_the_command_that_installs_it(monkeypatch, package, options):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UnavailableError, match="pip install"):
        read_rows(options)

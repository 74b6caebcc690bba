"""The data set of completions: what other libraries read, at any moment of a run that is killed, stopped, resumed."""

import importlib.util
import math
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from logitless.train.record import rollout_data
from logitless.train.record.rollout_data import COLUMNS
from logitless.train.record.run_folder import RunFolder, create_run_folder, open_run_folder
from logitless.train.store.atomic import write_atomically
from tests.train.fake_run import fake_groups, fake_run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run of 7 blocks of 32 rows, in parts of 64 rows."""
    monkeypatch.setattr(rollout_data, "FULL_ROWS", 64)
    return fake_run(tmp_path, num_blocks=7)


def contents(folder: RunFolder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rollouts.iterdir()}


def test_a_part_grows_until_it_is_full_and_then_another_begins(run: RunFolder) -> None:
    assert sorted(contents(run)) == [f"part-00000{first}.parquet" for first in (1, 3, 5, 7)]
    assert run.rollout_blocks() == [1, 2, 3, 4, 5, 6, 7]
    assert [number for number, _ in run.read_rollouts()] == [1, 2, 3, 4, 5, 6, 7]


def test_a_part_is_full_by_its_bytes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_data, "FULL_BYTES", 1)
    assert len(contents(fake_run(tmp_path, num_blocks=3))) == 3


def test_writing_a_block_opens_no_part_but_the_last(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, read = [], pyarrow.parquet.read_metadata
    monkeypatch.setattr(pyarrow.parquet, "read_metadata", lambda path: (opened.append(path.name), read(path))[1])
    run.write_rollouts(8, fake_groups(8, 7))
    assert set(opened) == {"part-000007.parquet"}


@pytest.mark.parametrize("block", range(1, 8))
def test_one_block_is_found_among_all(run: RunFolder, block: int) -> None:
    rows = run.read_block(block)
    assert rows == dict(run.read_rollouts())[block]
    assert [(row["group"], row["sample"]) for row in rows] == [(g, s) for g in range(1, 5) for s in range(1, 9)]


@pytest.mark.parametrize("stopped_after", range(8))
def test_a_run_that_samples_blocks_again_leaves_the_files_of_one_without_a_stop(
    run: RunFolder, stopped_after: int, tmp_path: Path
) -> None:
    whole = contents(run)
    folder = create_run_folder(tmp_path, "stopped")
    for block in [*range(1, 8), *range(stopped_after + 1, 8)]:
        folder.write_rollouts(block, fake_groups(block, 7), advantages_of(run, block))
    assert contents(folder) == whole


def advantages_of(run: RunFolder, block: int) -> list[list[float]]:
    rows = run.read_block(block)
    return [[row["advantage"] for row in rows if row["group"] == group] for group in range(1, 5)]


def write_for_ever(folder: Path) -> None:
    run, block = RunFolder(folder), 0
    while True:
        block += 1
        run.write_rollouts(block, fake_groups(1, 12))


@pytest.mark.slow
def test_the_data_set_of_a_killed_run_is_whole_up_to_some_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = create_run_folder(tmp_path, "killed")
    process = multiprocessing.get_context("spawn").Process(target=write_for_ever, args=(folder.path,))
    process.start()
    while len(folder.rollout_blocks()) < 5:
        assert process.is_alive()
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    table = pyarrow.parquet.read_table(folder.rollouts)  # as a stranger reads the folder
    found = table["block"].to_pylist()
    assert found == [block for block in range(1, max(found) + 1) for _ in range(32)]


def test_every_column_has_its_documented_type(run: RunFolder) -> None:
    schema = pyarrow.parquet.read_table(run.rollouts).schema
    names = [*COLUMNS, "reward/exact", "reward/style"]
    assert sorted(schema.names) == sorted(names)
    assert {name: schema.field(name).type for name in COLUMNS} == {name: kind for name, (kind, _) in COLUMNS.items()}


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pyarrow.int64(), [*range(-9, 9), None, -(2**63), 2**63 - 1]),
        (pyarrow.float64(), [None, 0.1, -0.0, 1e-320, math.inf, 1, True]),
        (pyarrow.string(), ["", None, "\x00", "naïve", "😀"]),
    ],
)
def test_a_column_is_what_pyarrow_makes_of_its_values(kind: pyarrow.DataType, values: list[Any]) -> None:
    for each in (values, values[:1], []):
        column = rollout_data._column(each, kind)
        column.validate(full=True)
        assert column.equals(pyarrow.array(each, kind))
    assert math.isnan(rollout_data._column([math.nan], pyarrow.float64())[0].as_py())


@pytest.mark.parametrize(("kind", "value"), [(pyarrow.int64(), 1.5), (pyarrow.string(), 7), (pyarrow.float64(), "7")])
def test_a_value_of_another_type_is_refused(kind: pyarrow.DataType, value: object) -> None:
    with pytest.raises(TypeError):
        rollout_data._column([value], kind)


def test_a_function_that_a_later_block_brings_is_null_before(tmp_path: Path) -> None:
    for block, name in enumerate(["a", "b"], start=1):
        rollout_data.append(tmp_path, block, [{"block": block, f"reward/{name}": 1.0}], write_atomically)
    (table,) = rollout_data.parts(tmp_path)
    assert table["reward/b"].to_pylist() == [None, 1.0]


@pytest.mark.parametrize("first", [1, 7])
def test_files_of_a_run_begun_before_are_read_and_gone_on_from(run: RunFolder, first: int) -> None:
    part = run.rollouts / f"part-00000{first}.parquet"
    old = pyarrow.parquet.read_table(part).drop_columns(["group", "sample", "weights_version"])
    part.unlink()
    pyarrow.parquet.write_table(old, run.rollouts / f"block-00000{first}.parquet")
    assert [block for block, _ in open_run_folder(run.path).read_rollouts()] == [1, 2, 3, 4, 5, 6, 7]
    for block in (5, 6, 7):  # resumed after block 4
        run.write_rollouts(block, fake_groups(block, 8))
    assert open_run_folder(run.path).rollout_blocks() == [1, 2, 3, 4, 5, 6, 7]
    assert len(run.read_block(5)) == 32
    run.write_rollouts(8, fake_groups(8, 8))
    assert len(run.read_block(7)) == len(run.read_block(8)) == 32


def test_datasets_reads_it(run: RunFolder, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    files = f"{run.rollouts}/*.parquet"
    found = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert found["block"][:] == [block for block in range(1, 8) for _ in range(32)]
    assert found["completion"][:] == [row["completion"] for _, rows in run.read_rollouts() for row in rows]


@pytest.mark.skipif(importlib.util.find_spec("polars") is None, reason="polars is not installed")
def test_polars_reads_it(run: RunFolder) -> None:
    import polars

    found = polars.scan_parquet(f"{run.rollouts}/*.parquet").sort("block", "group", "sample").collect()
    assert found["completion"].to_list() == [row["completion"] for _, rows in run.read_rollouts() for row in rows]


@pytest.mark.skipif(importlib.util.find_spec("duckdb") is None, reason="duckdb is not installed")
def test_duckdb_reads_it(run: RunFolder) -> None:
    import duckdb

    query = f"SELECT block, count(*), avg(reward) FROM '{run.rollouts}/*.parquet' GROUP BY block ORDER BY block"
    found = duckdb.sql(query).fetchall()
    assert [(block, count) for block, count, _ in found] == [(block, 32) for block in range(1, 8)]

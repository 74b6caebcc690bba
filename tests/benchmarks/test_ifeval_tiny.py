"""The data of the recipe: no argument that is held out is trained on, and what is imitated is mostly wrong."""

import importlib.util
import json
from pathlib import Path

from logitless.rewards.instructions.instruction_reward import InstructionReward
from logitless.rewards.instructions.suites import SUITES

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "ifeval-tiny"


def _rows(name):
    return [json.loads(line) for line in (RECIPE / f"{name}.jsonl").read_text().splitlines()]


def _arguments(rows):
    pairs = (pair for row in rows for pair in zip(row["instruction_id_list"], row["kwargs"], strict=True))
    return {(name, json.dumps(given)) for name, given in pairs if given}


def test_no_argument_that_is_held_out_is_trained_on():
    train, held_out = _rows("train"), _rows("held_out")
    assert not _arguments(train) & _arguments(held_out)
    assert all(any(row["kwargs"]) for row in held_out)
    assert {name for row in train for name in row["instruction_id_list"]} <= SUITES["ifeval_basic"].keys()


def test_the_answers_to_imitate_are_wrong_more_often_than_not():
    rows = _rows("train")
    columns = {name: [row[name] for row in rows] for name in ("instruction_id_list", "kwargs")}
    reward = InstructionReward(name="ifeval_basic", reduction="all")
    scores = reward([row["prompt"] for row in rows], [row["answer"] for row in rows], **columns)
    assert 0.1 < sum(scores) / len(scores) < 0.3


def test_the_committed_files_are_those_that_the_script_writes(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("make_data", RECIPE / "make_data.py")
    make_data = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_data)
    monkeypatch.setattr(make_data, "FOLDER", tmp_path)
    make_data.main()
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "tokenizer_config.json"]
    assert {path.name for path in written} == {"train.jsonl", "held_out.jsonl", "tokenizer.json"}
    for path in written:
        assert path.read_bytes() == (RECIPE / path.relative_to(tmp_path)).read_bytes(), path.name

"""First contacts: the benchmark's cases run at toy size here, and what it measured on a GPU went well."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from logitless.cli.main import main
from logitless.models.char_tokenizer import character_tokenizer
from logitless.rollout import steps
from logitless.train.recipe import load_recipe
from logitless.train.run_folder import RunFolder
from tests.head.interpreter import complete_interpreter, interpreted

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("first_contact", ROOT / "benchmarks" / "first_contact.py")
benchmark = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = benchmark  # where its dataclasses look for their types
SPEC.loader.exec_module(benchmark)

if interpreted():
    complete_interpreter()

SMALL = [
    "model.device=cpu",
    "rollout.prompts_per_block=2",
    "rollout.completions_per_prompt=2",
    "rollout.sampling.max_new_tokens=2",
]
IN_ONE_PROCESS = [name for name, case in benchmark.CASES.items() if case.num_gpus == 1]


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Runs a case's command line on its model; returns the exit status."""
    monkeypatch.setattr("logitless.train.run.write_report", lambda path: None)
    monkeypatch.setattr(steps, "STEPS", 2)
    character_tokenizer("abcdefgh").save_pretrained(str(tmp_path / "tokenizer"))

    def run(name, engine):
        model = list(benchmark.TOYS)[list(benchmark.CASES).index(name) % len(benchmark.TOYS)]
        recipe = benchmark.write_recipe(tmp_path, benchmark.TOYS[model], tmp_path / "tokenizer")
        case = benchmark.CASES[name]
        sets = [*benchmark.overrides_of(case, engine, tmp_path, few=2), *SMALL, f"output={tmp_path}/runs"]
        command = ["train", str(recipe), *(word for each in sets for word in ("--set", each))]
        first = main([*command, "--set", "train.blocks=1"]) if case.resumed else 0
        return first or main([*command, *["--resume"] * case.resumed])

    return run


@pytest.mark.parametrize("engine", benchmark.ENGINES)
@pytest.mark.parametrize("name", IN_ONE_PROCESS)
def test_a_first_contact_goes_well_at_toy_size(tmp_path, toy, capsys, name, engine):
    case = benchmark.CASES[name]
    if case.needs:
        pytest.importorskip(case.needs)
    if engine == "gpu" and case.without_gpu_engine:
        assert toy(name, engine) == 1
        assert "Sample with rollout.engine: {name: transformers}" in capsys.readouterr().err
        return
    assert toy(name, engine) == 0
    assert ("layers row-invariant" in capsys.readouterr().out) == (engine == "gpu")
    lines = [line for line in RunFolder(tmp_path / "runs" / "contact").read_metrics() if "loss/total" in line]
    assert len(lines) == (4 if name == "changed_options" else 2)
    if name == "changed_options":
        assert lines[-1]["length/mean"] <= 1 < lines[0]["length/mean"]  # the guardrail has halved it
    if name == "two_evaluations":
        assert {"evaluation/length_mean", "held_out/second/length_mean"} <= lines[-1].keys()


@pytest.mark.parametrize("engine", benchmark.ENGINES)
@pytest.mark.parametrize("name", benchmark.CASES)
def test_every_case_is_a_recipe_at_real_size_too(tmp_path, name, engine):
    recipe = benchmark.write_recipe(tmp_path, str(tmp_path), tmp_path)
    checked = load_recipe(recipe, benchmark.overrides_of(benchmark.CASES[name], engine, tmp_path))
    assert checked.rollout.engine.name == engine
    assert checked.model.device == "auto"


def test_what_cannot_run_is_skipped_with_its_reason(tmp_path):
    alone = benchmark.Runner(tmp_path, timeout=1, devices=["0"])
    assert "needs 2 GPUs, and there is 1" in alone.row("qwen2.5-0.5b", "several_gpus", "auto", None)["error"]
    assert "no one set of bits" in alone.skipped("four_bits", "gpu")
    assert alone.skipped("top_p", "gpu") == ""
    assert "needs a GPU" in benchmark.Runner(tmp_path, timeout=1, devices=[]).skipped("top_p", "gpu")
    assert benchmark.Runner(tmp_path, timeout=1, devices=["0", "1"]).skipped("several_gpus", "auto") == ""


def test_what_went_wrong_is_the_last_line_of_the_traceback():
    traceback = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\ntorch.AcceleratorError: CUDA error\n'
    assert benchmark.error_of(1, traceback + "and a warning after it\n", 9) == "torch.AcceleratorError: CUDA error"
    torchrun = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    assert benchmark.error_of(1, traceback + torchrun, 9) == "torch.AcceleratorError: CUDA error"
    assert benchmark.error_of(2, "logitless train: needed: a\n", 9) == "logitless train: needed: a"
    assert benchmark.error_of(None, "still here\n", 9) == "no end after 9 s; last line: still here"
    assert benchmark.error_of(-11, "", 9) == "nothing was said"


def test_the_table_counts_what_went_well_and_names_the_rest_and_the_longest_first_call():
    row = {"model": "m", "options": "top_p", "engine": "gpu", "ok": True, "first_call_seconds": 14.0, "error": None}
    alone = {**row, "options": "min_p", "first_call_seconds": 16.0, "alone_seconds": 6.0}
    failed = {**row, "options": "top_k", "ok": False, "first_call_seconds": None, "error": "E: no"}
    skipped = {**failed, "options": "four_bits", "ok": None, "error": "skipped: no"}
    lines = benchmark.table([row, alone, failed, skipped]).splitlines()
    assert lines == [
        "m gpu: 2 ok, 1 failed, 1 skipped; first call at most 14.0 s",
        "FAILED m top_k gpu: E: no",
        "skipped m four_bits gpu: no",
        "The longest first call: 14.0 s (m top_p gpu).",
    ]


def test_results_go_on_from_a_file_of_the_same_machine_and_begin_anew_on_another(tmp_path):
    path, row = tmp_path / "first-contact-A.json", {"model": "smollm2-135m", "options": "top_p", "engine": "gpu"}
    row |= {"ok": True, "first_call_seconds": 4.0, "error": None}
    benchmark.Results.of(path, {"gpu": "A"}).add(row)
    assert list(benchmark.Results.of(path, {"gpu": "A"}).rows.values()) == [row]
    assert benchmark.Results.of(path, {"gpu": "B"}).rows == {}
    assert set(json.loads(path.read_text())) >= {"environment", "rows"}


@pytest.mark.parametrize("path", sorted(benchmark.RESULTS.glob("first-contact-*.json")), ids=lambda path: path.name)
def test_every_first_contact_that_was_measured_went_well_in_time(path):
    rows = json.loads(path.read_text())["rows"]
    assert [row for row in rows if row["ok"] is False] == []
    assert max(map(benchmark.first_call, rows)) <= benchmark.BOUND

"""What the scripts share; and every table of a page is the one that its script makes of the committed results."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from logitless.models.loading import load_model
from script import PAGES, RESULTS, ROOT, begin, digest, end, update, weights_drawn_on
from shapes import TINY

SCRIPTS = [
    path
    for path in sorted((ROOT / "benchmarks").glob("*.py"))
    if re.search(r"\.parse_args\(\)|main\(sys\.modules|main_at_seeds\(", path.read_text())
]


MARKED = re.compile(r"<!-- (\w+)((?: \w+)*): begin -->")


def test_the_tables_of_the_pages_are_made_from_the_committed_results():
    marks = [mark for page in PAGES for mark in MARKED.findall(page.read_text())]
    assert len(marks) > 20
    for script in sorted({script for script, _ in marks}):
        reports = f"{script}_report" if (ROOT / "benchmarks" / f"{script}_report.py").is_file() else script
        tables = importlib.import_module(reports).tables(RESULTS)
        parts = {part.strip() for each, part in marks if each == script}
        assert parts <= set(tables)
        assert update([], script, tables, check=True) == 0, script


def test_a_page_is_rewritten_between_its_marks_and_checked(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{begin('head', '')}\nold\n{end('head', '')}\nafter\n")
    tables = {"": "new", "summary": "not on this page"}
    assert update([page], "head", tables, check=True) == 1
    assert update([page], "head", tables, check=False) == 0
    assert page.read_text() == f"before\n{begin('head', '')}\n\nnew\n\n{end('head', '')}\nafter\n"
    assert update([page], "head", tables, check=True) == 0


def test_every_script_that_a_page_names_is_there():
    named = {name for page in PAGES for name in re.findall(r"(?<!tests/)benchmarks/(\w+\.py)", page.read_text())}
    assert len(named) > 15
    assert {name for name in named if not (ROOT / "benchmarks" / name).is_file()} == set()


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_says_what_it_measures_and_takes_the_options_that_pages_give_it(script: Path):
    done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    shown = [re.findall(rf"python benchmarks/{script.name}([^`#\n]*)", page.read_text()) for page in PAGES]
    given = {word for lines in shown for line in lines for word in line.split() if word.startswith("--")}
    assert given <= set(re.findall(r"--[\w-]+", done.stdout))


TOYS = {
    "divergence": "--device cpu --widths 8,16 --vocabulary 40 --rows 32 --rounds 1 --kinds reverse_kl --output {out}",
    "head": "--device cpu --shape 8,19 --rows 512 --lengths 64 --contenders logitless-chunked --output {out}",
    "objective": "--tokens 40 --head 8,16 --device cpu --out {out}/found.json",
    "step_host": "--models tiny --device cpu --workloads 512/64-256 --live 0.5 --steps 2 --output {out}",
    "first_step": "--toy --runs 1 --set train.blocks=1 --set rollout.prompts_per_block=2 --out {out}/found.json",
}


@pytest.mark.slow
@pytest.mark.parametrize("script", TOYS)
def test_a_script_measures_everything_at_toy_size_without_a_gpu(script, tmp_path):
    command = [sys.executable, f"benchmarks/{script}.py", *TOYS[script].format(out=tmp_path).split()]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"}
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert found
    for row in (row for document in found for row in document.get("rows", [document])):
        assert row.get("failure") is None
        assert any(isinstance(value, float) and value > 0 for value in row.values())


def test_one_bit_or_another_name_changes_the_digest_and_another_width_does_not():
    weights = torch.ones(5)
    other = weights.clone()
    other.view(torch.int32)[3] += 1
    found = [digest({"a": each}) for each in (weights, weights.clone(), weights.bfloat16(), other)]
    assert found[0] == found[1] == found[2] != found[3]
    assert digest({"b": weights}) != found[0]


def test_weights_are_drawn_on_the_named_device_with_one_seed():
    tiny = {**TINY.config, "num_hidden_layers": 1}
    with weights_drawn_on("cpu"):
        models = [load_model(tiny, random_weights=True, seed=seed) for seed in (1, 2)]
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))

"""What pages show as the output of a command is what a committed run of it printed."""

import json
import re
from pathlib import Path

import pytest

import commands

ROOT = Path(__file__).parents[2]

RESULTS = sorted((ROOT / "benchmarks" / "results").glob("commands-*.json"))


@pytest.mark.parametrize("page", commands.PAGES, ids=lambda page: page.name)
def test_outputs_on_a_page_are_those_of_the_committed_run(page):
    text = page.read_text(encoding="utf-8")
    assert commands.filled(text) == text, "run python benchmarks/commands.py --pages"


def test_there_is_a_run_on_a_cpu_and_pages_show_it():
    assert ROOT / "benchmarks" / "results" / "commands-cpu.json" in RESULTS
    shown = {found[1:3] for page in commands.PAGES for found in commands.MARKED.findall(page.read_text())}
    assert ("cpu", "doctor-recipe") in {tuple(each) for each in shown}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_committed_command_ended_as_it_should(path):
    for name, row in json.loads(path.read_text())["rows"].items():
        assert row["status"] == (1 if name == "doctor-refuses" else 0), name
        assert row["output"], name
        assert not any("Traceback" in line for line in row["output"]), name


def test_no_kept_output_names_a_folder_of_the_machine_that_it_ran_on():
    for path in commands.RESULTS.glob("commands-*.json"):
        for name, row in json.loads(path.read_text())["rows"].items():
            packages = re.findall(r"[^\s(]*site-packages", "\n".join(row["output"]))
            assert all(each.startswith(".venv/") for each in packages), name

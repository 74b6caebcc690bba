"""What pages show as the output of a command is what a committed run of it printed."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("commands", ROOT / "benchmarks" / "commands.py")
commands = importlib.util.module_from_spec(spec)
spec.loader.exec_module(commands)

RESULTS = sorted((ROOT / "benchmarks" / "results").glob("commands-*.json"))


@pytest.mark.parametrize("page", commands.PAGES, ids=lambda page: page.name)
def test_outputs_on_a_page_are_those_of_the_committed_run(page):
    text = page.read_text(encoding="utf-8")
    assert commands.filled(text) == text, "run python benchmarks/commands.py --pages"


def test_there_is_a_run_on_a_cpu_and_pages_show_it():
    assert ROOT / "benchmarks" / "results" / "commands-cpu.json" in RESULTS
    shown = {found[1:3] for page in commands.PAGES for found in commands.MARKED.findall(page.read_text())}
    assert ("cpu", "doctor") in {tuple(each) for each in shown}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_committed_command_ended_as_it_should(path):
    for name, row in json.loads(path.read_text())["rows"].items():
        assert row["status"] == (1 if name == "doctor-refuses" else 0), name
        assert row["output"], name
        assert not any("Traceback" in line for line in row["output"]), name


def test_a_page_with_another_output_is_not_current():
    page = (ROOT / "docs" / "doctor.md").read_text()
    assert re.search(r", exit status \d", page)
    assert commands.filled(re.sub(r", exit status \d", ", fine", page)) == page


def test_a_command_keeps_its_output_and_status_without_the_folder(tmp_path):
    row = commands.ran("logitless recipes show no-such-recipe", tmp_path)
    assert row["status"] == 2
    assert any("no-such-recipe" in line for line in row["output"])
    assert not any(str(tmp_path) in line for line in row["output"])


def test_no_kept_output_names_a_folder_of_the_machine_that_it_ran_on():
    for path in commands.RESULTS.glob("commands-*.json"):
        for name, row in json.loads(path.read_text())["rows"].items():
            packages = re.findall(r"[^\s(]*site-packages", "\n".join(row["output"]))
            assert all(each.startswith(".venv/") for each in packages), name

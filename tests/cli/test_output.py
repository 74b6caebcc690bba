"""A reader that goes away ends the output, not the work."""

import subprocess
import sys
from pathlib import Path

import pytest

from logitless.cli.output import program

WORK = """
import sys
from pathlib import Path
from rich.console import Console
from logitless.cli.output import patient_output
with patient_output():
    console = Console()
    for number in range(3000):
        console.print(f"a line that fills the pipe, number {number}")
        print("and on the other stream", file=sys.stderr, flush=True)
    print("the end")
Path(sys.argv[1]).write_text("done")
"""


def test_a_closed_pipe_ends_the_output_and_the_work_goes_on_to_a_clean_end(tmp_path):
    done = tmp_path / "done"
    command = [sys.executable, "-c", WORK, str(done)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert "number 0" in process.stdout.readline()
        process.stdout.close()
        assert process.wait(300) == 0
    assert done.read_text() == "done"


@pytest.mark.parametrize(
    ("on_path", "started", "called"),
    [
        (True, ".venv/bin/logitless", "logitless"),
        (False, ".venv/bin/logitless", ".venv/bin/logitless"),
        (False, "/a b/bin/logitless", "'/a b/bin/logitless'"),
        (False, "src/logitless/__main__.py", "/a/python -m logitless"),
    ],
)
def test_the_program_is_called_by_its_name_where_the_shell_finds_it_and_else_as_it_was_started(
    on_path, started, called, tmp_path, monkeypatch
):
    if on_path:
        (tmp_path / "logitless").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [started, "train"])
    monkeypatch.setattr(sys, "executable", "/a/python")
    assert program() == called


def test_what_is_read_is_all_there(tmp_path):
    command = [sys.executable, "-c", WORK, str(tmp_path / "done")]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert len(found.stdout.splitlines()) == 3001
    assert len(found.stderr.splitlines()) == 3000


@pytest.mark.slow
def test_a_run_whose_output_is_piped_into_head_trains_to_its_end(tmp_path):
    settings = [
        *("rollout.prompts_per_block=2", "rollout.completions_per_prompt=2", "rollout.sampling.max_new_tokens=4"),
        *("train.blocks=2", "writers=[]", "data.train.size=8", f"output={tmp_path}"),
    ]
    command = [sys.executable, "-m", "logitless.cli.main", "train", "recipes/length-toy.yaml"]
    command += [word for setting in settings for word in ("--set", setting)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(800) == 0
    assert (tmp_path / "length-toy" / "summary.json").exists()

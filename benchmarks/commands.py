"""Runs the commands that pages show, as a new user types them, and keeps what they print.

    python benchmarks/commands.py              # on this machine: those that its results lack; --again: all
    python benchmarks/commands.py --pages      # put the kept outputs into the pages
    python benchmarks/commands.py --pages --check

Each command runs in a new process, in a folder that holds only the recipes, and finds only settings that these commands
measured; on a GPU these settings are kept beside the outputs. Outputs include standard error; the names of the folder,
of Python's environment and of the home folder are replaced.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from logitless.bench.machine import environment, write_result
from script import RESULTS, ROOT, command_line, short_name

PAGES = tuple(sorted((ROOT / "docs").glob("*.md")))

STAND_INS = (
    "--set model.source=recipes/dry-run/qwen2.5-0.5b --set model.random_weights=true "
    "--set model.tokenizer=recipes/dry-run/tokenizer --set data.held_out=null "
    "--set 'data.train={name: file, path: recipes/dry-run/gsm8k.jsonl, columns: {prompt: question}}' "
    "--set 'rewards=[{name: regex, pattern: .}]' "
    "--set rollout.prompts_per_block=8 --set rollout.completions_per_prompt=32"
)
"""The 0.5B recipe where there is no hub: weights drawn at random, eight questions."""

BENCHMARKS = ("precision", "optimizer", "attention", "layers", "compile", "sampling")

EVERYWHERE = {
    "doctor": "logitless doctor",
    "train": "logitless train recipes/length-toy.yaml --set train.blocks=6",
    "show": "logitless show runs/length-toy --block 6 --group 1",
    "sample": "logitless sample runs/length-toy --prompt hello --samples 2",
    "export": "logitless export runs/length-toy",
    "doctor-recipe": "logitless doctor recipes/length-toy.yaml",
}
ON_A_CPU = {
    **{f"bench-{name}": f"logitless bench {name} --quick" for name in BENCHMARKS},
    "recipes": "logitless recipes list",
    "doctor-refuses": "logitless doctor recipes/length-toy.yaml --set model.device=cuda --no-measure",
}
ON_A_GPU = {
    **{f"bench-{name}": f"logitless bench {name}" for name in BENCHMARKS},
    "bench-quick": "logitless bench precision --quick --out quick",
    "doctor-0.5b": f"logitless doctor recipes/qwen2.5-0.5b-gsm8k.yaml {STAND_INS}",
}


def ran(command: str, folder: Path) -> dict[str, Any]:
    """The command, its exit status, seconds and output."""
    words = [sys.executable, "-m", *shlex.split(command)]
    own = {"LOGITLESS_SETTINGS": str(folder / "settings"), "COLUMNS": "120"}
    own["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # an activated environment
    began = time.perf_counter()
    done = subprocess.run(
        words,
        cwd=folder,
        env=os.environ | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=300,
    )
    seconds = time.perf_counter() - began
    output = done.stdout.replace(f"{folder}/", "").replace(sys.prefix, ".venv").replace(str(Path.home()), "~")
    return {"command": command, "status": done.returncode, "seconds": round(seconds, 1), "output": output.splitlines()}


def measure(out: Path, *, again: bool, only: list[str]) -> None:
    """Run what the results of this machine lack, and write them after each command."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    commands = {**(ON_A_GPU if device == "cuda" else ON_A_CPU), **EVERYWHERE}
    machine = environment(device, ("transformers", "triton"))
    path, rows = out / f"commands-{short_name(device)}.json", dict[str, Any]()
    if path.exists() and (before := json.loads(path.read_text()))["environment"] == machine:
        rows = before["rows"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "recipes").symlink_to(ROOT / "recipes")
        settings = out / f"settings-{short_name(device)}"
        if settings.is_dir():
            shutil.copytree(settings, Path(folder) / "settings")
        for name, command in commands.items():
            if (name in rows and not again) or (only and name not in only):
                continue
            rows[name] = ran(command, Path(folder))
            print(f"{rows[name]['seconds']:7.1f} s, exit status {rows[name]['status']}: {command}", flush=True)
            write_result(path, {"environment": machine, "rows": rows})
            if device == "cuda" and (Path(folder) / "settings").is_dir():
                shutil.copytree(Path(folder) / "settings", settings, dirs_exist_ok=True)


MARKED = re.compile(r"(<!-- output of (\S+) (\S+): begin[^\n]*-->\n).*?(<!-- output: end -->)", re.DOTALL)


def filled(page: str) -> str:
    """The page with the kept outputs between its marks, and where each came from."""

    def block(found: re.Match[str]) -> str:
        begin, machine, name, end = found.groups()
        kept = json.loads((RESULTS / f"commands-{machine}.json").read_text())
        row, where = kept["rows"][name], kept["environment"]
        on = "a CPU" if where["gpu"] == "none" else where["gpu"]
        lines = "\n".join(f"    {line}".rstrip() for line in (f"$ {row['command']}", *row["output"]))
        note = f"({on}, torch {where['torch']}, {row['seconds']:.0f} s, exit status {row['status']}; "
        link = f"[commands-{machine}.json](../benchmarks/results/commands-{machine}.json))"
        return f"{begin}\n{lines}\n\n{note}{link}\n\n{end}"

    return MARKED.sub(block, page)


def main() -> int:
    """Run, or fill the pages."""
    parser = command_line(__doc__)
    parser.add_argument("--again", action="store_true", help="run commands that have a result, too")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these alone")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--pages", action="store_true", help="put the kept outputs into the pages; runs nothing")
    parser.add_argument("--check", action="store_true", help="with --pages: exit with 1 where one is not current")
    options = parser.parse_args()
    if not options.pages:
        measure(options.out, again=options.again, only=options.only)
        return 0
    stale = [path for path in PAGES if filled(path.read_text()) != path.read_text()]
    for path in stale:
        if options.check:
            print(f"not current: {path.relative_to(ROOT)}; run python benchmarks/commands.py --pages", file=sys.stderr)
        else:
            path.write_text(filled(path.read_text()))
    return int(bool(stale) and options.check)


if __name__ == "__main__":
    sys.exit(main())

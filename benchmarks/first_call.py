"""Seconds of the sampler's first call in a process, by phase, and the kernels that it compiled.

    python benchmarks/first_call.py                        # Qwen2.5-0.5B, results/first-call-GPU.json
    python benchmarks/first_call.py --table                # writes what was measured into docs/rollout.md

Each measurement is a process of its own. ``empty``: the caches of Triton, the driver and the self-check are empty, as
on a new machine. ``full``: they are filled by the process before, as in every later run. The model has random weights;
its loading is not counted. ``--stacks`` samples the main thread's stack every few milliseconds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from script import caches_in, command_line, parsed

_EVERY = 0.004  # seconds between two looks at the main thread


def measured(model: str, workload: str, *, stacks: bool) -> dict[str, Any]:
    """Seconds of the first and of a second call in this process, and those of the first by phase."""
    start = time.perf_counter()
    import torch
    from triton import knobs
    from triton.runtime import build

    from logitless.bench.machine import environment
    from logitless.models.row_invariant import self_check
    from logitless.rollout.gpu import engine as gpu
    from logitless.rollout.gpu.steps import Steps
    from rollout_contenders import CONTENDERS, Subject
    from rollout_workloads import Workload

    phases, compiled, launchers = dict[str, float](), list[dict[str, Any]](), list[float]()
    begun = time.perf_counter()

    def listen(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        compiled.append(
            {
                "kernel": src.name,
                "seconds": round(times.total / 1e6, 3),
                "python_seconds": round(times.ir_initialization / 1e6, 3),
                "found": cache_hit,
                "waited_for": threading.current_thread() is threading.main_thread(),
                "at": round(time.perf_counter() - begun, 2),
            }
        )

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            entered = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                phases[name] = phases.get(name, 0.0) + time.perf_counter() - entered

        return call

    def build_and_note(*args: Any, **kwargs: Any) -> Any:
        entered = time.perf_counter()
        try:
            return built(*args, **kwargs)
        finally:
            if threading.current_thread() is threading.main_thread():
                launchers.append(round(time.perf_counter() - entered, 3))

    built, build._build = build._build, build_and_note
    knobs.compilation.listener = listen
    self_check.self_check = timed("self-check", self_check.self_check)
    Steps.compile = timed("compile", Steps.compile)
    Steps._captured = timed("capture", Steps._captured)
    gpu._Session._prefill_prompts = timed("read prompts", gpu._Session._prefill_prompts)
    imported = time.perf_counter()
    subject, work = Subject(model), Workload.parse(workload)
    torch.cuda.synchronize()
    loaded = time.perf_counter()
    with Stacks(stacks) as seen:
        begun = time.perf_counter()
        contender = CONTENDERS["gpu"](subject, work)
        tokens = contender.sample()
        torch.cuda.synchronize()
        first = time.perf_counter() - begun
    by_phase = {name: round(seconds, 2) for name, seconds in phases.items()}
    began = time.perf_counter()
    contender.sample()
    torch.cuda.synchronize()
    second = time.perf_counter() - began
    return {
        "machine": environment("cuda", ("triton", "transformers")),
        "model": model,
        "workload": workload,
        "tokens": tokens,
        "imports_seconds": round(imported - start, 2),
        "model_seconds": round(loaded - imported, 2),
        "first_seconds": round(first, 2),
        "second_seconds": round(second, 2),
        "first_seconds_by_phase": by_phase,
        "compiled": sum(not each["found"] for each in compiled),
        "compiled_while_waited_for": sum(each["waited_for"] and not each["found"] for each in compiled),
        "launchers_built_while_waited_for": len(launchers),
        "launcher_seconds_while_waited_for": round(sum(launchers), 2),
        "compilations": compiled,
        **({"stacks": seen.told()} if stacks else {}),
    }


class Stacks:
    """Where the main thread is, every few milliseconds: functions of this library, and the innermost of all."""

    def __init__(self, wanted: bool) -> None:
        self.wanted, self.over = wanted, threading.Event()
        self.seen: defaultdict[str, float] = defaultdict(float)
        self.main = threading.get_ident()

    def __enter__(self) -> "Stacks":
        self.thread = threading.Thread(target=self._look)
        if self.wanted:
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        if self.wanted:
            self.thread.join()

    def _look(self) -> None:
        before = time.perf_counter()
        while not self.over.wait(_EVERY):
            frame: Any = sys._current_frames().get(self.main)
            names = list[str]()
            innermost = ""
            while frame is not None:
                code = frame.f_code
                innermost = innermost or f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}"
                if "logitless" in code.co_filename and "benchmarks" not in code.co_filename:
                    names.append(f"{code.co_name}:{frame.f_lineno}")
                frame = frame.f_back
            now = time.perf_counter()
            self.seen[" < ".join([innermost, *names[:6]])] += now - before
            before = now

    def told(self) -> list[tuple[float, str]]:
        """Seconds, the most first."""
        dearest = sorted(self.seen.items(), key=lambda item: -item[1])
        return [(round(seconds, 3), where) for where, seconds in dearest[:150]]


def tables(results: Path) -> dict[str, str]:
    """Medians on the H200, with empty and with full caches."""
    found = json.loads((results / "first-call-H200.json").read_text())
    machine, rows = found["machine"], found["rows"]
    lines = [
        f"**{machine['gpu']}**, driver {machine['driver']}, torch {machine['torch']}, Triton {machine['triton']};"
        f" {rows[0]['model']}, {rows[0]['workload']}",
        "",
        "| seconds | with empty caches | with full ones |",
        "|---|--:|--:|",
    ]
    states = [[row for row in rows if row["caches"] == state] for state in ("empty", "full")]

    def line(name: str, number: Callable[[dict[str, Any]], float], digits: int = 1) -> None:
        cells = [f"{statistics.median(map(number, of)):.{digits}f}" for of in states]
        lines.append(f"| {name} | {' | '.join(cells)} |")

    def in_phases(*names: str) -> Callable[[dict[str, Any]], float]:
        return lambda row: sum(row["first_seconds_by_phase"].get(name, 0.0) for name in names)

    line("imports before it", lambda row: row["imports_seconds"])
    line("the first call", lambda row: row["first_seconds"])
    line("of it compilations and the self-check", in_phases("self-check", "compile"))
    line("capturing graphs", in_phases("capture"))
    line("the second call", lambda row: row["second_seconds"])
    line("kernels compiled", lambda row: row["compiled"], 0)
    return {"": "\n".join(lines)}


def in_a_process(caches: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What ``measured`` finds in a new process with these caches."""
    environment = {**os.environ, **caches_in(Path(caches))}
    command = [sys.executable, __file__, "--here", "--model", arguments.model, "--workload", arguments.workload]
    done = subprocess.run(
        [*command, *["--stacks"] * arguments.stacks], env=environment, stdout=subprocess.PIPE, check=True, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measures and writes."""
    parser = command_line(__doc__)
    parser.add_argument("--model", default="qwen2.5-0.5b")
    parser.add_argument("--workload", default="64x8-512-64:512")
    parser.add_argument("--runs", type=int, default=2, help="each with empty caches, then with full ones")
    parser.add_argument("--stacks", action="store_true", help="note where the main thread is")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parsed(parser, tables)
    if arguments.here:
        print(json.dumps(measured(arguments.model, arguments.workload, stacks=arguments.stacks)))
        return
    from logitless.bench.machine import write_result  # not in the process that is measured: imports are timed there

    rows = list[dict[str, Any]]()
    for run in range(arguments.runs):
        with tempfile.TemporaryDirectory() as caches:
            for state in ("empty", "full"):
                row = in_a_process(caches, arguments)
                machine = row.pop("machine")
                rows.append({"run": run, "caches": state, **row})
                seconds, phases = row["first_seconds"], row["first_seconds_by_phase"]
                print(f"{arguments.model} {state} caches: {seconds} s, {phases}", file=sys.stderr)
                arguments.output.mkdir(parents=True, exist_ok=True)
                gpu = machine["gpu"].split()[-1]
                path = arguments.output / f"first-call-{gpu}.json"
                write_result(path, {"machine": machine, "rows": rows})


if __name__ == "__main__":
    main()

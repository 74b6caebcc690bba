"""Shared by the scripts of this folder: command line, runs of recipes, weights, result files, a clock, tables in pages.

Torch is imported inside functions, because one script times imports.
"""

import argparse
import hashlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from logitless.errors import ConfigurationError, DataError, LogitlessError, UnavailableError

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
Tables = Callable[[Path], dict[str, str]]
"""From a folder of results to a script's tables in pages, by part (empty where there is one table)."""


# --- command line


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the script's docstring as its help."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def main(script: ModuleType, arguments: Sequence[str] | None = None) -> int:
    """Run a script by its ``add_arguments`` and ``run``; 2 where what it was given is wrong, 1 where it cannot run."""
    parser = command_line(script.__doc__)
    script.add_arguments(parser)
    try:
        return script.run(parser.parse_args(arguments))
    except LogitlessError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1


def commit() -> str | None:
    """What is measured: ``$COMMIT``, or where git knows it the commit; None if nothing says."""
    import torch

    from logitless.train.record.provenance import environment

    return os.environ.get("COMMIT") or environment(torch.device("cpu"))["commit"]


def among(what: str, given: str, known: Sequence[str]) -> list[str]:
    """Names by commas, each of them known.

    Raises:
        ConfigurationError: one is not.

    Example:
        >>> among("a fruit", "apple,pear", ("apple", "pear", "plum"))
        ['apple', 'pear']
    """
    names = [name for name in given.split(",") if name]
    for name in names:
        if name not in known:
            raise ConfigurationError(
                needed=f"{what} of {', '.join(known)}", given=repr(name), remedy="Name some of them, by commas."
            )
    return names


def needs_gpu(remedy: str = "Run it on a machine with a GPU.") -> None:
    """Refuse to go on without one.

    Raises:
        UnavailableError: there is none.
    """
    import torch

    if not torch.cuda.is_available():
        raise UnavailableError(needed="a CUDA device", given="none", remedy=remedy)


# --- runs of recipes


def caches_in(folder: Path) -> dict[str, str]:
    """Environment variables with which a process keeps its compiled kernels and self-checks in this folder."""
    names = ("TRITON_CACHE_DIR", "XDG_CACHE_HOME", "CUDA_CACHE_PATH", "TORCHINDUCTOR_CACHE_DIR")
    places = {name: folder / name.lower() for name in names}
    for place in places.values():  # torch warns where the folder that its own is to be in is not there
        place.mkdir(parents=True, exist_ok=True)
    return {name: str(place) for name, place in places.items()}


def trained(recipe: str, name: str, output: Path, *settings: str) -> Path:
    """Train ``recipes/RECIPE.yaml`` in a process of its own, on the CPU; the folder of the run."""
    given = (f"name={name}", f"output={output}", "model.device=cpu", *settings)
    words = [word for each in given for word in ("--set", each)]
    command = [sys.executable, "-m", "logitless.cli.main", "train", f"recipes/{recipe}.yaml", *words]
    subprocess.run(command, cwd=ROOT, check=True)
    return output / name


def summary_of(folder: Path) -> dict[str, Any]:
    """Of a run."""
    return json.loads((folder / "summary.json").read_text())


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Every record of a run."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def at_seeds(
    recipe: str, seeds: Sequence[int], noted: Callable[[Path], dict[str, Any]] = lambda _: {}
) -> list[dict[str, Any]]:
    """A run a seed, one after the other: its summary, the seconds it took, and what is noted of its folder."""
    runs = []
    with tempfile.TemporaryDirectory() as output:
        for seed in seeds:
            start, used = time.perf_counter(), _processor_seconds()
            folder = trained(recipe, f"seed-{seed}", Path(output), f"seed={seed}")
            took = {
                "wall_clock_seconds": time.perf_counter() - start,
                "processor_seconds": _processor_seconds() - used,
            }
            runs.append({"seed": seed, **summary_of(folder), **took, **noted(folder)})
            found = f"accuracy {runs[-1]['accuracy_before']:.3f} -> {runs[-1]['accuracy_after']:.3f}"
            print(f"seed {seed}: {found} in {took['processor_seconds']:.0f} s of the processor", flush=True)
    return runs


def main_at_seeds(
    doc: str | None,
    recipe: str,
    noted: Callable[[Path], dict[str, Any]] = lambda _: {},
    *,
    seeds: Sequence[int] = (0, 1, 2),
    tables: Tables | None = None,
) -> None:
    """A script that is ``at_seeds`` and nothing else; its result file has the recipe's name.

    Args:
        doc, recipe, noted: of the script, and of ``at_seeds``.
        seeds: unless others are asked for.
        tables: for pages; None if no page shows the result.
    """
    parser = command_line(doc)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds))
    options = parsed(parser, tables)
    record(at_seeds(recipe, options.seeds, noted), options.output / f"{recipe}.json")


def completed(
    path: Path,
    wanted: Sequence[dict[str, Any]],
    run: Callable[..., dict[str, Any]],
    write: Callable[[list[dict[str, Any]], Path], None] | None = None,
) -> list[dict[str, Any]]:
    """The runs of a result file and those that it lacks, written after each.

    Args:
        path: of the file.
        wanted: what names a run, by argument of
        run: which also takes a folder to run in.
        write: in place of ``record``.
    """
    runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []
    for each in wanted:
        if not any(each.items() <= found.items() for found in runs):
            with tempfile.TemporaryDirectory() as folder:
                runs.append(each | run(Path(folder), **each))
            (write or record)(runs, path)
    return runs


def _processor_seconds() -> float:
    """Of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def processor() -> str:
    """The name of the processor, where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def short_name(device: str) -> str:
    """What result files of a machine are called by: ``cpu``, or the GPU's name without the vendor and the memory.

    Example:
        >>> short_name("cpu")
        'cpu'
    """
    import torch

    return "cpu" if device == "cpu" else short_name_of(torch.cuda.get_device_name())


def short_name_of(gpu: str) -> str:
    """A GPU's name without the vendor and the memory.

    Example:
        >>> short_name_of("NVIDIA H100 80GB HBM3")
        'H100'
    """
    return gpu.removeprefix("NVIDIA ").split()[0]


def record(runs: list[dict[str, Any]], out: Path, **more: Any) -> None:
    """Write runs, the machine that they were made on, and more by name."""
    import torch
    import transformers

    from logitless.bench.machine import write_result

    machine = {
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    write_result(out, {"machine": machine, "runs": runs, **more}, indent=2)


def reward_curve(label: str, rewards: Sequence[float]) -> Any:
    """A line for a plot, each point the mean of the last ten blocks (or steps), of fewer at the beginning."""
    from logitless.train.report.plots import Line

    means = tuple(statistics.fmean(rewards[max(0, end - 10) : end]) for end in range(1, len(rewards) + 1))
    return Line(label, tuple(range(1, len(rewards) + 1)), means)


# --- weights


def digest(tensors: Mapping[str, Any]) -> str:
    """Of tensors by name, in their order: the same for the same bits.

    16 bits are widened first, so that weights read in another width have the same digest; committed results hold it.
    """
    found = hashlib.sha256()
    for name, tensor in tensors.items():
        wide = tensor.detach().float() if tensor.itemsize == 2 and tensor.is_floating_point() else tensor.detach()
        found.update(name.encode())
        found.update(wide.cpu().numpy().tobytes())
    return found.hexdigest()[:16]


@contextmanager
def weights_drawn_on(device: str) -> Iterator[None]:
    """Inside, random weights of a model are drawn on the device: seconds, where a CPU takes minutes for 8 billion."""
    import torch

    from logitless.models import loading
    from logitless.models.seeded import seeded

    plain = loading._built

    def built(config: Any, options: Any) -> Any:
        with seeded(0, device), torch.device(device):
            return plain(config, options)

    with patch.object(loading, "_built", built):
        yield


# --- rows


def rows_of_processes(file: str, count: int, order: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What a script prints as JSON, a row a line, run as ``file --order ORDER`` by so many processes under torchrun.

    Raises:
        UnavailableError: a process failed.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(count), file, "--order", json.dumps(order)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        if running.wait():
            raise UnavailableError(needed=f"{count} processes of {file}", given="an error", remedy="Read it above.")


class Rows:
    """A result file that grows row by row.

    Args:
        path: of the file; begun anew where it is of another machine or other versions.
        here: machine and versions.
        identity: names of what tells one row from another.
        more: what else stands in the file, unless it says otherwise itself.
    """

    def __init__(self, path: Path, here: Mapping[str, str], identity: Sequence[str], **more: Any) -> None:
        self.path, self.here, self.identity = path, here, identity
        found = json.loads(path.read_text()) if path.exists() else {}
        found = found if found.get("environment") == here else {}
        self.rows: list[dict[str, Any]] = found.get("rows", [])
        self.more = {name: found.get(name, value) for name, value in more.items()}

    def has(self, **identity: Any) -> bool:
        """Whether there is such a row."""
        return any(all(row[name] == value for name, value in identity.items()) for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        """One more row, in place of the same one; printed, and written at once."""
        same = [all(old.get(name) == row.get(name) for name in self.identity) for old in self.rows]
        self.rows = [row if is_same else old for old, is_same in zip(self.rows, same, strict=True)]
        self.rows += [] if any(same) else [row]
        print(json.dumps(row), flush=True)
        self.write()

    def write(self) -> None:
        """To the file."""
        from logitless.bench.machine import write_result

        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_result(self.path, {"environment": self.here, **self.more, "rows": self.rows})


def milliseconds(run: Callable[[], object], device: str, *, pause: int = 20_000_000) -> float:
    """Device time of one run. The device first pauses for ``pause`` cycles (20 million are 10 ms), so that the whole
    run is queued before it begins."""
    import torch

    if device != "cuda":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1000
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if pause:
        torch.cuda._sleep(pause)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


# --- pages


def between(page: str, begin: str, end: str, text: str) -> str:
    """The page with another text between its two marks."""
    before, _, rest = page.partition(begin)
    return f"{before}{begin}{text}{end}{rest.partition(end)[2]}"


def parsed(parser: argparse.ArgumentParser, tables: Tables | None) -> argparse.Namespace:
    """The arguments of a script with ``--output``; with ``--table`` its tables are written, and the process ends."""
    if tables is None:
        parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the JSON files")
        return parser.parse_args()
    add_table_arguments(parser)
    options = parser.parse_args()
    if options.table is not None:
        sys.exit(update(options.table, Path(sys.argv[0]).stem, tables(options.output), check=options.check))
    return options


def add_table_arguments(parser: argparse.ArgumentParser) -> None:
    """Where results are kept, and the pages whose tables are made from them."""
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument(
        "--table", type=Path, nargs="*", help="rewrite the tables of these pages, or of all; measures nothing"
    )
    parser.add_argument("--check", action="store_true", help="with --table: fail if a page is out of date")


def begin(script: str, part: str) -> str:
    """The line above a table in a page; ``part`` tells a script's tables apart.

    Example:
        >>> begin("head", "targets")
        '<!-- head targets: begin -->'
    """
    return f"<!-- {f'{script} {part}'.rstrip()}: begin -->"


def end(script: str, part: str) -> str:
    """The line below it."""
    return f"<!-- {f'{script} {part}'.rstrip()}: end -->"


def update(pages: Sequence[Path], script: str, tables: Mapping[str, str], *, check: bool) -> int:
    """Rewrite those of a script's tables, by their parts, that a page has; with ``check``, 1 if one is out of date.

    Args:
        pages: none for all that have one of them.
        script: its name.
        tables: by part.
        check: write nothing.

    Raises:
        DataError: a page with none of them.
    """
    stale = 0
    for path in pages or [page for page in PAGES if any(begin(script, part) in page.read_text() for part in tables)]:
        text = fresh = path.read_text()
        found = [part for part in tables if begin(script, part) in text and end(script, part) in text]
        if not found:
            raise DataError(
                needed=f"marks in {path}",
                given="none of " + ", ".join(repr(begin(script, part)) for part in tables),
                remedy="Add such a line where a table should go, and the same with 'end' below it.",
            )
        for part in found:
            fresh = between(fresh, begin(script, part), end(script, part), f"\n\n{tables[part]}\n\n")
        if fresh != text:
            stale = 1
            if check:
                print(f"{path} is out of date: run python benchmarks/{script}.py --table")
            else:
                path.write_text(fresh)
    return stale if check else 0

"""``benchmarks/step.py``: a whole optimizer step, beside TRL's trainer and an ordinary one.

Models with random weights take the same step again and again: forward, loss, backward, gradient clipping and AdamW.
Three parts, each measured where it is missing, so that a run that was cut short goes on where it ended:

    rows      a step over recorded rollouts of five workloads, with every sequence live or half of the groups
              (``step_rows``), and what its kernels take on one of them
    lengths   a step on one sequence, by length, under three heads and TRL
    longest   the longest sequence that fits into a card's memory, found by running under a limit on what this process
              may take (which stands in for the card), not by a formula
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import step_report
import step_rows
from logitless.bench.machine import environment, release, write_result
from logitless.errors import UnavailableError
from logitless.train.assembly.process import set_allocator
from logitless.train.learn.policy import Policy
from logitless.train.optim.optimizer import adamw, take_step
from logitless.train.recipe.model import ModelSection
from logitless.train.recipe.training import OptimizerSection
from script import add_table_arguments, among, main, needs_gpu, update
from shapes import SHAPES, TINY, WORKLOADS, Shape, Workload
from step_contenders import CONTENDERS, Rollouts, Trainer, trainer
from step_rows import OUT_OF_MEMORY

PARTS = ("rows", "lengths", "longest")
PACKAGES = ("triton", "transformers", "trl", "accelerate", "peft")
LENGTHS = (2048, 8192, 32768, 65536)
MEMORY = (24, 80, 141)
"""Cards, in GB of 10^9 bytes."""

SEARCHED = ("full-logits", "logitless-budget-0", "trl")
"""Who is asked for its longest sequence: ours as a recipe at its limit of memory would have it."""

MULTIPLE = 128
"""Lengths that are searched are multiples of this many tokens."""

PROBES = 6
PATIENCE = 3.0
"""A step on one sequence that should take more seconds is timed at once, without one to warm up."""


@dataclass
class Measurement:
    """Steps of one contender so far, or why there are none."""

    seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    loss: float | None = None
    grad_norm: float | None = None
    failure: str | None = None

    def row(self, num_tokens: int) -> dict[str, Any]:
        """The numbers of a result file."""
        median = statistics.median(self.seconds) if self.seconds else None
        return {
            "seconds": median,
            "seconds_min": min(self.seconds, default=None),
            "seconds_max": max(self.seconds, default=None),
            "runs": len(self.seconds),
            "tokens": num_tokens,
            "tokens_per_second": None if median is None else num_tokens / median,
            "peak_bytes": self.peak_bytes,
            "reserved_bytes": self.reserved_bytes,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "failure": self.failure,
        }


class Bench:
    """A model, its optimizer and everyone who trains it, on rollouts that change.

    Args:
        shape: of the model.
        workload: of the step.
        device: ``cuda`` or ``cpu``; in bfloat16 autocast on the first, in float32 on the second.
    """

    def __init__(self, shape: Shape, workload: Workload, device: str) -> None:
        self.shape, self.workload, self.device = shape, workload, device
        self.autocast = torch.bfloat16 if device == "cuda" else None
        self.model = shape.build(device)
        self.optimizer = adamw(self.model.parameters(), OptimizerSection(), torch.device(device))
        self.rollouts: Rollouts | None = None
        self._trainers: dict[str, Trainer] = {}

    def record(self, rollouts: Rollouts) -> None:
        """Train on these from now on."""
        self.rollouts = rollouts.recorded(Policy(self.model, autocast=self.autocast))
        for each in self._trainers.values():
            each.load(self.rollouts)
        release(self.device)

    def step(self, name: str, measurement: Measurement, *, timed: bool) -> None:
        """One step of a contender, added to what is known of it; without memory or package, the reason is."""
        assert self.rollouts is not None
        try:
            if name not in self._trainers:
                made = trainer(name, self.model, self.optimizer, self.workload, self.autocast)
                made.load(self.rollouts)
                self._trainers[name] = made
            self._clocked(self._trainers[name], measurement, timed=timed)
        except torch.OutOfMemoryError:
            measurement.failure = OUT_OF_MEMORY
        except Exception as error:  # a peer that cannot run here is a result, not the end of the run
            measurement.failure = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        if measurement.failure is not None:
            self.optimizer.zero_grad(set_to_none=True)
            release(self.device)

    def _clocked(self, contender: Trainer, measurement: Measurement, *, timed: bool) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss = contender.gradients()
        norm, taken = take_step(self.optimizer, rate=0.0, max_grad_norm=1.0)
        if self.device == "cuda":
            torch.cuda.synchronize()
            measurement.peak_bytes = torch.cuda.max_memory_allocated()
            measurement.reserved_bytes = torch.cuda.max_memory_reserved()
        if timed:
            measurement.seconds.append(time.perf_counter() - start)
        measurement.loss, measurement.grad_norm = loss, float(norm)
        if not taken:
            measurement.failure = "the gradient is not finite"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``benchmarks/step.py``."""
    names = ",".join(shape.name for shape in SHAPES if shape is not TINY)
    parser.add_argument("--models", default=names, help=f"by commas, of {names},{TINY.name}")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to measure, by commas")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="of the rows, by commas")
    parser.add_argument(
        "--contenders",
        default=",".join(name for name in step_rows.CONTENDERS if name not in step_rows.MOMENTS),
        help=f"of the rows, by commas; besides: {', '.join(step_rows.MOMENTS)}",
    )
    parser.add_argument("--live", default="1,0.5", help="of the rows: fractions of groups with an advantage, by commas")
    parser.add_argument(
        "--profiles", default="", help="workloads on which kernels of logitless are timed too, besides long, by commas"
    )
    parser.add_argument("--again", default="", help="contenders whose rows are thrown away first, by commas")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each contender, fewer where they are slow")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which nothing more of the rows is begun")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="completion tokens of single sequences")
    parser.add_argument("--memory", default=",".join(map(str, MEMORY)), help="cards, in GB, to search a length for")
    parser.add_argument(
        "--probe-seconds", type=float, default=12.0, help="a longer step is not run but its length extrapolated"
    )
    parser.add_argument(
        "--references",
        type=Path,
        default=Path("runs/step-references"),
        help="folder that keeps what steps are compared with",
    )
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the tool itself with --models tiny")
    add_table_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measures what is missing under ``--output``, or rewrites tables; 0 when all is well."""
    if args.table is not None:
        return update(args.table, "step", step_report.tables(args.output), check=args.check)
    if args.device == "cuda":
        needs_gpu("Use --device cpu --models tiny to try the tool itself.")
    set_allocator(ModelSection.model_fields["allocator"].default)  # as the trainer does
    args.output.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * args.minutes
    parts = among("a part", args.parts, PARTS)
    workloads = among("a workload", args.workloads, tuple(WORKLOADS))
    contenders = among("a contender", args.contenders, step_rows.CONTENDERS)
    live = [float(each) for each in args.live.split(",")]
    again = among("a contender", args.again, step_rows.CONTENDERS)
    names = among("a model", args.models, tuple(shape.name for shape in SHAPES))
    for shape in [next(shape for shape in SHAPES if shape.name == name) for name in names]:
        results = Results(args.output / shape.file, shape, args.device)
        if "rows" in parts:
            results.forget(again)
            step_rows.measure(
                shape,
                args.device,
                [case for case in step_rows.cases(workloads, contenders, live) if not results.has(case)],
                args.references,
                steps=args.steps,
                keep=results.keep,
                in_time=lambda: time.monotonic() < end,
                profiles=among("a workload", args.profiles, tuple(WORKLOADS)),
            )
            release(args.device)
        if "lengths" in parts or "longest" in parts:
            lengths = tuple(int(n) for n in args.lengths.split(",") if n) if "lengths" in parts else ()
            memory = tuple(int(n) for n in args.memory.split(",") if n) if "longest" in parts else ()
            _measure_lengths(results, shape, lengths, memory, args.device, args.probe_seconds)
            release(args.device)
    found = step_report.load(args.output)
    step_report.plot(found, args.output / "step.png")
    step_report.plot_profile(found, args.output / "step-profile.png")
    print(step_report.table(found))
    return 0


class Results:
    """The file of one model: what it has is not measured again on the same machine with the same packages.

    Args:
        path: of the file.
        shape: of the model.
        device: measured on.
    """

    def __init__(self, path: Path, shape: Shape, device: str) -> None:
        self.path, self.here = path, environment(device, PACKAGES)
        found = json.loads(path.read_text()) if path.exists() else {}
        with torch.device("meta"):
            model = shape.build("meta")
        self.document: dict[str, Any] = {
            "environment": found.get("environment", self.here),
            "model": {
                "name": shape.name,
                "title": shape.title,
                "parameters": sum(p.numel() for p in model.parameters()),
                "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
            },
            "rows": _known(found.get("rows", [])),
            "profile": found.get("profile", []),
            "lengths_environment": found.get("lengths_environment", self.here),
            "lengths": _known(found.get("lengths", [])),
            "longest": found.get("longest", []),
        }

    def has(self, case: step_rows.Case) -> bool:
        """Whether a case needs no measurement; rows of another machine are thrown away."""
        if self.document["environment"] != self.here:
            self.document |= {"environment": self.here, "rows": [], "profile": []}
        return any(case.names(row) for row in self.document["rows"])

    def forget(self, contenders: Sequence[str]) -> None:
        """Throw away rows and profiles of these."""
        for part in ("rows", "profile"):
            self.document[part] = [row for row in self.document[part] if row["contender"] not in contenders]

    def keep(self, part: str, rows: list[dict[str, Any]]) -> None:
        """Add rows to a part, print them and write the file."""
        self.document[part] += rows
        self.document["rows"] = step_rows.with_ratios(self.document["rows"])
        write_result(self.path, self.document)
        for row in rows:
            print(part, json.dumps(row), flush=True)


def _measure_lengths(
    results: Results, shape: Shape, lengths: tuple[int, ...], memory: tuple[int, ...], device: str, probe_seconds: float
) -> None:
    """Measures single sequences that the file does not have yet, and writes it after every length."""
    document, workload = results.document, shape.workload("long")
    if document["lengths_environment"] != results.here:
        document |= {"lengths_environment": results.here, "lengths": [], "longest": []}
    bench = Bench(shape, workload, device)
    for length in lengths:
        known = {row["contender"] for row in document["lengths"] if row["completion_tokens"] == length}
        missing = [
            name
            for name in CONTENDERS
            if name not in known and _predicted_seconds(document["lengths"], name, length) <= probe_seconds
        ]
        if missing:
            slow = {n for n in missing if _predicted_seconds(document["lengths"], n, length) > PATIENCE}
            results.keep("lengths", _on_one_sequence(bench, length, missing, slow))
    if device == "cuda":
        for gigabytes in memory:
            known = {row["contender"] for row in document["longest"] if row["memory_gb"] == gigabytes}
            for name in SEARCHED:
                if name not in known:
                    results.keep("longest", _longest_row(bench, name, gigabytes, document["lengths"], probe_seconds))


def _known(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What need not be measured again: another failure may be gone with a package that was missing."""
    return [row for row in rows if row["failure"] in (None, OUT_OF_MEMORY)]


def _on_one_sequence(bench: Bench, length: int, names: Sequence[str], slow: Collection[str]) -> list[dict[str, Any]]:
    """Rows of the step on a single sequence; those who are slow have no step to warm up."""
    rollouts = Rollouts.single(length, bench.workload, bench.shape.vocabulary)
    bench.record(rollouts)
    rows = []
    for name in names:
        measurement = Measurement()
        if name not in slow:
            bench.step(name, measurement, timed=False)
        if measurement.failure is None:
            bench.step(name, measurement, timed=True)
        release(bench.device)
        rows.append({"contender": name, "completion_tokens": length, **measurement.row(rollouts.num_tokens)})
    return rows


# --- the longest sequence that fits -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Longest:
    """The end of a search.

    Args:
        completion_tokens: the length.
        how: ``measured``: a step of this length ran under the limit; ``extrapolated``: the line through measured peaks
            reaches the limit there, and a step of that length would take too long to run.
        out_of_memory_at: the shortest length that did not fit, or None.
    """

    completion_tokens: int
    how: str
    out_of_memory_at: int | None


def longest(
    peaks: Mapping[int, int], limit: int, affordable: Callable[[int], bool], peak_of: Callable[[int], int | None]
) -> Longest:
    """The longest sequence whose step fits into ``limit`` bytes, to 3 per cent or a few probes.

    Args:
        peaks: bytes by length, measured without a limit; at least two.
        limit: bytes.
        affordable: whether a step of this length may be run.
        peak_of: runs one under the limit: its peak, or None where it did not fit.

    Example:
        >>> run = lambda tokens: 1000 + 10 * tokens if tokens <= 1900 else None
        >>> longest({100: 2000, 200: 3000}, 21_000, lambda _: True, run)
        Longest(completion_tokens=1792, how='measured', out_of_memory_at=1920)
    """
    known, best, misses = dict(peaks), 0, 0
    too_long: int | None = None
    for _ in range(PROBES):
        length = _where_line_reaches(limit, known)
        if too_long is not None:
            length = min(length, int(0.97 * too_long))
        if too_long is not None and misses > 1:
            length = (max((n for n, peak in known.items() if peak <= limit), default=0) + too_long) // 2
        length = length // MULTIPLE * MULTIPLE
        if length <= 1.03 * best:
            break
        if not affordable(length):
            return Longest(length, "extrapolated", too_long)
        peak = peak_of(length)
        if peak is None:
            too_long, misses = length, misses + 1
        else:
            best, known[length], misses = length, peak, 0
    return Longest(best, "measured", too_long)


def _where_line_reaches(limit: int, peaks: Mapping[int, int]) -> int:
    """Length at which the line through the two points nearest to the limit reaches it; 0 if it never was below."""
    points = sorted(peaks.items())
    above = next((i for i, (_, peak) in enumerate(points) if peak > limit), len(points) - 1)
    (n0, m0), (n1, m1) = points[max(above, 1) - 1], points[max(above, 1)]
    return max(0, n0 + (limit - m0) * (n1 - n0) // max(m1 - m0, 1))


def _predicted_seconds(rows: Sequence[Mapping[str, Any]], name: str, length: int) -> float:
    """What a step on one sequence should take, as ``a length + b length^2`` through the two longest measured."""
    points = sorted((r["completion_tokens"], r["seconds"]) for r in rows if r["contender"] == name and r["seconds"])
    if not points:
        return 0.0
    n1, s1 = points[-1]
    n0, s0 = points[-2] if len(points) > 1 else (0, 0.0)
    growth = max(0.0, (s1 / n1 - s0 / n0) / (n1 - n0)) if n0 else 0.0
    return float((s1 / n1 + growth * (length - n1)) * length)


def _longest_row(
    bench: Bench, name: str, gigabytes: int, rows: list[dict[str, Any]], probe_seconds: float
) -> list[dict[str, Any]]:
    """The row of one contender and card; none where too little is known to search from."""
    peaks = {r["completion_tokens"]: r["peak_bytes"] for r in rows if r["contender"] == name and r["failure"] is None}
    if len(peaks) < 2:
        return []
    limit = gigabytes * 10**9
    available = torch.cuda.get_device_properties(bench.device).total_memory

    def affordable(length: int) -> bool:
        return limit <= available and _predicted_seconds(rows, name, length) <= probe_seconds

    def peak_of(length: int) -> int | None:
        bench.record(Rollouts.single(length, bench.workload, bench.shape.vocabulary))
        measurement = Measurement()
        with _limited(limit / available):
            bench.step(name, measurement, timed=False)
        if measurement.failure not in (None, OUT_OF_MEMORY):
            raise UnavailableError(
                needed=f"a step of {name} on {length} tokens that fits or does not",
                given=str(measurement.failure),
                remedy="Repair that, or leave the search out with --skip-search.",
            )
        fits = measurement.failure is None and (measurement.reserved_bytes or 0) <= limit
        return measurement.peak_bytes if fits else None

    found = longest(peaks, limit, affordable, peak_of)
    return [{"contender": name, "memory_gb": gigabytes, **asdict(found)}]


@contextmanager
def _limited(fraction: float) -> Iterator[None]:
    """Inside, this process may hold no more than a fraction of the device's memory."""
    torch.cuda.set_per_process_memory_fraction(min(1.0, fraction))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))

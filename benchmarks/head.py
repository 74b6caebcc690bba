"""``benchmarks/head.py``: time, memory and error of every way to score and train through the head.

All contenders run interleaved in one process on the same inputs; every ratio is against the bare matrix products of
the same round's inputs. What "bare" is: plain cuBLAS products of the shapes that a head cannot do without (forward,
gradient of hidden states, gradient of the weight), in chunks of 4096 rows with a chunk's bfloat16 output overwritten
by the next: no softmax, no sums, nothing kept. Times are the device's: the queue is filled before the clock starts.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import head_report
from head_contenders import CONTENDERS, Problem, bare
from logitless.bench.machine import environment, release
from logitless.errors import ConfigurationError
from script import Rows, add_table_arguments, main, milliseconds, needs_gpu, update

ROWS = 16384
LENGTHS = (2048, 4096, 8192, 32768, 65536, 131072)
LIVE = (1.0, 0.5, 0.2, 0.0)
RUN = 256
"""Rows without gradient come in runs of this length."""

PACKAGES = ("triton", "trl", "liger-kernel", "cut-cross-entropy")
ERROR_ROWS = 256
RANK = 16
PATIENCE = 0.8
"""Seconds a case may have taken before it sits out further rounds."""

IDENTITY = ("contender", "N", "live", "trained", "budget_bytes")


@dataclass(frozen=True)
class Shape:
    """A head that is measured.

    Example:
        >>> Shape.parse("896,151936").file
        'head-D896-V151936.json'
    """

    width: int
    vocabulary: int
    model: str = ""

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """From ``D,V``."""
        try:
            width, vocabulary = (int(part) for part in text.split(","))
        except ValueError as error:
            raise ConfigurationError(
                needed="a shape as D,V", given=repr(text), remedy="Write for example --shape 896,151936."
            ) from error
        return next((s for s in SHAPES if (s.width, s.vocabulary) == (width, vocabulary)), cls(width, vocabulary))

    @property
    def file(self) -> str:
        return f"head-D{self.width}-V{self.vocabulary}.json"


SHAPES = (
    Shape(896, 151936, "Qwen2.5-0.5B"),
    Shape(2048, 151936, "Qwen3-1.7B"),
    Shape(4096, 128256, "Llama-3.1-8B"),
    Shape(8192, 128256, "Llama-3.1-70B"),
)


@dataclass(frozen=True)
class Case:
    """One thing to time: who, how many rows, which of them have a gradient, what is trained."""

    contender: str
    N: int
    live: float
    trained: str
    budget_bytes: int | None = None

    @property
    def bare(self) -> "Case":
        """The products this case cannot do without."""
        trained = {"lora": "frozen"}.get(self.trained, self.trained)
        return Case("bare", self.N, 1.0, trained)


@dataclass
class Measurement:
    """Times of one case so far, in milliseconds, or why there are none."""

    times: list[float]
    peak_bytes: int | None = None  # beyond inputs and returned gradients
    failure: str | None = None


def cases(shape: Shape, rows: int, lengths: tuple[int, ...]) -> Iterator[Case]:
    """Everything that is measured at a shape.

    Every contender at every live fraction (the oracle, which skips nothing, at 1), with the weight trained and frozen
    and, where it can, with LoRA; memory budgets of the fused head; the other lengths for bare products, the fused
    head and TRL.

    Example:
        >>> sum(case.contender == "trl" for case in cases(SHAPES[0], 16384, (2048,)))
        10
    """
    for trained in ("weight", "frozen", "none"):
        yield Case("bare", rows, 1.0, trained)
    for name, contender in CONTENDERS.items():
        for trained in contender.trained:
            for live in LIVE if trained != "none" and contender.skips else (1.0,):
                yield Case(name, rows, live, trained)
    full = 2 * shape.vocabulary * rows
    for budget in (0, full // 4, full // 2):
        yield Case("logitless-fused", rows, 1.0, "weight", budget)
    for n in lengths:
        for name in ("bare", "logitless-fused", "trl"):
            yield Case(name, n, 1.0, "weight")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``benchmarks/head.py``."""
    parser.add_argument(
        "--shape", action="append", type=Shape.parse, help="D,V; may be repeated (default: four models)"
    )
    parser.add_argument("--rows", type=int, default=ROWS, help="tokens at which everything is measured")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="other numbers of tokens, by commas")
    parser.add_argument("--contenders", default="", help="only these, by commas (bare always runs)")
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each case")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the tool itself")
    add_table_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measures what is missing under ``--output``, or rewrites tables; 0 when all is well."""
    if args.table is not None:
        return update(args.table, "head", head_report.tables(args.output), check=args.check)
    if args.device == "cuda":
        needs_gpu("Use --device cpu with a small --shape to try the tool itself.")
    args.output.mkdir(parents=True, exist_ok=True)
    wanted = {"bare", *filter(None, args.contenders.split(","))} if args.contenders else None
    lengths = tuple(int(n) for n in args.lengths.split(",") if n)
    for shape in args.shape or SHAPES:
        measure(shape, args.rows, lengths, args.output / shape.file, args.device, args.rounds, wanted)
    results = head_report.load(args.output)
    head_report.plot(results, args.output / "head.png")
    print(head_report.summary(results))
    return 0


def measure(
    shape: Shape, rows: int, lengths: tuple[int, ...], path: Path, device: str, rounds: int, wanted: set[str] | None
) -> None:
    """Measures the cases that ``path`` does not have yet and writes it, one number of rows at a time."""
    results = Rows(path, environment(device, PACKAGES), IDENTITY, shape=asdict(shape))
    # another failure may be gone with a package that was missing
    results.rows = [row for row in results.rows if row["failure"] in (None, "out of memory")]
    todo: dict[int, list[Case]] = {}
    for case in cases(shape, rows, lengths):
        if (wanted is None or case.contender in wanted) and not results.has(**asdict(case)):
            todo.setdefault(case.N, []).append(case)
    for n, missing in todo.items():
        needed = {c.bare for c in missing}
        group = [*sorted(needed, key=lambda c: c.trained), *(c for c in missing if c not in needed)]
        for row in _measured(shape, n, group, device, rounds, with_errors=n == rows):
            results.add(row)


def _measured(
    shape: Shape, rows: int, group: list[Case], device: str, rounds: int, *, with_errors: bool
) -> list[dict[str, Any]]:
    """Rows of results for cases of one length, measured in turns."""
    problem = Problem.draw(rows, shape.width, shape.vocabulary, rank=RANK, device=device, run=RUN)
    found = {case: Measurement([]) for case in group}
    for case, measurement in found.items():
        _attempt(case, problem, measurement, timed=False)
        release(device)
    for _ in range(rounds):
        for case, measurement in found.items():
            if measurement.failure is None and sum(measurement.times) < PATIENCE * 1000:
                _attempt(case, problem, measurement, timed=True)
    del problem
    release(device)
    errors = _errors(shape, {case.contender for case in group}, device) if with_errors else {}
    return [_row(shape, case, m, found[case.bare], errors.get(case.contender)) for case, m in found.items()]


def _attempt(case: Case, problem: Problem, measurement: Measurement, *, timed: bool) -> None:
    """One run of a case: for its time, or to compile and warm up; either way its memory is looked at."""
    part = problem.with_live(case.live)
    part.clear()
    try:
        runner = _runner(case, part)
        before = _allocated(problem.device)
        ms = milliseconds(runner, problem.device)
        peak = _peak(problem.device)
        if timed:
            measurement.times.append(ms)
        if peak is not None and before is not None:
            beyond = peak - before - part.gradient_bytes()
            measurement.peak_bytes = min(beyond, measurement.peak_bytes or beyond)
    except torch.OutOfMemoryError:
        measurement.failure = "out of memory"
    except Exception as error:  # a peer that cannot run here is a result, not the end of the run
        measurement.failure = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    finally:
        part.clear()


def _runner(case: Case, problem: Problem) -> Callable[[], object]:
    if case.contender == "bare":
        return bare(problem, case.trained)
    contender = CONTENDERS[case.contender]
    return lambda: contender.run(problem, case.trained, case.budget_bytes)


def _allocated(device: str) -> int | None:
    """Bytes allocated now; the peak counts from here."""
    if device != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak(device: str) -> int | None:
    return torch.cuda.max_memory_allocated() if device == "cuda" else None


def _errors(shape: Shape, contenders: set[str], device: str) -> dict[str, dict[str, float | None]]:
    """Errors against float64 on ERROR_ROWS rows: the largest of logp, and dX's and dW's in the Frobenius norm."""
    problem = Problem.draw(ERROR_ROWS, shape.width, shape.vocabulary, rank=RANK, device=device, run=RUN // 4)
    x, w = problem.hidden.detach().double(), problem.weight.detach().double()
    z = x @ w.T
    p = z.log_softmax(1)
    logp = p.gather(1, problem.target[:, None]).squeeze(1)
    dz = p.exp_().mul_(-problem.upstream[:, None].double())
    dz[torch.arange(ERROR_ROWS, device=device), problem.target] += problem.upstream.double()
    dx, dw = dz @ w, dz.T @ x
    del z, p, dz
    found: dict[str, dict[str, float | None]] = {}
    for name in contenders - {"bare"}:
        try:
            given = CONTENDERS[name].run(problem, "weight", None)
            assert problem.hidden.grad is not None
            assert problem.weight.grad is not None
            found[name] = {
                "logp_max_error": None if given is None else float((given.double() - logp).abs().max()),
                "dx_rel_error": float((problem.hidden.grad.double() - dx).norm() / dx.norm()),
                "dw_rel_error": float((problem.weight.grad.double() - dw).norm() / dw.norm()),
            }
        except Exception as error:
            print(f"{name}: no errors measured ({type(error).__name__})")
        problem.clear()
    return found


def _row(
    shape: Shape, case: Case, mine: Measurement, against: Measurement, errors: dict[str, float | None] | None
) -> dict[str, Any]:
    ms = statistics.median(mine.times) if mine.times else None
    base = statistics.median(against.times) if against.times else None
    row = {
        "contender": case.contender,
        "D": shape.width,
        "V": shape.vocabulary,
        "N": case.N,
        "live": case.live,
        "trained": case.trained,
        "budget_bytes": case.budget_bytes,
        "ms": ms,
        "ms_min": min(mine.times, default=None),
        "ms_max": max(mine.times, default=None),
        "bare_ms": base,
        "ratio_to_bare": None if ms is None or base is None else ms / base,
        "peak_bytes": mine.peak_bytes,
        "failure": mine.failure,
    }
    plain = case.trained == "weight" and case.live == 1.0 and case.budget_bytes is None
    names = ("logp_max_error", "dx_rel_error", "dw_rel_error")
    return row | {name: errors[name] if errors is not None and plain else None for name in names}


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))

"""A divergence of two models over the whole vocabulary, forward and backward: time, memory and errors.

    python benchmarks/divergence.py                                 # results/divergence-GPU.json, about a minute
    python benchmarks/divergence.py --device cpu --widths 8,16 --vocabulary 40 --rows 32 --output FOLDER   # tries it

Every contender runs interleaved in one process on the same bfloat16 inputs. Two sets of bare cuBLAS products, in chunks
of 4096 rows whose bfloat16 output the next chunk overwrites, stand beside them:

    bare    student's logits, teacher's logits, gradient of the student's hidden states, gradient of its weight
    logits  the two products for the logits alone; a contender that keeps no logits computes them again in the backward

A row's ``ratio_to_bare`` is against the first, ``ratio_to_bare_recomputed`` against the sum of both. Times are the
device's, medians; ``kernels_ms`` says where those of ``logitless-fused`` and ``bare`` go. Errors are against float64 on
128 rows, also those of float32 logits (``float32-logits``).
"""

import argparse
import functools
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from logitless.bench.machine import environment, release
from logitless.errors import ConfigurationError
from logitless.float32_sums import float32_product
from logitless.head import token_divergence
from logitless.head.divergence_reference import value_of
from logitless.head.measure import Measure
from script import RESULTS, Rows, main, milliseconds, needs_gpu, short_name

WIDTHS = ("896,2048", "2048,2048", "2048,4096", "4096,4096")
BETAS = {"forward_kl": 0.0, "reverse_kl": 1.0, "jensen_shannon": 0.5, "total_variation": None}
BUDGETS = {
    "logitless-fused": ("fused", None),
    "logitless-fused-1GiB": ("fused", 2**30),
    "logitless-chunked": ("chunked", None),
}
CHUNK, ERROR_ROWS = 4096, 128
PATIENCE = 500.0
"""Milliseconds that a case may have taken before it sits out further rounds."""

IDENTITY = ("contender", "kind", "D", "E", "V", "N")
PACKAGES = ("triton", "trl")


@dataclass
class Streams:
    """A student, a teacher with which it shares nine tenths of the narrower width, and the incoming gradient."""

    hidden: Tensor
    weight: Tensor
    hidden_teacher: Tensor
    weight_teacher: Tensor
    target: Tensor
    upstream: Tensor

    @classmethod
    def draw(cls, rows: int, width: int, width_teacher: int, vocabulary: int, device: str) -> "Streams":
        """Logits have a standard deviation of 4 to 5."""
        generator = torch.Generator(device).manual_seed(0)
        common = min(width, width_teacher) * 9 // 10

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, generator=generator, dtype=torch.bfloat16)

        hidden, hidden_teacher = normal(rows, width), normal(rows, width_teacher)
        weight = normal(vocabulary, width).mul_(4 / width**0.5)
        weight_teacher = normal(vocabulary, width_teacher).mul_(4 / width_teacher**0.5)
        hidden_teacher[:, :common] = hidden[:, :common]
        weight_teacher[:, :common] = weight[:, :common]
        target = torch.randint(0, vocabulary, (rows,), device=device, generator=generator)
        upstream = torch.randn(rows, device=device, generator=generator) / rows
        return cls(hidden.requires_grad_(), weight.requires_grad_(), hidden_teacher, weight_teacher, target, upstream)

    def first(self, rows: int) -> "Streams":
        """The same of fewer rows."""
        hidden, hidden_teacher = self.hidden.detach()[:rows].requires_grad_(), self.hidden_teacher[:rows]
        return Streams(
            hidden, self.weight, hidden_teacher, self.weight_teacher, self.target[:rows], self.upstream[:rows]
        )

    def gradients(self, divergence: Tensor) -> tuple[Tensor, ...]:
        """By the student's hidden states and weight."""
        return torch.autograd.grad(divergence, (self.hidden, self.weight), self.upstream[: len(divergence)])


Run = Callable[[Streams], tuple[Tensor, ...]]
"""A contender: its divergence and both gradients, or nothing."""


def logitless(given: Streams, kind: str, backend: str, budget: int | None) -> tuple[Tensor, ...]:
    """Divergence and both gradients."""
    streams = (given.hidden, given.weight, given.hidden_teacher, given.weight_teacher, given.target)
    beta = BETAS[kind] if kind == "jensen_shannon" else None
    found = token_divergence(*streams, kind=kind, beta=beta, backend=backend, memory_budget=budget)  # type: ignore[arg-type]
    return found.divergence.detach(), *given.gradients(found.divergence)


def trl(given: Streams, kind: str) -> tuple[Tensor, ...]:
    """TRL's own loss kernel; it has no total variation, and no target."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    value, _ = ChunkedDivergenceFunction.apply(
        given.hidden, given.weight, None, given.hidden_teacher, given.weight_teacher, None, BETAS[kind]
    )
    return value.detach(), *given.gradients(value)


def float32_logits(given: Streams, kind: str) -> tuple[Tensor, ...]:
    """Full logits in float32, and plain autograd down to them; its gradient is stored in bfloat16 for the products."""
    x, w = given.hidden.detach(), given.weight.detach()
    z = float32_product(x, w.T).requires_grad_()
    value, u = _value_and_slope(z, float32_product(given.hidden_teacher, given.weight_teacher.T), given, kind)
    u = u.bfloat16()
    return value, float32_product(u, w).bfloat16(), float32_product(u.T, x).bfloat16()


def exact(given: Streams, kind: str) -> tuple[Tensor, ...]:
    """In float64."""
    x, w = given.hidden.detach().double(), given.weight.detach().double()
    z = (x @ w.T).requires_grad_()
    value, u = _value_and_slope(z, given.hidden_teacher.double() @ given.weight_teacher.double().T, given, kind)
    return value, u @ w, u.T @ x


def _value_and_slope(z: Tensor, y: Tensor, given: Streams, kind: str) -> tuple[Tensor, Tensor]:
    measure = Measure(kind, BETAS[kind] or 0.5)  # type: ignore[arg-type]
    value = value_of(z.log_softmax(1), y.log_softmax(1), measure)
    return value.detach(), torch.autograd.grad(value, z, given.upstream.to(z.dtype))[0]


def bare(given: Streams, *, gradients: bool) -> Run:
    """The products alone; buffers are made here, outside of the clock."""
    x, w, x_teacher, w_teacher = (
        t.detach() for t in (given.hidden, given.weight, given.hidden_teacher, given.weight_teacher)
    )
    rows = min(CHUNK, len(x))
    logits = x.new_empty(rows, len(w))
    slope = torch.randn(rows if gradients else 1, len(w), device=x.device, dtype=x.dtype)
    of_hidden, of_weight = torch.empty_like(x[:rows]), torch.empty_like(w) if gradients else w

    def products(_: Streams) -> tuple[()]:
        for start in range(0, len(x), rows):
            part, part_teacher = x[start : start + rows], x_teacher[start : start + rows]
            n = len(part)
            torch.mm(part, w.T, out=logits[:n])
            torch.mm(part_teacher, w_teacher.T, out=logits[:n])
            if gradients:
                torch.mm(slope[:n], w, out=of_hidden[:n])
                torch.mm(slope[:n].T, part, out=of_weight)
        return ()

    return products


def kernels_ms(run: Run, given: Streams) -> dict[str, float]:
    """Milliseconds of one run on the device, by what its kernels do."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run(given)
        torch.cuda.synchronize()
    return grouped({event.key: event.self_device_time_total / 1000 for event in found.key_averages()})


def grouped(of_kernels: dict[str, float]) -> dict[str, float]:
    """Sums over the library's products, over each kernel of the two streams by its name, and over the rest.

    Example:
        >>> grouped({"nvjet_hsh_128x256": 2.0, "sm90_xmma_gemm": 1.0, "pair_sums": 3.0, "copy": 0.5, "cudaMalloc": 0.0})
        {'products': 3.0, 'pair_sums': 3.0, 'other': 0.5}
    """
    found: dict[str, float] = {}
    for name, ms in of_kernels.items():
        is_product = any(word in name for word in ("nvjet", "gemm", "cutlass", "xmma"))
        kind = "products" if is_product else name if name.startswith("pair_") else "other"
        if ms:
            found[kind] = found.get(kind, 0.0) + ms
    return found


@dataclass
class Found:
    """What was found of one contender so far."""

    times: list[float]
    peak_bytes: int | None = None  # beyond inputs and returned gradients
    failure: str | None = None

    def attempt(self, run: Run, given: Streams, *, timed: bool) -> None:
        """One run: for its time, or to compile and warm up; either way its memory is looked at."""
        if self.failure is not None or sum(self.times) > PATIENCE:
            return
        on_gpu, returned = given.hidden.is_cuda, []
        try:
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() if on_gpu else 0
            ms = milliseconds(lambda: returned.extend(run(given)), given.hidden.device.type)
            if timed:
                self.times.append(ms)
            if on_gpu:
                size = sum(x.numel() * x.element_size() for x in returned)
                self.peak_bytes = torch.cuda.max_memory_allocated() - before - size
        except torch.OutOfMemoryError:
            self.failure = "out of memory"
        except Exception as error:  # a peer that cannot run here is a result, not the end of the run
            self.failure = f"{type(error).__name__}: {error}".splitlines()[0][:200]


def contenders(kinds: list[str], device: str) -> dict[tuple[str, str], Run]:
    """What is timed, by its name and divergence; of total variation, the fused backend alone."""
    found: dict[tuple[str, str], Run] = {}
    for kind in kinds:
        for name, (backend, budget) in BUDGETS.items():
            alone = kind == "total_variation" and name != "logitless-fused"
            if not alone and (backend != "fused" or device == "cuda"):
                found[name, kind] = functools.partial(logitless, kind=kind, backend=backend, budget=budget)
        if BETAS[kind] is not None:
            found["trl", kind] = functools.partial(trl, kind=kind)
    return found


def errors(given: Streams, kind: str, runs: dict[str, Run]) -> dict[str, dict[str, float]]:
    """The largest error of a divergence, and those of both gradients in the Frobenius norm."""
    value, *wanted = exact(given, kind)
    result = {}
    for name, run in runs.items():
        try:
            found, *gradients = run(given)
        except Exception:  # its failure stands beside its time
            continue
        relative = [float((g.double() - x).norm() / x.norm()) for g, x in zip(gradients, wanted, strict=True)]
        worst = float((found.double() - value).abs().max())
        result[name] = {"max_error": worst, "dx_rel_error": relative[0], "dw_rel_error": relative[1]}
    return result


def measure(widths: tuple[int, int], options: argparse.Namespace, results: Rows) -> None:
    """All rows of one pair of widths."""
    (d, e), v, n = widths, options.vocabulary, options.rows
    kinds = [kind for kind in options.kinds.split(",") if kind]
    shape = {"D": d, "E": e, "V": v, "N": n}
    given = Streams.draw(n, d, e, v, options.device)
    ours = contenders(kinds, options.device)
    runs = {("bare", ""): bare(given, gradients=True), ("logits", ""): bare(given, gradients=False)} | ours
    found = {name: Found([]) for name in runs}
    for number in range(options.rounds + 1):
        for name, run in runs.items():
            found[name].attempt(run, given, timed=number > 0)
    where = {}
    if options.device == "cuda":
        for name in runs:
            if name[0] in ("bare", "logitless-fused") and found[name].failure is None:
                where[name] = kernels_ms(runs[name], given)
    del runs, run
    whole, logits = (statistics.median(found[name, ""].times) for name in ("bare", "logits"))
    few, errors_of = given.first(ERROR_ROWS), {}
    for kind in kinds:
        release(options.device)
        some = {name: run for (name, of), run in ours.items() if of == kind}
        plain = {"float32-logits": functools.partial(float32_logits, kind=kind)}
        for name, of_name in errors(few, kind, plain | some).items():
            errors_of[name, kind] = of_name
    for (name, kind), each in found.items():
        ms = statistics.median(each.times) if each.times else None
        ratios = (None, None) if ms is None else (ms / whole, ms / (whole + logits))
        row = {"contender": name, "kind": kind, **shape, "ms": ms, "bare_ms": whole, "logits_ms": logits}
        row |= dict(zip(("ratio_to_bare", "ratio_to_bare_recomputed"), ratios, strict=True))
        row |= {"peak_bytes": each.peak_bytes, "failure": each.failure}
        if (name, kind) in where:
            row["kernels_ms"] = where[name, kind]
        results.add(row | errors_of.get((name, kind), {}))
    for kind in kinds:
        results.add({"contender": "float32-logits", "kind": kind, **shape, **errors_of["float32-logits", kind]})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``benchmarks/divergence.py``."""
    parser.add_argument("--widths", action="append", help="student's and teacher's, D,E; may be repeated")
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--rows", type=int, default=16384, help="tokens")
    parser.add_argument("--kinds", default=",".join(BETAS), help="divergences, by commas")
    parser.add_argument("--rounds", type=int, default=3, help="timed runs of each case")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the tool itself")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the JSON file")


def run(options: argparse.Namespace) -> int:
    """Measures every pair of widths and writes the file after each."""
    if options.device == "cuda":
        needs_gpu("Use --device cpu with small --widths to try the tool itself.")
    path = options.output / f"divergence-{short_name(options.device)}.json"
    results = Rows(path, environment(options.device, PACKAGES), IDENTITY)
    for text in options.widths or WIDTHS:
        try:
            width, width_teacher = (int(part) for part in text.split(","))
        except ValueError as error:
            raise ConfigurationError(
                needed="widths as D,E", given=repr(text), remedy="Write for example --widths 896,2048."
            ) from error
        measure((width, width_teacher), options, results)
        release(options.device)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))

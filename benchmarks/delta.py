"""One gated delta net, in Qwen3.5's shape: bits of decoding and of packed rows, and its time beside fla.

    python benchmarks/delta.py --out FILE.json            # on a GPU
    python benchmarks/delta.py --out FILE.json --tiny     # tries the script itself

Bits: outputs of tokens decoded from their first token, or from a prompt's end, against the same tokens in packed rows;
packed rows against other orders and sequences alone. Time: a decoding step in CUDA graphs, and forward and forward +
backward of a packed row, beside flash-linear-attention's (``fla``) where it is installed, and beside the time that the
memory takes. Error: of outputs and gradients against the float64 recurrence. Tiles: each one's bits and time, in a
process of their own, and a packed row with the fastest.

A kernel that fails is named: where bits are compared, each launch is waited for.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import Timer
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.bench.machine import environment, write_result
from logitless.models.kernels import delta_launch as delta
from logitless.models.kernels.compiling import compiled_together
from logitless.models.kernels.delta_launch import Chunks, DeltaCache, DeltaTile, DeltaTiles
from logitless.models.row_invariant.delta_net import DeltaRule
from logitless.quick_launch import QuickKernel
from script import command_line, milliseconds

BEGAN = time.perf_counter()


class Case(NamedTuple):
    """Shape and amounts of work."""

    key_heads: int
    heads: int
    width: int
    size: int
    row_tokens: int
    sequences: int
    longest: int
    workloads: dict[str, list[int]]
    decoded: tuple[int, ...]
    error_tokens: int


def ragged(total: int) -> list[int]:
    """Lengths from 64 to 512 that fill a row."""
    lengths, step = [], 0
    while total > 0:
        lengths.append(min(total, 64 + step * 197 % 449))
        total, step = total - lengths[-1], step + 1
    return lengths


REAL = Case(
    16, 32, 128, 64, 16384, 256, 511,
    {"1 x 16384": [16384], "16 x 1024": [1024] * 16, "64 to 512": ragged(16384)}, (16, 64, 256, 512), 256,
)  # fmt: skip
TINY = Case(1, 2, 16, 16, 96, 4, 37, {"2 x 40": [40, 40]}, (2,), 20)

# Two warps multiply without Hopper's products of warp groups (wgmma), which assemblers have miscompiled.
SCANS = [(64, 4, 2), (64, 4, 1), (64, 4, 3), (32, 4, 2), (32, 4, 3), (64, 8, 2), (128, 8, 1), (128, 8, 2),
         (32, 2, 1), (32, 2, 2)]  # fmt: skip
REVERSES = [(64, 4, 2), (64, 4, 1), (32, 4, 2), (32, 4, 3), (64, 8, 2), (128, 8, 1), (32, 2, 1)]
OUTPUTS = [(64, 4, 1), (128, 4, 1), (128, 8, 1), (32, 4, 1)]
SOLVES = [(0, 2, 1), (0, 4, 1), (0, 8, 1)]
GRADIENTS = [  # columns, warps, stages, depth
    (64, 8, 2, 64), (64, 8, 1, 64), (64, 4, 2, 64), (32, 8, 2, 64), (32, 4, 2, 64), (64, 8, 2, 128), (32, 8, 2, 128),
    (128, 8, 1, 64), (64, 4, 2, 32), (128, 4, 1, 32),
]  # fmt: skip
STEPS = [  # columns, warps, stages, whether the state is read before the solve
    (128, 4, 1, False), (64, 4, 1, False), (32, 4, 1, False), (128, 8, 1, False), (128, 4, 1, True), (128, 8, 1, True),
]  # fmt: skip
ADVANCES = [(64, 4, 1), (128, 8, 1), (32, 4, 1)]


class Record:
    """The result file, written after each row."""

    def __init__(self, path: Path, device: str) -> None:
        self.path, self.rows = path, list[dict[str, Any]]()
        self.machine = environment(device, ("triton", "flash-linear-attention", "fla-core"))

    def add(self, **row: Any) -> None:
        """One more row."""
        self.rows.append(row | {"at": round(time.perf_counter() - BEGAN, 1)})
        print(json.dumps(self.rows[-1]), flush=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_result(self.path, {"environment": self.machine, "rows": self.rows})


@contextmanager
def reported(record: Record, what: str) -> Iterator[None]:
    """A failure becomes a row, and the other measurements go on."""
    try:
        yield
    except Exception as error:  # of another library, whatever it is
        record.add(failed=what, error_message=repr(error)[:1000])


def reason(said: str) -> str:
    """The last line of what a process printed, which names its error; a traceback would name this machine's folders."""
    return next((line for line in reversed(said.splitlines()) if line.strip()), "")[:1000]


Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def draw(case: Case, tokens: int, device: str, seed: int = 0) -> Inputs:
    """Queries, keys (alike, as after SiLU), values, log-decays of 0.001 to 3, beta."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    query, key = (torch.nn.functional.silu(normal(tokens, case.key_heads, case.width)).bfloat16() for _ in range(2))
    value = normal(tokens, case.heads, case.width).bfloat16()
    decay = -torch.exp(torch.rand(tokens, case.heads, generator=generator, device=device) * 8.0 - 6.9)
    return query, key, value, decay, normal(tokens, case.heads).sigmoid()


def at(inputs: Inputs, rows: Tensor) -> Inputs:
    """Some rows of each."""
    query, key, value, decay, beta = (x[rows] for x in inputs)
    return query, key, value, decay, beta


def differing(a: Tensor, b: Tensor) -> int:
    """Tokens that differ in any bit."""
    return int((a != b).flatten(1).any(1).sum()) if len(a) else 0


# --- bits


def packed(case: Case, inputs: Inputs, lengths: Sequence[int], tiles: DeltaTiles, device: str) -> Tensor:
    """Outputs of one packed row."""
    return delta.forward(*inputs, Chunks.of(lengths, case.size, device), tiles)[0]


def laws(case: Case, record: Record, device: str) -> None:
    """Counts tokens that differ."""
    picker = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, case.longest + 1, (case.sequences,), generator=picker).tolist()
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1].tolist()
    tokens, tiles = sum(lengths), DeltaTiles()
    inputs = draw(case, tokens, device)
    out = torch.empty_like(inputs[2])
    found = dict.fromkeys(("reversed", "alone"), 0)
    sequence = 0
    while sequence < len(lengths):  # rows of so many tokens
        row, first = [], sequence
        while sequence < len(lengths) and sum(row) + lengths[sequence] <= case.row_tokens:
            row.append(lengths[sequence])
            sequence += 1
        span = torch.arange(starts[first], starts[first] + sum(row), device=device)
        mine = at(inputs, span)
        out[span] = here = packed(case, mine, row, tiles, device)
        back = torch.cat([torch.arange(starts[n], starts[n] + lengths[n]) for n in reversed(range(first, sequence))])
        again = packed(case, at(inputs, back.to(device)), row[::-1], tiles, device)
        found["reversed"] += differing(again, out[back.to(device)])
        alone = packed(case, at(mine, span[: row[0]] - span[0]), row[:1], tiles, device)
        found["alone"] += differing(alone, here[: row[0]])
    record.add(law="packed", tokens=tokens, differ=found)
    prompts = [int(torch.randint(0, n, (1,), generator=picker)) for n in lengths]
    for name, begins, at_once in (("first token", [0] * len(lengths), case.sequences), ("prompt's end", prompts, 16)):
        found = decoded(case, inputs, out, starts, lengths, begins, at_once, device, tiles)
        record.add(law=f"decoded from the {name}", rows_at_once=at_once, **found)


def decoded(
    case: Case, inputs: Inputs, out: Tensor, starts: list[int], lengths: list[int], begins: list[int], at_once: int,
    device: str, tiles: DeltaTiles,
) -> dict[str, Any]:  # fmt: skip
    """Tokens decoded and tokens that differ; of what is kept for the next token, numbers that differ."""
    count, wrong = 0, torch.zeros((), dtype=torch.long, device=device)
    kept = dict.fromkeys(DeltaCache._fields, 0)
    start, begin = (torch.tensor(x, device=device) for x in (starts, begins))
    for first in range(0, len(lengths), at_once):
        group = list(range(first, min(first + at_once, len(lengths))))
        cache = DeltaCache.empty(
            len(group), case.key_heads, case.heads, case.width, case.width, size=case.size, device=device
        )
        prompted = [n for n in group if begins[n]]
        if prompted:
            rows = torch.cat([torch.arange(starts[n], starts[n] + begins[n]) for n in prompted]).to(device)
            chunks = Chunks.of([begins[n] for n in prompted], case.size, device, [n - first for n in prompted])
            delta.forward(*at(inputs, rows), chunks, tiles, cache=cache)
        for step in range(max(lengths[n] - begins[n] for n in group)):
            slot = torch.tensor([n - first for n in group if begins[n] + step < lengths[n]], device=device)
            position = begin[first + slot] + step
            rows = start[first + slot] + position
            index = position % case.size
            now = delta.delta_step(
                *at(inputs, rows), cache, slot.int(), index.int(), (slot * case.size + index).int(), tiles
            )
            wrong += (now != out[rows]).flatten(1).any(1).sum()
            count += len(slot)
        rows = torch.cat([torch.arange(starts[n], starts[n] + lengths[n]) for n in group]).to(device)
        chunks = Chunks.of([lengths[n] for n in group], case.size, device, range(len(group)))
        ends = DeltaCache.empty(
            len(group), case.key_heads, case.heads, case.width, case.width, size=case.size, device=device
        )
        delta.forward(*at(inputs, rows), chunks, tiles, cache=ends)
        rest = torch.tensor([lengths[n] % case.size for n in group], device=device)
        live = torch.arange(case.size, device=device) < rest[:, None]  # rows of the unfinished chunk
        for name, mine, theirs in zip(DeltaCache._fields, cache, ends, strict=True):
            if mine is None or theirs is None:
                continue
            differ = mine != theirs
            if name not in ("high", "low"):
                rows_last = differ.transpose(1, 2) if name == "keys" else differ
                differ = rows_last.flatten(3).any(3) & live[:, None] if differ.dim() > 3 else differ & live[:, None]
            kept[name] += int(differ.sum())
    return {"tokens": count, "differ": int(wrong), "kept_differ": kept}


# --- error


def recurrence(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The rule one token after the other; [B, T, heads, width]."""
    group = value.shape[2] // query.shape[2]
    query, key = (
        (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).repeat_interleave(group, 2) for x in (query, key)
    )
    state = torch.zeros(*value.shape[:1], *value.shape[2:3], key.shape[3], value.shape[3]).to(value)
    outs = []
    for t in range(query.shape[1]):
        state = state * decay[:, t].exp()[..., None, None]
        new = beta[:, t, :, None] * (value[:, t] - torch.einsum("bhkv,bhk->bhv", state, key[:, t]))
        state = state + key[:, t, :, :, None] * new[:, :, None]
        outs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]))
    return torch.stack(outs, 1) * key.shape[3] ** -0.5


def errors_of(case: Case, device: str, run: Callable[..., Tensor]) -> dict[str, float]:
    """Relative errors of outputs and gradients."""
    names, length = ("out", "query", "key", "value", "log_decay", "beta"), case.error_tokens
    inputs = draw(case, 2 * length, device, seed=2)
    grad = draw(case, 2 * length, device, seed=3)[2]
    exact = [x.double().unflatten(0, (2, length)).requires_grad_() for x in inputs]
    wanted = recurrence(*exact)
    wanted.backward(grad.double().view_as(wanted))
    truth = [wanted.detach(), *(x.grad for x in exact)]
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = run(*leaves)
    out.backward(grad.view_as(out))
    got = [out.detach(), *(x.grad for x in leaves)]
    pairs = zip(names, got, truth, strict=True)
    return {n: float((g.double().reshape(t.shape) - t).norm() / t.norm()) for n, g, t in pairs}


@cache
def ends_of(lengths: tuple[int, ...], device: str) -> Tensor:
    """[B + 1]; one tensor for equal lengths, because ``fla`` keeps what it derives from one."""
    return torch.tensor([0, *lengths], device=device).cumsum(0)


def of_fla(fla: Any, inputs: Sequence[Tensor], lengths: Sequence[int], device: str) -> Tensor:
    """``chunk_gated_delta_rule`` of a packed row."""
    ends = ends_of(tuple(lengths), device)
    query, key, value, decay, beta = (x[None] for x in inputs)
    out: Tensor = fla.chunk_gated_delta_rule(
        query, key, value, decay, beta, cu_seqlens=ends, use_qk_l2norm_in_kernel=True
    )[0][0]
    return out


# --- launches


@contextmanager
def after_each_launch(do: Callable[[str], None]) -> Iterator[None]:
    """``do`` gets each launch of our kernels, by name, grid and constants; none under the interpreter."""
    launch = QuickKernel._launch

    def launched(kernel: Any, grid: Any, *args: Any, **named: Any) -> None:
        launch(kernel, grid, *args, **named)
        do(f"{kernel.__name__} {grid} {named}")

    QuickKernel._launch = launched  # type: ignore[method-assign]
    try:
        yield
    finally:
        QuickKernel._launch = launch  # type: ignore[method-assign]


def waited(device: str) -> AbstractContextManager[None]:
    """Waits for each kernel, so that one that fails is named."""

    def wait(launch: str) -> None:
        try:
            torch.cuda.synchronize()
        except Exception as error:
            raise RuntimeError(f"failed: {launch}") from error

    return after_each_launch(wait) if device == "cuda" else nullcontext()


def kernel_ms(run: Callable[[], object], device: str, times: int = 3) -> dict[str, float]:
    """Milliseconds of each kernel that a run launches, the mean of some runs; on the CPU of the whole."""
    if device != "cuda":
        return {"all": timed(run, device)}

    def event() -> torch.cuda.Event:
        made = torch.cuda.Event(enable_timing=True)
        made.record()
        return made

    found = dict[str, list[float]]()
    run()
    for _ in range(times):
        torch.cuda._sleep(4_000_000)  # two milliseconds, in which the host runs ahead
        marks = [("", event())]
        with after_each_launch(lambda launch: marks.append((launch.split()[0], event()))):  # noqa: B023
            run()
        torch.cuda.synchronize()
        for (_, before), (name, after) in pairwise(marks):
            found.setdefault(name, []).append(before.elapsed_time(after))
    return {name: sum(ms) / times for name, ms in found.items()}


# --- time


def timed(run: Callable[[], object], device: str, times: int = 5) -> float:
    """Milliseconds, the median of some runs after the first two."""
    for _ in range(2 if device == "cuda" else 0):
        run()
    return median(milliseconds(run, device) for _ in range(times if device == "cuda" else 1))


class Work(NamedTuple):
    """A packed row and a gradient of its outputs."""

    inputs: Inputs
    chunks: Chunks
    grad: Tensor

    @classmethod
    def of(cls, case: Case, lengths: Sequence[int], device: str) -> "Work":
        """Drawn."""
        inputs = draw(case, sum(lengths), device)
        return cls(inputs, Chunks.of(lengths, case.size, device), torch.randn_like(inputs[2]))

    def forward(self, tiles: DeltaTiles) -> tuple[Tensor, delta.Inner]:
        """Outputs, and what the backward reads."""
        return delta.forward(*self.inputs, self.chunks, tiles)

    def backward(self, made: delta.Inner, tiles: DeltaTiles) -> tuple[Tensor, ...]:
        """Gradients of all inputs."""
        query, key, value, _, beta = self.inputs
        return delta.backward(query, key, value, beta, made, self.grad, self.chunks, tiles)


def train(case: Case, record: Record, device: str, tiles: DeltaTiles) -> None:
    """Packed rows, forward and forward + backward, and each kernel's time."""
    for name, lengths in case.workloads.items():
        work = Work.of(case, lengths, device)
        with waited(device), torch.no_grad():
            work.backward(work.forward(tiles)[1], tiles)
        run = partial(_ours, chunks=work.chunks, tiles=tiles)
        with reported(record, f"ours: {name}"):
            record.add(train=name, who="ours", tiles=repr(tiles), **trained(work, run, device))
        with reported(record, f"kernels: {name}"):
            made = work.forward(tiles)[1]
            ms = kernel_ms(lambda w=work: w.forward(tiles), device)  # type: ignore[misc]
            ms |= kernel_ms(lambda w=work, m=made: w.backward(m, tiles), device)  # type: ignore[misc]
            record.add(kernels=name, ms=ms)


def _ours(*inputs: Tensor, chunks: Chunks, tiles: DeltaTiles) -> Tensor:
    out: Tensor = DeltaRule.apply(*inputs, chunks, None, tiles)
    return out


def trained(work: Work, run: Callable[..., Tensor], device: str) -> dict[str, float]:
    """Milliseconds of a forward pass, and of a forward and a backward pass."""
    leaves = [x.clone().requires_grad_() for x in work.inputs]

    def both() -> None:
        for leaf in leaves:
            leaf.grad = None
        run(*leaves).backward(work.grad)

    with torch.no_grad():
        forward = timed(lambda: run(*work.inputs), device)
    return {"forward_ms": forward, "both_ms": timed(both, device)}


def with_step(tile: tuple[int, int, int, bool]) -> Callable[[DeltaTiles], DeltaTiles]:
    """Changes the tile of a step."""
    return lambda tiles: tiles._replace(step=DeltaTile(*tile[:3]), step_early=tile[3])


def with_advance(tile: tuple[int, int, int]) -> Callable[[DeltaTiles], DeltaTiles]:
    """Changes the tile of a state's advance."""
    return lambda tiles: tiles._replace(advance=DeltaTile(*tile))


def bandwidth(device: str) -> float:
    """Bytes a millisecond, of a copy."""
    a = torch.empty(2**28 if device == "cuda" else 2**16, dtype=torch.float32, device=device)
    b = torch.empty_like(a)
    return 2 * a.nbytes / timed(lambda: b.copy_(a), device)


def graphed(runs: Sequence[Callable[[], object]], device: str) -> float:
    """Milliseconds of one of these runs, in one graph."""
    if device != "cuda":
        return timed(lambda: [run() for run in runs], device) / len(runs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        runs[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return timed(graph.replay, device) / len(runs)


def step_ms(case: Case, rows: int, device: str, tiles: DeltaTiles) -> float:
    """Milliseconds of a step of some rows: the mean over a chunk's rows."""
    inputs = draw(case, rows, device, seed=4)
    held = DeltaCache.empty(rows, case.key_heads, case.heads, case.width, case.width, size=case.size, device=device)
    slot = torch.randperm(rows, generator=torch.Generator().manual_seed(5)).int().to(device)
    indices = [torch.full_like(slot, n) for n in range(case.size)]
    places = [(slot * case.size + index).int() for index in indices]

    def step(n: int) -> object:
        return delta.delta_step(*inputs, held, slot, indices[n], places[n], tiles)

    return graphed([lambda n=n: step(n) for n in range(case.size)], device)  # type: ignore[misc]


def decode(case: Case, record: Record, device: str) -> None:
    """A step of some rows, beside memory's time."""
    rate = bandwidth(device)
    record.add(bandwidth_gb=rate / 1e6)
    for rows in case.decoded:
        ms = step_ms(case, rows, device, DeltaTiles())
        width, mean = case.width, (case.size + 1) / 2
        state = case.heads * width * width * 4
        io = (2 * case.key_heads + 2 * case.heads) * width * 2
        chunk = mean * (case.heads * (width + case.size) * 2 + case.key_heads * width * 2)
        recurrent = rows * (2 * state + io) / rate
        least = rows * (state / 2 + io + chunk + 2 * state / case.size) / rate
        record.add(decode=rows, who="ours", ms=ms, recurrent_memory_ms=recurrent, own_memory_ms=least)


# --- flash-linear-attention, in processes of its own, which a kernel that fails ends

FLA = ("fla", "fla, guard off")
"""As released; and with its refusal of Triton 3.4 to 3.7.0 on Hopper removed. Gradients of keys are wrong there, for
Triton miscompiles a product of a transposed sum; the work, and so the time, is that of a Triton without the fault."""


def imported_fla(who: str) -> Any:
    """``fla.ops.gated_delta_rule``."""
    import fla.ops.common.chunk_o as chunks
    import fla.ops.gated_delta_rule as rule

    if who != FLA[0]:
        chunks.TRITON_ABOVE_3_7_1 = True
    return rule


def measure_fla(case: Case, who: str, device: str, add: Callable[..., None]) -> None:
    """Times of training, errors, and times of steps."""
    fla = imported_fla(who)
    for name, lengths in case.workloads.items():
        work = Work.of(case, lengths, device)
        run = partial(_of_fla, fla=fla, lengths=lengths, device=device)
        with torch.no_grad():
            add(train=name, who=who, forward_ms=timed(lambda w=work, r=run: r(*w.inputs), device))  # type: ignore[misc]
        add(train=name, who=who, **trained(work, run, device))
    add(error=who, **errors_of(case, device, partial(_of_fla, fla=fla, lengths=[case.error_tokens] * 2, device=device)))
    for rows in case.decoded:
        query, key, value, decay, beta = (x[:, None] for x in draw(case, rows, device, seed=4))
        states = torch.zeros(rows, case.heads, case.width, case.width, dtype=torch.float32, device=device)

        def step() -> object:
            return fla.fused_recurrent_gated_delta_rule(
                query, key, value, decay, beta, initial_state=states, output_final_state=True,  # noqa: B023
                use_qk_l2norm_in_kernel=True,
            )  # fmt: skip

        add(decode=rows, who=who, ms=graphed([step] * 8, device))


def _of_fla(*inputs: Tensor, fla: Any, lengths: Sequence[int], device: str) -> Tensor:
    return of_fla(fla, inputs, lengths, device)


def beside_fla(case: Case, record: Record) -> None:
    """The rows of a process for each way to run ``fla``, and why one ended."""
    for who in FLA:
        command = [sys.executable, __file__, "--out", str(record.path), "--size", str(case.size), "--fla", who]
        environ = os.environ | {"FLA_CACHE_RESULTS": "0"}
        child = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ, check=False, timeout=240
        )
        said = list[str]()
        for line in child.stdout.splitlines():
            if line.startswith("{"):
                record.add(**json.loads(line))
            else:
                said.append(line)
        if child.returncode:
            record.add(failed=who, code=child.returncode, error_message=reason("\n".join(said)))


# --- the whole


def warm_fla(case: Case, part: int) -> None:
    """Compiles kernels of ``fla`` into Triton's cache on disk: of each one's configurations one in ``WARMERS``."""
    from triton.runtime.autotuner import Autotuner

    rule, run, seen = imported_fla(FLA[1]), Autotuner.run, set()

    def run_some(tuner: Any, *args: Any, **named: Any) -> Any:
        if id(tuner) not in seen:
            seen.add(id(tuner))
            tuner.configs = tuner.configs[part::WARMERS] or tuner.configs[:1]
        return run(tuner, *args, **named)

    Autotuner.run = run_some
    lengths = [1024] * 16
    inputs = [x.requires_grad_() for x in draw(case, sum(lengths), "cuda")]
    out = of_fla(rule, inputs, lengths, "cuda")
    if part == 0:
        query, key, value, decay, beta = (x.detach()[:16, None] for x in inputs)
        states = torch.zeros(16, case.heads, case.width, case.width, device="cuda")
        rule.fused_recurrent_gated_delta_rule(
            query, key, value, decay, beta, initial_state=states, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
    out.backward(torch.ones_like(out))
    torch.cuda.synchronize()


WARMERS = 8
"""Processes that compile the kernels of ``fla``, which takes one two minutes."""


def compile_all(case: Case, device: str, tried: Sequence[DeltaTiles]) -> None:
    """Our kernels with all these tiles, in parallel; executes none."""
    if device != "cuda":
        return
    small = Work.of(case, [case.size + 5] * 2, device)
    continued = Chunks.of([case.size + 5] * 2, case.size, device, [0, 1])
    cache = DeltaCache.empty(2, case.key_heads, case.heads, case.width, case.width, size=case.size, device=device)
    slot = torch.zeros(2, dtype=torch.int32, device=device)
    some = at(small.inputs, torch.arange(2, device=device))

    def launch(tiles: DeltaTiles) -> None:
        small.backward(small.forward(tiles)[1], tiles)
        delta.forward(*small.inputs, continued, tiles, cache=cache)
        delta.delta_step(*some, cache, slot, slot, slot, tiles)

    with compiled_together(torch.device("cuda", torch.cuda.current_device())):
        for tiles in tried:
            launch(tiles)


# --- tiles


class Trial(NamedTuple):
    """Tiles that differ from the default in one part."""

    part: str
    tiles: DeltaTiles


def trials() -> list[Trial]:
    """All that are tried."""
    base, of = DeltaTiles(), DeltaTile
    return [
        *(Trial("scan", base._replace(scan=of(*t))) for t in SCANS),
        *(Trial("output", base._replace(scan=of(*s), output=of(*t))) for s in SCANS[:3] for t in OUTPUTS),
        *(Trial("solve", base._replace(solve=of(*t))) for t in SOLVES),
        *(Trial("scan_again", base._replace(scan_again=of(*t))) for t in SCANS),
        *(Trial("reverse", base._replace(reverse=of(*t))) for t in REVERSES),
        *(Trial("gradient", base._replace(gradient=of(*t[:3]), gradient_depth=t[3])) for t in GRADIENTS),
        *(Trial("step", with_step(t)(base)) for t in STEPS),
        *(Trial("advance", with_advance(t)(base)) for t in ADVANCES),
    ]


def try_tiles(case: Case, device: str, first: int, last: int, add: Callable[..., None]) -> None:
    """Bits and milliseconds of the trials from the ``first`` to the ``last``."""
    from triton.runtime.errors import OutOfResources

    every, base = trials()[first : last + 1], DeltaTiles()
    compile_all(case, device, [base, *(trial.tiles for trial in every)])
    works = [Work.of(case, lengths, device) for lengths in list(case.workloads.values())[:2]]
    default = [(out, made, work.backward(made, base)) for work in works for out, made in [work.forward(base)]]
    lengths = [case.longest - n % case.size for n in range(8)]
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    inputs = draw(case, sum(lengths), device, seed=6)
    out = packed(case, inputs, lengths, base, device)

    def outputs_of(tiles: DeltaTiles) -> dict[str, Any]:
        with waited(device):
            differ = [
                differing(work.forward(tiles)[0], right) for work, (right, *_) in zip(works, default, strict=True)
            ]
        return {"differ": sum(differ), "ms": [kernel_ms(lambda w=work: w.forward(tiles), device) for work in works]}  # type: ignore[misc]

    def gradients_of(tiles: DeltaTiles) -> dict[str, Any]:
        differ, ms = 0, []
        for work, (_, made, right) in zip(works, default, strict=True):
            with waited(device):
                differ += sum(int((a != b).sum()) for a, b in zip(work.backward(made, tiles), right, strict=True))
            ms.append(kernel_ms(lambda w=work, m=made: w.backward(m, tiles), device))  # type: ignore[misc]
        return {"differ": differ, "ms": ms}

    def steps_of(tiles: DeltaTiles) -> dict[str, Any]:
        with waited(device):
            begins = [length - length // 4 for length in lengths]
            bits = decoded(case, inputs, out, starts, lengths, begins, len(lengths), device, tiles)
        differ = bits["differ"] + sum(bits["kept_differ"].values())
        return {"differ": differ, "ms": {rows: step_ms(case, rows, device, tiles) for rows in case.decoded}}

    for n, (part, tiles) in enumerate(every, first):
        add(trying=n)
        of = (
            steps_of
            if part in ("step", "advance")
            else outputs_of
            if part in ("scan", "output", "solve")
            else gradients_of
        )
        row = {"trial": n, "part": part, "tiles": repr(tiles)}
        try:
            add(**row, **of(tiles))
        except OutOfResources as error:
            add(**row, too_large=str(error))


def other_assembler() -> Path:
    """Triton's second ``ptxas``, newer than the one that it takes for this GPU."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas-blackwell"


def in_child(
    case: Case, path: Path, span: tuple[int, int], until: float,
    took: Callable[[dict[str, Any]], None] | None = None, environ: dict[str, str] | None = None,
) -> tuple[list[dict[str, Any]], str, int]:  # fmt: skip
    """Trials in a process of their own, which ends at a time: rows, what else it printed, and its exit code."""
    command = [sys.executable, __file__, "--out", str(path), "--size", str(case.size), "--trials", *map(str, span)]
    command += ["--tiny"] if case.heads == TINY.heads else []
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | (environ or {})
    )
    clock = Timer(max(1.0, until - (time.perf_counter() - BEGAN)), child.kill)
    clock.start()
    rows, said = list[dict[str, Any]](), list[str]()
    for line in child.stdout or ():
        if not line.startswith("{"):
            said.append(line)
            continue
        rows.append(json.loads(line))
        if "trial" in rows[-1] and took is not None:
            took(rows[-1])
    code = child.wait()
    clock.cancel()
    return rows, reason("".join(said)), code


def search(case: Case, record: Record, device: str, until: float) -> DeltaTiles:
    """The fastest tiles with the default's bits; trials have a process of their own, which a failing kernel ends."""
    every, tried, first = trials(), dict[int, float](), 0

    def took(row: dict[str, Any]) -> None:
        record.add(**row)
        if row.get("differ") == 0:
            ms = row["ms"].values() if isinstance(row["ms"], dict) else [sum(x.values()) for x in row["ms"]]
            tried[row["trial"]] = sum(ms)

    if device != "cuda":
        try_tiles(case, device, 0, len(every), lambda **row: took(row) if "trial" in row else None)
    while device == "cuda" and first < len(every) and time.perf_counter() - BEGAN < until:
        rows, said, code = in_child(case, record.path, (first, len(every)), until, took)
        if code == 0:
            break
        trying = max((row["trying"] for row in rows if "trying" in row), default=None)
        name = "trials" if trying is None else f"trial {trying}: {every[trying]}"
        if time.perf_counter() - BEGAN >= until:
            record.add(out_of_time=name)
            break
        record.add(failed=name, code=code, error_message=said)
        if trying is None:
            break
        if time.perf_counter() - BEGAN < until:  # is it the assembler?
            assembler = other_assembler()
            other = {"TRITON_PTXAS_PATH": str(assembler)}
            rows, said, code = in_child(case, record.path, (trying, trying), until, None, other)
            record.add(
                again=name,
                assembler=assembler.name,
                code=code,
                error_message=said,
                found=[r for r in rows if "trial" in r],
            )
        first = trying + 1
    best = DeltaTiles()
    for part in dict.fromkeys(trial.part for trial in every):
        numbers = [n for n in tried if every[n].part == part]
        if (
            part == "output"
            and numbers
            and min(tried[n] for n in numbers)
            >= min((ms for n, ms in tried.items() if every[n].part == "scan"), default=float("inf"))
        ):
            continue
        if numbers:
            chosen = every[min(numbers, key=lambda n: tried[n])].tiles
            changed = {f: x for f, x in chosen._asdict().items() if x != getattr(DeltaTiles(), f)}
            best = best._replace(**changed)
    record.add(best=repr(best))
    return best


def summary(record: Record) -> str:
    """A short table."""
    lines = [str(record.machine)]
    for row in record.rows:
        if "law" in row or "error" in row or "failed" in row:
            lines.append(json.dumps(row))
    measured = {(row["train"], row["who"]): row for row in record.rows if "train" in row}
    steps = {(row["decode"], row["who"]): row for row in record.rows if "decode" in row}
    for name in dict.fromkeys(name for name, _ in measured):
        for what in ("forward_ms", "both_ms"):
            ours, *theirs = (measured.get((name, who), {}).get(what) for who in ("ours", *FLA))
            beside = [f"{who} {ms:.3f}, ratio {ours / ms:.2f}" for who, ms in zip(FLA, theirs, strict=True) if ms]
            lines.append(f"{name}, {what}: {'; '.join([f'{ours:.3f}', *beside])}")
    for (rows, who), row in steps.items():
        if who == "ours":
            line = f"step of {rows}: {row['ms']:.4f} ms, {row['ms'] / row['recurrent_memory_ms']:.2f} of the recurrent"
            line += f" form's memory time, {row['ms'] / row['own_memory_ms']:.2f} of its own"
            for other in FLA:
                if (rows, other) in steps:
                    theirs = steps[rows, other]["ms"]
                    line += f"; {other} {theirs:.4f}, ratio {row['ms'] / theirs:.2f}"
            lines.append(line)
    lines += [f"best tiles: {row['best']}" for row in record.rows if "best" in row]
    return "\n".join([*lines, f"{time.perf_counter() - BEGAN:.0f} s"])


def main() -> None:
    """Measures, prints and writes."""
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--size", type=int, help="of chunks")
    parser.add_argument("--warm-fla", type=int, help=warm_fla.__doc__)
    parser.add_argument("--fla", choices=FLA, help="only measure it, as lines of JSON")
    parser.add_argument("--trials", type=int, nargs=2, help="only trials from the first to the last, as lines of JSON")
    parser.add_argument("--until", type=float, default=95.0, help="seconds since the start; then no more tiles")
    options = parser.parse_args()
    case = TINY if options.tiny else REAL
    case = case._replace(size=options.size or case.size)
    if options.warm_fla is not None:
        warm_fla(case, options.warm_fla)
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.trials is not None:
        with torch.no_grad():
            try_tiles(case, device, *options.trials, lambda **row: print(json.dumps(row), flush=True))
        return
    if options.fla is not None:
        measure_fla(case, options.fla, device, lambda **row: print(json.dumps(row), flush=True))
        return
    record = Record(options.out, device)
    children = []
    if device == "cuda" and not options.tiny and find_spec("fla"):
        environ = os.environ | {"FLA_CACHE_RESULTS": "0"}
        command = [sys.executable, __file__, "--out", str(options.out), "--warm-fla"]
        children = [
            subprocess.Popen(
                [*command, str(n)], env=environ, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True
            )
            for n in range(WARMERS)
        ]
    tiles = DeltaTiles()
    with reported(record, "compilation"):
        compile_all(case, device, [tiles])
        record.add(compiled=True)
    with reported(record, "laws"), waited(device), torch.no_grad() if device == "cuda" else nullcontext():
        laws(case, record, device)
    for n, child in enumerate(children):
        said, _ = child.communicate()
        record.add(warmer=n, code=child.returncode, said="" if child.returncode == 0 else reason(said))
    with reported(record, "errors"), waited(device):
        chunks = Chunks.of([case.error_tokens] * 2, case.size, device)
        record.add(error="ours", **errors_of(case, device, partial(_ours, chunks=chunks, tiles=tiles)))
    with reported(record, "decode"):
        decode(case, record, device)
    with reported(record, "train"):
        train(case, record, device, tiles)
    if children:
        with reported(record, "fla"):
            beside_fla(case, record)
    with reported(record, "tiles"):
        best = search(case, record, device, options.until)
        if best != tiles:
            train(case, record, device, best)
    print(summary(record))


if __name__ == "__main__":
    main()

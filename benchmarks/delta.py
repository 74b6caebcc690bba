"""One gated delta net, in Qwen3.5's shape: bits of decoding and of packed rows, and its time beside fla.

    python benchmarks/delta.py                            # results/delta-GPU.json, on a GPU
    python benchmarks/delta.py --tiny --output FOLDER     # tries the script itself
    python benchmarks/delta.py --table [--check]          # the table of docs/bits.md

Bits: outputs of tokens decoded from their first token, or from a prompt's end, against the same tokens in packed rows;
packed rows against other orders and sequences alone. Time: a decoding step in CUDA graphs, and forward and forward +
backward of a packed row, beside flash-linear-attention's (``fla``) where it is installed, and beside the time that the
memory takes. Error: of outputs and gradients against the float64 recurrence.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.bench.machine import environment, write_result
from logitless.models.kernels import delta_launch as delta
from logitless.models.kernels.compiling import compiled_together
from logitless.models.kernels.delta_launch import Chunks, DeltaCache, DeltaTiles
from logitless.models.row_invariant.delta_net import DeltaRule
from script import command_line, milliseconds, parsed, short_name, short_name_of


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


class Record:
    """The result file, written after each row."""

    def __init__(self, path: Path, device: str) -> None:
        self.path, self.rows = path, list[dict[str, Any]]()
        self.machine = environment(device, ("triton", "flash-linear-attention", "fla-core"))

    def add(self, **row: Any) -> None:
        """One more row."""
        self.rows.append(row)
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


def train(case: Case, record: Record, device: str) -> None:
    """Packed rows, forward and forward + backward."""
    for name, lengths in case.workloads.items():
        work = Work.of(case, lengths, device)
        with reported(record, f"ours: {name}"):
            record.add(train=name, who="ours", **trained(work, partial(_ours, chunks=work.chunks), device))


def _ours(*inputs: Tensor, chunks: Chunks) -> Tensor:
    out: Tensor = DeltaRule.apply(*inputs, chunks)
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


def step_ms(case: Case, rows: int, device: str) -> float:
    """Milliseconds of a step of some rows: the mean over a chunk's rows."""
    inputs = draw(case, rows, device, seed=4)
    held = DeltaCache.empty(rows, case.key_heads, case.heads, case.width, case.width, size=case.size, device=device)
    slot = torch.randperm(rows, generator=torch.Generator().manual_seed(5)).int().to(device)
    indices = [torch.full_like(slot, n) for n in range(case.size)]
    places = [(slot * case.size + index).int() for index in indices]

    def step(n: int) -> object:
        return delta.delta_step(*inputs, held, slot, indices[n], places[n])

    return graphed([lambda n=n: step(n) for n in range(case.size)], device)  # type: ignore[misc]


def decode(case: Case, record: Record, device: str) -> None:
    """A step of some rows, beside memory's time."""
    rate = bandwidth(device)
    record.add(bandwidth_gb=rate / 1e6)
    for rows in case.decoded:
        ms = step_ms(case, rows, device)
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


def of_this_script(*arguments: str) -> subprocess.Popen[str]:
    """A process of this script whose ``fla`` keeps no result of an earlier call."""
    return subprocess.Popen(
        [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"FLA_CACHE_RESULTS": "0"},
    )  # fmt: skip


def beside_fla(record: Record) -> None:
    """The rows of a process for each way to run ``fla``, and why one ended."""
    for who in FLA:
        child = of_this_script("--fla", who)
        printed, _ = child.communicate(timeout=240)
        said = list[str]()
        for line in printed.splitlines():
            if line.startswith("{"):
                record.add(**json.loads(line))
            else:
                said.append(line)
        if child.returncode:
            record.add(failed=who, code=child.returncode, error_message=reason("\n".join(said)))


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


def compile_ours(case: Case, device: str) -> None:
    """Our kernels, in parallel; executes none."""
    if device != "cuda":
        return
    small, tiles = Work.of(case, [case.size + 5] * 2, device), DeltaTiles()
    continued = Chunks.of([case.size + 5] * 2, case.size, device, [0, 1])
    cache = DeltaCache.empty(2, case.key_heads, case.heads, case.width, case.width, size=case.size, device=device)
    slot = torch.zeros(2, dtype=torch.int32, device=device)
    with compiled_together(torch.device("cuda", torch.cuda.current_device())):
        query, key, value, _, beta = small.inputs
        made = delta.forward(*small.inputs, small.chunks, tiles)[1]
        delta.backward(query, key, value, beta, made, small.grad, small.chunks, tiles)
        delta.forward(*small.inputs, continued, tiles, cache=cache)
        delta.delta_step(*at(small.inputs, torch.arange(2, device=device)), cache, slot, slot, slot, tiles)


# --- pages


def table(documents: Sequence[Mapping[str, Any]]) -> str:
    """What was measured, as Markdown.

    Example:
        >>> here = {"environment": {"gpu": "x"}}
        >>> laws = [{"law": "packed", "tokens": 8, "differ": {"alone": 0}}]
        >>> laws += [{"law": "decoded from the prompt's end", "tokens": 4, "differ": 0}]
        >>> ours = [{"train": "1 x 8", "who": "ours", "forward_ms": 1.0, "both_ms": 2.0}]
        >>> ours += [{"decode": 16, "who": "ours", "ms": 3.0}]
        >>> fla = [row | {"who": FLA[1], "forward_ms": 2.0, "both_ms": 4.0, "ms": 4.0} for row in ours]
        >>> print(table([here | {"rows": laws + ours + fla}]).splitlines()[-1])
        | x | 0 of 12 | 0.50 to 0.50 | 0.50 to 0.50 | 0.75 to 0.75 |
    """
    lines = [
        "| | tokens that differ | forward | and backward | decoding step, 16 to 256 rows |",
        "|---|--:|--:|--:|--:|",
    ]
    for document in documents:
        rows = document["rows"]
        laws = [row for row in rows if "law" in row]
        differ = sum(sum(x.values()) if isinstance(x, dict) else x for x in (row["differ"] for row in laws))
        cells = [f"{min(found):.2f} to {max(found):.2f}" for found in ratios(rows)]
        tokens = sum(row["tokens"] for row in laws)
        lines.append(
            f"| {short_name_of(document['environment']['gpu'])} | {differ} of {tokens:,} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def ratios(rows: Sequence[Mapping[str, Any]]) -> Iterator[list[float]]:
    """Our time over that of ``fla``: forward, forward and backward, and a step; by workload."""
    for identity, what in (("train", "forward_ms"), ("train", "both_ms"), ("decode", "ms")):
        ms = {(row[identity], row["who"]): row[what] for row in rows if identity in row and what in row}
        yield [mine / ms[name, FLA[1]] for (name, who), mine in ms.items() if who == "ours" and (name, FLA[1]) in ms]


def tables(results: Path) -> dict[str, str]:
    """The table of the GPUs that were measured."""
    files = sorted(path for path in results.glob("delta-*.json") if path.stem != "delta-cpu")
    return {"": table([json.loads(path.read_text()) for path in files])} if files else {}


def main() -> None:
    """Measures, prints and writes."""
    parser = command_line(__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--warm-fla", type=int, help=warm_fla.__doc__)
    parser.add_argument("--fla", choices=FLA, help="only measure it, as lines of JSON")
    options = parsed(parser, tables)
    case = TINY if options.tiny else REAL
    if options.warm_fla is not None:
        warm_fla(case, options.warm_fla)
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.fla is not None:
        measure_fla(case, options.fla, device, lambda **row: print(json.dumps(row), flush=True))
        return
    record = Record(options.output / f"delta-{short_name(device)}.json", device)
    children = []
    if device == "cuda" and not options.tiny and find_spec("fla"):
        children = [of_this_script("--warm-fla", str(n)) for n in range(WARMERS)]
    compile_ours(case, device)
    with torch.no_grad() if device == "cuda" else nullcontext():
        laws(case, record, device)
    for n, child in enumerate(children):
        said, _ = child.communicate()
        if child.returncode:
            record.add(failed=f"compilation {n} of fla", code=child.returncode, error_message=reason(said))
    chunks = Chunks.of([case.error_tokens] * 2, case.size, device)
    record.add(error="ours", **errors_of(case, device, partial(_ours, chunks=chunks)))
    decode(case, record, device)
    train(case, record, device)
    if children:
        with reported(record, "fla"):
            beside_fla(record)


if __name__ == "__main__":
    main()

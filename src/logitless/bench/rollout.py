"""``logitless bench rollout``: how fast completions are sampled, and what a whole block costs.

A workload is ``64x8-512-64:512``: prompts x samples, tokens of a prompt, and new tokens, whose number is drawn for each
sample from the range and forced, so that every engine samples the same lengths. The roofline is the least time that
this device's memory and matrix units allow (``roofline``). A block is sampled, scored, and trained on for its optimizer
steps. What a result file has already is not measured again, so a long run can be made of short ones (``--seconds``).
"""

import argparse
import json
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from logitless.bench import rollout_report
from logitless.bench.machine import environment, release, write_result
from logitless.errors import ConfigurationError, UnavailableError

PACKAGES = ("triton", "transformers", "peft")
MODELS = ("qwen2.5-0.5b", "qwen2.5-0.5b-lora", "qwen3-1.7b", "qwen3-4b", "llama-3.1-8b-lora")
WORKLOADS = ("64x8-512-64:512", "8x8-512-128:2048", "256x1-512-512", "32x16-2048-128:1024")
ENGINES = ("gpu", "transformers", "generate")
BLOCK = "64x8-512-1:512"
"""131 thousand tokens."""

BLOCK_MODELS = ("qwen2.5-0.5b", "llama-3.1-8b-lora")
BLOCK_ENGINES = ("gpu", "transformers")


@dataclass(frozen=True)
class Workload:
    """Prompts, samples and lengths.

    Args:
        prompts, samples: P and G.
        prompt_tokens: of every prompt.
        least, most: new tokens of a completion; uniform between them.

    Example:
        >>> Workload.parse("2x3-5-4:6").lengths
        ((5, 4, 5), (6, 4, 4))
    """

    prompts: int
    samples: int
    prompt_tokens: int
    least: int
    most: int

    @classmethod
    def parse(cls, name: str) -> "Workload":
        """Of its name.

        Raises:
            ConfigurationError: it has another form.
        """
        found = re.fullmatch(r"(\d+)x(\d+)-(\d+)-(?:(\d+):)?(\d+)", name)
        if found is None or not all(int(x) for x in found.groups() if x is not None):
            raise ConfigurationError(
                needed="a workload such as 64x8-512-64:512: prompts x samples, prompt tokens, new tokens",
                given=repr(name),
                remedy="Write it so; the range may be one number.",
            )
        prompts, samples, prompt, least, most = found.groups()
        return cls(int(prompts), int(samples), int(prompt), int(least or most), int(most))

    @cached_property
    def lengths(self) -> tuple[tuple[int, ...], ...]:
        """New tokens by prompt and sample."""
        chance = random.Random(7)
        return tuple(
            tuple(chance.randint(self.least, self.most) for _ in range(self.samples)) for _ in range(self.prompts)
        )

    @property
    def tokens(self) -> int:
        """New tokens of all."""
        return sum(map(sum, self.lengths))

    def prompt_ids(self, vocabulary: int) -> list[tuple[int, ...]]:
        """Random tokens, the first eight left out."""
        chance = random.Random(8)
        return [tuple(chance.randrange(8, vocabulary) for _ in range(self.prompt_tokens)) for _ in range(self.prompts)]


@dataclass(frozen=True)
class Ceilings:
    """What a device does at best.

    Args:
        bytes_per_second: read and written, by a large copy.
        flops_per_second: of a large bfloat16 product of random numbers.
    """

    bytes_per_second: float
    flops_per_second: float

    @classmethod
    def measured(cls) -> "Ceilings":
        """On the current CUDA device."""
        source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_()
        target = torch.empty_like(source)
        seconds = _seconds(lambda: target.copy_(source))
        a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        return cls(2 * source.nbytes / seconds, 2 * 8192**3 / _seconds(lambda: a @ b))


def _seconds(call: Any) -> float:
    times = []
    for _ in range(12):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return sorted(times[2:])[len(times[2:]) // 2]


@dataclass(frozen=True)
class Cost:
    """What a model asks of a device.

    Args:
        parameters: that a step multiplies with; of an embedding that is not the head's, one row is read.
        token_bytes: keys and values of a token.
    """

    parameters: int
    token_bytes: int


def roofline(cost: Cost, work: Workload, ceilings: Ceilings) -> float:
    """Tokens a second where each step reads weights and keys once, with all rows in it.

        sum_t max(2 n / bandwidth, 2 n rows_t / flops) + kv (groups_t prompt + rows_t t) / bandwidth  +  prompts once

    where n is the number of parameters in bfloat16, and a prompt's keys are read once for its live samples.

    Example:
        >>> round(roofline(Cost(10**9, 10**5), Workload(1, 1, 1, 11, 11), Ceilings(2e12, 1e15)))
        1099
    """
    lengths = [length for group in work.lengths for length in group]
    weights, seconds = 2 * cost.parameters / ceilings.bytes_per_second, 0.0
    for t in range(1, max(lengths)):
        rows = sum(length > t for length in lengths)
        groups = sum(max(group) > t for group in work.lengths)
        keys = cost.token_bytes * (groups * work.prompt_tokens + rows * t) / ceilings.bytes_per_second
        seconds += max(weights, 2 * cost.parameters * rows / ceilings.flops_per_second) + keys
    seconds += 2 * cost.parameters * work.prompts * work.prompt_tokens / ceilings.flops_per_second
    return work.tokens / seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``logitless bench rollout``."""
    names = ", ".join(MODELS)
    parser.add_argument(
        "--models", default="qwen2.5-0.5b,qwen3-1.7b,qwen3-4b,llama-3.1-8b-lora", help=f"by commas, of {names}"
    )
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="by commas; empty: none")
    parser.add_argument("--engines", default="gpu", help=f"by commas, of {','.join(ENGINES)}")
    parser.add_argument(
        "--blocks", default="", help=f"engines whose whole block to measure, of {','.join(BLOCK_ENGINES)}"
    )
    parser.add_argument(
        "--law", type=int, default=0, help="tokens of each model whose bits to compare with training's; 0: none"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing new after this time")
    parser.add_argument("--again", action="store_true", help="measure what the files have already")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"), help="folder of the JSON files")
    parser.add_argument("--table", type=Path, nargs="*", help="documents whose tables to rewrite; measures nothing")
    parser.add_argument("--check", action="store_true", help="with --table: fail if a document is out of date")


def run(args: argparse.Namespace) -> int:
    """Measures what is missing; 0 where no token has other bits than training's."""
    if args.table is not None:
        return rollout_report.update(args.table, args.output, check=args.check)
    if not torch.cuda.is_available():
        raise UnavailableError(needed="a CUDA device", given="none", remedy="Run it on a GPU.")
    models, engines, blocks = (_names(text) for text in (args.models, args.engines, args.blocks))
    _check("model", models, MODELS)
    _check("engine", engines, ENGINES)
    _check("engine", blocks, BLOCK_ENGINES)
    workloads = {name: Workload.parse(name) for name in _names(args.workloads)}
    from logitless.bench import rollout_contenders as contenders  # needs Triton

    here = environment("cuda", PACKAGES)
    card = here["gpu"].removeprefix("NVIDIA ").split(" ")[0]
    rollouts = Results(args.output / f"rollout-{card}.json", here, ("model", "workload", "engine"))
    whole = Results(args.output / f"block-{card}.json", here, ("model", "engine"))
    laws = Results(args.output / f"sampled-bits-{card}.json", here, ("model",))
    started, ceilings = time.perf_counter(), Ceilings.measured()
    release("cuda")

    def wanted(results: Results, **identity: str) -> bool:
        return (args.again or not results.has(**identity)) and time.perf_counter() - started < args.seconds

    for model in models:
        missing = [(w, e) for w in workloads for e in engines if wanted(rollouts, model=model, workload=w, engine=e)]
        subject = contenders.Subject(model) if missing else None
        for workload, engine in missing:
            if subject is not None and time.perf_counter() - started < args.seconds:
                row = contenders.measured(engine, subject, workloads[workload])
                best = roofline(subject.cost, workloads[workload], ceilings)
                row |= {"roofline_tokens_per_second": best, "of_roofline": row["tokens_per_second"] / best}
                row |= {"bytes_per_second": ceilings.bytes_per_second, "flops_per_second": ceilings.flops_per_second}
                rollouts.add({"model": model, "workload": workload, "engine": engine, **row})
        del subject
        release("cuda")
        if args.law and wanted(laws, model=model):
            laws.add({"model": model, **contenders.law(model, Workload.parse(WORKLOADS[0]), args.law)})
            release("cuda")
        for engine in blocks:
            if model in BLOCK_MODELS and wanted(whole, model=model, engine=engine):
                whole.add({"model": model, "engine": engine, **contenders.block(model, engine, Workload.parse(BLOCK))})
                release("cuda")
    print("\n".join(_lines(rollouts.rows, whole.rows)), flush=True)
    for row in laws.rows:
        print(
            f"{row['model']:18} {row['mismatched_tokens']} of {row['tokens']:,} tokens have other bits than training's"
        )
    return 1 if any(row["mismatched_tokens"] for row in laws.rows) else 0


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _check(what: str, names: list[str], known: tuple[str, ...]) -> None:
    for name in names:
        if name not in known:
            raise ConfigurationError(
                needed=f"{what}s among {', '.join(known)}", given=repr(name), remedy="Name some of them by commas."
            )


def _lines(rollouts: list[dict[str, Any]], blocks: list[dict[str, Any]]) -> Iterator[str]:
    for row in rollouts:
        yield (
            f"{row['model']:18} {row['workload']:20} {row['engine']:13}{row['tokens_per_second']:10,.0f} tokens/s"
            f"  {row['of_roofline']:4.0%} of the roofline  {row['peak_bytes'] / 2**30:6.1f} GiB"
        )
    for row in blocks:
        phases = ", ".join(f"{name} {row[name + '_seconds']:.2f} s" for name in ("rollout", "scoring", "training"))
        yield f"{row['model']:18} a block of {row['tokens']:,} tokens, {row['engine']}: {phases}"


class Results:
    """A result file that grows row by row.

    Args:
        path: of the file; begun anew where it is of another machine or other versions.
        here: machine and versions.
        identity: names of what tells one row from another.
    """

    def __init__(self, path: Path, here: dict[str, str], identity: tuple[str, ...]) -> None:
        self.path, self.here, self.identity = path, here, identity
        found = json.loads(path.read_text()) if path.exists() else {}
        self.rows: list[dict[str, Any]] = found["rows"] if found.get("environment") == here else []

    def has(self, **identity: str) -> bool:
        """Whether there is such a row."""
        return any(all(row[name] == value for name, value in identity.items()) for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        """One more row, in place of the same one; written at once."""
        self.rows = [old for old in self.rows if any(old[name] != row[name] for name in self.identity)] + [row]
        print(json.dumps(row), flush=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_result(self.path, {"environment": self.here, "rows": self.rows})

"""Times objectives, forward and backward, against one product of hidden states with a head of the same tokens.

python benchmarks/objective.py && make docs

Every distinct objective of the presets, and two with every part that there is, on sequences of 1, 2, 4, ... 4096
tokens: log-probs in, gradient in ``logp`` out, without and with the step's diagnostics. ``ms`` is the device's time
(its queue is filled before the clock starts), ``wall_ms`` from an idle device to an idle device, launches included.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from head_contenders import Problem, bare
from logitless.bench.machine import environment, release, write_result
from logitless.objective.correction import SamplerCorrection
from logitless.objective.diagnostics import step_diagnostics
from logitless.objective.divergence import KLPenalty
from logitless.objective.entropy import EntropyBonus
from logitless.objective.filters import OffPolicy, TopEntropy
from logitless.objective.objective import Objective
from logitless.objective.presets import PRESETS, algorithm
from logitless.objective.weighting import SequenceMean, Totals
from logitless.types import TokenBatch
from script import RESULTS, command_line, milliseconds

RESULT = RESULTS / "objective.json"
ROUNDS = 5
SLEEP = 100_000_000
"""Cycles, about 50 ms: longer than the host takes to launch a run."""

EVERY_PART: dict[str, Any] = {
    "filters": (OffPolicy(0.5), TopEntropy(0.2)),
    "correction": SamplerCorrection("sequence", max=2.0),
    "kl": KLPenalty("k3"),
    "entropy_bonus": EntropyBonus(0.01),
}


def objectives() -> dict[str, Objective]:
    """By the first preset that has it, and GRPO's and GSPO's with every other part."""
    found: dict[str, Objective] = {}
    for name in PRESETS:
        objective = algorithm(name).objective
        if objective not in found.values():
            found[name] = objective
    return found | {f"{name} with every part": replace(found[name], **EVERY_PART) for name in ("grpo", "gspo")}


def lengths_of(num_tokens: int) -> tuple[int, ...]:
    """1, 2, 4, ... 4096 and again, the last one cut."""
    lengths: list[int] = []
    powers = cycle([2**k for k in range(13)])
    while (left := num_tokens - sum(lengths)) > 0:
        lengths.append(min(next(powers), left))
    return tuple(lengths)


def draw(num_tokens: int, device: str) -> tuple[Tensor, Tensor, TokenBatch]:
    """Log-probs, entropy and a batch with every vector that an objective can ask for, float32."""
    generator = torch.Generator().manual_seed(0)
    lengths = lengths_of(num_tokens)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def near(values: Tensor) -> Tensor:
        return values + 0.1 * torch.randn(len(values), generator=generator)

    logp, entropy = -torch.rand(num_tokens, generator=generator) - 0.5, torch.rand(num_tokens, generator=generator)
    batch = TokenBatch(
        sequence=sequence,
        num_sequences=len(lengths),
        advantage=torch.randn(len(lengths), generator=generator)[sequence],
        token_weight=SequenceMean()(lengths, Totals.of(lengths)),
        logp_old=near(logp),
        logp_sampler=near(logp),
        logp_ref=near(logp),
        entropy_old=entropy,
        entropy_weight=torch.full((num_tokens,), 1 / num_tokens),
    )
    return logp.to(device), entropy.to(device), batch


def run_of(
    objective: Objective, logp: Tensor, entropy: Tensor, batch: TokenBatch, *, diagnostics: bool
) -> Callable[[], None]:
    """One step's work; what is made once a block is made here."""
    block = objective.block_statistics(batch, generator=torch.Generator().manual_seed(0))
    if block is not None:
        batch = block.attach(batch)
        mean = block.correction_mean
        block = replace(
            block,
            thresholds={name: threshold.to(logp.device) for name, threshold in block.thresholds.items()},
            correction_mean=None if mean is None else mean.to(logp.device),
        )
    batch = batch.to(logp.device)
    beta = 0.0 if objective.kl is None else 0.05

    def step() -> None:
        leaves = [each.requires_grad_() for each in (logp.detach(), entropy.detach())]
        output = objective(*leaves, batch, beta=beta, block=block)
        output.loss.backward()
        if diagnostics:
            step_diagnostics([output])

    return step


def both_times(run: Callable[[], None], device: str) -> tuple[float, float]:
    """Milliseconds of the device, and of the wall clock."""
    _wait(device)
    start = time.perf_counter()
    run()
    _wait(device)
    wall = (time.perf_counter() - start) * 1000
    return (wall if device == "cpu" else milliseconds(run, device, pause=SLEEP)), wall


def measured(run: Callable[[], None], device: str) -> dict[str, float]:
    """Medians over the rounds, after two runs to warm up."""
    run()
    run()
    times = [both_times(run, device) for _ in range(ROUNDS)]
    return {"ms": statistics.median(t for t, _ in times), "wall_ms": statistics.median(t for _, t in times)}


def peak_bytes(run: Callable[[], None], device: str) -> int | None:
    """What a run allocates at most, beyond its inputs."""
    if device == "cpu":
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


def rows(num_tokens: int, product_ms: float, device: str) -> list[dict[str, Any]]:
    """A row an objective, without and with diagnostics."""
    logp, entropy, batch = draw(num_tokens, device)
    found = []
    for name, objective in objectives().items():
        for diagnostics in (False, True):
            run = run_of(objective, logp, entropy, batch, diagnostics=diagnostics)
            times = measured(run, device)
            peak = peak_bytes(run, device)
            found.append(
                {
                    "objective": name,
                    "diagnostics": diagnostics,
                    **times,
                    "ratio_to_product": times["ms"] / product_ms,
                    "peak_bytes_per_token": None if peak is None else peak / num_tokens,
                }
            )
    return found


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Measure, write the file, print it."""
    parser = command_line(__doc__)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--head", default="4096,128256", help="D,V of the product")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    width, vocabulary = (int(number) for number in options.head.split(","))
    problem = Problem.draw(options.tokens, width, vocabulary, rank=1, device=options.device, run=1)
    product = measured(bare(problem, "none"), options.device)["ms"]
    del problem
    release(options.device)
    document = {
        "environment": environment(options.device, ()),
        "tokens": options.tokens,
        "sequences": len(lengths_of(options.tokens)),
        "head": {"width": width, "vocabulary": vocabulary},
        "product_ms": product,
        "rows": rows(options.tokens, product, options.device),
    }
    write_result(options.out, document)
    print(f"one product: {product:.1f} ms")
    for row in document["rows"]:
        what = row["objective"] + (" and diagnostics" if row["diagnostics"] else "")
        peak = row["peak_bytes_per_token"] or float("nan")
        print(
            f"{what:40} {row['ms']:6.2f} ms {row['ratio_to_product']:7.2%} {row['wall_ms']:6.2f} ms wall {peak:5.0f} B"
        )


if __name__ == "__main__":
    main()

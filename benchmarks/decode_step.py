"""Kernel times of a decoding step, by part, and a picture of them.

    python benchmarks/decode_step.py                # Qwen2.5-0.5B at 64 and 512 rows, on a GPU
    python benchmarks/decode_step.py --sample         # the picture of what the result file has; measures nothing

Rows are samples of prompts of 448 tokens whose pages the eight samples of a prompt share. Kernels are launched one
behind the other, so that none begins before its turn: the sum is a little more than a step takes.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from logitless.bench.machine import environment, write_result
from logitless.models.lm_head import backbone
from logitless.models.row_invariant.layers import install_row_invariant
from logitless.models.row_invariant.paged_attention import PAGE
from logitless.rollout.gpu.steps import STEPS, Begin, Place, Steps, TokenSampling
from logitless.rollout.sampling import SamplingOptions
from rollout_report import plot_step
from script import RESULTS, ROOT, command_line, short_name_of

PROMPT_PAGES = 7
SAMPLES = 8
NAMED = {  # by the beginning of a kernel's name
    "norm_kernel": "norms",
    "rotary_kernel": "rotary positions, cache",
    "decode_shared": "attention, shared pages",
    "decode_own": "attention, own pages",
    "merge_splits": "attention, splits merged",
    "low_rank_kernel": "LoRA",
    "add_low_rank_kernel": "LoRA",
    "gate_kernel": "gate",
    "sample_kernel": "sample",
    "finish_kernel": "sample",
    "begin_kernel": "begin, embedding, end",
    "end_kernel": "begin, embedding, end",
}
PRODUCTS = ("query, key, value product", "output product", "gate and up product", "down product")
GATED = "gate and up product, gate"
SCORES = "scores by the head"


def parts(names: Sequence[str], num_layers: int) -> Iterator[str]:
    """The part of each kernel of a step, told from its name and, for products, from its turn.

    Example:
        >>> names = ["begin_kernel", "gather", "norm_kernel", "gemm", "gemm", "gemm", "gate_kernel", "gemm", "gemm"]
        >>> list(parts(names, 1))[3:]
        ['query, key, value product', 'output product', 'gate and up product', 'gate', 'down product', 'logits']
    """
    products = begun = 0
    for name in names:
        known = next((part for start, part in NAMED.items() if name.startswith(start)), None)
        begun += known == "norms"
        if known is not None or not begun or name.startswith("Mem"):
            yield known or "begin, embedding, end"
            continue
        yield "logits" if products == 4 * num_layers else PRODUCTS[products % 4] if "gated" not in name else GATED
        products += 1


def rows_of(model: torch.nn.Module, rows: int, position: int) -> tuple[Steps, Place]:
    """So many samples at a position, whose keys are all zero."""
    pages = -(-(position + 10 * STEPS) // PAGE)
    steps = Steps(model, max_rows=rows, max_pages=pages, group_size=SAMPLES)
    shared, own = rows // SAMPLES * PROMPT_PAGES, pages - PROMPT_PAGES
    steps.open(shared + rows * own)
    steps.cache.zero_()
    begins = []
    for row in range(rows):
        prompt, start = row // SAMPLES, shared + row * own
        of_prompt = range(prompt * PROMPT_PAGES, (prompt + 1) * PROMPT_PAGES)
        held = (*of_prompt, *range(start, start + own))
        begins.append(Begin(row, 5, position, position + 9 * STEPS, row + 1, held, None, (5,)))
    steps.begin(begins, TokenSampling(SamplingOptions(max_new_tokens=9 * STEPS), (2,)))
    groups = tuple((tuple(range(p, p + SAMPLES)), PROMPT_PAGES) for p in range(0, rows, SAMPLES))
    return steps, Place(tuple(range(rows)), steps.reach(position + 10 * STEPS), groups)


def kernels(call: Callable[[], object]) -> list[tuple[str, float]]:
    """Name and microseconds of each kernel of a call, in order."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    events = [event for event in found.events() if event.device_type.name == "CUDA"]
    events.sort(key=lambda event: event.time_range.start)
    return [(event.name, event.time_range.elapsed_us()) for event in events]


@torch.no_grad()
def measured(model: torch.nn.Module, rows: int, position: int) -> dict[str, float]:
    """Microseconds of each part of a step, over ``STEPS`` steps and what the head scores behind them."""
    steps, place = rows_of(model, rows, position)
    sampling = TokenSampling(SamplingOptions(max_new_tokens=9 * STEPS), (2,))
    count = steps.place(place)
    steps.run(place, count, sampling)()  # captures
    step = steps._step_for(count, place, sampling)
    sums: dict[str, float] = defaultdict(float)
    decoder: Any = backbone(model)
    num_layers = len(decoder.layers)
    for _ in range(STEPS):
        found = kernels(step)
        for part, (_, microseconds) in zip(parts([name for name, _ in found], num_layers), found, strict=True):
            sums[part] += microseconds
    sums[SCORES] = sum(
        us for name, us in kernels(lambda: steps._results(rows, sampling.options, place.adapters)) if "Mem" not in name
    )
    steps.close()
    return {part: round(microseconds / STEPS, 2) for part, microseconds in sums.items()}


def main() -> None:
    """Measures each number of rows and samples them."""
    parser = command_line(__doc__)
    parser.add_argument("--model", default="qwen2.5-0.5b")
    parser.add_argument("--at", nargs="*", default=["64:1200", "512:700"], help="rows:position")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "decode-step.svg")
    parser.add_argument("--sample", action="store_true")
    options = parser.parse_args()
    if not options.sample:
        from logitless.models.kernels import overlap
        from logitless.models.row_invariant import self_check
        from rollout_contenders import Subject  # needs Triton

        model = Subject(options.model).model
        install_row_invariant(model)
        model.eval()
        self_check.self_check(model)
        overlap._OVERLAPPING = overlap._APART  # one kernel behind the other
        found = {
            rows: measured(model, rows, position) for rows, position in (map(int, at.split(":")) for at in options.at)
        }
        order = [
            "begin, embedding, end",
            "norms",
            *PRODUCTS[:1],
            *list(NAMED.values())[1:6],
            *PRODUCTS[1:3],
            "gate",
            GATED,
        ]
        order += [PRODUCTS[3], "logits", "sample", SCORES]
        rows = [
            {"num_rows": rows, "part": part, "microseconds": found[rows][part]}
            for part in order
            for rows in found
            if part in found[rows]
        ]
        here = environment("cuda", ("triton", "transformers", "peft"))
        card = short_name_of(here["gpu"])
        note = "kernels' times by torch.profiler, each launched behind the other; samples of prompts of 448 tokens, at "
        write_result(
            options.output / f"decode-step-{card}.json",
            {"environment": here, "model": options.model, "note": note + ", ".join(options.at), "rows": rows},
        )
        print(json.dumps(rows, indent=1))
    for path in sorted(options.output.glob("decode-step-*.json"))[:1]:
        plot_step(json.loads(path.read_text()), options.picture)


if __name__ == "__main__":
    main()

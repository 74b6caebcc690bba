"""``benchmarks/bits.py``: laws and price of bitwise identical sampling and training, and the table of docs/bits.md.

Laws: log-probs, entropies and hidden states of the same tokens, computed in every way that training and sampling
compute them, compared in every bit. Price: the same model with row-invariant layers and with transformers' own, in the
forward pass, in a training step, and in a step of decoding against the same CUDA graph with plain cuBLAS. What a result
file has already is not measured again, so a long run can be made of short ones (``--seconds``).
"""

import argparse
import sys
import time

import torch

import bits_report
from bits_cases import HYBRIDS, MIXTURES, MODELS, Results
from logitless.bench.machine import environment, release
from script import add_table_arguments, among, main, needs_gpu, short_name_of, update

PACKAGES = ("triton", "transformers")
PARTS = ("laws", "second_gpu", "train_forward", "train_step", "decode")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``benchmarks/bits.py``."""
    names = ",".join(MODELS | MIXTURES | HYBRIDS)
    parser.add_argument("--models", default=",".join(MODELS), help=f"by commas, of {names}")
    parser.add_argument("--parts", default=",".join(PARTS), help="by commas: what to measure")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing new after this time")
    add_table_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measures what is missing; 0 when every law held."""
    if args.table is not None:
        return update(args.table, "bits", bits_report.tables(args.output), check=args.check)
    needs_gpu("Run it on a GPU; on a CPU the laws are tests of small models.")
    models = among("a model", args.models, tuple(MODELS | MIXTURES | HYBRIDS))
    from bits_measured import Measured  # needs Triton

    here = environment("cuda", PACKAGES)
    card = short_name_of(here["gpu"])
    path = args.output / f"bits-{card}.json"
    results = Results(path, here)
    parts = args.parts.split(",")
    if "second_gpu" in parts and torch.cuda.device_count() < 2:
        parts.remove("second_gpu")
        print("second_gpu: left out, for this machine has one", flush=True)
    started = time.perf_counter()
    for name in models:
        missing = [part for part in parts if not results.has(name, part)]
        if not missing or time.perf_counter() - started > args.seconds:
            continue
        measured = Measured(name, results)
        for part in missing:
            if time.perf_counter() - started > args.seconds:
                break
            for row in measured.part(part):
                results.add(row)
        del measured
        release("cuda")
    document = {"environment": here, "rows": results.rows, **results.more}
    bits_report.plot(document, args.output / f"bits-{card}.png")
    print(bits_report.table(document), flush=True)
    return 1 if any(row.get("differ") and row.get("exact", True) for row in results.rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))

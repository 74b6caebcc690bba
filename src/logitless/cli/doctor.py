"""``logitless doctor``: versions, devices, head backends and optional packages of this machine."""

import argparse
import importlib.metadata
import importlib.util
import json
import platform
from typing import Any

import torch

from logitless.head.api import why_not
from logitless.rewards.sandbox import walls_of
from logitless.types import LMHead

OPTIONAL = {
    "triton": "triton",
    "peft": "lora",
    "datasets": "data",
    "reasoning_gym": "rewards",
    "math_verify": "rewards",
    "langdetect": "rewards",
    "nltk": "rewards",
    "trl": "trl",
    "liger_kernel": "liger",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The form of the output."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print what was found; nothing is an error."""
    found = findings()
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    for section, entries in found.items():
        print(section)
        for name, value in entries.items():
            print(f"  {name:30s} {value}")
    return 0


def findings() -> dict[str, dict[str, Any]]:
    """Sections of names and values; a backend's value is "runs" or the reason why not."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head = LMHead(torch.zeros(8, 16, device=device, dtype=torch.bfloat16))
    hidden = torch.zeros(1, 16, device=device, dtype=torch.bfloat16)
    machine: dict[str, Any] = {"python": platform.python_version(), "cpu threads": torch.get_num_threads()}
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        machine[f"cuda:{index}"] = f"{card.name}, {card.total_memory / 2**30:.0f} GiB, {card.major}.{card.minor}"
    return {
        "machine": machine,
        "packages": {name: importlib.metadata.version(name) for name in ("logitless", "torch", "transformers")},
        "optional": {
            module: "installed" if importlib.util.find_spec(module) else f"absent: pip install 'logitless[{extra}]'"
            for module, extra in OPTIONAL.items()
        },
        "walls around a model's text": {
            "programs (code)": str(walls_of("program")),
            "graders (math, reasoning_gym)": str(walls_of("grader")),
        },
        "one set of bits": bits(),
        "head backends": {name: why_not(name, hidden, head) or "runs" for name in ("reference", "chunked", "fused")},
    }


def bits() -> dict[str, str]:
    """Which kernels may serve here for a layer of an 8B model, or why none; docs/bits.md says what for."""
    if not torch.cuda.is_available():
        return {"row-invariant layers": "no: they need a CUDA device"}
    if importlib.util.find_spec("triton") is None:
        return {"row-invariant layers": "no: pip install 'logitless[triton]'"}
    from logitless.models.self_check import check_layer, rows_in_words

    report = check_layer(torch.device("cuda", torch.cuda.current_device()))
    same = "the bits of the packed row" if report.exact else f"OTHER BITS than the packed row: {report.attention}"
    found = {"attention, decoded": same}
    for shape, finding in report.linear.items():
        refused = {way: rows_in_words(rows) for way, rows in finding.failed.items()}
        found[f"product {shape}"] = "; ".join(f"{way} not at rows {rows}" for way, rows in refused.items()) or "all"
    return found

"""What is installed on this machine, what of logitless runs on it, and settings that would be faster."""

import importlib.util
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

from logitless.bench.recommended import recommended_here
from logitless.doctor.nearest import free_memory
from logitless.head.api import why_not
from logitless.installed import gpu_driver, unused_gpu, version_of, without_triton
from logitless.rewards.workers.sandbox import sandbox_of
from logitless.train.assembly.layers import against_row_invariant
from logitless.train.assembly.model import policy_model, tokenizer_of
from logitless.train.assembly.process import allocator_of_environment, device_of, sdpa_allowed
from logitless.train.optim.optimizer import automatic_implementation
from logitless.train.plan.run_plan import Plan
from logitless.train.recipe.config import Recipe
from logitless.train.recipe.rule import value_at
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
    "torchao": "torchao",
    "bitsandbytes": "four-bit",
    "gguf": "gguf",
    "starlette": "serve",
    "tinker": "tinker",
    "mlflow": "mlflow",
    "verifiers": "verifiers",
}
"""Packages, and the extra that installs each."""

_OTHERS = ("wandb", "trackio")
"""Packages that are used if installed, and that no extra installs."""

Sections = dict[str, dict[str, Any]]


def findings() -> Sections:
    """Sections of names and values; the value is "runs", or the reason why not.

    Example:
        >>> findings()["head backends"]["chunked"]
        'runs'
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head = LMHead(torch.zeros(8, 16, device=device, dtype=torch.bfloat16))
    hidden = torch.zeros(1, 16, device=device, dtype=torch.bfloat16)
    optional = {
        module: _version(module) or f"absent: pip install 'logitless[{extra}]'" for module, extra in OPTIONAL.items()
    }
    others = {name: _version(name) or f"absent: pip install {name}" for name in _OTHERS}
    return {
        "machine": _hardware(device),
        "packages": {name: _version(name) for name in ("logitless", "torch", "transformers")},
        "optional": optional | others,
        "sandbox around a model's text": {
            "programs (code)": str(sandbox_of("program")),
            "graders (math, reasoning_gym)": str(sandbox_of("grader")),
        },
        "bitwise identical": _bitwise_identical(),
        "head backends": {name: why_not(name, hidden, head) or "runs" for name in ("reference", "chunked", "fused")},
        "engines": _engines(),
        "attention": _attention(),
        "settings": dict(_settings()),
    }


def _version(module: str) -> str:
    """Version of the package that provides a module; empty if it is not installed."""
    if importlib.util.find_spec(module) is None:
        return ""
    version = version_of(module) or version_of(f"{module}-skinny")  # as MLflow's client calls itself
    return version or "imported from a folder, without a version"


def _hardware(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "cpu": f"{_processor()}, {os.cpu_count()} threads, torch uses {torch.get_num_threads()}",
    }
    if device == "cuda":
        found["driver"] = f"{gpu_driver()}, CUDA {torch.version.cuda}"
    elif unused := unused_gpu():
        found["driver"] = unused
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        found[f"cuda:{index}"] = f"{card.name}, {card.total_memory / 2**30:.0f} GiB, {card.major}.{card.minor}"
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in _lines(info) if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []


def _bitwise_identical() -> dict[str, str]:
    """Which kernels pass the self-check for the layer shapes of an 8B model (docs/bits.md), or why none can run."""
    if not torch.cuda.is_available():
        return {"row-invariant layers": "no: they need a CUDA device"}
    if missing := without_triton():
        return {"row-invariant layers": f"no: {missing}"}
    from logitless.models.row_invariant.self_check import check_layer, rows_in_words

    report = check_layer(torch.device("cuda", torch.cuda.current_device()))
    same = "as in the packed row" if report.exact else f"NOT as in the packed row: {report.attention}"
    found = {"attention, decoded": same}
    for shape, finding in report.linear.items():
        refused = {way: rows_in_words(rows) for way, rows in finding.failed.items()}
        found[f"product {shape}"] = "; ".join(f"{way} not at rows {rows}" for way, rows in refused.items()) or "all"
    return found


def _engines() -> dict[str, str]:
    gpu = "runs"
    if not torch.cuda.is_available():
        gpu = "no: it needs a CUDA device"
    elif missing := without_triton():
        gpu = f"no: {missing}"
    servers = "runs, on servers that the recipe names"
    return {"transformers": "runs", "recorded": "runs", "gpu": gpu, "vllm_server": servers}


def _attention() -> dict[str, str]:
    cuda = torch.cuda.is_available()
    may = ", ".join(name for name in sdpa_allowed() if cuda or name in ("flash", "math"))
    return {
        "packed": "runs",
        "sdpa": f"runs, by {may}",
        "eager": "runs, and holds length x length numbers a head",
        "flex_attention": "runs, compiled at first use" if cuda else "no: its backward needs a CUDA device",
        "xformers": "never needed",
    }


def _settings() -> Iterator[tuple[str, str]]:
    """Settings that environment variables override, and their defaults."""
    allocator = allocator_of_environment()
    yield "allocator", allocator or "not set: a recipe's model.allocator holds (default expandable_segments:True)"
    yield "float32 products", "full precision unless model.matmul_precision says high (TF32) or medium"
    threads = os.environ.get("OMP_NUM_THREADS")
    yield "OMP_NUM_THREADS", threads or "not set: torch takes every core"
    if torch.cuda.device_count() > 1:
        name = torch.cuda.get_device_name(0)
        off = os.environ.get("NCCL_P2P_DISABLE")
        needs = "GeForce RTX 40" in name and off != "1"
        hint = "; cards of the 4000 series have no peer-to-peer: if the first collective hangs, set it to 1"
        yield "NCCL_P2P_DISABLE", (off or "not set") + (hint if needs else "")


def left_on_the_table(recipe: Recipe, plan: Plan) -> list[str]:
    """Warnings of the plan, and settings that ``logitless bench`` found faster on this machine, one line each."""
    device = device_of(recipe.model)
    settled = _settled(recipe, plan, device)
    measured = [
        f"{line} — bench {name}"
        for name, line in recommended_here()
        if line.partition(":")[0] not in settled and not _has(recipe, line, device)
    ]
    return [*plan.warnings, *measured]


_NOT_ROW_INVARIANT = frozenset(
    f"model.{key}" for key in ("attention", "sdpa_backends", "autocast", "matmul_precision", "compile", "layers")
)


def _settled(recipe: Recipe, plan: Plan, device: torch.device) -> frozenset[str]:
    """Keys for which the fastest measured value is not recommended, because the recipe would lose something else."""
    rows = frozenset[str]() if _has_room_for_rows(recipe, plan, device) else frozenset({"rollout.max_rows"})
    if takes_row_invariant_layers(recipe, device) or _would_take_row_invariant_layers(recipe, device):
        return rows | _NOT_ROW_INVARIANT  # these would rule out row-invariant layers
    lowered = recipe.model.trained_dtype != "float32"  # its products are in that dtype already
    return rows | ({"model.autocast", "model.matmul_precision"} if lowered else frozenset())


def _has_room_for_rows(recipe: Recipe, plan: Plan, device: torch.device) -> bool:
    """Whether more completions could be decoded at once: fewer than a block's are, and the plan takes less than a
    quarter of the memory."""
    rollout = recipe.rollout
    completions = rollout.prompts_per_block * rollout.completions_per_prompt
    return rollout.max_rows < completions and plan.total_bytes < free_memory(device) / 4


def takes_row_invariant_layers(recipe: Recipe, device: torch.device) -> bool:
    """Whether a run would use row-invariant layers, if this GPU passes the self-check."""
    if device.type != "cuda" or recipe.model.layers not in ("auto", "row_invariant"):
        return False
    tokenizer = tokenizer_of(recipe.model)
    model = policy_model(recipe.model, tokenizer, seed=recipe.seed, device=torch.device("meta"))
    return not against_row_invariant(recipe.model, model, device)


def _would_take_row_invariant_layers(recipe: Recipe, device: torch.device) -> bool:
    """Whether only a dtype keeps a recipe from them: that of its weights, under LoRA that of the base model."""
    if recipe.model.layers != "auto" or takes_row_invariant_layers(recipe, device):
        return False
    key = "trained_dtype" if recipe.model.lora is None else "dtype"
    lowered = recipe.model.model_copy(update={"autocast": None, key: "bfloat16"})
    return takes_row_invariant_layers(recipe.model_copy(update={"model": lowered}), device)


def _has(recipe: Recipe, line: str, device: torch.device) -> bool:
    """Whether a recipe already has the setting of a line, explicitly or by default."""
    key, _, value = line.partition(": ")
    at = value_at(recipe, key)
    if key == "train.optimizer.implementation" and at == "auto":
        at = automatic_implementation(device)
    wanted = yaml.safe_load(value)
    return bool(at == (tuple(wanted) if isinstance(wanted, list) else wanted))

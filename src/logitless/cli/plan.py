"""``logitless plan RECIPE --gpus N``: memory, messages and, from measured speeds, time of a step on N GPUs."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from logitless.cli.arguments import add_overrides
from logitless.errors import ConfigurationError, DataError
from logitless.train.assembly.algorithm import algorithm_of, value_head_of
from logitless.train.assembly.checks import arrangement_of
from logitless.train.assembly.model import policy_model, tokenizer_of
from logitless.train.plan.scaling import Speeds, forecast, forecast_text
from logitless.train.recipe.loading import load_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The recipe, the number of GPUs, and what was measured."""
    parser.add_argument("recipe", type=Path, help="YAML file; its `parallel` says how the processes are arranged")
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="processes, one a GPU")
    parser.add_argument(
        "--gpus-per-machine", type=int, default=8, metavar="N", help="processes that share a host's memory (default 8)"
    )
    add_overrides(parser)
    parser.add_argument("--measured", type=Path, metavar="FILE", help="what `benchmarks/scale.py` wrote of the model")
    parser.add_argument("--tokens-per-second", type=float, help="of one GPU alone in training steps, measured")
    parser.add_argument("--gigabytes-per-second", type=float, help="that a GPU sends in large collectives, measured")


def run(options: argparse.Namespace) -> int:
    """Print the forecast."""
    recipe = load_recipe(options.recipe, options.overrides, plans_for_gpus=True)
    for key in ("gpus", "gpus_per_machine"):
        if (given := getattr(options, key)) < 1:
            name = "--" + key.replace("_", "-")
            raise ConfigurationError(needed="at least one GPU", given=f"{name} {given}", remedy="Give a number.")
    speeds, arrangement = _speeds(options), arrangement_of(recipe, options.gpus)
    model = policy_model(recipe.model, tokenizer_of(recipe.model), seed=recipe.seed, device=torch.device("meta"))
    value_head = value_head_of(recipe, algorithm_of(recipe), model)
    processes = min(options.gpus, options.gpus_per_machine)
    found = forecast(recipe, model, arrangement, value_head=value_head, speeds=speeds, processes=processes)
    print(forecast_text(recipe, found))
    return 0


def _rows(path: Path) -> list[dict[str, Any]]:
    """Measured rows.

    Raises:
        DataError: not a file of ``benchmarks/scale.py``.
    """
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
        return [row for row in rows if "tokens_per_second" in row]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            needed="a file that `benchmarks/scale.py` wrote",
            given=f"{path}: {error}",
            remedy="Name benchmarks/results/scale-MODEL.json.",
        ) from error


def _speeds(options: argparse.Namespace) -> Speeds | None:
    """Speeds from the file, replaced by those given as options; None without either.

    Raises:
        ConfigurationError: one speed without the other and without a file, or one that is not positive.
    """
    tokens, gigabytes = options.tokens_per_second, options.gigabytes_per_second
    measured = None if options.measured is None else Speeds.measured(_rows(options.measured))
    if (measured is None and (tokens is None) != (gigabytes is None)) or any(
        each is not None and each <= 0 for each in (tokens, gigabytes)
    ):
        raise ConfigurationError(
            needed="both speeds, positive, or none of them",
            given=f"--tokens-per-second {tokens}, --gigabytes-per-second {gigabytes}",
            remedy="`python benchmarks/scale.py` of the repository measures them.",
        )
    if measured is None:
        return None if tokens is None else Speeds(tokens, gigabytes * 1e9)
    return replace(
        measured,
        tokens_per_second=tokens or measured.tokens_per_second,
        bytes_per_second=gigabytes * 1e9 if gigabytes else measured.bytes_per_second,
    )

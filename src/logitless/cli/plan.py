"""``logitless plan RECIPE --gpus N``: memory, messages and, from measured speeds, time of a step on N GPUs."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from logitless.errors import ConfigurationError, DataError
from logitless.train.checks import arrangement_of
from logitless.train.forecast import Speeds, forecast, forecast_text
from logitless.train.recipe import load_recipe
from logitless.train.setup import algorithm_of, policy_model, tokenizer_of, value_head_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The recipe, the number of GPUs, and what was measured."""
    parser.add_argument("recipe", type=Path, help="YAML file; its `parallel` says how the processes are arranged")
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="processes, one a GPU")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="replace a value (repeatable)"
    )
    parser.add_argument("--measured", type=Path, metavar="FILE", help="what `logitless bench scale` wrote of the model")
    parser.add_argument("--tokens-per-second", type=float, help="of one GPU alone in training steps, measured")
    parser.add_argument("--gigabytes-per-second", type=float, help="that a GPU sends in large collectives, measured")


def run(options: argparse.Namespace) -> int:
    """Print the forecast."""
    recipe = load_recipe(options.recipe, options.overrides)
    if options.gpus < 1:
        raise ConfigurationError(needed="at least one GPU", given=f"--gpus {options.gpus}", remedy="Give a number.")
    given = (options.tokens_per_second, options.gigabytes_per_second)
    speeds = None if options.measured is None else Speeds.measured(_rows(options.measured))
    if (speeds is None and (given[0] is None) != (given[1] is None)) or any(n is not None and n <= 0 for n in given):
        raise ConfigurationError(
            needed="both speeds, positive, or none of them",
            given=f"--tokens-per-second {given[0]}, --gigabytes-per-second {given[1]}",
            remedy="`logitless bench scale` measures them.",
        )
    if speeds is not None:  # of other links, for example
        speeds = replace(
            speeds,
            tokens_per_second=given[0] or speeds.tokens_per_second,
            bytes_per_second=given[1] * 1e9 if given[1] else speeds.bytes_per_second,
        )
    elif given[0] is not None:
        speeds = Speeds(given[0], given[1] * 1e9)
    arrangement = arrangement_of(recipe, options.gpus)
    model = policy_model(recipe.model, tokenizer_of(recipe.model), seed=recipe.seed, device=torch.device("meta"))
    value_head = value_head_of(recipe, algorithm_of(recipe), model)
    print(forecast_text(recipe, forecast(recipe, model, arrangement, value_head=value_head, speeds=speeds)))
    return 0


def _rows(path: Path) -> list[dict[str, Any]]:
    """What was measured.

    Raises:
        DataError: no file of ``logitless bench scale``.
    """
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
        return [row for row in rows if "tokens_per_second" in row]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            needed="a file that `logitless bench scale` wrote",
            given=f"{path}: {error}",
            remedy="Name benchmarks/results/scale-MODEL.json.",
        ) from error

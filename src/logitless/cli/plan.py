"""``logitless plan RECIPE --gpus N``: memory, messages and, from measured speeds, time of a step on N GPUs."""

import argparse
from pathlib import Path

import torch

from logitless.errors import ConfigurationError
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
    parser.add_argument("--tokens-per-second", type=float, help="of one GPU alone in training steps, measured")
    parser.add_argument("--gigabytes-per-second", type=float, help="that a GPU sends in large collectives, measured")


def run(options: argparse.Namespace) -> int:
    """Print the forecast."""
    recipe = load_recipe(options.recipe, options.overrides)
    if options.gpus < 1:
        raise ConfigurationError(needed="at least one GPU", given=f"--gpus {options.gpus}", remedy="Give a number.")
    measured = (options.tokens_per_second, options.gigabytes_per_second)
    if (measured[0] is None) != (measured[1] is None) or any(each is not None and each <= 0 for each in measured):
        raise ConfigurationError(
            needed="both speeds, positive, or none of them",
            given=f"--tokens-per-second {measured[0]}, --gigabytes-per-second {measured[1]}",
            remedy="`logitless bench scale` measures them.",
        )
    arrangement = arrangement_of(recipe, options.gpus)
    model = policy_model(recipe.model, tokenizer_of(recipe.model), seed=recipe.seed, device=torch.device("meta"))
    value_head = value_head_of(recipe, algorithm_of(recipe), model)
    speeds = None if measured[0] is None else Speeds(measured[0], measured[1] * 1e9)
    print(forecast_text(recipe, forecast(recipe, model, arrangement, value_head=value_head, speeds=speeds)))
    return 0

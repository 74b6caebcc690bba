"""``logitless plan RECIPE --gpus N``: memory of each process and messages of a step on N GPUs, here or elsewhere."""

import argparse
from pathlib import Path

from logitless.cli.arguments import add_overrides
from logitless.cli.loading import loading
from logitless.errors import ConfigurationError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The recipe and the number of GPUs."""
    parser.add_argument("recipe", type=Path, help="YAML file; its `parallel` says how the processes are arranged")
    parser.add_argument(
        "--gpus", type=int, required=True, metavar="N", help="processes, one a GPU; they need not be here"
    )
    parser.add_argument(
        "--gpus-per-machine", type=int, default=8, metavar="N", help="processes that share a host's memory (default 8)"
    )
    add_overrides(parser)


def run(options: argparse.Namespace) -> int:
    """Print the forecast."""
    with loading("plan"):
        from logitless.train.recipe.loading import load_recipe

        recipe = load_recipe(options.recipe, options.overrides, plans_for_gpus=True)
        import torch

        from logitless.train.assembly.algorithm import algorithm_of, value_head_of
        from logitless.train.assembly.checks import arrangement_of
        from logitless.train.assembly.model import policy_model, tokenizer_of
        from logitless.train.assembly.sampling import with_sampling
        from logitless.train.plan.placement import placed, room_of
        from logitless.train.plan.scaling import forecast, forecast_text
    for key in ("gpus", "gpus_per_machine"):
        if (given := getattr(options, key)) < 1:
            name = "--" + key.replace("_", "-")
            raise ConfigurationError(needed="at least one GPU", given=f"{name} {given}", remedy="Give a number.")
    recipe, line = with_sampling(recipe, options.gpus)
    arrangement = arrangement_of(recipe, options.gpus)
    model = policy_model(recipe.model, tokenizer_of(recipe.model), seed=recipe.seed, device=torch.device("meta"))
    gpu = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recipe, placement = placed(recipe, model, arrangement, room_of(gpu))
    arrangement = arrangement_of(recipe, options.gpus)
    value_head = value_head_of(recipe, algorithm_of(recipe), model)
    processes = min(options.gpus, options.gpus_per_machine)
    found = forecast(recipe, model, arrangement, value_head=value_head, processes=processes)
    print(forecast_text(recipe, found, line, placement))
    return 0

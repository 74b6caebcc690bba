"""``logitless serve-engine RECIPE|RUN``: the recipe's engine behind an OpenAI endpoint on loopback."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from logitless.cli.arguments import add_checkpoint, add_overrides
from logitless.cli.loading import loading
from logitless.cli.serving import add_port, wait_for_end
from logitless.errors import ConfigurationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from logitless.rollout.engine import Engine
    from logitless.train.recipe.config import Recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to serve, and where."""
    parser.add_argument(
        "source", type=Path, help="a recipe's YAML file, or a run folder; its max_new_tokens limits max_tokens"
    )
    add_checkpoint(parser, "of a run (default: latest)")
    add_overrides(parser, "of a recipe")
    add_port(parser, 8000)
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same completions (default 0)")


def run(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    with loading("serve-engine"):
        from logitless.http_server import listening
        from logitless.rollout.serving.server import EngineServer

    with listening(options.port) as connection:
        recipe, engine, tokenizer, version = _opened(options)
        with EngineServer(
            engine,
            tokenizer,
            recipe.rollout.sampling,
            seed=options.seed,
            connection=connection,
            chat_template_kwargs=recipe.model.chat_template_kwargs,
            version=version,
            name=recipe.name,
        ) as server:
            print(server.url, flush=True)
            print(f"weights of version {version}; Ctrl-C ends it", file=sys.stderr)
            wait_for_end()
    return 0


def _opened(options: argparse.Namespace) -> "tuple[Recipe, Engine, PreTrainedTokenizerBase, int]":
    """Recipe, engine, tokenizer and version; the weights are a run's, or those that a recipe starts with."""
    with loading("serve-engine"):
        from logitless.distributed.arrangement import Arrangement
        from logitless.train.assembly.engines import open_engines
        from logitless.train.assembly.model import policy_model, tokenizer_of
        from logitless.train.assembly.process import device_of, set_process
        from logitless.train.assembly.resolve import resolved
        from logitless.train.recipe.loading import load_recipe
        from logitless.train.record.run_folder import open_run_folder
        from logitless.train.saved_policy import load_policy
    if options.source.is_dir():
        if options.overrides:
            raise ConfigurationError(
                needed="a recipe beside --set",
                given=f"{options.source}, a run folder",
                remedy=f"Leave --set out; a run is served by its own {options.source / 'config.yaml'}.",
            )
        saved = load_policy(open_run_folder(options.source), options.checkpoint)
        return saved.recipe, saved.engine(), saved.tokenizer, saved.step
    recipe = load_recipe(options.source, options.overrides)
    set_process(recipe.model, seed=recipe.seed)
    tokenizer = tokenizer_of(recipe.model)
    model = policy_model(recipe.model, tokenizer, seed=recipe.seed, device=device_of(recipe.model))
    recipe = resolved(recipe, model, Arrangement()).recipe
    return recipe, open_engines(recipe, model, tokenizer).training, tokenizer, 0

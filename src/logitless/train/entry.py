"""``logitless.train(recipe)``: a run as one call, for the command line and for Python."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from logitless.distributed.ranks import ranks_of_environment, restarted
from logitless.errors import ConfigurationError
from logitless.train.assembly.process import device_of
from logitless.train.callbacks import Callback, check_callbacks
from logitless.train.recipe.config import Recipe
from logitless.train.recipe.loading import load_recipe, parse_recipe
from logitless.train.record.result import RunResult
from logitless.train.record.wall_clock import WallClock
from logitless.train.run import run_recipe


def train(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    *,
    resume: bool | Literal["auto"] = False,
    fork: str | Path | None = None,
    replay: str | Path | None = None,
    numbered: bool = False,
    callbacks: Sequence[Callback] = (),
    clock: WallClock | None = None,
) -> RunResult:
    """Run a recipe, as ``logitless train`` does. Under ``torchrun`` all processes train together.

    Args:
        recipe: the path of a YAML file, a mapping with the same keys, or a checked recipe.
        resume: continue the run of this name from its last checkpoint; ``"auto"``: if there is one, else start it.
        fork: ``RUN`` or ``RUN:CHECKPOINT``, whose weights, optimizer state and position a new run starts from.
        replay: folder of a run that this one repeats on as many training processes, or with ``parallel.deterministic``
            on any number; the first token, metric or weight that differs in any bit ends it. It always starts anew.
        numbered: if the name is taken, use ``name-2``, ``name-3``, ...
        callbacks: called as the run goes on (``Callback``), on the first rank; they may stop it.
        clock: started when the process began; None for a new one.

    Returns:
        Folder, what ended the run, and its last metrics. A signal or a callback that stops it is no error.

    Raises:
        LogitlessError: what is wrong with the recipe, the data, the model or the machine, or why the run cannot go on.
    """
    check_callbacks(callbacks)
    if isinstance(recipe, str | Path):
        recipe = load_recipe(recipe)
    else:  # parsed again: a Recipe that was constructed directly may still have dtype auto
        recipe = parse_recipe(recipe.model_dump(mode="json") if isinstance(recipe, Recipe) else recipe)
    if replay is not None and (resume or fork is not None or restarted()):
        raise ConfigurationError(
            needed="a replay from the first block on",
            given="resume" if resume else "a restart by torchrun --max-restarts" if fork is None else "fork",
            remedy="Replay anew: without --resume, --fork and --max-restarts.",
        )
    if restarted():  # by torchrun, after a failure: resume the run
        if numbered:
            raise ConfigurationError(
                needed="one name for a run that torchrun --max-restarts may start again",
                given="--numbered",
                remedy="Set the name: --set name=...",
            )
        resume = resume or "auto"
    with ranks_of_environment(device_of(recipe.model).type, timeout_seconds=recipe.parallel.timeout_seconds) as ranks:
        if not ranks.is_first:
            logging.getLogger("logitless").setLevel(logging.WARNING)
        return run_recipe(
            recipe,
            resume=resume,
            fork=None if fork is None else str(fork),
            replay=None if replay is None else Path(replay),
            numbered=numbered,
            callbacks=callbacks,
            ranks=ranks,
            clock=clock,
        )

"""A run that repeats another one, and compares itself: tokens as they are sampled, metrics and weights at the end."""

import json
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from logitless.errors import ConfigurationError, TrainingError
from logitless.train.block import JudgedBlock
from logitless.train.recipe.config import Recipe
from logitless.train.record.metrics import repeatable
from logitless.train.record.provenance import parent_in
from logitless.train.record.result import RunResult
from logitless.train.record.run_folder import RunFolder
from logitless.train.store.checkpoint import checkpoints
from logitless.types import PER_TOKEN, Completion


def check_replayed(run: RunFolder, recipe: Recipe) -> None:
    """Refuse a run that cannot be repeated.

    Args:
        run: to repeat.
        recipe: that repeats it.

    Raises:
        ConfigurationError: the run is not finished, is a fork, or has no last checkpoint or log of all its blocks; or
            servers would sample.
    """
    if reason := _why_not(run):
        raise ConfigurationError(
            needed=f"a run to repeat: finished, begun anew, with a checkpoint and a log of its blocks in {run.path}",
            given=reason,
            remedy="Repeat another run. Only rollout.staleness and parallel.sampling write a log.",
        )
    if not recipe.rollout.engine.samples_policy:
        raise ConfigurationError(
            needed="an engine that samples the same again: gpu or transformers",
            given=f"rollout.engine: {recipe.rollout.engine.name}",
            remedy=f"Train on what was sampled: rollout.engine={{name: recorded, path: {run.path}}}.",
        )


def check_in_flight(recipe: Recipe) -> None:
    """Refuse in-flight updates where nothing can arrive: a run in turns can only repeat them.

    Raises:
        ConfigurationError: no processes only sample.
    """
    if not recipe.parallel.sampling:
        raise ConfigurationError(
            needed="for rollout.in_flight: parallel.sampling, processes that sample while others train",
            given="0",
            remedy="Set it, or leave rollout.in_flight out; --replay repeats such a run on any number of processes.",
        )


def _why_not(run: RunFolder) -> str:
    """Why a run cannot be repeated; empty if it can."""
    summary = json.loads(run.summary.read_bytes()) if run.summary.is_file() else {}
    if not RunResult(run, summary.get("ended_by", "error")).complete:
        return "one that is not finished"
    if parent_in(run) is not None:
        return "a fork, whose first weights and optimizer state are another run's"
    if not checkpoints(run.checkpoints):
        return "no checkpoint"
    logged = {int(file.stem.removeprefix("block-")) for file in run.collected.glob("block-*.json")}
    missing = [block for block in range(1, summary["blocks"] + 1) if block not in logged]
    return f"no log of {len(missing)} blocks, the first of them {missing[0]}" if missing else ""


def check_same_block(block: int, sampled: JudgedBlock, recorded: JudgedBlock) -> None:
    """Refuse a block that differs from that of the run that is repeated, in any bit.

    Args:
        block: number, from 0.
        sampled, recorded: here and there.

    Raises:
        TrainingError: names the first token that differs, or what differs besides tokens.
    """
    for at, here, there in _completions(sampled, recorded):
        place = f"block {block + 1}, prompt {there.prompt_id!r}, completion {at}"
        token = _first_difference(here, there)
        if token is not None:
            raise _differs(f"{place}, token {token + 1}: {_at(there, token)}", _at(here, token))
    if sampled != recorded:
        raise _differs(f"block {block + 1}: the recorded prompts, rewards and texts", "others, of the same tokens")


def _completions(sampled: JudgedBlock, recorded: JudgedBlock) -> Iterator[tuple[int, Completion, Completion]]:
    """Number in its group, here and there, of each completion in order, as far as both have them."""
    for here, there in zip(sampled.sampled, recorded.sampled, strict=False):
        for number, (one, other) in enumerate(zip(here.completions, there.completions, strict=False), start=1):
            yield number, one, other


def _first_difference(here: Completion, there: Completion) -> int | None:
    """The index of the first token with another id, version or log-prob in any bit; None where there is none."""
    most = min(here.length, there.length)
    differs = np.full(most, here.weights_version != there.weights_version)
    for name in PER_TOKEN:
        one, other = (_bits(getattr(each, name)) for each in (here, there))
        if one is not None and other is not None:
            differs |= one[:most] != other[:most]
        elif one is not other:
            differs |= True
    if differs.any():
        return int(differs.argmax())
    return most if here.length != there.length else None


def _bits(values: np.ndarray | None) -> np.ndarray | None:
    return values.view(np.int32) if values is not None and values.dtype == np.float32 else values


def _at(completion: Completion, token: int) -> str:
    """A token of a completion in words."""
    if token >= completion.length:
        return "none, it ended before"
    versions, logp = completion.token_versions, completion.logp_sampler
    version = completion.weights_version if versions is None else int(versions[token])
    drawn = f"id {int(completion.token_ids[token])} by version {version}"
    return drawn if logp is None else f"{drawn}, log-prob {float(logp[token])!r}"


def check_same_end(here: RunFolder, there: RunFolder) -> None:
    """Refuse a run whose metrics or last checkpoint differ from those of the run that it repeats, in any bit.

    Times, speeds and memory are not compared, nor are numbers by rank.

    Raises:
        TrainingError: names the first metric or weight.
    """
    lines = [[*map(repeatable, each.read_metrics())] for each in (here, there)]
    for one, other in zip_longest(*lines, fillvalue={}):
        for name in (each for each in {**other, **one} if not each.startswith("parallel/")):
            if one.get(name) != other.get(name):
                place = f"{name} of block {other.get('block')}, step {other.get('step')}"
                raise _differs(f"{place}: {other.get(name)}", str(one.get(name)))
    sums, recorded = (_checksums(checkpoints(each.checkpoints)[-1]) for each in (here, there))
    for name in {**recorded, **sums}:
        if sums.get(name) != recorded.get(name):
            raise _differs(f"{name} of the last checkpoint", "another value")


def _checksums(checkpoint: Path) -> dict[str, Any]:
    """Checksums of the tensors of a checkpoint, by name."""
    index = json.loads((checkpoint / "index.json").read_bytes())["tensors"]
    return {
        name: [[piece["start"], piece["sha256"]] for piece in entry["pieces"]]
        for name, entry in index.items()
        if not name.startswith("random/")  # of code of others
    }


def _differs(recorded: str, here: str) -> TrainingError:
    return TrainingError(
        needed=f"what was recorded: {recorded}",
        given=here,
        remedy="Compare provenance.json of both runs: versions, device and data must be the same. So must the number of"
        " processes that train, unless parallel.deterministic is set.",
    )

"""A run that repeats another: it compares tokens as they are sampled, metrics and checkpoints at the end.

An unfinished run is repeated up to its last whole block: the last one with a line of metrics and a checkpoint after it.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from logitless.errors import ConfigurationError, TrainingError
from logitless.train.block import JudgedBlock
from logitless.train.callbacks import Callback
from logitless.train.recipe.config import Recipe
from logitless.train.record.metrics import repeatable
from logitless.train.record.provenance import parent_in
from logitless.train.record.result import COMPLETE
from logitless.train.record.run_folder import RunFolder
from logitless.train.store.checkpoint import checkpoints, damaged, folder_name
from logitless.types import PER_TOKEN, Completion

logger = logging.getLogger("logitless")


def repeated_on(world: int, run: RunFolder, recipe: Recipe) -> Recipe:
    """The recipe that repeats a run on so many processes: as many train as did in the run, the others sample.

    Under ``parallel.deterministic`` any number may train. With none left to sample only, all do both in turns.

    Args:
        world: number of processes.
        run: to repeat.
        recipe: of the run, possibly with changes.

    Raises:
        ConfigurationError: the run cannot be repeated, or not in every bit on so many processes.
    """
    _check_repeatable(run, recipe)
    parallel, trained = recipe.parallel, _num_trained(run, recipe)
    number, shards = parallel.sampling, parallel.sampling_shards
    beside = recipe.rollout.staleness > 0 if number == "auto" else number > 0
    if trained and not parallel.deterministic:
        number = world - max(trained) if beside else 0
        if number < 0 or {world - number} != trained:
            raise _not_on(world, trained, recipe, beside=beside)
    elif number != "auto" and (number >= world or (world - number).bit_count() > 1):
        number = 0
    changes: dict[str, Any] = {"sampling": number}
    if beside and number == 0:
        logger.info("replay: no process is left to sample alone, so that all train and sample in turns")
        if parallel.shard == "auto" and not parallel.deterministic:  # beside samplers it means whole weights
            changes |= {"shard": 1, "replicate": world}
    is_cut = parallel.shard not in ("auto", 1)
    if beside and number != "auto" and shards != "auto" and ((number or world) % shards or not (number or is_cut)):
        logger.info("replay: parallel.sampling_shards: auto, for %d do not fit these processes", shards)
        changes["sampling_shards"] = "auto"
    return recipe.model_copy(update={"parallel": parallel.model_copy(update=changes)})


def _num_trained(run: RunFolder, recipe: Recipe) -> set[int]:
    """On how many processes the run trained; several numbers after a resume, none without a step."""
    steps = (line for line in run.read_metrics() if "loss/total" in line)
    return {len(line.get("parallel/tokens_per_rank", [0])) * recipe.parallel.sequence for line in steps}


def _not_on(world: int, trained: set[int], recipe: Recipe, *, beside: bool) -> ConfigurationError:
    """The error of a number of processes on which gradients would be rounded otherwise."""
    words = ", after a resume ".join(map(str, sorted(trained)))
    remedy = f"Start {words} of them (torchrun --nproc-per-node){', or more, which sample' if beside else ''}."
    return ConfigurationError(
        needed=f"as many processes that train as the run had, for their number rounds gradients: {words}",
        given=f"{world} in all, parallel.sampling: {recipe.parallel.sampling}",
        remedy=remedy if len(trained) == 1 else "Repeat a run that was not resumed on another number.",
    )


def _check_repeatable(run: RunFolder, recipe: Recipe) -> None:
    """Refuse a run that cannot be repeated on any processes."""
    if found := _why_not(run):
        given, remedy = found
        raise ConfigurationError(
            needed=f"a run to repeat: begun anew, with a checkpoint and a log of its blocks in {run.path}",
            given=given,
            remedy=remedy,
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


def _why_not(run: RunFolder) -> tuple[str, str] | None:
    """Why a run cannot be repeated, and what to do; None if it can."""
    if (parent := parent_in(run)) is not None:
        given = "a fork, whose first weights and optimizer state are another run's"
        return given, "Fork {run}:{checkpoint} again, and see `logitless report` of both.".format(**parent)
    found, summary = checkpoints(run.checkpoints), run.read_summary()
    if not found:
        return "no checkpoint", "Repeat a run that has its last one: without it no weights can be compared."
    last = last_whole(run)
    if last is None:
        if summary.get("ended_by") not in COMPLETE:
            return "one without a whole block", "Go on with it (--resume), then repeat it."
        if found[-1].name != folder_name(summary["blocks"], summary["steps"]):
            return f"one that went on after its end, to {found[-1].name}", "Finish it with --resume, then repeat it."
    blocks = summary["blocks"] if last is None else last.block
    logged = {int(file.stem.removeprefix("block-")) for file in run.collected.glob("block-*.json")}
    if missing := [block for block in range(1, blocks + 1) if block not in logged]:
        given = f"no log of {len(missing)} blocks, the first of them {missing[0]}"
        return given, "Repeat another run. Only rollout.staleness and parallel.sampling write a log."
    return None


class LastWholeBlock(Callback):
    """Ends the repetition of an unfinished run after that run's last whole block.

    Args:
        block: its number, from 1.
        checkpoint: name of the one after it.
    """

    def __init__(self, block: int, checkpoint: str) -> None:
        self.block, self.checkpoint = block, checkpoint

    def on_block(self, metrics: Mapping[str, Any]) -> bool:
        """Whether it is this block."""
        return bool(metrics["block"] >= self.block)


def last_whole(run: RunFolder) -> LastWholeBlock | None:
    """The last whole block of an unfinished run; None of a finished one, and without any.

    Raises:
        CheckpointError: a checkpoint is damaged.
    """
    if run.read_summary().get("ended_by") in COMPLETE:
        return None
    for folder in reversed(checkpoints(run.checkpoints)):
        try:
            state = json.loads((folder / "state.json").read_bytes())
            block, unwritten = state["progress"]["block"], state["loop"].get("unwritten")
            amid_block = state["block"] is not None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise damaged(folder, error) from error
        if block and not unwritten and not amid_block:
            return LastWholeBlock(block, folder.name)
    return None


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


def check_same_end(here: RunFolder, there: RunFolder, last: LastWholeBlock | None = None) -> None:
    """Refuse a run whose metrics or checkpoints differ from those of the run that it repeats, in any bit.

    Each checkpoint that both runs have is compared, the last one included. Times, speeds and memory are not, nor are
    numbers by rank.

    Args:
        here, there: folders of the repetition, and of the run.
        last: block up to which an unfinished run was repeated; None for a finished one.

    Raises:
        TrainingError: names the first metric, or the first checkpoint and what differs there.
    """
    lines = [[*map(repeatable, each.read_metrics())] for each in (here, there)]
    if last is not None:
        lines = [[line for line in of if line["block"] <= last.block] for of in lines]
    for one, other in zip_longest(*lines, fillvalue={}):
        for name in (each for each in {**other, **one} if not each.startswith("parallel/")):
            if one.get(name) != other.get(name):
                place = f"{name} of block {other.get('block')}, step {other.get('step')}"
                raise _differs(f"{place}: {other.get(name)}", str(one.get(name)))
    ended, recorded = (checkpoints(each.checkpoints)[-1].name for each in (here, there))
    recorded = recorded if last is None else last.checkpoint
    if ended != recorded:
        raise _differs(f"{recorded} as the last checkpoint", ended)
    for folder in checkpoints(there.checkpoints):
        if (again := here.checkpoints / folder.name).is_dir():
            found, entries = _entries(again), _entries(folder)
            for name in {**entries, **found}:
                if found.get(name) != entries.get(name):
                    raise _differs(f"{name} of checkpoint {folder.name}", "another value")


def _entries(checkpoint: Path) -> dict[str, Any]:
    """Checksums of a checkpoint's tensors, and the numbers of its state, by name."""
    index = json.loads((checkpoint / "index.json").read_bytes())["tensors"]
    sums = {name: [[piece["start"], piece["sha256"]] for piece in entry["pieces"]] for name, entry in index.items()}
    return sums | dict(_leaves("state", json.loads((checkpoint / "state.json").read_bytes())))


_NOT_REPEATED = {
    *("state/journal/seconds", "state/loop/block_metrics"),  # times, and lines of metrics
    *("state/loop/unwritten", "state/loop/unwritten_by_rank"),
    "state/random/python",  # drawn from by tools in the process, such as beartype, whenever they run
}


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """The entries of a state by path, as JSON, where NaN equals itself; without what no run repeats."""
    if name in _NOT_REPEATED:
        return
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(f"{name}/{key}", inner)
    else:
        yield name, json.dumps(value)


def _differs(recorded: str, here: str) -> TrainingError:
    return TrainingError(
        needed=f"what was recorded: {recorded}",
        given=here,
        remedy="Compare provenance.json of both runs: versions, device and data must be the same. So must the number of"
        " processes that train, unless parallel.deterministic is set.",
    )

r"""Asynchrony: blocks are collected in a thread of their own while others are trained on, at most so many ahead.

    collector's thread   block 0   block 1   block 2 ...       begins block b when b - staleness blocks are trained on
                             \        \
    training              waits  0      1    ...               hands its weights over after each; they are sampled with
                                                               from the next call of the engine on

When exactly a block begins depends on the machine, and with it the weights that draw it. What was drawn is therefore
written down, a file a block, before it is trained on: the *log*. A run that goes on takes from its log what it has
there, and another run can replay it; either is then the same run in every bit, for all else follows from the seed.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from logitless.errors import DataError
from logitless.rollout.engine import ConcurrentEngine
from logitless.rollout.environment import Driver, Environment, play
from logitless.seeds import derived_seed
from logitless.train.block import JudgedBlock
from logitless.train.collect.collector import Collector
from logitless.train.collect.group_json import group_as_json, group_of_json
from logitless.train.collect.refill import refilled_as_they_come
from logitless.train.recipe.config import Recipe
from logitless.train.store.atomic import write_atomically
from logitless.types import Episode, Prompt

LOG = "collected"
"""The log's folder in that of a run."""


def collector_of(recipe: Recipe, folder: Path | None, *arguments: Any, **options: Any) -> Collector:
    """The collector of a recipe: one that collects ahead, one that replays another run's log, or one that does neither.

    Args:
        recipe: checked.
        folder: of the run; None where no block is to be collected ahead or replayed.
        *arguments, **options: of ``Collector``.
    """
    engine, prompts = recipe.rollout.engine, arguments[0]
    if folder is None:
        return Collector(*arguments, **options)
    if engine.recorded_run is not None:
        return ReplayingCollector(*arguments, log=CollectedBlocks(engine.recorded_run / LOG, prompts), **options)
    staleness = recipe.rollout.staleness
    if staleness == 0:
        return Collector(*arguments, **options)
    log = CollectedBlocks(folder / LOG, prompts)
    return AheadCollector(*arguments, staleness=staleness, blocks=recipe.train.blocks, log=log, **options)


class CollectedBlocks:
    """The log: what was drawn for each block, in what order, and when.

    A file has the block's number, ``begun_after`` (blocks that had been trained on), ``versions`` (of the weights that
    drew it), ``rounds``, ``kept``, the groups with tokens, log-probs and verdicts, and where in the prompts the
    collector stood before and after it.

    Args:
        folder: of the log; made when the first block is written.
        prompts: to train on; the log names them by id.

    Example:
        >>> CollectedBlocks(Path("/nonexistent"), []).has(0)
        False
    """

    def __init__(self, folder: Path, prompts: Sequence[Prompt]) -> None:
        self.folder, self._prompts = folder, {prompt.id: prompt for prompt in prompts}

    def has(self, block: int) -> bool:
        """Whether the block is there."""
        return self._file(block).is_file()

    def write(self, block: int, judged: JudgedBlock, *, begun_after: int, before: Any, after: Any) -> None:
        """Write a block down, whole or not at all.

        Args:
            block: from 0.
            judged: all that was drawn.
            begun_after: blocks that had been trained on when it began.
            before, after: the collector's states.
        """
        self.folder.mkdir(exist_ok=True)
        completions = [completion for group in judged.drawn for completion in group.completions]
        whole = {c.weights_version for c in completions if c.token_versions is None and c.weights_version is not None}
        versions = whole.union(*(c.token_versions.tolist() for c in completions if c.token_versions is not None))
        row = {
            "schema_number": 1,
            "block": block,
            "begun_after": begun_after,
            "versions": sorted(versions),
            "rounds": judged.rounds,
            "kept": judged.kept,
            "before": before,
            "after": after,
            "groups": [{"prompt_id": group.prompt.id, **group_as_json(group)} for group in judged.drawn],
        }
        write_atomically(self._file(block), json.dumps(row, default=str).encode())

    def read(self, block: int) -> tuple[JudgedBlock, Any]:
        """What was drawn, and the collector's state after it.

        Raises:
            DataError: the block is not there, is damaged, or is of other prompts.
        """
        file = self._file(block)
        try:
            row = json.loads(file.read_bytes())
            groups = tuple(group_of_json(self._prompts[each["prompt_id"]], each) for each in row["groups"])
            return JudgedBlock(groups, tuple(row["kept"]), row["rounds"]), row["after"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                needed=f"block {block + 1} in the log {self.folder}",
                given=f"{type(error).__name__}: {error}",
                remedy="Replay the run with its own data, and no more blocks than it has.",
            ) from error

    def _file(self, block: int) -> Path:
        return self.folder / f"block-{block + 1:06d}.json"


class AheadCollector(Collector):
    """A ``Collector`` whose blocks are begun before they are asked for.

    Args:
        *arguments, **options: of ``Collector``.
        staleness: blocks ahead: block b begins when b - staleness have been trained on.
        blocks: of the run; none is collected beyond.
        log: of this run; what it has is not collected again.

    Raises:
        ConfigurationError: several ranks, whose exchanges two threads would mix up.
    """

    def __init__(
        self,
        *arguments: Any,
        staleness: int,
        blocks: int,
        log: CollectedBlocks,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.staleness, self.blocks, self.log = staleness, blocks, log
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._trained, self._wanted, self._factor = 0, 0, 1.0
        self._before: dict[int, Any] = {}
        self._ready: dict[int, JudgedBlock] = {}
        self._error: BaseException | None = None
        self._closing = False

    def next(self, block: int, *, length_factor: float = 1.0) -> JudgedBlock:
        """The block, as soon as it is there; that it is asked for says that those before it were trained on."""
        with self._changed:
            self._trained = self._wanted = block
            self._factor = length_factor
            if self._thread is None:
                self._thread = threading.Thread(target=self._collect, args=(block,), name="collector", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            while block not in self._ready and self._error is None:
                self._changed.wait()
            if block not in self._ready:
                assert self._error is not None
                raise self._error
            self._wanted = block + 1
            return self._ready.pop(block)

    def close(self) -> None:
        """Begin no further block, and wait for the one that is being collected."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def state_dict(self) -> dict[str, Any]:
        """Where in the prompts the next block that training asks for begins."""
        with self._changed:
            return self._before.get(self._wanted) or super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``; once blocks are being collected, they stay in line and there is nothing to do."""
        if self._thread is None:
            super().load_state_dict(state)

    def _collect(self, block: int) -> None:
        """The thread: one block after another, as soon as it may begin."""
        try:
            while block < self.blocks:
                with self._changed:
                    while block > self._trained + self.staleness and not self._closing:
                        self._changed.wait()
                    if self._closing:
                        return
                    begun_after, factor = self._trained, self._factor
                    before = self._before[block] = super().state_dict()
                if self.log.has(block):
                    judged, after = self.log.read(block)
                    super().load_state_dict(after)
                else:
                    judged = self._drawn(block, factor)
                    after = super().state_dict()
                    self.log.write(block, judged, begun_after=begun_after, before=before, after=after)
                with self._changed:
                    self._ready[block] = judged
                    self._before.pop(block - self.staleness - 2, None)
                    self._changed.notify_all()
                block += 1
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _drawn(self, block: int, length_factor: float) -> JudgedBlock:
        """The block from the engine; refills stream where several threads may ask it."""
        engine, environment, options = self.engine, self.environment, self.options
        at_once = engine.prompts_at_once if isinstance(engine, ConcurrentEngine) else 1
        if options.zero_signal != "refill" or at_once == 1 or isinstance(environment, Driver):
            return super().next(block, length_factor=length_factor)
        sampling = self.sampling(length_factor)

        def draw(prompt: Prompt, environment: Environment, refill: int) -> list[Episode]:
            [episodes] = play(
                engine,
                [prompt],
                environment,
                num_samples=options.completions_per_prompt,
                options=sampling,
                seed=derived_seed(self.seed, "rollout", block, refill),
                limits=options.limits,
            )
            return episodes

        drawn = refilled_as_they_come(
            [self.prompts[i] for i in self.order.next(options.prompts_per_block)],
            lambda: self.prompts[self.order.next(1)[0]],
            draw,
            environment,
            self.rewards,
            unscored=options.unscored,
            max_refills=options.max_refills,
            at_once=at_once,
        )
        return self.checked(drawn)


class ReplayingCollector(Collector):
    """A ``Collector`` that draws nothing: it gives the blocks of another run's log.

    Args:
        *arguments, **options: of ``Collector``.
        log: of the run that is replayed.
    """

    def __init__(self, *arguments: Any, log: CollectedBlocks, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.log = log

    def next(self, block: int, *, length_factor: float = 1.0) -> JudgedBlock:  # noqa: ARG002 - it was drawn already
        """The block as it was drawn then."""
        judged, after = self.log.read(block)
        self.load_state_dict(after)
        return judged

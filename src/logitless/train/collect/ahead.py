r"""Asynchronous rollout: a thread collects blocks while earlier ones are trained on, at most ``staleness`` ahead.

    collector's thread   block 0   block 1   block 2 ...       begins block b when b - staleness blocks are trained on
                             \        \
    training              waits  0      1    ...               syncs weights after each block; the engine's next call
                                                               samples with them

When a block begins depends on the machine, and so do the weights that sample it. Each block is therefore written to a
file, the *log*, before it is trained on. A resumed run takes blocks that are in its log from there, and another run can
replay the log. Both are bitwise the same run, for all else follows from the seed.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from logitless.data.mixing import MixedOrder
from logitless.data.prompts import PromptOrder
from logitless.distributed.ranks import Ranks
from logitless.errors import DataError
from logitless.rewards.reward import WeightedReward
from logitless.rollout.engine import ConcurrentEngine, Engine
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


def collector_of(
    recipe: Recipe,
    folder: Path | None,
    prompts: Sequence[Prompt],
    engine: Engine,
    environment: Environment | Driver,
    rewards: Sequence[WeightedReward],
    *,
    ranks: Ranks,
    order: PromptOrder | MixedOrder,
    greedy_baseline: bool = False,
) -> Collector:
    """The collector of a recipe: ``AheadCollector``, ``ReplayingCollector`` or plain ``Collector``.

    Args:
        folder: of the run; None for a plain collector.
        prompts, engine, environment, rewards, ranks, order, greedy_baseline: of ``Collector``.
    """

    def made(kind: type[Collector], **options: Any) -> Collector:
        parts = (prompts, engine, environment, rewards, recipe.rollout)
        return kind(*parts, seed=recipe.seed, ranks=ranks, order=order, greedy_baseline=greedy_baseline, **options)

    replayed, staleness = recipe.rollout.engine.recorded_run, recipe.rollout.staleness
    if folder is not None and replayed is not None:
        return made(ReplayingCollector, log=CollectedBlocks(replayed / LOG, prompts))
    if folder is not None and staleness > 0:
        log = CollectedBlocks(folder / LOG, prompts)
        return made(AheadCollector, staleness=staleness, blocks=recipe.train.blocks, log=log)
    return made(Collector)


class CollectedBlocks:
    """The log: a JSON file for each block that was sampled.

    It has the block's number, ``begun_after`` (blocks that had been trained on), ``versions`` (of the weights that
    sampled it), ``rounds``, ``kept``, the groups with tokens, log-probs and verdicts, and the collector's position in
    the prompts before and after it.

    Args:
        folder: of the log; created with the first block.
        prompts: to train on; the log refers to them by id.

    Example:
        >>> CollectedBlocks(Path("/nonexistent"), []).has(0)
        False
    """

    def __init__(self, folder: Path, prompts: Sequence[Prompt]) -> None:
        self.folder, self._prompts = folder, {prompt.id: prompt for prompt in prompts}

    def has(self, block: int) -> bool:
        """Whether the block is in the log."""
        return self._file(block).is_file()

    def write(self, block: int, judged: JudgedBlock, *, begun_after: int, before: Any, after: Any) -> None:
        """Write a block, atomically.

        Args:
            block: number, from 0.
            judged: all groups.
            begun_after: blocks that had been trained on when it began.
            before, after: the collector's states.
        """
        self.folder.mkdir(exist_ok=True)
        completions = [completion for group in judged.sampled for completion in group.completions]
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
            "groups": [{"prompt_id": group.prompt.id, **group_as_json(group)} for group in judged.sampled],
        }
        write_atomically(self._file(block), json.dumps(row, default=str).encode())

    def read(self, block: int) -> tuple[JudgedBlock, Any]:
        """The block, and the collector's state after it.

        Raises:
            DataError: the block is missing or damaged, or its prompts are others.
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
    """A ``Collector`` that collects blocks in a thread, before they are asked for.

    Args:
        *arguments, **options: of ``Collector``; a single rank, for two threads would mix up its collectives.
        staleness: block b begins when b - staleness blocks have been trained on.
        blocks: of the run; none is collected beyond.
        log: of this run; its blocks are not sampled again.
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
        """Wait for the block. The call also tells the thread that all earlier blocks were trained on."""
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
        """Begin no further block, and wait for the current one."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def state_dict(self) -> dict[str, Any]:
        """The position in the prompts at which the block begins that training asks for next."""
        with self._changed:
            return self._before.get(self._wanted) or super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``. Does nothing once the thread runs, which keeps its own position."""
        if self._thread is None:
            super().load_state_dict(state)

    def _collect(self, block: int) -> None:
        """The thread: collect one block after another, each as soon as it may begin."""
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
                    judged = self._sample(block, factor)
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

    def _sample(self, block: int, length_factor: float) -> JudgedBlock:
        """Sample a block; zero-signal groups are refilled one by one if several threads may ask the engine."""
        engine, environment, options = self.engine, self.environment, self.options
        at_once = engine.prompts_at_once if isinstance(engine, ConcurrentEngine) else 1
        if options.zero_signal != "refill" or at_once == 1 or isinstance(environment, Driver):
            return super().next(block, length_factor=length_factor)
        sampling = self.sampling(length_factor)

        def sample(prompt: Prompt, environment: Environment, refill: int) -> list[Episode]:
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

        sampled = refilled_as_they_come(
            [self.prompts[i] for i in self.order.next(options.prompts_per_block)],
            lambda: self.prompts[self.order.next(1)[0]],
            sample,
            environment,
            self.rewards,
            unscored=options.unscored,
            max_refills=options.max_refills,
            at_once=at_once,
        )
        return self.checked(sampled)


class ReplayingCollector(Collector):
    """A ``Collector`` that samples nothing and gives the blocks of another run's log.

    Args:
        *arguments, **options: of ``Collector``.
        log: of the run that is replayed.
    """

    def __init__(self, *arguments: Any, log: CollectedBlocks, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.log = log

    def next(self, block: int, *, length_factor: float = 1.0) -> JudgedBlock:  # noqa: ARG002 - sampled already
        """The block as it is in the log."""
        judged, after = self.log.read(block)
        self.load_state_dict(after)
        return judged

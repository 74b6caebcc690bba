r"""Blocks sampled by older weights, in turns with training or beside it: block b by those after b - staleness blocks.

    in turns (one set of ranks)        sample 0 1 │ train 0 │ sample 2 │ train 1 │ sample 3 │ train 2 ...

    beside it (sampling ranks)         sample   0 │ 1 │  2  │   3  │ 4 ...       the thread of ``AheadCollector`` sends
                                                  \   \  ^ \    ^ \              weights and waits for completions
                                       train       │0 │/ 1 │ /2   │ 3 ...        waits for its block alone

Both are the same run, bit for bit (shown for staleness 1). Two exceptions depend on time: servers (``vllm_server``)
sample with whatever weights they were synced with last, and in flight (``rollout.in_flight``) a block begins with the
newest weights and goes on with newer ones, which makes it at most ``staleness`` blocks old, as the others are. Which
weights sampled which tokens is then in the log, and a repetition collects each block when training asks for it.

Each block is written to the log (``block_log.py``) before it is trained on. A resumed run takes from there the blocks
whose weights are gone: a checkpoint appears only when all of them are in the log (``settle``). Another run can replay
the log, or sample again and compare (``replay.py``).
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from logitless.data.mixing import MixedOrder
from logitless.data.prompts import PromptOrder
from logitless.distributed.failing import failing_together
from logitless.distributed.ranks import Ranks
from logitless.errors import CheckpointError
from logitless.rewards.reward import WeightedReward
from logitless.rollout.engine import ConcurrentEngine, Engine, VersionedEngine
from logitless.rollout.environment import Driver, Environment
from logitless.rollout.in_flight import RepeatingEngine
from logitless.rollout.sampling_ranks import SamplingRanks
from logitless.seeds import derived_seed
from logitless.train.block import JudgedBlock
from logitless.train.collect.block_log import BlockLog
from logitless.train.collect.collector import Collector
from logitless.train.collect.group_json import decode_groups, encode_groups
from logitless.train.collect.refill import refilled_as_they_come
from logitless.train.collect.replay import check_same_block
from logitless.train.recipe.config import Recipe
from logitless.train.record.run_folder import RunFolder
from logitless.types import Prompt


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
    greedy_baseline: bool,
    replayed: Path | None,
) -> Collector:
    """The collector of a recipe.

    Args:
        folder: of the run; None for a plain collector.
        replayed: folder of the run that this one repeats; None for any other.
    """

    def made(kind: type[Collector], **options: Any) -> Collector:
        parts = (prompts, engine, environment, rewards, recipe.rollout)
        return kind(*parts, seed=recipe.seed, ranks=ranks, order=order, greedy_baseline=greedy_baseline, **options)

    recorded, staleness = recipe.rollout.engine.recorded_run, recipe.rollout.staleness
    beside = recipe.parallel.num_sampling > 0 or not recipe.rollout.engine.samples_policy
    if folder is not None and recorded is not None:
        return made(ReplayingCollector, log=BlockLog(RunFolder(recorded).collected, prompts))
    if folder is not None and (staleness > 0 or recipe.parallel.num_sampling > 0 or replayed is not None):
        return made(
            AheadCollector if beside else ScheduledCollector,
            staleness=staleness,
            blocks=recipe.train.blocks,
            log=BlockLog(RunFolder(folder).collected, prompts),
            replayed=None if replayed is None else BlockLog(RunFolder(replayed).collected, prompts),
        )
    return made(Collector)


class ScheduledCollector(Collector):
    """A ``Collector`` whose block b is sampled by the weights after b - ``staleness`` blocks, in turns with training.

    After a resume, weights older than the checkpoint's are gone. Their blocks are in the log; where they are not,
    because the run had fewer blocks before, the checkpoint's weights sample them.

    Args:
        log: of this run; its blocks are not sampled again.
        replayed: log of the run that this one repeats, with the same blocks by the same weights; None for any other. A
            run that was stopped early has not logged all blocks that another end of it would sample ahead.
    """

    def __init__(
        self,
        *arguments: Any,
        staleness: int,
        blocks: int,
        log: BlockLog,
        replayed: BlockLog | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.staleness, self.blocks, self.log, self.replayed = staleness, blocks, log, replayed
        self._first: int | None = None
        self._begun = self._wanted = 0
        self._before: dict[int, Any] = {}
        self._ready: dict[int, JudgedBlock] = {}
        self._factors: dict[int, float] = {}  # of lengths, by trained blocks

    def next(self, block: int, *, length_factor: float = 1.0) -> JudgedBlock:
        """The block, after every block was sampled that has to be by the current weights."""
        self._wanted, self._factors[block] = block, length_factor
        if self._first is None:
            self._first = self._begun = block
        while self._begun < self.blocks and self.sampled_after(self._begun) <= block:
            self._before[self._begun] = Collector.state_dict(self)
            self._collect(self._begun, block, length_factor)
            self._begun += 1
        self._wanted = block + 1
        return self._ready.pop(block)

    def sampled_after(self, block: int) -> int:
        """The number of trained blocks whose weights sample a block."""
        assert self._first is not None
        if self._in_flight is not None:
            return block  # by then all weights are there that sampled it
        if self.replayed is not None and self.replayed.has(block):
            return self.replayed.begun_after(block)
        return max(block - self.staleness, self._first)

    @property
    def _in_flight(self) -> BlockLog | None:
        """The log that says which weights sampled which tokens, where a run with in-flight updates is repeated."""
        return None if self.options.in_flight is None else self.replayed

    def state_dict(self) -> dict[str, Any]:
        """The position in the prompts at which the block begins that training asks for next."""
        return self._before.get(self._wanted) or super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``; blocks after it are taken from the log."""
        super().load_state_dict(state)
        self._first = None
        self._before.clear()
        self._ready.clear()

    def _collect(self, block: int, begun_after: int, length_factor: float) -> None:
        """Take a block from the log, or sample it and write it there."""
        engine = self.engine
        if self.ranks.broadcast_object(self.log.has(block)):
            with failing_together(self.ranks, "a block of the log"):
                judged, after = self.log.read(block)
            Collector.load_state_dict(self, after)
            judged = replace(judged, exact=self.is_exact and judged.exact)  # a resumed run may shard its layers
        else:
            drawn = None
            if (recorded := self._in_flight) is not None:
                assert isinstance(engine, RepeatingEngine | SamplingRanks)
                begun_after, drawn = recorded.begun_after(block), recorded.drawn(block)
                engine.repeat(drawn)
                length_factor = self._factors[begun_after]
            judged = self._sample(block, length_factor)
            if drawn is None and self.options.in_flight is not None:
                assert isinstance(engine, SamplingRanks)
                drawn = engine.drawn
            after = Collector.state_dict(self)
            if self.ranks.is_first:
                before = self._before[block]
                self.log.write(block, judged, begun_after=begun_after, before=before, after=after, drawn=drawn)
        if self.replayed is not None and self.replayed.has(block):
            check_same_block(block, judged, self.replayed.read(block)[0])
        self._ready[block] = judged
        self._before.pop(block - self.staleness - 2, None)

    def _sample(self, block: int, length_factor: float) -> JudgedBlock:
        """Sample a block; zero-signal groups are refilled one by one if several threads may ask the engine."""
        engine, options = self.engine, self.options
        at_once = engine.prompts_at_once if isinstance(engine, ConcurrentEngine) else 1
        if options.zero_signal != "refill" or at_once == 1 or isinstance(self.environment, Driver):
            return Collector.next(self, block, length_factor=length_factor)
        sampled = refilled_as_they_come(
            self.sampler,
            [self.prompts[i] for i in self.order.next(options.prompts_per_block)],
            lambda: self.prompts[self.order.next(1)[0]],
            options.completions_per_prompt,
            self.sampling(length_factor),
            seed_of=lambda refill: derived_seed(self.seed, "rollout", block, refill),
            max_refills=options.max_refills,
            at_once=at_once,
        )
        return self.checked(sampled)


class AheadCollector(ScheduledCollector):
    """A ``ScheduledCollector`` that collects in a thread, beside training, from an engine with weights of its own.

    A ``VersionedEngine`` samples a block with exactly the scheduled weights. Other engines, and any in flight, sample
    with the newest; when a block begins then depends on time, and the log records it.

    Args:
        ranks: that train; the first one collects, and gives the others each block.
    """

    def __init__(self, *arguments: Any, ranks: Ranks = Ranks.alone(), **options: Any) -> None:
        super().__init__(*arguments, ranks=Ranks.alone(), **options)  # two threads would mix up collectives
        self._training_ranks = ranks
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._trained = 0
        self._versions: dict[int, int | None] = {}  # of weights, by trained blocks
        self._error: BaseException | None = None
        self._closing = False

    def next(self, block: int, *, length_factor: float = 1.0) -> JudgedBlock:
        """Wait for the block. The call also tells the thread that all earlier blocks were trained on."""
        ranks, judged = self._training_ranks, None
        with failing_together(ranks, "a block of completions"):
            if ranks.is_first:
                judged = self._awaited(block, length_factor)
        return self._of_first(judged)

    def _awaited(self, block: int, length_factor: float) -> JudgedBlock:
        with self._changed:
            self._trained = self._wanted = block
            self._versions[block], self._factors[block] = self._newest, length_factor
            if self._thread is None:
                self._first = block
                self._thread = threading.Thread(target=self._go_ahead, args=(block,), name="collector", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            while block not in self._ready and self._error is None:
                self._changed.wait()
            if block not in self._ready:
                assert self._error is not None
                raise self._error
            self._wanted = block + 1
            return self._ready.pop(block)

    def _of_first(self, judged: JudgedBlock | None) -> JudgedBlock:
        """The block of the first training rank, on all of them."""
        ranks = self._training_ranks
        if ranks.world > 1:
            rest, numbers = encode_groups(() if judged is None else judged.sampled)
            mine = judged and [[g.prompt.id for g in judged.sampled], rest, judged.kept, judged.rounds, judged.exact]
            ids, rest, kept, rounds, exact = ranks.broadcast_object(mine)
            by_id = {prompt.id: prompt for prompt in self.prompts}
            groups = decode_groups([by_id[id] for id in ids], rest, ranks.all_gather_bytes(numbers)[0])
            judged = JudgedBlock(tuple(groups), tuple(kept), rounds, exact)
        assert judged is not None
        return judged

    def settle(self, done: int, *, in_training: bool) -> None:
        """Wait until every block is in the log whose weights the checkpoint does not have.

        Raises:
            CheckpointError: the sampling ranks failed before.
        """
        needed = min(done + self.staleness + in_training, self.blocks) if done or in_training else 0
        # In flight, a block that is not in the log is sampled by the checkpoint's weights or newer ones.
        if not isinstance(self.engine, VersionedEngine) or self.options.in_flight is not None:
            return
        with self._changed:
            if self._thread is not None:
                # In a replay of a run that was resumed, blocks may wait for more training than staleness says.
                waiting = (b for b in range(self._begun, needed) if self.sampled_after(b) > self._trained)
                needed = next(waiting, needed)
                self._changed.wait_for(lambda: self._begun >= needed or self._error is not None)
                if self._begun < needed:
                    raise CheckpointError(
                        needed=f"blocks up to {needed} in {self.log.folder}, whose weights this checkpoint lacks",
                        given=f"{self._begun}, and then: {self._error}",
                        remedy="Go on from the checkpoint before, with --resume.",
                    )

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
            return super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``. Does nothing once the thread runs, which keeps its own position."""
        if self._thread is None:
            super().load_state_dict(state)

    def _go_ahead(self, block: int) -> None:
        """The thread: collect one block after another, each as soon as it may begin."""
        engine = self.engine
        try:
            while block < self.blocks:
                begun_after = self.sampled_after(block)
                with self._changed:
                    while begun_after > self._trained and not self._closing:
                        self._changed.wait()
                    if self._closing:
                        return
                    if not isinstance(engine, VersionedEngine) or self.options.in_flight is not None:
                        begun_after = self._trained
                    version, factor = self._versions[begun_after], self._factors[begun_after]
                    self._before[block] = Collector.state_dict(self)
                if version is not None and isinstance(engine, VersionedEngine) and self._in_flight is None:
                    (engine.forget if self.log.has(block) else engine.use)(version)
                self._collect(block, begun_after, factor)
                block += 1
                with self._changed:
                    self._begun = block
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()


class ReplayingCollector(Collector):
    """A ``Collector`` that samples nothing and gives the blocks of another run's log."""

    def __init__(self, *arguments: Any, log: BlockLog, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.log = log

    def next(self, block: int, *, length_factor: float = 1.0) -> JudgedBlock:  # noqa: ARG002 - sampled already
        """The block as it is in the log, and never exact: another model may have sampled it."""
        judged, after = self.log.read(block)
        self.load_state_dict(after)
        return replace(judged, exact=False)

"""The loop: who waits for whom, and nothing else.

    weights ──> Engine ──> Collector ──> Learner ──> Journal
       ^        sample     judge,        score,      metrics,
       │                   refill        step        rollouts
       └────────────────── hand over <─────┘

The engine gets the weights when a run begins (after a warm start and on resume too) and whenever a block has been
trained on, before anything is sampled with them, held-out prompts included. Everything happens in turn: the collector
waits for the learner's weights, the learner for the collector's block. A run that is stopped anywhere goes on bitwise,
because all that is random follows from the seed and the numbers that a checkpoint holds.

With several ranks each runs this loop. They share the prompts of a round and the rows of a pass; what comes of it every
rank has whole, and so every rank plans, weighs and decides alike. The first one writes.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from signal import Signals

from logitless.errors import CheckpointError, EngineError, LostRankError
from logitless.train.block_metrics import training_metrics
from logitless.train.checkpoint import BackgroundSaver, Checkpoint, checkpoints, damaged
from logitless.train.collector import Collector
from logitless.train.config import Recipe
from logitless.train.engines import Engines
from logitless.train.evaluate import Evaluation, HeldOut
from logitless.train.failures import Failures
from logitless.train.interrupt import Interrupt
from logitless.train.journal import Journal
from logitless.train.learner import Learner
from logitless.train.limits import SignalLimit, UnscoredLimit
from logitless.train.metrics import Numbers
from logitless.train.parity import check_parity
from logitless.train.prepare import prepare
from logitless.train.saving import restore_run, save_run
from logitless.train.shared_checkpoint import SharedSaver
from logitless.types import Group


class Loop:
    """One run, from its first rollout to its last checkpoint.

    Args:
        recipe: checked.
        collector: draws blocks.
        learner: trains on them.
        evaluation: of held-out prompts.
        journal: is told everything.

    Attributes:
        stopped_by: the signal that ended ``run`` before its last block, the same on every rank; None without one.
    """

    def __init__(
        self, recipe: Recipe, collector: Collector, learner: Learner, evaluation: Evaluation, journal: Journal
    ) -> None:
        self.recipe, self.ranks, train = recipe, learner.ranks, recipe.train
        self.collector, self.learner, self.evaluation, self.journal = collector, learner, evaluation, journal
        self.engines = Engines(collector.engine, evaluation.engine)
        self.block_metrics: Numbers = {}
        self.unwritten: Numbers = {}
        self.without_signal = SignalLimit(max_blocks=train.max_blocks_without_signal)
        self.unscored = UnscoredLimit(max_fraction=train.max_unscored_fraction, max_blocks=train.max_blocks_unscored)
        self.failures = Failures(evaluation.rewards)
        root, keep = journal.folder.checkpoints, recipe.checkpoint.keep
        self.saver: BackgroundSaver | SharedSaver = BackgroundSaver(root, keep=keep)
        if self.ranks.world > 1:
            self.saver = SharedSaver(root, keep=keep, ranks=self.ranks)
        self.interrupt = Interrupt(journal.message)
        self.stopped_by: Signals | None = None

    def run(self) -> bool:
        """Train to the end, or to a signal, which is then in ``stopped_by``; returns whether the run is complete.

        Either way a checkpoint is saved.

        Raises:
            EngineError: an engine elsewhere is gone for good; a checkpoint of what was done until then is saved.
        """
        with self.interrupt.heard():
            self._hand_over()
            if self.ranks.of_first(not checkpoints(self.journal.folder.checkpoints)):
                place: Numbers = {"step": self.learner.progress.step, "block": self._done + 1, "epoch": 1}
                self.journal.write({**place, **self._evaluated(self.evaluation.sets)})
                self.save()
                self._wait_for_saver()  # from here on there is something to go on from
            try:
                self._blocks()
            except EngineError:
                self._save_what_was_done()
                raise
            signals = self.ranks.everyones(self.interrupt.signal)  # heard by some ranks, answered by all alike
        complete = self._done == self.recipe.train.blocks
        if not complete:
            self.stopped_by = next((Signals(number) for number in signals if number is not None), None)
        return complete

    def _blocks(self) -> None:
        """Every block that there is left, and the last checkpoint."""
        if self.unwritten:  # a block that is trained on, and whose weights reached no engine
            self._end_block({}, by_rank={})
        while self._done < self.recipe.train.blocks and not self._stopping():
            self._block()
            if self._stopping() or self._done % self.recipe.checkpoint.every_blocks == 0:
                self.save()
        self.save()
        self._wait_for_saver()

    def _wait_for_saver(self) -> None:
        with self.journal.phase("checkpoint"):
            self.saver.wait()

    @property
    def _done(self) -> int:
        """Blocks finished."""
        return self.learner.progress.block

    def _stopping(self) -> bool:
        """Whether Ctrl-C was heard on any rank; all of them ask at the same places."""
        return self.ranks.any(self.interrupt.requested)

    def _block(self) -> None:
        """Collect a block unless one is in training, and train on it until its end or Ctrl-C."""
        if not self.learner.in_training and not self._collected():
            return
        while self.learner.in_training and not self._stopping():
            self._wait_for_saver()  # a step changes what is being written
            with self.journal.phase("training") as seconds:
                record = self.learner.step()
            if self.learner.parity is not None:
                check_parity(self.learner.parity, self.recipe.rollout.parity, self.journal.message)
            record |= training_metrics(record, seconds=seconds[0]) | self.block_metrics
            self.block_metrics = {}
            if self.learner.in_training:
                self.journal.write(record, self.learner.by_rank)
            else:
                self.unwritten = record
                self._end_block(self._hand_over(), by_rank=self.learner.by_rank)
            for message in (self.learner.halved, self.learner.check_skipped()):
                if message is not None:
                    self.journal.message(message)

    def _end_block(self, handed_over: Numbers, *, by_rank: Mapping[str, Sequence[int]]) -> None:
        """Evaluate with the new weights, if it is time, and write the line that the block ends with."""
        record = self.unwritten | handed_over | self._evaluated_if_due()
        self.unwritten = {}
        self.journal.write(record, by_rank)

    def _collected(self) -> bool:
        """Whether there is a block to train on; what Ctrl-C interrupts here is given up without a trace.

        With several ranks nothing is interrupted here: one that left would leave the others waiting.
        """
        before = self.collector.state_dict()
        try:
            at_once = self.interrupt.at_once() if self.ranks.world == 1 else nullcontext()
            with at_once, self.journal.phase("preparation"):
                prepared = prepare(self.collector, self.learner, self.journal)
        except KeyboardInterrupt:
            self.collector.load_state_dict(before)
            return False
        except EngineError:
            self.collector.load_state_dict(before)
            raise
        self.block_metrics = prepared.metrics
        self._tell_failures(prepared.judged.drawn)
        self.unscored.see(prepared.judged.drawn)
        if prepared.block is None:
            self._pass_over()
        else:
            self.learner.begin(prepared.block)
        self.without_signal.see(has_signal=self.learner.in_training)
        return self.learner.in_training

    def _tell_failures(self, groups: Sequence[Group]) -> None:
        """Say what failed in judging and was not said before."""
        for message in self.failures.new(groups):
            self.journal.message(message)

    def _pass_over(self) -> None:
        """Write the metrics of a block with nothing to train on."""
        place: Numbers = {"step": self.learner.progress.step, "block": self._done + 1, "epoch": 1}
        self.learner.end_block()
        self.unwritten = {**place, **self.block_metrics}
        self._end_block({}, by_rank={})
        self.journal.message(f"block {self._done}: no group with a signal, no step taken")
        self.block_metrics = {}

    def _hand_over(self) -> Numbers:
        """Every engine gets the weights as they are now."""
        with self.journal.phase("weights"):
            if self.engines.in_this_process:
                self.learner.policy.gather()  # until the next step
            return self.engines.load_all(self.learner.weights(), self.learner.version)

    def _evaluated_if_due(self) -> Numbers:
        """Held-out metrics after the blocks finished so far, where they are asked for."""
        return self._evaluated(self.evaluation.due(self._done, self.recipe.train.blocks))

    def _evaluated(self, sets: Sequence[HeldOut]) -> Numbers:
        """Metrics of these held-out sets."""
        if not sets:
            return {}
        with self.journal.phase("evaluation") as seconds:
            found = self.evaluation(sets, self._tell_failures)
        return found | {"time/evaluation_seconds": seconds[0]}

    def save(self) -> None:
        """Begin a checkpoint of everything; every rank writes what it alone has."""
        remembered = {
            "block_metrics": self.block_metrics,
            "unwritten": self.unwritten,
            "without_signal_in_a_row": self.without_signal.in_a_row,
            "unscored_in_a_row": self.unscored.in_a_row,
        }
        with self.journal.phase("checkpoint"):
            save_run(self.saver, self.collector, self.learner, self.journal, remembered)

    def _save_what_was_done(self) -> None:
        """A checkpoint before the run ends with an error, which stays what it ends with if this fails too."""
        try:
            self.save()
            self._wait_for_saver()
        except (CheckpointError, LostRankError) as error:
            self.journal.message(f"no further checkpoint: {error}")

    def restore(self, saved: Checkpoint) -> None:
        """Go on from a checkpoint, which is read into the policy that there is."""
        remembered = restore_run(self.collector, self.learner, self.journal, saved)
        try:
            self.block_metrics = dict(remembered["block_metrics"])
            self.unwritten = dict(remembered.get("unwritten", {}))
            self.without_signal.in_a_row = remembered["without_signal_in_a_row"]
            self.unscored.in_a_row = remembered["unscored_in_a_row"]
        except KeyError as error:
            raise damaged(saved.folder, error) from error

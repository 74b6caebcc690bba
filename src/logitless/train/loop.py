"""The training loop: who waits for whom.

    weights ──> Engine ──> Collector ──> Learner ──> Journal
       ^        sample     rewards,      score,      metrics,
       │                   refill        step        rollouts
       └────────────────── sync <──────────┘

Weights are synced to the engine when a run starts or resumes, and after every block, before anything is sampled with
them, evaluation included. The collector waits for the learner's weights, the learner for the collector's block. A run
that is stopped anywhere resumes bitwise, because all randomness follows from the seed and the counters in a checkpoint.

With several ranks each runs this loop. They divide the prompts of a block and the packed rows of a pass, and exchange
the results, so that all of them plan and decide alike. Only the first one writes.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from signal import Signals
from types import MappingProxyType
from typing import Any

from logitless.errors import CheckpointError, EngineError, LostRankError
from logitless.rollout.environment import Driver
from logitless.rollout.in_flight import RepeatingEngine
from logitless.train.assembly.stages import Parts
from logitless.train.block import JudgedBlock, ScoredBlock
from logitless.train.callbacks import Callbacks
from logitless.train.collect.collector import Collector
from logitless.train.collect.evaluate import HeldOut
from logitless.train.collect.failures import Failures, first_failures
from logitless.train.collect.limits import NO_SIGNAL_YET, SignalLimit, UnscoredLimit
from logitless.train.collect.stopping import StoppedTogether, stopping_together
from logitless.train.interrupt import Interrupt
from logitless.train.learn.block_metrics import (
    advantage_metrics,
    advantages_of,
    block_metrics,
    lag_metrics,
    scoring_metrics,
    teacher_metrics,
    training_metrics,
    value_metrics,
)
from logitless.train.learn.learner import Learner
from logitless.train.learn.parity_gate import check_parity, parity_metrics
from logitless.train.learn.progress import halvings
from logitless.train.learn.score import check_same, check_sampler_logp, sampled_scores
from logitless.train.record.best import Best
from logitless.train.record.journal import Journal
from logitless.train.record.metrics import Numbers
from logitless.train.record.result import RunResult
from logitless.train.store.checkpoint import BackgroundSaver, Checkpoint, checkpoints, damaged, folder_name
from logitless.train.store.shared_checkpoint import SharedSaver
from logitless.train.store.training_state import random_state, random_tensors, restore_random
from logitless.types import Group, TokenScores


class Loop:
    """One run, from its first rollout to its last checkpoint.

    Attributes:
        best: the best evaluation, whose checkpoint is kept; None without ``checkpoint.keep_best``.
    """

    def __init__(self, parts: Parts, journal: Journal, callbacks: Callbacks) -> None:
        recipe, train = parts.recipe, parts.recipe.train
        self.parts = parts
        self.recipe, self.ranks, self.engines = recipe, parts.learner.ranks, parts.engines
        self.collector, self.learner, self.evaluation = parts.collector, parts.learner, parts.evaluation
        self.journal, self.callbacks, self.interrupt = journal, callbacks, Interrupt(journal.message)
        self.block_metrics: Numbers = {}
        self.unwritten: Numbers = {}
        self.unwritten_by_rank: Mapping[str, Sequence[int]] = {}
        self.without_signal = SignalLimit(max_blocks=train.max_blocks_without_signal)
        self.unscored = UnscoredLimit(max_fraction=train.max_unscored_fraction, max_blocks=train.max_blocks_unscored)
        self.failures = Failures(parts.inputs.rewards)
        root, keep = journal.folder.checkpoints, recipe.checkpoint.keep
        is_shared = self.ranks.world > 1
        self.saver = SharedSaver(root, keep=keep, ranks=self.ranks) if is_shared else BackgroundSaver(root, keep=keep)
        stop, best = recipe.evaluation.stop, recipe.checkpoint.keep_best
        self.patience = None if stop is None else Best(stop)
        self.best = None if best is None else Best(best)
        self._of_block: Numbers = {}
        self._being_saved: Path | None = None

    def run(self) -> RunResult:
        """Train until the last block, an early stop, a signal or a callback; a checkpoint is saved at the end.

        Raises:
            EngineError: an engine failed for good; a checkpoint is saved first.
        """
        with self.interrupt.heard():
            # Nothing to save yet, and a server may keep it waiting.
            with self.interrupt.at_once() if self.ranks.world == 1 else nullcontext():
                self._sync_weights()
            if self.ranks.broadcast_object(not checkpoints(self.journal.folder.checkpoints)):
                self.unwritten = self._block_start
                self._evaluate()
                self.save()  # in the background, while the first block is collected
            try:
                self._blocks()
            except (EngineError, LostRankError) as error:
                # A lost rank beside a single one that trains only sampled: this one has all that a checkpoint needs.
                if isinstance(error, EngineError) or self.ranks.world == 1:
                    self._save_what_was_done()
                raise
            # A signal may have reached some ranks only; all must return the same result.
            signals = self.ranks.all_gather_object(self.interrupt.signal)
            stopped_by = self.ranks.broadcast_object(self.callbacks.stopped_by)
        folder, ended = self.journal.folder, self._ended and not self.unwritten
        if ended and self.journal.nothing_scored:
            return RunResult(folder, "unscored")
        if ended:
            return RunResult(folder, "blocks" if self._done >= self.recipe.train.blocks else "early_stopping")
        for number in signals:
            if number is not None:
                return RunResult(folder, "signal", Signals(number))
        return RunResult(folder, "callback", callback=stopped_by)

    def _blocks(self) -> None:
        """Train on all blocks that are left, and save the last checkpoint."""
        if self.unwritten:  # resumed after a block's last step, or amid an evaluation
            self._evaluate()
        while not self._ended and not self._stopping():
            self._block()
            if self._stopping() or self._is_best or self._done % self.recipe.checkpoint.every_blocks == 0:
                self.save()
        self.save()
        self._wait()

    @property
    def _done(self) -> int:
        """Number of finished blocks."""
        return self.learner.progress.block

    @property
    def _block_start(self) -> Numbers:
        """The place of what is measured before a block's first step."""
        return {"step": self.learner.progress.step, "block": self._done + 1, "epoch": 1}

    @property
    def _ended(self) -> bool:
        """Whether every block is done, or early stopping has run out of patience."""
        return self._done >= self.recipe.train.blocks or (self.patience is not None and self.patience.is_over)

    @property
    def _is_best(self) -> bool:
        """Whether the current weights had the best evaluation."""
        progress = self.learner.progress
        return self.best is not None and (self.best.block, self.best.step) == (progress.block, progress.step)

    @property
    def _watches(self) -> list[Best]:
        """What follows evaluations: early stopping, the best checkpoint, both or neither."""
        return [each for each in (self.patience, self.best) if each is not None]

    def _stopping(self) -> bool:
        """Whether a signal on any rank or a callback asks for a stop. A collective."""
        return self.ranks.any(self.interrupt.requested or self.callbacks.stopped_by is not None)

    def _block(self) -> None:
        """Collect a block unless one is in training already, and train on it until its end or a stop."""
        if not self.learner.in_training and not self._collected():
            return
        while self.learner.in_training and not self._stopping():
            self._wait()  # a step changes the tensors that are being saved
            with self.journal.phase("training") as seconds:
                record = self.learner.step()
            if self.learner.parity is not None:
                check_parity(self.learner.parity, self.recipe.rollout.parity, self.journal.message)
            record |= training_metrics(record, seconds=seconds[0]) | self.block_metrics
            self.block_metrics = {}
            if self.learner.in_training:
                self._write(record, self.learner.by_rank)
            else:
                self.unwritten, self.unwritten_by_rank = record, self.learner.by_rank
                # A server that died keeps the push waiting; what a signal leaves undone here a resumed run does first.
                waits = self._at_once() if self.recipe.rollout.engine.is_vllm else nullcontext()
                try:
                    with waits:
                        self.unwritten |= self._sync_weights()
                except self._interrupted:
                    return
                self._evaluate()
            for message in (self.learner.halved, self.learner.check_skipped()):
                if message is not None:
                    self.journal.message(message)

    def _evaluate(self) -> None:
        """Evaluate the weights before the first block, or if it is due after one, and write the line that waits for it.

        A signal ends an evaluation. The line then stays unwritten, and a resumed run evaluates first.
        """
        is_start = self.unwritten["block"] > self._done
        due = self.evaluation.sets if is_start else self.evaluation.due(self._done, self.recipe.train.blocks)
        before = [each.state_dict() for each in self._watches]
        try:
            with self._at_once() if due else nullcontext():
                found = self._evaluated_and_watched(due)
        except self._interrupted:
            for each, state in zip(self._watches, before, strict=True):
                each.load_state_dict(state)
            return
        record, self.unwritten = self.unwritten | found, {}
        self._write(record, self.unwritten_by_rank)
        self.unwritten_by_rank = {}
        if not is_start:
            self.callbacks.block(self._of_block)
        self._of_block = {}
        if found:
            self.callbacks.evaluation({"step": record["step"], "block": record["block"], **found})

    def _evaluated_and_watched(self, due: Sequence[HeldOut]) -> Numbers:
        """Metrics of the sets that are due, and of the others where early stopping ends the run by them."""
        found, was_ended = self._evaluated(due), self._ended
        self._watch(found)
        if self._ended and not was_ended:
            assert self.patience is not None
            since = f"{self.patience.since} evaluations without a better value than {self.patience.words}"
            self.journal.message(f"early stopping: {since}")
            # As after the last block, every held-out set is evaluated.
            rest = self._evaluated([each for each in self.evaluation.sets if each not in due])
            self._watch(rest)
            seconds = [each.get("time/evaluation_seconds", 0.0) for each in (found, rest)]
            found |= {**rest, "time/evaluation_seconds": sum(seconds)}
        return found

    def _write(self, record: Numbers, by_rank: Mapping[str, Sequence[int]] = MappingProxyType({})) -> None:
        """Write a line of metrics, and remember it for ``Callback.on_block``."""
        self.journal.write(record, by_rank)
        self._of_block |= record

    def _watch(self, found: Numbers) -> None:
        """Update early stopping and the best checkpoint with an evaluation."""
        progress = self.learner.progress
        for each in self._watches:
            each.see(found, block=progress.block, step=progress.step)
        self._show_best()

    def _show_best(self) -> None:
        """Show the best evaluation so far in the live view."""
        watched = self.best or self.patience
        if watched is not None:
            self.journal.best(watched.words)

    def _collected(self) -> bool:
        """Collect a block; False if a stop was requested or nothing in it can be trained on.

        A signal discards the block, without a trace.
        """
        if isinstance(self.collector.engine, RepeatingEngine):
            self._wait()  # it samples with older weights in the tensors that are being saved
        before, counted = self.collector.state_dict(), dict(self.journal.summary)
        try:
            with self._at_once(), self.journal.phase("preparation"):
                judged, block, metrics = next_block(self.collector, self.learner, self.journal)
        except self._interrupted:
            self.collector.load_state_dict(before)
            self.journal.summary = counted
            return False
        except EngineError:
            self.collector.load_state_dict(before)
            raise
        self.block_metrics = metrics
        self._tell_failures(judged.sampled)
        if block is not None and self.journal.no_signal and "blocks_with_signal" not in counted:
            self.journal.message(f"block {self._done + 1}: {NO_SIGNAL_YET}")
        self.unscored.see(judged.sampled, is_first=self._done == 0)
        if block is None:
            self._skip_block()
        else:
            self.learner.begin(block)
        self.without_signal.see(judged.sampled, has_signal=self.learner.in_training)
        return self.learner.in_training

    def _at_once(self) -> AbstractContextManager[None]:
        """Inside, the first signal interrupts: at once on a single rank, between two decoding steps on several."""
        if self.ranks.world == 1:
            return self.interrupt.at_once()
        if isinstance(self.parts.inputs.environment, Driver):  # it samples in a thread that nothing may end
            return nullcontext()
        return stopping_together(self.engines.distinct, self.ranks, lambda: self.interrupt.signal)

    @property
    def _interrupted(self) -> type[KeyboardInterrupt]:
        """What ``_at_once`` raises. On several ranks a second Ctrl-C ends this one alone, without saving."""
        return KeyboardInterrupt if self.ranks.world == 1 else StoppedTogether

    def _tell_failures(self, groups: Sequence[Group]) -> None:
        """Report failures of rewards that were not reported before."""
        for message in self.failures.new(groups):
            self.journal.message(message)
        self.journal.first_failures(first_failures(groups))

    def _skip_block(self) -> None:
        """End a block without a token to train on."""
        self.unwritten = {**self._block_start, **self.block_metrics}
        self.learner.end_block()
        self._evaluate()
        self.journal.message(f"block {self._done}: in every group all rewards are equal; no step taken")
        self.block_metrics = {}

    def _sync_weights(self) -> Numbers:
        """Give every engine the current weights; returns the engines' transfer metrics."""
        with self.journal.phase("weights"):
            engine = self.recipe.rollout.engine
            if not (engine.is_vllm or self.recipe.parallel.has_copy):
                # Engines in this process, also those of evaluation alone, read whole weights.
                self.learner.policy.gather()  # released by the next step
            # Before the engines have this version: another thread may be sampling.
            self.collector.expect(self.learner.version)
            return self.engines.load_all(self.learner.weights(), self.learner.version)

    def _evaluated(self, sets: Sequence[HeldOut]) -> Numbers:
        """Metrics of these held-out sets."""
        if not sets:
            return {}
        with self.journal.phase("evaluation") as seconds:
            found = self.evaluation(sets, self._tell_failures)
        return found | {"time/evaluation_seconds": seconds[0]}

    def save(self) -> None:
        """Begin to write a checkpoint, in the background; every rank writes its own shards."""
        progress, best = self.learner.progress, self.best_checkpoint
        done, in_training = progress.block, self.learner.in_training
        self._wait()
        with self.journal.phase("checkpoint"):
            path = self.journal.folder.checkpoints / folder_name(done, progress.step)
            is_new = not path.exists()
            self.saver.save(
                block=done,
                step=progress.step,
                tensors=self.learner.tensors() | random_tensors(),
                state=self._state(),
                best=None if best is None else best.name,
                settle=lambda: self.collector.settle(done, in_training=in_training),
            )
            self._being_saved = path if is_new else None

    def _state(self) -> dict[str, Any]:
        """The state of the whole run but for its tensors, as JSON."""
        return {
            **self.learner.state_dict(),
            "collector": self.collector.state_dict(),
            "journal": self.journal.state_dict(),
            "loop": {
                "block_metrics": self.block_metrics,
                "unwritten": self.unwritten,
                "unwritten_by_rank": dict(self.unwritten_by_rank),
                "without_signal_in_a_row": self.without_signal.in_a_row,
                "unscored_in_a_row": self.unscored.in_a_row,
                "patience": None if self.patience is None else self.patience.state_dict(),
                "best": None if self.best is None else self.best.state_dict(),
            },
            "random": random_state(),
        }

    def _wait(self) -> None:
        """Wait until the checkpoint is written, and call the callbacks with it."""
        with self.journal.phase("checkpoint"):
            self.saver.wait()
        path, self._being_saved = self._being_saved, None
        if path is not None:
            self.callbacks.checkpoint(path)

    @property
    def best_checkpoint(self) -> Path | None:
        """The checkpoint of the best evaluation; None without ``checkpoint.keep_best`` or a finite value."""
        if self.best is None or self.best.value is None:
            return None
        return self.journal.folder.checkpoints / folder_name(self.best.block, self.best.step)

    def _save_what_was_done(self) -> None:
        """Save a checkpoint before the run ends with an error; if that fails too, only report it."""
        try:
            self.save()
            self._wait()
        except (CheckpointError, LostRankError) as error:
            self.journal.message(f"no further checkpoint: {error}")

    def restore(self, saved: Checkpoint, *, resized: bool) -> None:
        """Load a checkpoint. Lines of metrics after it are removed.

        Args:
            resized: micro-batches have another size than before, so that no halving is repeated.

        Raises:
            CheckpointError: the checkpoint is damaged or of another model; nothing on the disk was changed.
        """
        try:
            remembered, progress = saved.state["loop"], saved.state["progress"]
            later = (record for record in self.journal.folder.read_metrics() if record["step"] > progress["step"])
            halved = [] if resized else halvings(progress.get("halvings", ()), later)
            self.learner.load_state(saved.tensors, {**saved.state, "progress": {**progress, "halvings": halved}})
            self.collector.load_state_dict(saved.state["collector"])
            restore_random(saved.tensors, saved.state["random"])
            self.block_metrics = dict(remembered["block_metrics"])
            self.unwritten = dict(remembered.get("unwritten", {}))
            self.unwritten_by_rank = dict(remembered.get("unwritten_by_rank", {}))
            self.without_signal.in_a_row = remembered["without_signal_in_a_row"]
            self.unscored.in_a_row = remembered["unscored_in_a_row"]
            for each, state in ((self.patience, remembered.get("patience")), (self.best, remembered.get("best"))):
                if each is not None and state is not None:
                    each.load_state_dict(state)
            self.journal.load_state_dict(saved.state["journal"])  # last: it changes metrics.jsonl
        except (KeyError, TypeError, AttributeError) as error:
            raise damaged(saved.folder, error) from error
        if self.best_checkpoint is not None and not self.ranks.broadcast_object(self.best_checkpoint.is_dir()):
            assert self.best is not None
            self.journal.message(f"the checkpoint of {self.best.words} is gone: the best is sought among later ones")
            self.best = Best(self.best.section)
        self._show_best()
        if self.ranks.is_first:  # the steps of a block that has begun, for the callbacks
            block = self._done + (not self.unwritten)
            steps = [
                line for line in self.journal.folder.read_metrics() if line["block"] == block and "loss/total" in line
            ]
            self._of_block = {name: value for line in steps for name, value in line.items()}


def next_block(
    collector: Collector, learner: Learner, journal: Journal
) -> tuple[JudgedBlock, ScoredBlock | None, Numbers]:
    """Collect the next block, score it, compute advantages and write its rollouts.

    Returns:
        All that was sampled; the block to train on, None if it has no token; and metrics for its first line.
    """
    done = learner.progress.block
    with journal.phase("rollout") as seconds:
        judged = collector.next(done, length_factor=learner.controllers.length_factor)
    options = collector.options
    by_token = options.in_flight is not None or options.engine.changes_in_flight
    metrics = block_metrics(judged, seconds=seconds[0])
    metrics |= lag_metrics(judged, version=learner.version, by_token=by_token)
    if "logp_sampler" in learner.algorithm.objective.needs:
        check_sampler_logp(completion for group in judged.trained for completion in group.completions)
    sampled = sampled_scores(judged.trained, options.sampling, learner.version, exact=judged.exact)
    metrics["sampler/exact"] = int(sampled is not None)
    packed, by_rewards = learner.packed(judged.trained), learner.algorithm.learns_from_rewards
    if not packed.packed.num_tokens:
        journal.write_rollouts(done + 1, judged, has_signal=False if by_rewards else None)
        return judged, None, metrics
    if learner.algorithm.reads_scores:
        sampled = None
    rescore = sampled is not None and done % collector.options.engine.blocks_between_rescores == 0
    with journal.phase("scoring") as seconds:
        scored = learner.score(packed, judged.trained, sampled, rescore=rescore)
    passed = sampled is None or rescore
    if sampled is not None and rescore:
        metrics["sampler/mismatched_tokens"] = check_same(sampled, TokenScores(scored.logp_old, scored.entropy_old))
    if passed and not scored.scores_itself and not collector.options.sampling.filters_distribution:
        found = parity_metrics(scored.packed, scored.logp_old)
        metrics |= found
        check_parity(found, collector.options.parity, journal.message)
    advantages = advantages_of(scored, judged)
    metrics |= scoring_metrics(scored, passed=passed, seconds=seconds[0])
    metrics |= advantage_metrics(advantages, learner.algorithm.advantage)
    metrics |= value_metrics(scored) | teacher_metrics(scored)
    has_signal = bool(scored.advantage.any()) if by_rewards else None
    journal.write_rollouts(done + 1, judged, advantages, has_signal=has_signal)
    return judged, scored, metrics
